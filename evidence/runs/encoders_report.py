"""What `encoders.py` found: tables, verdicts on what was expected, the plot and the learned slopes in docs/results/encoders.md.

Made from records alone. All losses are bits per masked token.
"""

import io
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from linbias._run.files import write_whole
from linbias.methods import METHODS
from markers import fill
from paper_report import Verdict, judge, table, unique

Record = dict[str, Any]
CORPUS_NAMES = {"stdlib": "Python's standard library"}
ALIBI = ("symmetric", "directional", "asymmetric", "random", "littlebird")
ONE_SIDED = ("directional", "asymmetric", "random", "littlebird")  # they can tell left from right


class Found:
    """The records of a run, asked by what they measure."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        (self.made,) = self.of("made")
        self.plan = self.made["plan"]
        self.lengths: list[int] = self.plan["test_lengths"]
        self.methods = [m for m in METHODS if m in unique(self.of("test"), "method")]
        seeds = {corpus: self._seeds(corpus) for corpus in unique(self.of("test"), "corpus")}
        self.seeds = {corpus: own for corpus, own in seeds.items() if own}

    def of(self, kind: str, **fields: Any) -> list[Record]:
        wanted = {"kind": kind, **fields}
        return [record for record in self.records if record.items() >= wanted.items()]

    def _seeds(self, corpus: str) -> list[int]:
        """Those that every method has been tested with, so that means compare like with like."""
        tested = [{r["seed"] for r in self.of("model", corpus=corpus, method=m)} for m in self.plan["methods"]]  # fmt: skip
        return sorted(set.intersection(*tested))

    def bits(self, corpus: str, method: str, length: int, *, amid: bool = False) -> list[float]:
        """Bits per masked token of each seed; none where the model cannot read so much."""
        margin = self.plan["margin"] if amid else 0
        found = self.of("test", corpus=corpus, method=method, length=length, margin=margin)
        return [
            r["nll"] / math.log(2) for s in self.seeds[corpus] for r in found if r["seed"] == s
        ]

    def mean(self, method: str, length: int) -> float:
        """Over seeds and corpora, in blocks; nan where there is none."""
        all_bits = [b for corpus in self.seeds for b in self.bits(corpus, method, length)]
        return statistics.fmean(all_bits) if all_bits else math.nan


def cell(values: Sequence[float], digits: int = 3) -> str:
    """The mean, and half the range."""
    if not values:
        return ""
    half = (max(values) - min(values)) / 2
    return f"{statistics.fmean(values):.{digits}f} ± {half:.{digits}f}"


def title(corpus: str) -> str:
    return CORPUS_NAMES.get(corpus, corpus)


def loss_tables(found: Found, *, amid: bool) -> str:
    """A table per corpus: methods down, test lengths across."""
    parts = []
    for corpus in found.seeds:
        lines = [[f"{title(corpus)}, tested at", *(f"{n:,}" for n in found.lengths)]]
        for method in found.methods:
            bits = [found.bits(corpus, method, n, amid=amid) for n in found.lengths]
            lines.append([METHODS[method].label, *map(cell, bits)])
        parts.append(table(lines))
    return "\n\n".join(parts)


def slope_tables(found: Found) -> str:
    """The learned slopes of each head, mean and half range over seeds, beside those at the start."""
    parts = []
    for corpus in found.seeds:
        for method in ("asymmetric", "littlebird"):
            trained = [r for r in found.of("model", corpus=corpus, method=method) if r["seed"] in found.seeds[corpus]]  # fmt: skip
            start = found.of("model", corpus=corpus, method="symmetric")
            if not trained or not start:
                continue
            heads = range(len(trained[0]["slopes"]["left"]))
            lines = [[f"{METHODS[method].label}; {title(corpus)}, head", *map(str, heads)]]
            lines.append(["at the start", *(f"{x:.4f}" for x in start[0]["slopes"]["left"])])
            for side, words in (("left", "before"), ("right", "after"), ("first", "first token")):
                if side in trained[0]["slopes"]:
                    each = zip(*(r["slopes"][side] for r in trained), strict=True)
                    lines.append([words, *(cell(values, 4) for values in each)])
            parts.append(table(lines))
    return "\n\n".join(parts)


def compare(
    found: Found, corpus: str, ours: tuple[str, int], others: tuple[str, int], by: float = 0.0
) -> tuple[list[bool], str]:
    """For each seed whether our loss is lower by more than `by` bits, and the two means."""
    a, b = found.bits(corpus, *ours), found.bits(corpus, *others)
    if not a or not b:
        return [], ""
    number = f"{statistics.fmean(a):.3f} against {statistics.fmean(b):.3f}"
    return [x + by < y for x, y in zip(a, b, strict=True)], number


def claims(found: Found) -> list[tuple[str, Callable[[str], Verdict]]]:
    """What docs/results/encoders.md expected before, each with how a corpus judges it, seed by seed."""
    short, twice, longest = found.lengths[0], found.lengths[1], found.lengths[-1]

    def all_of(pairs: list[tuple[tuple[str, int], tuple[str, int], float]]) -> Callable[[str], Verdict]:  # fmt: skip
        def verdict(corpus: str) -> Verdict:
            found_each = [compare(found, corpus, *pair) for pair in pairs]
            number = ", ".join(words for _, words in found_each if words)
            return judge([each for holds, _ in found_each for each in holds], number)

        return verdict

    def best(method: str, length: int) -> Callable[[str], Verdict]:
        def verdict(corpus: str) -> Verdict:
            bits = {m: found.bits(corpus, m, length) for m in found.methods}
            own = bits.pop(method, [])
            rivals = {m: b for m, b in bits.items() if b}
            if not own or not rivals:
                return judge([], "")
            nearest = min(rivals, key=lambda m: statistics.fmean(rivals[m]))
            words = f"{statistics.fmean(own):.3f}; of the others {METHODS[nearest].label} is best, {statistics.fmean(rivals[nearest]):.3f}"
            others = zip(*rivals.values(), strict=True)
            return judge([x < min(each) for x, each in zip(own, others, strict=True)], words)

        return verdict

    def halves(corpus: str) -> Verdict:
        gains = []
        for amid in (False, True):
            at = [found.bits(corpus, "asymmetric", n, amid=amid) for n in (short, longest)]
            gains.append([a - b for a, b in zip(*at, strict=True)])
        if not all(gains):
            return judge([], "")
        blocks, amidst = map(statistics.fmean, gains)
        number = f"{amidst:.3f} bits gained against {blocks:.3f} in blocks"
        return judge([b < a / 2 for a, b in zip(*gains, strict=True)], number)

    def close(corpus: str) -> Verdict:
        each, numbers = [], []
        for n in found.lengths:
            a, b = found.bits(corpus, "window", n), found.bits(corpus, "symmetric", n)
            apart = [abs(x - y) for x, y in zip(a, b, strict=False)]
            each += [x <= 0.02 for x in apart]
            numbers += apart
        return judge(each, f"at most {max(numbers):.3f} bits apart" if numbers else "")

    return [
        (f"1. Symmetric, directional, asymmetric, random and LittleBird's slopes are no worse at {longest:,} than at {short}",
         all_of([((m, longest), (m, short), 0.0) for m in ALIBI])),
        (f"2. With {found.plan['margin']} tokens on both sides of what is scored, the asymmetric one gains less than half of what it gains in blocks",
         halves),
        (f"3. Sinusoidal and rotary positions are worse at {twice} than at {short}",
         all_of([((m, short), (m, twice), 0.0) for m in ("sinusoidal", "rotary")])),
        (f"4. The T5 bias is worse at {longest:,} than at {short}",
         all_of([(("t5", short), ("t5", longest), 0.0)])),
        (f"5. Directional, asymmetric and random slopes beat symmetric ones by 0.05 bits at {short}: those cannot tell left from right",
         all_of([((m, short), ("symmetric", short), 0.05) for m in ONE_SIDED[:3]])),
        (f"6. The T5 bias is the best at {short}", best("t5", short)),
        ("7. A local window is within 0.02 bits of symmetric slopes at every length", close),
        (f"8. The asymmetric one is the best of all at {longest:,}", best("asymmetric", longest)),
    ]  # fmt: skip


def claims_table(found: Found) -> str:
    lines = [["expected", *map(title, found.seeds)]]
    for text, verdict in claims(found):
        lines.append([text, *(str(verdict(corpus)) for corpus in found.seeds)])
    return table(lines)


def summary(found: Found) -> str:
    """Who holds its loss at the longest length, and who is best there."""
    short, longest = found.lengths[0], found.lengths[-1]
    read = [m for m in found.methods if not math.isnan(found.mean(m, longest))]
    order = sorted(read, key=lambda m: found.mean(m, longest))
    hold = [
        m
        for m in order
        if all(
            statistics.fmean(found.bits(c, m, longest))
            <= statistics.fmean(found.bits(c, m, short))
            for c in found.seeds
        )
    ]
    at_short = min(found.methods, key=lambda m: found.mean(m, short))
    words = [
        f"Least loss at {short}: {METHODS[at_short].label} ({found.mean(at_short, short):.3f} bits per masked token, mean over "
        f"seeds and corpora). Least loss at {longest:,}: {METHODS[order[0]].label} ({found.mean(order[0], longest):.3f})."
    ]
    if hold:
        listed = ", ".join(f"{METHODS[m].label} ({found.mean(m, longest):.3f})" for m in hold)
        words.append(
            f"No worse at {longest:,} than at {short} on every corpus, best first: {listed}."
        )
        words.append(f"**Recommended where inputs may be longer than in training: `encoder_position=\"{hold[0]}\"`.**")  # fmt: skip
    else:
        words.append(f"No method is as good at {longest:,} as at {short}.")
    return " ".join(words)


def description(found: Found) -> str:
    """How it was measured."""
    plan, trained = found.plan, found.of("model")
    rates = ", ".join(
        f"{lr:g}: {statistics.fmean(r['validation_loss'] for r in found.of('tune', lr=lr)) / math.log(2):.3f}"
        for lr in unique(found.of("tune"), "lr")
    )
    seeds = "; ".join(f"{title(c)}: {', '.join(map(str, s))}" for c, s in found.seeds.items())
    texts = ", ".join(f"{title(name)} ({size})" for name, size in found.made["texts"].items())
    scored = found.of("test")[0]
    minutes = sum(r["seconds"] for r in trained) / 60
    return (
        f"Bytes of {texts}. {trained[0]['num_parameters'] / 1e6:.2f} M parameters; {plan['steps']:,} steps of "
        f"{plan['batch_size']} sequences of {plan['length']}, {trained[0]['tokens'] / 1e6:.2f} M tokens, 15 % of them masked: the same "
        f"for all methods of a seed. Seeds: {seeds}. Learning rate {trained[0]['lr']:g} for all: the least mean validation loss after a "
        f"quarter of the steps with another seed (bits by rate: {rates}). {scored['num_scored']:,} masked tokens of {scored['num_tokens']:,} "
        f"of the test text are scored, the same at every length. Cells: mean ± half the range over the seeds. "
        f"{found.made['machine']}, torch {found.made['versions']['torch']}, {found.made['date']}; {minutes:.0f} minutes of training, a thread each."
    )


def figure(found: Found) -> Figure:
    """Bits by test length: a panel per corpus; dashed what is no linear bias."""
    picture = Figure(figsize=(5.6 * len(found.seeds), 4.6), layout="constrained")
    panels = picture.subplots(1, len(found.seeds), squeeze=False)[0]
    for axes, corpus in zip(panels, found.seeds, strict=True):
        for method in found.methods:
            line = {n: found.bits(corpus, method, n) for n in found.lengths}
            line = {n: bits for n, bits in line.items() if bits}
            style = "-o" if METHODS[method].linear else "--s"
            mean = [statistics.fmean(bits) for bits in line.values()]
            axes.plot(list(line), mean, style, color=METHODS[method].colour, label=METHODS[method].label, markersize=4)  # fmt: skip
            low, high = [min(b) for b in line.values()], [max(b) for b in line.values()]
            axes.fill_between(
                list(line), low, high, color=METHODS[method].colour, alpha=0.15, linewidth=0
            )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(found.lengths))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xticklabels([f"{n:,}" for n in found.lengths])
        axes.set_title(title(corpus), loc="left", fontweight="bold", fontsize=11)
        axes.set_xlabel(f"tokens read at a time (trained on {found.lengths[0]})")
        axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("bits per masked token (lower is better)")
    panels[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return picture


def write(records: Path, document: Path) -> None:
    """Fills the document and draws its plot."""
    found = Found([json.loads(line) for line in records.read_text().splitlines()])
    if not found.seeds:
        raise SystemExit(f"encoders_report: {records} must have tests of a whole seed, got none")
    parts = {
        "summary": f"{summary(found)}\n\n![bits per masked token by test length](encoders.png)",
        "made": description(found),
        "blocks": loss_tables(found, amid=False),
        "amid": loss_tables(found, amid=True),
        "claims": claims_table(found),
        "slopes": slope_tables(found),
    }
    fill(document, parts)
    image = io.BytesIO()
    figure(found).savefig(image, dpi=100)
    write_whole(document.with_name("encoders.png"), image.getvalue())
