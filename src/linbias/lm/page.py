"""The report of an extrapolation experiment as one self-contained HTML page.

It is made from the records of results.json alone, so it can be made again without measuring again.
The page needs no network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from linbias.lm import figures, findings
from linbias.lm.findings import Finding
from linbias.lm.methods import COLOURS, NAMES
from linbias.lm.records import EvaluationRecord, ExtrapolationResults, TrainingRecord
from linbias.runs.files import write_whole


def write_report(results: ExtrapolationResults, folder: Path) -> None:
    """Writes `extrapolation.png` and `report.html`, each whole or not at all."""
    png = figures.png(figures.loss_by_length(results.evaluations))
    write_whole(folder / "extrapolation.png", png)
    write_whole(folder / "report.html", html(results).encode())


def html(results: ExtrapolationResults) -> str:
    """The page."""
    evaluations = results.evaluations
    by_position = figures.loss_by_position(findings.records_by_position(results))
    template = resources.files("linbias.lm").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        introduction=escape(findings.introduction(evaluations)),
        findings=_finding_list(findings.findings(evaluations)),
        loss_by_length=figures.svg(figures.loss_by_length(evaluations)),
        loss_by_position=figures.svg(by_position),
        length_tables="".join(_length_tables(evaluations)),
        budget=escape(findings.budget(results.settings.training)),
        training_table=_training_table(results.trainings),
        facts=_fact_list(results.made),
    )


def _finding_list(found: Sequence[Finding]) -> str:
    items = [
        f'<li style="--colour: {COLOURS[finding.method]}"><b>{escape(NAMES[finding.method])}</b> '
        f"is {escape(str(finding))}</li>"
        for finding in found
    ]
    return f'<ul class="findings">{"".join(items)}</ul>'


def _length_tables(evaluations: Sequence[EvaluationRecord]) -> Iterator[str]:
    for train_length in findings.train_lengths(evaluations):
        lengths = findings.test_lengths(evaluations, train_length)
        titles = "".join(f"<th>{n / train_length:g}x<br>{n:,}</th>" for n in lengths)
        body = ""
        for row in findings.loss_rows(evaluations, train_length):
            cells = "".join(
                '<td class="missing">beyond<br>its table</td>' if c is None else f"<td>{c}</td>"
                for c in row.cells()
            )
            body += f"{_row_start(row.method)}{cells}<td>{row.change_cell()}</td></tr>"
        yield (
            f'<div class="scroll"><table><tr><th>trained on {train_length:,}, loss at</th>'
            f"{titles}<th>change</th></tr>{body}</table></div>"
        )


def _training_table(trainings: Sequence[TrainingRecord]) -> str:
    costs = findings.costs(trainings)
    fastest = max(cost.tokens_per_second for cost in costs)
    largest = max(cost.peak_memory_bytes for cost in costs)
    titles = "".join(f"<th>{title}</th>" for title in ("", *findings.COST_TITLES))
    rows = [f"<tr>{titles}</tr>"]
    for cost in costs:
        *cells, speed, memory = cost.cells()
        speed += _bar(cost.tokens_per_second / fastest)
        memory += _bar(cost.peak_memory_bytes / largest)
        row = "".join(f"<td>{cell}</td>" for cell in (*cells, speed, memory))
        rows.append(f"{_row_start(cost.method)}{row}</tr>")
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>'


def _fact_list(made: dict[str, str]) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in made.items()
    )
    return f"<dl>{items}</dl>"


def _row_start(method: str) -> str:
    return f'<tr style="--colour: {COLOURS[method]}"><td>{escape(NAMES[method])}</td>'


def _bar(share: float) -> str:
    return f'<span class="bar"><i style="width: {share:.0%}"></i></span>'
