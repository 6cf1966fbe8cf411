"""What `paper_small.py` found, in words, tables and plots: everything in docs/paper.md between markers.

Made from records alone. Letters: L is the shorter training length; a model is named by its position and
the length it was trained at.
"""

import io
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from operator import gt, lt
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from linbias._run.files import write_whole
from linbias.methods import METHODS
from markers import fill

Record = dict[str, Any]
KEPT = Path(__file__).parents[1] / "records" / "paper_small.jsonl"
SPEED = ("speed made", "training speed", "inference speed")
CORPUS_NAMES = {"wikitext-2": "WikiText-2", "stdlib": "Python's standard library"}
_CLOSE = 0.05  # speed and memory within this share count as the same


def unique(records: Iterable[Record], field: str) -> list[Any]:
    """The different values of a field, in order of appearance."""
    return list(dict.fromkeys(record[field] for record in records))


class Found:
    """The records of a run, asked by what they measure."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        (made,) = self.of("made")
        self.made, self.plan = made, made["plan"]
        self.speed_made = next(iter(self.of("speed made")), made)
        self.length: int = self.plan["length"]
        self.positions = unique(self.of("test"), "position")
        self.test_lengths = sorted(unique(self.of("test"), "test_length"))
        seeds = {corpus: self._seeds(corpus) for corpus in unique(self.of("test"), "corpus")}
        self.seeds = {corpus: own for corpus, own in seeds.items() if own}
        self.corpora = list(self.seeds)

    def of(self, kind: str, **fields: Any) -> list[Record]:
        wanted = {"kind": kind, **fields}
        return [record for record in self.records if record.items() >= wanted.items()]

    def _seeds(self, corpus: str) -> list[int]:
        """Those that every model has, so that means compare like with like."""
        by_model: dict[tuple[str, int], set[int]] = {}
        for r in self.of("test", corpus=corpus):
            by_model.setdefault((r["position"], r["train_length"]), set()).add(r["seed"])
        if len(by_model) < 2 * len(self.positions):
            return []
        return sorted(set.intersection(*by_model.values()))

    def bits(
        self, corpus: str, position: str, trained: int, tested: int, *, sliding: bool = False
    ) -> list[float]:
        """Bits per word of each seed; none where that was not measured."""
        model = {"corpus": corpus, "position": position, "train_length": trained}
        stride = self.plan["stride"] if sliding else tested
        found = self.of("test", **model, test_length=tested, stride=stride)
        return [r["loss_base2"] for seed in self.seeds[corpus] for r in found if r["seed"] == seed]

    def perplexities(self, *model: Any, sliding: bool = False) -> list[float]:
        return [2**bits for bits in self.bits(*model, sliding=sliding)]

    def speed(self, mode: str, position: str, length: int) -> list[float]:
        """Tokens per second of each round."""
        found = self.of(f"{mode} speed", position=position, length=length)
        return [record["tokens_per_second"] for record in found]

    def memory(self, kind: str, position: str, length: int, field: str) -> list[float]:
        """MiB on the first corpus, of each seed's process."""
        own = self.of(kind, corpus=self.corpora[0], position=position, **{field: length})
        return [r["memory_bytes"] / 2**20 for r in own if "memory_bytes" in r]


class Verdict(NamedTuple):
    """Whether a claim holds on a corpus, and the number that says so."""

    word: str
    number: str

    def __str__(self) -> str:
        return f"**{self.word}**: {self.number}" if self.number else self.word


def judge(holds: Iterable[bool], number: str) -> Verdict:
    """In words, from whether it holds for each seed or round."""
    each = list(holds)
    if not each:
        return Verdict("not measured", "")
    count = f"{sum(each)} of {len(each)}"
    word = "holds" if all(each) else "does not hold" if not any(each) else "holds in part"
    return Verdict(word, f"{number}; {count}")


