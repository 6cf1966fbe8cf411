"""What `paper_small.py` measured: all parts of docs/paper.md, from records alone."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from operator import gt, lt
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from drawing import draw, finish, on_a_log_scale, save
from linbias._run.files import write_whole
from linbias.methods import METHODS
from markers import RECORDS, Record, cell, fill, read, table, unique

KEPT = RECORDS / "paper_small.jsonl"
SPEED = ("speed made", "training speed", "inference speed")
RATE = "tokens_per_second"
MODEL = ("corpus", "position", "train_length", "seed")
CORPUS_NAMES = {"wikitext-2": "WikiText-2", "stdlib": "Python's standard library"}
_CLOSE = 0.05  # speed and memory within this share count as the same


class Records:
    """The records of a run with a plan, by kind.

    `seeds` are those by corpus that every model has, so that means compare like with like.
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = records
        (self.made,) = self.of("made")
        self.plan = self.made["plan"]
        corpora = unique(self.of("test"), "corpus")
        seeds = {corpus: sorted(set.intersection(*self.models(corpus))) for corpus in corpora}
        self.seeds = {corpus: own for corpus, own in seeds.items() if own}

    def of(self, kind: str, **fields: Any) -> list[Record]:
        wanted = {"kind": kind, **fields}
        return [record for record in self.records if record.items() >= wanted.items()]

    def models(self, corpus: str) -> list[set[int]]:
        """The seeds of each model that there must be."""
        raise NotImplementedError


class Found(Records):
    """The records of a run, asked by what they measure."""

    def __init__(self, records: Sequence[Record]) -> None:
        super().__init__(records)
        self.speed_made = next(iter(self.of("speed made")), self.made)
        self.length: int = self.plan["length"]
        self.test_lengths = sorted(unique(self.of("test"), "test_length"))
        self.corpora = list(self.seeds)

    @property
    def positions(self) -> list[str]:
        tested = unique(self.of("test"), "position")
        return [position for position in METHODS if position in tested]

    def models(self, corpus: str) -> list[set[int]]:
        lengths = [self.plan["length"] * times for times in (1, 4)]
        keys = product(self.positions, lengths)
        tests = (self.of("test", corpus=corpus, position=p, train_length=n) for p, n in keys)
        return [{record["seed"] for record in of} for of in tests]

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

    def compare(
        ours: Model, others: Model, holds: Callable[[Any, Any], bool]
    ) -> Callable[[str], Verdict]:
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
        (f"Rotary positions trained at {short} extrapolate better than sinusoidal ones, to"
         f" {2 * short}",
         compare(("rotary", short, 2 * short), ("sinusoidal", short, 2 * short), lt)),
        (f"The T5 bias trained at {short} extrapolates better than rotary positions, to"
         f" {longest}",
         compare(("t5", short, longest), ("rotary", short, longest), lt)),
        (f"ALiBi trained at {short} extrapolates better than the T5 bias, to {longest}",
         compare(("alibi", short, longest), ("t5", short, longest), lt)),
        (f"ALiBi trained at {short} and tested at {four} beats sinusoidal positions trained at"
         f" {four}",
         compare(("alibi", short, four), ("sinusoidal", four, four), lt)),
        (f"ALiBi trained at {four} beats sinusoidal positions trained at {four}",
         compare(("alibi", four, four), ("sinusoidal", four, four), lt)),
        ("The early-token curse: with a sliding window, less than half of ALiBi's gain from"
         f" {short} to {longest} is left",
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
        (f"ALiBi trains in no more memory than sinusoidal positions (MiB at {four}, within"
         f" {_CLOSE:.0%})",
         judge((a < (1 + _CLOSE) * b for a, b in zip(*memory, strict=False)),
               against(*memory, ".0f"))),
    ]  # fmt: skip


def claims_table(found: Found) -> str:
    """The claims, and what each corpus says to them."""
    head = ["the paper's claim", *(CORPUS_NAMES[corpus] for corpus in found.corpora)]
    rows = [[text, *(str(verdict(c)) for c in found.corpora)] for text, verdict in claims(found)]
    costs = [[text, str(verdict)] for text, verdict in cost_claims(found)]
    return "\n\n".join([table(head, rows), table([head[0], "here"], costs)])


