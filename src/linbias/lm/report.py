"""What an extrapolation run found: in words, as tables for the terminal, a PNG and an HTML page.

Everything is made from the records in `results.json` (see `linbias.lm.extrapolate`), so that a
report can be made again without measuring again. The page needs no network.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import product
from pathlib import Path
from statistics import fmean
from string import Template
from typing import NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from linbias.lm import figures
from linbias.lm.figures import COLOURS, NAMES, Point, Record, curve, unique
from linbias.runs.checkpoints import write_whole

# A change of loss below this share is within what another seed would change.
_CLEARLY = 0.01


@dataclass(frozen=True)
class Finding:
    """How one method fared from the training length to its longest test length."""

    method: str
    train_length: int
    at_training: Point
    at_longest: Point

    @property
    def change(self) -> float:
        """Relative change of bits per byte; negative is better."""
        return self.at_longest.mean / self.at_training.mean - 1.0

    @property
    def verdict(self) -> str:
        if self.at_longest.test_length == self.train_length:
            return "confined to what it was trained on"
        if self.change <= 0.0:
            return "no worse"
        return "clearly worse" if self.change > _CLEARLY else "slightly worse"

    def __str__(self) -> str:
        times = self.at_longest.test_length / self.train_length
        first, last = self.at_training.mean, self.at_longest.mean
        if times == 1:
            return f"{self.verdict}: {first:.3f} bits per byte at {self.train_length:,} tokens"
        return (
            f"{self.verdict} at {times:g}x the training length of {self.train_length:,}: "
            f"{first:.3f} to {last:.3f} bits per byte ({self.change:+.1%})"
        )


def findings(evaluations: Sequence[Record]) -> list[Finding]:
    """One finding per method and training length, in the order of the run."""
    found = []
    for train_length in unique(evaluations, "train_length"):
        for method in unique(evaluations, "method"):
            points = {p.test_length: p for p in curve(evaluations, method, train_length)}
            if train_length in points:
                longest = points[max(points)]
                found.append(Finding(method, train_length, points[train_length], longest))
    return found


def tables(results: Record) -> Iterator[Table]:
    """Terminal tables: bits per byte by test length, for each training length; then the costs."""
    evaluations = results["evaluations"]
    for train_length in unique(evaluations, "train_length"):
        table = _table(f"Bits per byte, trained on {train_length:,} tokens, tested on")
        lengths = _test_lengths(evaluations, train_length)
        for length in lengths:
            table.add_column(f"{length:,}\n{length / train_length:g}x", justify="right")
        table.add_column("change", justify="right")
        for method, cells, change in _rows(evaluations, train_length, lengths):
            shown = [Text("beyond\nits table", "dim") if cell is None else cell for cell in cells]
            table.add_row(_name(method), *shown, change)
        yield table
    table = _table(f"Training, {_budget(results)}")
    for title in _COST_TITLES:
        table.add_column(title, justify="right")
    for cost in _costs(results["trainings"]):
        table.add_row(_name(cost.method), *cost.cells())
    yield table


def write(results: Record, folder: Path) -> None:
    """Write `extrapolation.png` and `report.html`, each whole or not at all."""
    png = figures.png(figures.loss_by_length(results["evaluations"]))
    write_whole(folder / "extrapolation.png", png)
    write_whole(folder / "report.html", html(results).encode())


def html(results: Record) -> str:
    """The report as one self-contained page."""
    evaluations = results["evaluations"]
    found = findings(evaluations)
    template = resources.files("linbias.lm").joinpath("report.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        lead=escape(_lead(results)),
        findings=_list(found),
        loss_by_length=figures.svg(figures.loss_by_length(evaluations)),
        loss_by_position=figures.svg(figures.loss_by_position(_position_records(results))),
        length_tables="".join(_length_tables(evaluations)),
        budget=escape(_budget(results)),
        training_table=_training_table(results["trainings"]),
        facts=_facts(results),
    )


def _lead(results: Record) -> str:
    evaluations = results["evaluations"]
    lengths = " or ".join(f"{n:,}" for n in unique(evaluations, "train_length"))
    longest = max(record["test_length"] for record in evaluations)
    return (
        f"Language models that differ only in how they are told the order of tokens, trained on "
        f"{lengths} tokens at a time and tested on up to {longest:,}."
    )


def _position_records(results: Record) -> Sequence[Record]:
    """All records; with slopes that depend on the segment's length, only the longest segments'."""
    evaluations: list[Record] = results["evaluations"]
    if results["settings"]["training"]["model"].get("slope_scale") != "interpolate":
        return evaluations
    longest = {n: max(_test_lengths(evaluations, n)) for n in unique(evaluations, "train_length")}
    return [r for r in evaluations if r["test_length"] == longest[r["train_length"]]]


def _budget(results: Record) -> str:
    timed = results["settings"]["training"]["seconds"] is not None
    return (
        "equal time for every method"
        if timed
        else "the same tokens in the same order for every method"
    )


def _list(found: Sequence[Finding]) -> str:
    items = [
        f'<li style="--colour: {COLOURS[finding.method]}"><b>{escape(NAMES[finding.method])}</b> '
        f"is {escape(str(finding))}</li>"
        for finding in found
    ]
    return f'<ul class="findings">{"".join(items)}</ul>'


def _length_tables(evaluations: Sequence[Record]) -> Iterator[str]:
    for train_length in unique(evaluations, "train_length"):
        lengths = _test_lengths(evaluations, train_length)
        heads = "".join(f"<th>{n / train_length:g}x<br>{n:,}</th>" for n in lengths)
        body = ""
        for method, cells, change in _rows(evaluations, train_length, lengths):
            shown = "".join(
                '<td class="missing">beyond<br>its table</td>' if c is None else f"<td>{c}</td>"
                for c in cells
            )
            body += f"{_row_start(method)}{shown}<td>{change}</td></tr>"
        yield (
            f'<div class="scroll"><table><tr><th>trained on {train_length:,}, loss at</th>'
            f"{heads}<th>change</th></tr>{body}</table></div>"
        )


def _training_table(trainings: Sequence[Record]) -> str:
    costs = list(_costs(trainings))
    fastest = max(cost.tokens_per_second for cost in costs)
    largest = max(cost.peak_memory_bytes for cost in costs)
    titles = "".join(f"<th>{title}</th>" for title in ("", *_COST_TITLES))
    rows = [f"<tr>{titles}</tr>"]
    for cost in costs:
        *cells, speed, memory = cost.cells()
        speed += _bar(cost.tokens_per_second / fastest)
        memory += _bar(cost.peak_memory_bytes / largest)
        shown = "".join(f"<td>{cell}</td>" for cell in (*cells, speed, memory))
        rows.append(f"{_row_start(cost.method)}{shown}</tr>")
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _facts(results: Record) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>"
        for name, value in results["made"].items()
    )
    return f"<dl>{items}</dl>"


def _row_start(method: str) -> str:
    return f'<tr style="--colour: {COLOURS[method]}"><td>{escape(NAMES[method])}</td>'


def _bar(share: float) -> str:
    return f'<span class="bar"><i style="width: {share:.0%}"></i></span>'


def _test_lengths(evaluations: Sequence[Record], train_length: int) -> list[int]:
    here = [record for record in evaluations if record["train_length"] == train_length]
    return sorted(unique(here, "test_length"))


def _rows(
    evaluations: Sequence[Record], train_length: int, lengths: Sequence[int]
) -> Iterator[tuple[str, list[str | None], str]]:
    """For each method: its loss at each length (None beyond a learned table), and the change."""
    for method in unique(evaluations, "method"):
        points = {p.test_length: p.mean for p in curve(evaluations, method, train_length)}
        if points:
            cells = [f"{points[n]:.3f}" if n in points else None for n in lengths]
            first, last = points.get(train_length), points.get(lengths[-1])
            change = f"{last / first - 1:+.1%}" if first and last else ""
            yield method, cells, change


class _Cost(NamedTuple):
    """What training a method at a length took: means over the seeds."""

    method: str
    train_length: int
    tokens: float
    seconds: float
    tokens_per_second: float
    peak_memory_bytes: float

    def cells(self) -> list[str]:
        return [
            f"{self.train_length:,}",
            f"{self.tokens / 1e6:.2f} M",
            f"{self.seconds:.0f} s",
            f"{self.tokens_per_second:,.0f}",
            f"{self.peak_memory_bytes / 2**20:,.0f} MiB",
        ]


_COST_TITLES = ("trained on", "tokens read", "time", "tokens/s", "peak memory")


def _costs(trainings: Sequence[Record]) -> Iterator[_Cost]:
    for train_length, method in product(
        unique(trainings, "train_length"), unique(trainings, "method")
    ):
        same = [r for r in trainings if (r["method"], r["train_length"]) == (method, train_length)]
        if same:
            yield _Cost(
                method, train_length, *(fmean(r[n] for r in same) for n in _Cost._fields[2:])
            )


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    return table


def sentence(finding: Finding) -> Text:
    """A finding as a line for the terminal."""
    return Text.assemble(_name(finding.method), f" is {finding}")


def _name(method: str) -> Text:
    return Text(NAMES[method], f"bold {COLOURS[method]}")