def against(ours: Sequence[float], others: Sequence[float], form: str = ".1f") -> str:
    """The two means, and how far the first is from the second."""
    if not ours or not others:
        return ""
    a, b = statistics.fmean(ours), statistics.fmean(others)
    return f"{a:,{form}} against {b:,{form}} ({a / b - 1:+.1%})"


def claims(found: Found) -> list[tuple[str, Callable[[str], Verdict]]]:
    """The paper's claims about perplexity, each with how a corpus judges it, seed by seed."""
    short, four, longest = found.length, 4 * found.length, found.test_lengths[-1]
    Model = tuple[str, int, int]  # position, trained at, tested at

    def compare(ours: Model, others: Model, holds: Callable[[Any, Any], bool]) -> Callable[[str], Verdict]:  # fmt: skip
        def verdict(corpus: str) -> Verdict:
            a, b = found.perplexities(corpus, *ours), found.perplexities(corpus, *others)
            return judge(map(holds, a, b), against(a, b))

        return verdict

    def vanishes(corpus: str) -> Verdict:
        gains = []
        for sliding in (False, True):
            at = [found.bits(corpus, "alibi", short, n, sliding=sliding) for n in (short, longest)]
            gains.append([a - b for a, b in zip(*at, strict=True)])
        if not all(gains):
            return judge([], "")
        in_blocks, sliding_by = map(statistics.fmean, gains)
        changes = [f"{2**-gain - 1:+.1%}" for gain in (sliding_by, in_blocks)]
        number = f"{changes[0]} against {changes[1]} in blocks"
        return judge([b < a / 2 for a, b in zip(*gains, strict=True)], number)

    return [
        (f"ALiBi trained at {short} is better at {longest} than at {short}",
         compare(("alibi", short, longest), ("alibi", short, short), lt)),
        (f"Sinusoidal positions trained at {short} are worse at {2 * short}",
         compare(("sinusoidal", short, 2 * short), ("sinusoidal", short, short), gt)),
        (f"Rotary positions trained at {short} extrapolate better than sinusoidal ones, to {2 * short}",
         compare(("rotary", short, 2 * short), ("sinusoidal", short, 2 * short), lt)),
        (f"The T5 bias trained at {short} extrapolates better than rotary positions, to {longest}",
         compare(("t5", short, longest), ("rotary", short, longest), lt)),
        (f"ALiBi trained at {short} extrapolates better than the T5 bias, to {longest}",
         compare(("alibi", short, longest), ("t5", short, longest), lt)),
        (f"ALiBi trained at {short} and tested at {four} beats sinusoidal positions trained at {four}",
         compare(("alibi", short, four), ("sinusoidal", four, four), lt)),
        (f"ALiBi trained at {four} beats sinusoidal positions trained at {four}",
         compare(("alibi", four, four), ("sinusoidal", four, four), lt)),
        (f"The early-token curse: with a sliding window, less than half of ALiBi's gain from {short} to {longest} is left",
         vanishes),
    ]  # fmt: skip


def cost_claims(found: Found) -> list[tuple[str, Verdict]]:
    """The paper's claims about speed and memory, judged round by round (memory: seed by seed)."""
    short, four, longest = found.length, 4 * found.length, found.test_lengths[-1]

    def faster(mode: str, ours: tuple[str, int], others: tuple[str, int], share: float) -> Verdict:
        a, b = found.speed(mode, *ours), found.speed(mode, *others)
        return judge([x > share * y for x, y in zip(a, b, strict=False)], against(a, b, ".0f"))

    memory = [found.memory("train", p, four, "train_length") for p in ("alibi", "sinusoidal")]
    return [
        (f"ALiBi trains as fast as sinusoidal positions (at {four}, within {_CLOSE:.0%})",
         faster("training", ("alibi", four), ("sinusoidal", four), 1 - _CLOSE)),
        (f"ALiBi trains faster than the T5 bias (at {four})",
         faster("training", ("alibi", four), ("t5", four), 1.0)),
        (f"ALiBi trains faster at {short} than sinusoidal positions at {four}",
         faster("training", ("alibi", short), ("sinusoidal", four), 1.0)),
        (f"ALiBi reads as fast as sinusoidal positions (at {longest}, within {_CLOSE:.0%})",
         faster("inference", ("alibi", longest), ("sinusoidal", longest), 1 - _CLOSE)),
        (f"ALiBi reads faster than the T5 bias (at {longest})",
         faster("inference", ("alibi", longest), ("t5", longest), 1.0)),
        (f"ALiBi trains in no more memory than sinusoidal positions (MiB at {four}, within {_CLOSE:.0%})",
         judge([a < (1 + _CLOSE) * b for a, b in zip(*memory, strict=False)], against(*memory, ".0f"))),
    ]  # fmt: skip


