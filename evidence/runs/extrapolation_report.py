"""What extrapolation.py measured: tables of README and guides, the plot, what the explorer shows.

Every loss is in bits per byte; a method's cell is the mean over its seeds.
"""

import math
import statistics
from collections.abc import Iterator
from typing import Any

from extrapolation import PLANS, TILE, records_of
from linbias.lm.evaluation import Evaluation
from linbias.lm.report.findings import change_in_words
from linbias.lm.report.records import EvaluationRecord
from linbias.methods import METHODS
from linbias.models import LinbiasConfig
from markers import Record, read
from markers import table as markdown

COMMAND = "python evidence/runs/extrapolation.py --corpus wikitext-2"


class Found:
    """The records of a plan, asked by what they measure."""

    def __init__(self, name: str = "extrapolation") -> None:
        self.name = name
        path = records_of(name)
        self.plan, *records = read(path) if path.exists() else [{}]
        self.models = [record for record in records if record["kind"] == "model"]
        trained = {record["method"] for record in self.models}
        self.methods = [name for name in METHODS if name in trained]
        self.lengths: list[int] = self.plan.get("test_lengths", [])
        is_first = name == next(iter(PLANS))
        self.command = COMMAND if is_first else f"{COMMAND} --plan {name}"

    def seeds(self, method: str) -> list[Record]:
        """The models of a method."""
        return [record for record in self.models if record["method"] == method]

    def losses(self, method: str, read: str, length: int) -> list[float]:
        """Of each seed; none beyond a table of positions. read: "segments" or "sliding"."""
        found = (record[read].get(str(length)) for record in self.seeds(method))
        return [loss for loss in found if loss is not None]

    def limit(self, method: str) -> int | None:
        """The last test length, where a table of positions ends before the longest."""
        read = [length for length in self.lengths if self.losses(method, "segments", length)]
        return read[-1] if read[-1] < self.lengths[-1] else None


def table(read: str, found: Found) -> str:
    """Every method at every length."""
    first, last = found.lengths[0], found.lengths[-1]
    header = [f"bits per byte, {_READ[read]}", *(f"{n:,}" for n in found.lengths), "change"]
    rows = []
    for method in found.methods:
        losses = [found.losses(method, read, length) for length in found.lengths]
        means = {n: statistics.mean(x) for n, x in zip(found.lengths, losses, strict=True) if x}
        cells = [f"{means[n]:.3f}" if n in means else "-" for n in found.lengths]
        change = change_in_words(means[last] / means[first] - 1) if last in means else "-"
        rows.append([METHODS[method].label, *cells, change])
    return markdown(header, rows)


_READ = {"segments": "in segments of", "sliding": "with a window of"}


def _spread(found: Found, method: str) -> float:
    """Half the range over seeds, where it is largest."""
    measured = [found.losses(method, read, n) for read in _READ for n in found.lengths]
    return max((max(losses) - min(losses)) / 2 for losses in measured if losses)


def near_to_far_table(found: Found) -> str:
    """What near-to-far attention reads with each method at the longest length."""
    header = [
        f"near to far at {found.lengths[-1]:,} tokens",
        "pairs read",
        "heads that read less than a tenth",
        "a token's step, least and largest head",
        "most weight of a row unread",
    ]
    rows = []
    for method in found.methods:
        seen = [record["near_to_far"] for record in found.seeds(method)]
        read = [x for r in seen for row in r["read"] for x in row]
        step = [x for r in seen for row in r["step"] for x in row]
        few = f"{sum(share < 0.1 for share in read)} of {len(read)}"
        steps = f"{min(step):.2g} to {max(step):.2g}"
        dropped = f"{max(r['dropped'] for r in seen):.1g}"
        rows.append([METHODS[method].label, f"{statistics.mean(read):.0%}", few, steps, dropped])
    text = (
        f"In all layers of all seeds, on the first {found.lengths[-1]:,} bytes of the test text:"
        " of the pairs of a query and a key that it may see, those that `linbias.near_to_far`"
        f" reads (tiles of {TILE} queries and {TILE} keys, tolerance 2^-24); the mean by which"
        " scores fall from one token to the next; and the most that the keys left unread weigh"
        " together in any row."
    )
    return f"{markdown(header, rows)}\n\n{text}"


