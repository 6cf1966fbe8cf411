"""What the records of an extrapolation experiment say: numbers and sentences, without layout."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean
from typing import NamedTuple

import numpy as np

from linbias.lm.report.records import EvaluationRecord, ExtrapolationResults, TrainingRecord
from linbias.methods import METHODS

# Another seed can change the loss by up to this share.
_CLEAR_CHANGE = 0.01
# Tokens read for each parameter: what is usual for a full training (Hoffmann et al., 2022).
_FULL_TRAINING = 20
# What the report says of its numbers.
HOW_SCORED = (
    "Every token of the text but its first is scored once at each length. Tables and figures are "
    "made from results.json; there is one line per measurement in results.jsonl."
)
# The mean loss over fewer predictions is mostly noise.
_MIN_PREDICTIONS = 100


class Point(NamedTuple):
    """Bits per byte of one method at one test length: the mean over seeds, and the range."""

    test_length: int
    mean: float
    low: float
    high: float


def curve(evaluations: Iterable[EvaluationRecord], method: str, train_length: int) -> list[Point]:
    """Bits per byte of one method by test length, over the seeds that were measured."""
    by_length: dict[int, list[float]] = {}
    for record in evaluations:
        if (record.method, record.train_length) == (method, train_length):
            by_length.setdefault(record.test_length, []).append(record.bits_per_byte)
    return [Point(n, fmean(bits), min(bits), max(bits)) for n, bits in sorted(by_length.items())]


def methods(records: Iterable[EvaluationRecord | TrainingRecord]) -> list[str]:
    return list(dict.fromkeys(record.method for record in records))


def train_lengths(records: Iterable[EvaluationRecord | TrainingRecord]) -> list[int]:
    return list(dict.fromkeys(record.train_length for record in records))


def test_lengths(evaluations: Iterable[EvaluationRecord], train_length: int) -> list[int]:
    """The test lengths of the models with a training length, shortest first."""
    return sorted({r.test_length for r in evaluations if r.train_length == train_length})


@dataclass(frozen=True)
class Finding:
    """How the loss of one method changed from the training length to its longest test length."""

    method: str
    train_length: int
    at_training: Point
    at_longest: Point
    num_seeds: int

    @property
    def change(self) -> float:
        return self.at_longest.mean / self.at_training.mean - 1.0

    @property
    def verdict(self) -> str:
        if self.at_longest.test_length == self.train_length:
            return "limited to its training length"
        if self.change <= 0.0:
            return "no worse"
        return "clearly worse" if self.change > _CLEAR_CHANGE else "slightly worse"

    def __str__(self) -> str:
        multiple = self.at_longest.test_length / self.train_length
        first, last = self.at_training.mean, self.at_longest.mean
        seeds = "one seed" if self.num_seeds == 1 else f"mean of {self.num_seeds} seeds"
        if multiple == 1:
            at = f"bits per byte at {self.train_length:,} tokens"
            return f"{self.verdict}: {first:.3f} {at} ({seeds})"
        return (
            f"{self.verdict} at {multiple:g}x the training length of {self.train_length:,}: "
            f"{first:.3f} to {last:.3f} bits per byte ({change_in_words(self.change)}, {seeds})"
        )


def findings(evaluations: Sequence[EvaluationRecord]) -> list[Finding]:
    """One finding per training length and method, in the order of the run."""
    in_order = []
    for train_length, method in product(train_lengths(evaluations), methods(evaluations)):
        points = {point.test_length: point for point in curve(evaluations, method, train_length)}
        if train_length in points:
            longest = points[max(points)]
            seeds = {
                record.seed
                for record in evaluations
                if (record.method, record.train_length) == (method, train_length)
            }
            at_training = points[train_length]
            in_order.append(Finding(method, train_length, at_training, longest, len(seeds)))
    return in_order


def scope(trainings: Sequence[TrainingRecord]) -> str | None:
    """What so short a training cannot show; None where models read as much as is usual."""
    read = max((t.metrics.tokens / t.metrics.num_parameters for t in trainings), default=math.inf)
    if read >= _FULL_TRAINING:
        return None
    parameters = max(training.metrics.num_parameters for training in trainings)
    return (
        f"This was a short training of small models: they have {parameters / 1e6:.2f} M "
        f"parameters and read {read:.2g} tokens for each parameter, where about {_FULL_TRAINING} "
        "are usual. It can show whose loss rises beyond the training length. It cannot show which "
        "method is best after a full training, or in a large model."
    )


def cautions(results: ExtrapolationResults) -> list[str]:
    """What to keep in mind: that a number rests on one seed."""
    if all(finding.num_seeds > 1 for finding in findings(results.evaluations)):
        return []
    return [
        "Where it says one seed, one model was trained: another seed trains another one, whose "
        "numbers differ, and small differences may turn round. With --seeds 0,1,2 the figures "
        "show the mean and the range of three."
    ]


def change_in_words(change: float) -> str:
    """A relative change in percent, with its sign unless it rounds to zero."""
    text = f"{change:+.1%}"
    return text.lstrip("+-") if float(text[:-1]) == 0.0 else text


class Row(NamedTuple):
    """A row of a table; a cell is None beyond the method's table of positions."""

    method: str
    cells: list[str | None]