def claims_table(found: Found) -> str:
    """The claims, and what each corpus says to them."""
    titles = [CORPUS_NAMES[corpus] for corpus in found.corpora]
    lines = [["the paper's claim", *titles]]
    for text, verdict in claims(found):
        lines.append([text, *(str(verdict(corpus)) for corpus in found.corpora)])
    costs = [["the paper's claim", "here"]]
    costs += [[text, str(verdict)] for text, verdict in cost_claims(found)]
    return f"{table(lines)}\n\n{table(costs)}"


def table(lines: Sequence[Sequence[str]]) -> str:
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([rows[0], "|---" * len(lines[0]) + "|", *rows[1:]])


def cell(values: Sequence[float], form: str = ".1f") -> str:
    """The mean, and half the range."""
    if not values:
        return ""
    half = (max(values) - min(values)) / 2
    return f"{statistics.fmean(values):,{form}} ± {half:,{form}}"


def perplexity_tables(found: Found, *, sliding: bool) -> str:
    """A table per corpus: models down, test lengths across."""
    parts = []
    for corpus in found.corpora:
        lines = [[f"{CORPUS_NAMES[corpus]}, tested at", *map(str, found.test_lengths)]]
        for trained in (found.length, 4 * found.length):
            for position in found.positions:
                values = [
                    found.perplexities(corpus, position, trained, tested, sliding=sliding)
                    for tested in found.test_lengths
                ]
                lines.append(
                    [f"{METHODS[position].label}, trained at {trained}", *map(cell, values)]
                )
        parts.append(table(lines))
    return "\n\n".join(parts)


def cost_tables(found: Found) -> str:
    """Medians, and half the range, over rounds (speed) and seeds (memory)."""
    lengths = (found.length, 4 * found.length)

    def median(values: list[float]) -> str:
        half = (max(values) - min(values)) / 2 if values else 0
        return f"{statistics.median(values):,.0f} ± {half:,.0f}" if values else ""

    training = [["training", *(f"tokens/s at {n}" for n in lengths), *(f"MiB at {n}" for n in lengths)]]  # fmt: skip
    reading = [["inference, tokens/s at", *map(str, found.test_lengths)]]
    memory = [["inference, MiB at", *map(str, found.test_lengths)]]
    for position in found.positions:
        speeds = [median(found.speed("training", position, n)) for n in lengths]
        held = [median(found.memory("train", position, n, "train_length")) for n in lengths]
        training.append([METHODS[position].label, *speeds, *held])
        speeds = [median(found.speed("inference", position, n)) for n in found.test_lengths]
        held = [median(found.memory("test", position, n, "test_length")) for n in found.test_lengths]  # fmt: skip
        reading.append([METHODS[position].label, *speeds])
        memory.append([METHODS[position].label, *held])
    return "\n\n".join(map(table, (training, reading, memory)))