def how_made(found: Found) -> str:
    """The line below the tables."""
    made, plan = made_of(found), found.plan
    by_count: dict[int, list[str]] = {}
    for name in found.methods:
        count, half = len(found.seeds(name)), _spread(found, name)
        spread = f" ({half:.3f})" if count > 1 else ""
        by_count.setdefault(count, []).append(METHODS[name].label + spread)
    seeds = "; ".join(f"{count} of {', '.join(names)}" for count, names in by_count.items())
    sliding = ""
    if plan["sliding_tokens"]:
        by = f"with a window that slides by {plan['stride']}"
        sliding = f" and {plan['sliding_tokens']:,} {by}"
    return (
        f"Trained on {plan['length']} tokens at a time: {made['model']}; {made['training']}."
        f" {made['corpus']}; scored are the first {plan['test_tokens']:,} of the test text in"
        f" segments{sliding}. Means over seeds, and in brackets half of their range, at the length"
        f" where it is widest: {seeds}. Change: from {found.lengths[0]} to {found.lengths[-1]:,}"
        f" tokens. {made['machine']}, {made['time']}, {made['date']}, `{made['command']}`."
    )


def made_of(found: Found) -> dict[str, str]:
    """How the models were made, in words."""
    plan, models = found.plan, found.models
    tuned = {name: found.seeds(name)[0]["rate"] for name in found.methods}
    rates = ", ".join(f"{METHODS[name].label} {rate:g}" for name, rate in tuned.items())
    choices = ", ".join(f"{rate:g}" for rate in plan["rates"])
    tokens = models[0]["tokens"]
    steps = math.ceil(plan["tokens"] / (plan["batch_size"] * plan["length"]))
    parameters = [record["num_parameters"] / 1e6 for record in models]
    model = PLANS[found.name].settings(found.methods[0], 0, plan["rates"][0], plan["tokens"]).model
    config = LinbiasConfig(**model)
    machines = sorted({record["machine"] for record in models})
    days = sorted({record["date"][:10] for record in models})
    hours = sum(record["seconds"] for record in models) / 3600
    return {
        "command": found.command,
        "date": " to ".join(dict.fromkeys((days[0], days[-1]))),
        "time": f"{hours:.1f} hours of one thread for {len(models)} models",
        "machine": " and ".join(machines),
        "corpus": f"WikiText-2, a byte a token, {plan['bytes']['train'] / 1e6:.1f} MB to train on",
        "tokens": "256 different ones (bytes)",
        "model": (
            f"{config.num_hidden_layers} layers of width {config.hidden_size},"
            f" {config.num_attention_heads} heads, {min(parameters):.2f} M parameters"
        ),
        "training": (
            f"{tokens / 1e6:.1f} M tokens ({steps:,} steps of"
            f" {plan['batch_size'] * plan['length']:,}), bfloat16, at the best of the learning"
            f" rates {choices} by validation loss after an eighth of the tokens ({rates})"
        ),
        "versions": ", ".join(f"{name} {value}" for name, value in models[-1]["versions"].items()),
    }


def evaluations() -> Iterator[EvaluationRecord]:
    """The losses in segments, as the plot of `linbias extrapolate` takes them."""
    found = Found()
    for record in found.models:
        for length, bits in record["segments"].items():
            measured = Evaluation(int(length), None, 1, 1, bits * math.log(2), 1.0, 0, (), ())
            model = (record["method"], found.plan["length"], record["seed"])
            yield EvaluationRecord(*model, measured, date="")


def for_explorer() -> dict[str, Any]:
    """The comparison as `linbias.lm.report.summary.summary` gives a run."""
    found = Found()
    lines = [
        {
            "method": method,
            "limit": found.limit(method),
            "lengths": _points(found, method, "segments"),
            "sliding": _points(found, method, "sliding"),
            "positions": _positions(found, method),
        }
        for method in found.methods
    ]
    group = {"train_length": found.plan["length"], "test_lengths": found.lengths, "lines": lines}
    return {
        "name": "the comparison of the README",
        "made": made_of(found),
        "num_seeds": max(len(found.seeds(method)) for method in found.methods),
        "groups": [group],
    }


def _points(found: Found, method: str, read: str) -> list[dict[str, float]]:
    points = []
    for length in found.lengths:
        if losses := found.losses(method, read, length):
            mean = round(statistics.mean(losses), 5)
            points.append({"x": length, "y": mean, "low": min(losses), "high": max(losses)})
    return points


def _positions(found: Found, method: str) -> list[dict[str, float]]:
    curves = [record["positions"] for record in found.seeds(method)]
    return [
        {"x": point[0][0], "y": round(statistics.mean(loss for _, loss in point), 5)}
        for point in zip(*curves, strict=True)
    ]
