"""What `encoders.py` measured: tables, verdicts, plot and learned slopes in
docs/results/encoders.md.

Made from records alone. All losses are bits per masked token.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path

from matplotlib.figure import Figure

import markers
import paper_report
from drawing import draw, finish, save
from linbias.methods import METHODS
from markers import Record, cell, fill, read, table, unique
from paper_report import Verdict, judge

RECORDS = markers.RECORDS / "encoders.jsonl"
CORPUS_NAMES = {"stdlib": "Python's standard library"}
ALIBI = ("symmetric", "directional", "asymmetric", "random", "littlebird")
ONE_SIDED = ("directional", "asymmetric", "random", "littlebird")  # they can tell left from right


class Found(paper_report.Records):
    """The records of a run, asked by what they measure; those of models hold their tests."""

    def __init__(self, records: Sequence[Record]) -> None:
        tests = [
            {"kind": "test", **{n: r[n] for n in ("corpus", "method", "seed")}, **test}
            for r in records
            for test in r.get("tests", ())
        ]
        super().__init__([*records, *tests])

    @property
    def lengths(self) -> list[int]:
        return self.plan["test_lengths"]

    @property
    def methods(self) -> list[str]:
        tested = unique(self.of("test"), "method")
        return [method for method in METHODS if method in tested]

    def models(self, corpus: str) -> list[set[int]]:
        own = [self.of("model", corpus=corpus, method=m) for m in self.plan["methods"]]
        return [{record["seed"] for record in records} for records in own]

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


def title(corpus: str) -> str:
    return CORPUS_NAMES.get(corpus, corpus)


def loss_tables(found: Found, *, amid: bool) -> str:
    """A table per corpus: methods down, test lengths across."""
    parts = []
    for corpus in found.seeds:
        rows = []
        for method in found.methods:
            bits = [found.bits(corpus, method, n, amid=amid) for n in found.lengths]
            rows.append([METHODS[method].label, *map(partial(cell, form=".3f"), bits)])
        head = [f"{title(corpus)}, tested at", *(f"{n:,}" for n in found.lengths)]
        parts.append(table(head, rows))
    return "\n\n".join(parts)


def slope_table(found: Found) -> str:
    """The learned slopes of each head, mean and half range, beside those at the start."""
    (start, *_) = found.of("model", method="symmetric")
    rows = [["at the start", *(f"{x:.4f}" for x in start["slopes"]["left"])]]
    words = {"left": "before", "right": "after", "first": "first token"}
    for corpus, method in product(found.seeds, ("asymmetric", "littlebird")):
        trained = found.of("model", corpus=corpus, method=method)
        slopes = [r["slopes"] for r in trained if r["seed"] in found.seeds[corpus]]
        for side in (side for side in words if slopes and side in slopes[0]):
            each = zip(*(x[side] for x in slopes), strict=True)
            name = f"{METHODS[method].label}; {title(corpus)}, {words[side]}"
            rows.append([name, *(cell(values, ".4f") for values in each)])
    return table(["head", *map(str, range(len(rows[0]) - 1))], rows)


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
    """What docs/results/encoders.md expected, each with how a corpus judges it, seed by seed."""
    short, twice, longest = found.lengths[0], found.lengths[1], found.lengths[-1]

    def all_of(
        pairs: list[tuple[tuple[str, int], tuple[str, int], float]],
    ) -> Callable[[str], Verdict]:
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
            means = {m: statistics.fmean(b) for m, b in rivals.items()}
            nearest = min(means, key=means.__getitem__)
            words = f"{statistics.fmean(own):.3f}; of the others"
            words += f" {METHODS[nearest].label} is best, {means[nearest]:.3f}"
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
        (
            "1. Symmetric, directional, asymmetric, random and LittleBird's slopes are no worse at"
            f" {longest:,} than at {short}",
            all_of([((m, longest), (m, short), 0.0) for m in ALIBI]),
        ),
        (
            f"2. With {found.plan['margin']} tokens on both sides of what is scored, the"
            " asymmetric one gains less than half of what it gains in blocks",
            halves,
        ),
        (
            f"3. Sinusoidal and rotary positions are worse at {twice} than at {short}",
            all_of([((m, short), (m, twice), 0.0) for m in ("sinusoidal", "rotary")]),
        ),
        (
            f"4. The T5 bias is worse at {longest:,} than at {short}",
            all_of([(("t5", short), ("t5", longest), 0.0)]),
        ),
        (
            "5. Directional, asymmetric and random slopes beat symmetric ones by 0.05 bits at"
            f" {short}: those cannot tell left from right",
            all_of([((m, short), ("symmetric", short), 0.05) for m in ONE_SIDED[:3]]),
        ),
        (f"6. The T5 bias is the best at {short}", best("t5", short)),
        ("7. A local window is within 0.02 bits of symmetric slopes at every length", close),
        (f"8. The asymmetric one is the best of all at {longest:,}", best("asymmetric", longest)),
    ]


def claims_table(found: Found) -> str:
    rows = [[text, *(str(verdict(c)) for c in found.seeds)] for text, verdict in claims(found)]
    return table(["expected", *map(title, found.seeds)], rows)


def summary(found: Found) -> str:
    """Who holds its loss at the longest length, and who is best there."""
    short, longest = found.lengths[0], found.lengths[-1]
    read = [m for m in found.methods if not math.isnan(found.mean(m, longest))]
    order = sorted(read, key=lambda m: found.mean(m, longest))

    def holds(method: str, corpus: str) -> bool:
        before, after = (found.bits(corpus, method, n) for n in (short, longest))
        return statistics.fmean(after) <= statistics.fmean(before)

    hold = [method for method in order if all(holds(method, corpus) for corpus in found.seeds)]
    at_short = min(found.methods, key=lambda m: found.mean(m, short))

    def named(method: str, length: int, more: str = "") -> str:
        return f"{METHODS[method].label} ({found.mean(method, length):.3f}{more})"

    more = " bits per masked token, mean over seeds and corpora"
    text = f"Least loss at {short}: {named(at_short, short, more)}."
    text += f" Least loss at {longest:,}: {named(order[0], longest)}."
    if not hold:
        return f"{text} No method is as good at {longest:,} as at {short}."
    listed = ", ".join(named(method, longest) for method in hold)
    return (
        f"{text} No worse at {longest:,} than at {short} on every corpus, best first: {listed}."
        " **Recommended where inputs may be longer than in training:"
        f' `encoder_position="{hold[0]}"`.**'
    )


def description(found: Found) -> str:
    """How it was measured."""
    plan, trained = found.plan, found.of("model")
    tuned = {lr: found.of("tune", lr=lr) for lr in unique(found.of("tune"), "lr")}
    nats = {lr: statistics.fmean(r["validation_loss"] for r in own) for lr, own in tuned.items()}
    rates = ", ".join(f"{lr:g}: {loss / math.log(2):.3f}" for lr, loss in nats.items())
    seeds = "; ".join(f"{title(c)}: {', '.join(map(str, s))}" for c, s in found.seeds.items())
    texts = ", ".join(f"{title(name)} ({size})" for name, size in found.made["texts"].items())
    scored = found.of("test")[0]
    minutes = sum(r["seconds"] for r in trained) / 60
    return (
        f"Bytes of {texts}. {trained[0]['num_parameters'] / 1e6:.2f} M parameters;"
        f" {plan['steps']:,} steps of {plan['batch_size']} sequences of {plan['length']},"
        f" {trained[0]['tokens'] / 1e6:.2f} M tokens, 15 % of them masked: the same for all"
        f" methods of a seed. Seeds: {seeds}. Learning rate {trained[0]['lr']:g} for all: the"
        " least mean validation loss after a quarter of the steps with another seed"
        f" (bits by rate: {rates}). {scored['num_scored']:,} masked tokens of"
        f" {scored['num_tokens']:,} of the test text are scored, the same at every length."
        " Cells: mean ± half the range over the seeds."
        f" {paper_report.where(found.made)}; {minutes:.0f} minutes of training, a thread each."
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
            draw(axes, line, style, method, METHODS[method].label, shade=0.15)
        label = f"tokens read at a time (trained on {found.lengths[0]})"
        finish(axes, found.lengths, title(corpus), label)
    panels[0].set_ylabel("bits per masked token (lower is better)")
    panels[-1].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return picture


def parts(found: Found) -> dict[str, str]:
    """What stands between the markers of the document."""
    return {
        "summary": f"{summary(found)}\n\n![bits per masked token by test length](encoders.png)",
        "made": description(found),
        "blocks": loss_tables(found, amid=False),
        "amid": loss_tables(found, amid=True),
        "claims": claims_table(found),
        "slopes": slope_table(found),
    }


def write(records: Path, document: Path) -> None:
    """Fills the document and draws its plot."""
    found = Found(read(records))
    if not found.seeds:
        raise SystemExit(f"encoders_report: {records} must have tests of a whole seed, got none")
    fill(document, parts(found))
    save(figure(found), document.with_name("encoders.png"))