def description(found: Found) -> str:
    """How it was measured."""
    plan, model, trained = found.plan, found.made["model"], found.of("train")
    rates = unique(found.of("tune"), "lr")
    tuned = ", ".join(
        f"{lr:g}: {2 ** statistics.fmean(r['loss_base2'] for r in found.of('tune', lr=lr)):.0f}"
        for lr in rates
    )
    by_seeds = {c: ", ".join(map(str, found.seeds[c])) for c in found.corpora}
    seeds = " and ".join(f"{seeds} ({CORPUS_NAMES[c]})" for c, seeds in by_seeds.items())
    if len(set(by_seeds.values())) == 1:
        seeds = next(iter(by_seeds.values()))
    return (
        f"{model['num_hidden_layers']} layers of width {model['hidden_size']}, "
        f"{model['num_attention_heads']} heads, {trained[0]['num_parameters'] / 1e6:.2f} M parameters "
        f"({CORPUS_NAMES[trained[0]['corpus']]}), adaptive input and softmax cut at {model['cutoffs']}; "
        f"{plan['steps']:,} steps of {plan['max_tokens']} tokens, {trained[0]['tokens'] / 1e6:.2f} M tokens, "
        f"the same ones in the same order for all positions of a seed; seeds {seeds}. "
        f"Learning rate {trained[0]['lr']:g} for all: the least validation loss, in the mean over the four positions, after "
        f"a quarter of the steps with another seed (perplexity by rate: {tuned}). "
        f"Scored: the first {plan['test_tokens']:,} tokens of the test text without overlap; with a window that slides by "
        f"{plan['stride']} tokens, {plan['sliding_tokens']:,} that are the same for every length. "
        f"Cells: mean ± half the range over the seeds. {where(found.made)}. Speed: {where(found.speed_made)}."
    )


def where(made: Record) -> str:
    """The machine, the version of PyTorch and the date."""
    return f"{made['machine']}, torch {made['versions']['torch']}, {made['date']}"


def length_figure(found: Found) -> Figure:
    """Perplexity by test length: a panel per corpus, dashed where trained at 4 L."""
    figure = Figure(figsize=(5.4 * len(found.corpora), 4.4), layout="constrained")
    panels = figure.subplots(1, len(found.corpora), squeeze=False)[0]
    for axes, corpus in zip(panels, found.corpora, strict=True):
        for trained, style in ((found.length, "-o"), (4 * found.length, "--o")):
            for position in found.positions:
                line = {n: found.perplexities(corpus, position, trained, n) for n in found.test_lengths}  # fmt: skip
                label = f"{METHODS[position].label}, {trained}"
                _draw(
                    axes,
                    {n: v for n, v in line.items() if v},
                    style,
                    METHODS[position].colour,
                    label,
                )
        _finish(axes, found.test_lengths, f"{CORPUS_NAMES[corpus]}", "tokens per test block")
        _on_a_log_scale(axes)
    panels[0].set_ylabel("perplexity (lower is better)")
    panels[-1].legend(title="trained at", frameon=False, fontsize=9, loc="upper left")
    return figure


def curse_figure(found: Found) -> Figure:
    """Above: what ALiBi gains from longer input, in blocks and sliding. Below: perplexity by tokens of context."""
    figure = Figure(figsize=(5.4 * len(found.corpora), 7.6), layout="constrained")
    rows = figure.subplots(2, len(found.corpora), squeeze=False)
    longest = found.test_lengths[-1]
    for column, corpus in enumerate(found.corpora):
        upper, lower = rows[0][column], rows[1][column]
        for sliding, style, label in ((False, "-o", "blocks without overlap"), (True, "--s", "sliding window")):  # fmt: skip
            line = {n: found.bits(corpus, "alibi", found.length, n, sliding=sliding) for n in found.test_lengths}  # fmt: skip
            # Each seed beside itself: what is scored sliding is another part of the text, with a level of its own.
            line = {n: [100 * (2 ** (a - b) - 1) for a, b in zip(v, line[found.length], strict=True)] for n, v in line.items()}  # fmt: skip
            _draw(upper, line, style, METHODS["alibi"].colour, label)
        title = f"{CORPUS_NAMES[corpus]}: ALiBi trained at {found.length}"
        _finish(upper, found.test_lengths, title, "tokens per test block or window")
        for position in found.positions:
            model = {"corpus": corpus, "position": position, "train_length": found.length}
            records = found.of("test", **model, test_length=longest, stride=longest)
            curves = [r["by_context"] for r in records if r["seed"] in found.seeds[corpus]]
            line = {
                points[0][0]: [2**bits for _, bits in points]
                for points in zip(*curves, strict=True)
            }
            _draw(lower, line, "-", METHODS[position].colour, METHODS[position].label)
        ticks = [4**k for k in range(6) if 4**k <= longest]
        _finish(lower, ticks, f"All trained at {found.length}", "tokens of context before the predicted one")  # fmt: skip
        _on_a_log_scale(lower)
        lower.axvline(found.length, color="#888888", linewidth=1, linestyle=(0, (4, 3)))
    rows[0][0].set_ylabel(f"perplexity, change in % from that at {found.length}")
    rows[1][0].set_ylabel("perplexity (lower is better)")
    rows[0][-1].legend(frameon=False, fontsize=9)
    rows[1][-1].legend(frameon=True, framealpha=1, edgecolor="none", fontsize=9)
    return figure