def perplexity_tables(found: Found, *, sliding: bool) -> str:
    """A table per corpus: models down, test lengths across."""
    parts = []
    for corpus in found.corpora:
        rows = []
        for trained, position in product((found.length, 4 * found.length), found.positions):
            values = (
                found.perplexities(corpus, position, trained, tested, sliding=sliding)
                for tested in found.test_lengths
            )
            rows.append([f"{METHODS[position].label}, trained at {trained}", *map(cell, values)])
        head = [f"{CORPUS_NAMES[corpus]}, tested at", *map(str, found.test_lengths)]
        parts.append(table(head, rows))
    return "\n\n".join(parts)


def cost_tables(found: Found) -> str:
    """Medians, and half the range, over rounds (speed) and seeds (memory)."""
    lengths, tested = (found.length, 4 * found.length), found.test_lengths

    def median(values: list[float]) -> str:
        half = (max(values) - min(values)) / 2 if values else 0
        return f"{statistics.median(values):,.0f} ± {half:,.0f}" if values else ""

    def speed(mode: str, position: str, lengths: Iterable[int]) -> list[str]:
        return [median(found.speed(mode, position, n)) for n in lengths]

    def memory(kind: str, position: str, lengths: Iterable[int]) -> list[str]:
        return [median(found.memory(kind, position, n, f"{kind}_length")) for n in lengths]

    head = [f"{unit} at {n}" for unit in ("tokens/s", "MiB") for n in lengths]
    training, reading, held = [], [], []
    for position in found.positions:
        label = METHODS[position].label
        costs = speed("training", position, lengths) + memory("train", position, lengths)
        training.append([label, *costs])
        reading.append([label, *speed("inference", position, tested)])
        held.append([label, *memory("test", position, tested)])
    tables = (
        table(["training", *head], training),
        table(["inference, tokens/s at", *map(str, tested)], reading),
        table(["inference, MiB at", *map(str, tested)], held),
    )
    return "\n\n".join(tables)