class Table(NamedTuple):
    """A table with a row per method; a line end in a head divides it."""

    caption: str
    heads: list[str]
    rows: list[Row]
    note: str = ""


def loss_table(evaluations: Sequence[EvaluationRecord], train_length: int) -> Table:
    """Bits per byte for one training length by test length, and the change to the longest."""
    lengths, rows = test_lengths(evaluations, train_length), []
    for method in methods(evaluations):
        means = {p.test_length: p.mean for p in curve(evaluations, method, train_length)}
        if means:
            first, last = means.get(train_length), means.get(lengths[-1])
            change = change_in_words(last / first - 1) if first and last else ""
            losses = [f"{means[n]:.3f}" if n in means else None for n in lengths]
            rows.append(Row(method, [*losses, change]))
    heads = [f"{length:,}\n{length / train_length:g}x" for length in lengths]
    caption = f"Bits per byte, trained on {train_length:,} tokens, tested on"
    return Table(caption, [*heads, "change"], rows)


def cost_table(results: ExtrapolationResults) -> Table:
    """What training took: a row per training length and method, with means over the seeds."""
    trainings = results.trainings
    rows = []
    for length, method in product(train_lengths(trainings), methods(trainings)):
        key = (length, method)
        same = [r.metrics for r in trainings if (r.train_length, r.method) == key]
        if same:
            cells: list[str | None] = [
                f"{length:,}",
                f"{fmean(m.tokens for m in same) / 1e6:.2f} M",
                f"{fmean(m.seconds for m in same):.0f} s",
                f"{fmean(m.tokens_per_second for m in same):,.0f}",
                f"{fmean(m.peak_memory_bytes for m in same) / 2**20:,.0f} MiB",
            ]
            rows.append(Row(method, cells))
    heads = ["trained\non", "tokens\nread", "time", "tokens/s", "peak\nmemory"]
    note = "tokens/s: of a median step, without start-up"
    shared = "the same tokens in the same order for every method"
    if results.settings.training.seconds is not None:
        shared = "equal time for every method"
    return Table(f"Training, {shared}", heads, rows, note)


def loss_by_position(records: Sequence[EvaluationRecord]) -> tuple[list[float], list[float]]:
    """One method's mean bits per byte by position, from the shortest segments that have it."""
    total, count = np.zeros(0), np.zeros(0)
    evaluations = [record.evaluation for record in records]
    num_bytes = sum(evaluation.num_bytes or 0 for evaluation in evaluations)
    nats_per_bit = math.log(2.0) * num_bytes / sum(each.num_tokens for each in evaluations)
    for length in sorted({record.test_length for record in records}):
        same = [record.evaluation for record in records if record.test_length == length]
        counts = np.array([evaluation.count_by_position for evaluation in same], dtype=float)
        losses = np.array([evaluation.loss_by_position for evaluation in same], dtype=float)
        new = slice(len(count), length)
        total = np.append(total, (np.nan_to_num(losses, posinf=np.inf) * counts).sum(0)[new])
        count = np.append(count, counts.sum(0)[new])
    ends = np.unique(np.round(2.0 ** np.arange(0.5, math.log2(len(count)) + 0.5, 0.5)).astype(int))
    positions, bits, first = [], [], 0
    for end in [*ends[ends < len(count)], len(count)]:
        num = count[first:end].sum()
        if num >= _MIN_PREDICTIONS:
            positions.append(math.sqrt((first + 1) * end))  # positions count from 1
            bits.append(float(total[first:end].sum() / num / nats_per_bit))
            first = end
    return positions, bits


def records_by_position(results: ExtrapolationResults) -> list[EvaluationRecord]:
    """The records that `loss_by_position` may pool: all, unless slopes depend on the segment's
    length, which gives a position another loss in each; then those of the longest.
    """
    evaluations = results.evaluations
    if results.settings.training.model.get("slope_scale") != "interpolate":
        return list(evaluations)
    longest = {n: max(test_lengths(evaluations, n)) for n in train_lengths(evaluations)}
    return [record for record in evaluations if record.test_length == longest[record.train_length]]


def introduction(evaluations: Sequence[EvaluationRecord]) -> str:
    lengths = " or ".join(f"{n:,}" for n in train_lengths(evaluations))
    longest = max(record.test_length for record in evaluations)
    return (
        f"Language models that differ only in how they represent the order of tokens, trained on "
        f"{lengths} tokens at a time and tested on up to {longest:,}."
    )


def lengths_in_words(evaluations: Sequence[EvaluationRecord]) -> str:
    """The figure of losses by test length, for readers who do not see it."""
    parts = [
        f"{METHODS[method].label} trained on {train_length:,} tokens: "
        + ", ".join(f"{point.mean:.3f} at {point.test_length:,}" for point in points)
        for train_length, method in product(train_lengths(evaluations), methods(evaluations))
        if (points := curve(evaluations, method, train_length))
    ]
    return f"Lines of bits per byte by test length. {'; '.join(parts)}."