def _on_a_log_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw(axes: Axes, line: dict[Any, list[float]], style: str, colour: str, label: str) -> None:
    """The mean over seeds, and their range as a shade."""
    x = list(line)
    axes.plot(x, [statistics.fmean(v) for v in line.values()], style, color=colour, label=label, markersize=4)  # fmt: skip
    low, high = [min(v) for v in line.values()], [max(v) for v in line.values()]
    axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def _finish(axes: Axes, ticks: Sequence[int], title: str, x_label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{n:,}" for n in ticks])
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axes.set_xlabel(x_label)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def read_kept() -> Found:
    """The records that the document was written from."""
    return Found(read(KEPT))


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def renewed(kept: Sequence[Record], fresh: Sequence[Record]) -> list[Record]:
    """The kept records with those of a new run in the place of what it measured: the comparison, speed, or both.

    Raises:
        ValueError: The new run has one of the two only, and its plan is not that of the other.
    """
    comparison, speed = (
        [r for r in fresh if (r["kind"] in SPEED) == is_speed] for is_speed in (False, True)
    )
    is_whole = any(Found(comparison).seeds.values())
    if is_whole and speed:
        return list(fresh)
    plans = [{**Found(records).plan, "rounds": 0} for records in (kept, comparison)]
    if plans[0] != plans[1]:
        raise ValueError(f"paper_report: plan must be that of {KEPT}, {plans[0]}, got {plans[1]}")
    kept_speed = [r for r in kept if r["kind"] in SPEED]
    kept_comparison = [r for r in kept if r["kind"] not in SPEED]
    return (comparison if is_whole else kept_comparison) + (speed or kept_speed)


def parts(found: Found) -> dict[str, str]:
    """What stands between the markers of the document."""
    return {
        "made": description(found),
        "blocks": perplexity_tables(found, sliding=False),
        "sliding": perplexity_tables(found, sliding=True),
        "costs": cost_tables(found),
        "claims": claims_table(found),
    }


def write(results: Path, document: Path) -> None:
    """Fills the document, draws its plots, and keeps the records in evidence/records/paper_small.jsonl.

    What the results lack, comparison or speed, is that of the kept records.
    """
    if results.exists():
        kept = read(KEPT) if KEPT.exists() else []
        lines = (json.dumps(record) + "\n" for record in renewed(kept, read(results)))
        write_whole(KEPT, "".join(lines).encode())
    found = read_kept()
    if not any(found.seeds.values()):
        raise SystemExit(f"paper_report: {KEPT} must have tests of a whole seed, got none")
    fill(document, parts(found))
    for name, figure in {"length": length_figure(found), "curse": curse_figure(found)}.items():
        image = io.BytesIO()
        figure.savefig(image, dpi=100)
        write_whole(document.with_name(f"paper_{name}.png"), image.getvalue())