def description(found: Found) -> str:
    """How it was measured."""
    plan, model, trained = found.plan, found.made["model"], found.of("train")
    rates = {lr: found.of("tune", lr=lr) for lr in unique(found.of("tune"), "lr")}
    bits = {lr: statistics.fmean(r["loss_base2"] for r in own) for lr, own in rates.items()}
    tuned = ", ".join(f"{lr:g}: {2**loss:.0f}" for lr, loss in bits.items())
    by_seeds = {c: ", ".join(map(str, found.seeds[c])) for c in found.corpora}
    seeds = " and ".join(f"{seeds} ({CORPUS_NAMES[c]})" for c, seeds in by_seeds.items())
    if len(set(by_seeds.values())) == 1:
        seeds = next(iter(by_seeds.values()))
    first = trained[0]
    return (
        f"{model['num_hidden_layers']} layers of width {model['hidden_size']},"
        f" {model['num_attention_heads']} heads, {first['num_parameters'] / 1e6:.2f} M parameters"
        f" ({CORPUS_NAMES[first['corpus']]}), adaptive input and softmax cut at"
        f" {model['cutoffs']}; {plan['steps']:,} steps of {plan['max_tokens']} tokens,"
        f" {first['tokens'] / 1e6:.2f} M tokens, the same ones in the same order for all positions"
        f" of a seed; seeds {seeds}. Learning rate {first['lr']:g} for all: the least validation"
        " loss, in the mean over the four positions, after a quarter of the steps with another"
        f" seed (perplexity by rate: {tuned}). Scored: the first {plan['test_tokens']:,} tokens of"
        f" the test text without overlap; with a window that slides by {plan['stride']} tokens,"
        f" {plan['sliding_tokens']:,} that are the same for every length. Cells: mean ± half the"
        f" range over the seeds. {where(found.made)}. Speed: {where(found.speed_made)}."
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
                model = (corpus, position, trained)
                line = {n: found.perplexities(*model, n) for n in found.test_lengths}
                line = {n: values for n, values in line.items() if values}
                draw(axes, line, style, position, f"{METHODS[position].label}, {trained}")
        finish(axes, found.test_lengths, CORPUS_NAMES[corpus], "tokens per test block")
        on_a_log_scale(axes)
    panels[0].set_ylabel("perplexity (lower is better)")
    panels[-1].legend(title="trained at", frameon=False, fontsize=9, loc="upper left")
    return figure


def curse_figure(found: Found) -> Figure:
    """What ALiBi gains from longer input, in blocks and sliding; and perplexity by context."""
    figure = Figure(figsize=(5.4 * len(found.corpora), 7.6), layout="constrained")
    rows = figure.subplots(2, len(found.corpora), squeeze=False)
    short, lengths, longest = found.length, found.test_lengths, found.test_lengths[-1]
    ways = ((False, "-o", "blocks without overlap"), (True, "--s", "sliding window"))
    for column, corpus in enumerate(found.corpora):
        upper, lower = rows[0][column], rows[1][column]
        for sliding, style, label in ways:
            bits = {n: found.bits(corpus, "alibi", short, n, sliding=sliding) for n in lengths}
            # Each seed beside itself: what is scored sliding has a level of its own.
            pairs = {n: zip(bits[n], bits[short], strict=True) for n in lengths}
            line = {n: [100 * (2 ** (a - b) - 1) for a, b in of] for n, of in pairs.items()}
            draw(upper, line, style, "alibi", label)
        title = f"{CORPUS_NAMES[corpus]}: ALiBi trained at {short}"
        finish(upper, lengths, title, "tokens per test block or window")
        for position in found.positions:
            model = {"corpus": corpus, "position": position, "train_length": short}
            records = found.of("test", **model, test_length=longest, stride=longest)
            curves = [r["by_context"] for r in records if r["seed"] in found.seeds[corpus]]
            line = {of[0][0]: [2**bits for _, bits in of] for of in zip(*curves, strict=True)}
            draw(lower, line, "-", position, METHODS[position].label)
        ticks = [4**k for k in range(6) if 4**k <= longest]
        label = "tokens of context before the predicted one"
        finish(lower, ticks, f"All trained at {short}", label)
        on_a_log_scale(lower)
        lower.axvline(short, color="#888888", linewidth=1, linestyle=(0, (4, 3)))
    rows[0][0].set_ylabel(f"perplexity, change in % from that at {short}")
    rows[1][0].set_ylabel("perplexity (lower is better)")
    rows[0][-1].legend(frameon=False, fontsize=9)
    rows[1][-1].legend(frameon=True, framealpha=1, edgecolor="none", fontsize=9)
    return figure


def kept_together(records: Iterable[Record]) -> list[Record]:
    """The records as they are kept: the tests of a model in its record, and the rounds of a speed
    in one.
    """
    kept: dict[Any, Record] = {}
    for number, r in enumerate(records):
        if r["kind"] == "test":
            key, what = tuple(r[name] for name in MODEL), [*MODEL, "kind"]
            test = {name: value for name, value in r.items() if name not in what}
            kept[key].setdefault("tests", []).append(test)
        elif r["kind"] == "train":
            kept[tuple(r[name] for name in MODEL)] = dict(r)
        elif r["kind"] in SPEED[1:]:
            alike = {name: value for name, value in r.items() if name not in ("round", RATE)}
            key = (r["kind"], r["position"], r["length"])
            kept.setdefault(key, {**alike, "rounds": []})["rounds"].append([r["round"], r[RATE]])
        else:
            kept[number] = r
    return list(kept.values())


def read_kept() -> Found:
    """The records that the document was written from."""
    found = []
    for r in read(KEPT):
        tests, rounds = r.pop("tests", ()), r.pop("rounds", None)
        found += [{**r, "round": n, RATE: rate} for n, rate in rounds or ()]
        found += [] if rounds else [r]
        found += [{"kind": "test", **{n: r[n] for n in MODEL}, **test} for test in tests]
    return Found(found)


def renewed(kept: Sequence[Record], fresh: Sequence[Record]) -> list[Record]:
    """The kept records, but for what a new run measured: the comparison, speed, or both.

    A `ValueError` says that it has one of the two only, and its plan is not that of the other.
    """
    comparison = [r for r in fresh if r["kind"] not in SPEED]
    speed = [r for r in fresh if r["kind"] in SPEED]
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
    """Fills the document, draws its plots, and keeps the records with those of the results."""
    if results.exists():
        kept = read_kept().records if KEPT.exists() else []
        records = kept_together(renewed(kept, read(results)))
        lines = (json.dumps(record) + "\n" for record in records)
        write_whole(KEPT, "".join(lines).encode())
    found = read_kept()
    if not any(found.seeds.values()):
        raise SystemExit(f"paper_report: {KEPT} must have tests of a whole seed, got none")
    fill(document, parts(found))
    plots = document.parent / "results"
    plots.mkdir(exist_ok=True)
    save(length_figure(found), plots / "paper_length.png")
    save(curse_figure(found), plots / "paper_curse.png")
