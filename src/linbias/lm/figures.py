"""The two plots of an extrapolation experiment: loss by test length, and loss by position.

Both are Matplotlib figures of records, never of typed numbers. Each line has its name beside it.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, NullLocator

from linbias.lm import findings
from linbias.lm.methods import COLOURS, NAMES
from linbias.lm.records import EvaluationRecord

_TITLE: dict[str, Any] = {"loc": "left", "fontweight": "bold", "fontsize": 11.5, "pad": 10}
_TEXT_COLOUR, _FRAME_COLOUR = "#222222", "#888888"


class _LineEnd(NamedTuple):
    """Where a line ends, and what is written there."""

    x: float
    y: float
    name: str
    colour: str


def loss_by_length(evaluations: Sequence[EvaluationRecord]) -> Figure:
    """Bits per byte against test length, in multiples of the training length: a panel for each."""
    train_lengths = findings.train_lengths(evaluations)
    figure, panels = _panels(len(train_lengths))
    for axes, train_length in zip(panels, train_lengths, strict=True):
        ends = []
        for method in findings.methods(evaluations):
            points = findings.curve(evaluations, method, train_length)
            if not points:
                continue
            x = [point.test_length / train_length for point in points]
            mean = [point.mean for point in points]
            colour = COLOURS[method]
            axes.plot(x, mean, "-o", color=colour, linewidth=2.2, markersize=5, clip_on=False)
            low, high = [p.low for p in points], [p.high for p in points]
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
            ends.append(_LineEnd(x[-1], mean[-1], f"{NAMES[method]}  {mean[-1]:.2f}", colour))
        lengths = findings.test_lengths(evaluations, train_length)
        ticks = {n / train_length: f"{n / train_length:g}x\n{n:,}" for n in lengths}
        _finish(axes, ticks, ends, trained_at=1.0)
        axes.set_title(f"Trained on {train_length:,} tokens, tested on more", **_TITLE)
        axes.set_xlabel("test length: multiple of the training length, tokens")
    panels[0].set_ylabel("bits per byte (lower is better)")
    return figure


def loss_by_position(evaluations: Sequence[EvaluationRecord]) -> Figure:
    """Bits per token against the tokens of context before it: a panel per training length."""
    train_lengths = findings.train_lengths(evaluations)
    figure, panels = _panels(len(train_lengths))
    for axes, train_length in zip(panels, train_lengths, strict=True):
        records = [record for record in evaluations if record.train_length == train_length]
        ends = []
        for method in findings.methods(records):
            same = [record for record in records if record.method == method]
            positions, bits = findings.loss_by_position(same)
            axes.plot(positions, bits, "-", color=COLOURS[method], linewidth=2.2, clip_on=False)
            if positions:
                ends.append(_LineEnd(positions[-1], bits[-1], NAMES[method], COLOURS[method]))
        longest = max(record.test_length for record in records)
        powers = range(int(math.log(longest, 4)) + 1)
        ticks = {longest / 4**power: f"{longest / 4**power:,.0f}" for power in powers}
        _finish(axes, ticks, ends, trained_at=float(train_length))
        axes.set_title(f"Trained on {train_length:,} tokens", **_TITLE)
        axes.set_xlabel("tokens of context before the predicted one")
    panels[0].set_ylabel("bits per token (lower is better)")
    return figure


def png(figure: Figure) -> bytes:
    """The figure as a PNG file's bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, facecolor="white")
    return buffer.getvalue()


def svg(figure: Figure) -> str:
    """The figure as an <svg> element as wide as its surroundings, in the page's font."""
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(["Creator", "Date", "Format", "Type"])
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(max(8.0, 5.2 * count), 4.5), layout="constrained")
    axes = figure.subplots(1, count, sharey=True, squeeze=False)
    return figure, list(axes[0])


def _finish(
    axes: Axes,
    ticks: dict[float, str],
    ends: list[_LineEnd],
    trained_at: float,
) -> None:
    """Adds what both plots have: the axis in powers of two, the training length, names of lines."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels(list(ticks.values()))
    axes.axvline(trained_at, color=_FRAME_COLOUR, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.annotate(
        "training length",
        (trained_at, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(4, -3),
        textcoords="offset points",
        color=_FRAME_COLOUR,
        fontsize=9,
        verticalalignment="top",
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(_FRAME_COLOUR)
    axes.tick_params(colors=_TEXT_COLOUR, labelleft=True)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(y=0.08)  # room for the words "training length"
    _label_ends(axes, ends)


def _label_ends(axes: Axes, ends: list[_LineEnd]) -> None:
    """Writes each name beside the end of its line, moved up where two would overlap."""
    low, high = axes.get_ylim()
    line_height = 0.055 * (high - low)
    previous = -math.inf
    for x, y, name, colour in sorted(ends, key=lambda end: end.y):
        height = max(y, previous + line_height)
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
