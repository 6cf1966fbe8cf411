"""The two pictures of an extrapolation run: loss by test length, and loss by position.

Both are Matplotlib figures of records (see `linbias.lm.extrapolate`), never of typed numbers.
Colours are Okabe and Ito's, which colour-blind readers can tell apart; each line carries its name.
"""

import io
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, NullLocator

Record = dict[str, Any]

NAMES = {
    "alibi": "ALiBi",
    "sinusoidal": "sinusoidal",
    "rotary": "rotary",
    "learned": "learned",
    "t5": "T5 bias",
    "none": "no positions",
}
COLOURS = {
    "alibi": "#0072B2",
    "sinusoidal": "#D55E00",
    "rotary": "#009E73",
    "learned": "#CC79A7",
    "t5": "#B8860B",
    "none": "#666666",
}
_TITLE: dict[str, Any] = {"loc": "left", "fontweight": "bold", "fontsize": 11.5, "pad": 10}
# Below so many predictions a mean loss is mostly noise.
_ENOUGH = 100
_INK, _FAINT = "#222222", "#888888"


class Point(NamedTuple):
    """One test length of one method: the mean over seeds, and the range."""

    test_length: int
    mean: float
    low: float
    high: float


def curve(evaluations: Iterable[Record], method: str, train_length: int) -> list[Point]:
    """Bits per byte by test length of one method, over the seeds that were measured."""
    by_length: dict[int, list[float]] = {}
    for record in evaluations:
        if (record["method"], record["train_length"]) == (method, train_length):
            by_length.setdefault(record["test_length"], []).append(record["bits_per_byte"])
    return [Point(n, float(np.mean(v)), min(v), max(v)) for n, v in sorted(by_length.items())]


def loss_by_length(evaluations: Sequence[Record]) -> Figure:
    """Bits per byte against test length, in multiples of the training length: a panel for each."""
    train_lengths = unique(evaluations, "train_length")
    figure, panels = _panels(len(train_lengths))
    for axes, train_length in zip(panels, train_lengths, strict=True):
        ends = []
        for method in unique(evaluations, "method"):
            points = curve(evaluations, method, train_length)
            if not points:
                continue
            x = [point.test_length / train_length for point in points]
            mean = [point.mean for point in points]
            colour = COLOURS[method]
            axes.plot(x, mean, "-o", color=colour, linewidth=2.2, markersize=5, clip_on=False)
            low, high = [p.low for p in points], [p.high for p in points]
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
            ends.append((x[-1], mean[-1], f"{NAMES[method]}  {mean[-1]:.2f}", colour))
        here = [record for record in evaluations if record["train_length"] == train_length]
        lengths = sorted(unique(here, "test_length"))
        ticks = {n / train_length: f"{n / train_length:g}x\n{n:,}" for n in lengths}
        _finish(axes, ticks, ends, trained_at=1.0)
        axes.set_title(f"Trained on {train_length:,} tokens, tested on more", **_TITLE)
        axes.set_xlabel("test length: multiple of the training length, tokens")
    panels[0].set_ylabel("bits per byte (lower is better)")
    return figure


def loss_by_position(evaluations: Sequence[Record]) -> Figure:
    """Bits per token against the tokens of context before it: a panel per training length."""
    train_lengths = unique(evaluations, "train_length")
    figure, panels = _panels(len(train_lengths))
    for axes, train_length in zip(panels, train_lengths, strict=True):
        records = [r for r in evaluations if r["train_length"] == train_length]
        ends = []
        for method in unique(records, "method"):
            x, bits = by_position([record for record in records if record["method"] == method])
            axes.plot(x, bits, "-", color=COLOURS[method], linewidth=2.2, clip_on=False)
            if x:
                ends.append((x[-1], bits[-1], NAMES[method], COLOURS[method]))
        longest = max(record["test_length"] for record in records)
        steps = range(int(math.log(longest, 4)) + 1)
        ticks = {longest / 4**step: f"{longest / 4**step:,.0f}" for step in steps}
        _finish(axes, ticks, ends, trained_at=float(train_length))
        axes.set_title(f"Trained on {train_length:,} tokens", **_TITLE)
        axes.set_xlabel("tokens of context before the predicted one")
    panels[0].set_ylabel("bits per token (lower is better)")
    return figure


def by_position(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """One method's mean bits by position: the positions (middles of pools), the bits.

    What a causal model predicts at a position does not depend on how long its segment goes on.
    Each position is therefore taken from the shortest segments that reach it: they are the most.
    Neighbours are pooled over half octaves, and further until there are enough predictions.
    """
    total, count = np.zeros(0), np.zeros(0)
    for length in sorted(unique(records, "test_length")):
        same = [record for record in records if record["test_length"] == length]
        counts = np.array([record["count_by_position"] for record in same], dtype=float)
        losses = np.array([record["loss_by_position"] for record in same], dtype=float)
        new = slice(len(count), length)
        total = np.append(total, (np.nan_to_num(losses) * counts).sum(0)[new])
        count = np.append(count, counts.sum(0)[new])
    ends = np.unique(np.round(2.0 ** np.arange(0.5, math.log2(len(count)) + 0.5, 0.5)).astype(int))
    x, bits, first = [], [], 0
    for end in [*ends[ends < len(count)], len(count)]:
        num = count[first:end].sum()
        if num >= _ENOUGH:
            x.append(math.sqrt((first + 1) * end))  # positions count from 1
            bits.append(float(total[first:end].sum() / num / math.log(2.0)))
            first = end
    return x, bits


def unique(records: Iterable[Record], key: str) -> list[Any]:
    """The different values of a field, in order of appearance."""
    return list(dict.fromkeys(record[key] for record in records))


def png(figure: Figure) -> bytes:
    """The figure as a PNG file's bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, facecolor="white")
    return buffer.getvalue()


def svg(figure: Figure) -> str:
    """The figure as an <svg> element that takes the width of its place and the page's font."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(["Creator", "Date", "Format", "Type"])
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(max(8.0, 5.2 * count), 4.5), layout="constrained")
    axes = figure.subplots(1, count, sharey=True, squeeze=False)
    return figure, list(axes[0])


def _finish(
    axes: Axes,
    ticks: dict[float, str],
    ends: list[tuple[float, float, str, str]],
    trained_at: float,
) -> None:
    """Log-2 axis, training length, quiet frame, and the lines' names at their ends."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(list(ticks.values()))
    axes.axvline(trained_at, color=_FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.annotate(
        "training length",
        (trained_at, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(4, -3),
        textcoords="offset points",
        color=_FAINT,
        fontsize=9,
        verticalalignment="top",
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(_FAINT)
    axes.tick_params(colors=_INK, labelleft=True)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(y=0.08)  # room for the mark of the training length
    _label_ends(axes, ends)


def _label_ends(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write each name beside its line's end, moved up just so far that no two overlap."""
    low, high = axes.get_ylim()
    gap = 0.055 * (high - low)  # a line of text
    previous = -math.inf
    for x, y, name, colour in sorted(ends, key=lambda end: end[1]):
        height = max(y, previous + gap)
        previous = height
        axes.annotate(
            name,
            (x, height),
            fontsize=10,
            xytext=(9, 0),
            textcoords="offset points",
            color=colour,
            fontweight="bold",
            verticalalignment="center",
            annotation_clip=False,
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )
