"""The figure of loss by test length, of an extrapolation experiment."""

import io
import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from statistics import fmean
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, NullLocator

from linbias.lm.report import findings
from linbias.lm.report.records import EvaluationRecord
from linbias.methods import METHODS

_BACKGROUND, _TEXT, _FRAME, _GRID = "#FFFFFF", "#222222", "#888888", "#E6E6E6"
_DARK = {"background": "#16181C", "text": "#E4E4E4", "frame": "#9A9A9A", "grid": "#33363C"}
_TITLE: dict[str, Any] = {
    "loc": "left",
    "fontweight": "bold",
    "fontsize": 11,
    "pad": 10,
    "color": _TEXT,
}
_WIDTH, _HEIGHT = 4.7, 4.2  # inches of a panel, where two stand side by side
_ALONE_WIDTH = 8.0


_NAME_INCHES, _TICK_INCHES = 0.19, 0.5  # height of a line of names; width of a tick's label


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
        _draw(axes, evaluations, train_length)
        axes.set_title(f"Trained on {train_length:,} tokens, tested on more", **_TITLE)
    return figure


def _draw(axes: Axes, evaluations: Sequence[EvaluationRecord], train_length: int) -> None:
    ends = []
    for method in findings.methods(evaluations):
        points = findings.curve(evaluations, method, train_length)
        if not points:
            continue
        x = [point.test_length / train_length for point in points]
        mean = [point.mean for point in points]
        label, colour = METHODS[method].label, METHODS[method].colour
        axes.plot(x, mean, "-o", color=colour, clip_on=False, linewidth=2.2, markersize=5)
        low, high = [p.low for p in points], [p.high for p in points]
        axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        ends.append(_LineEnd(x[-1], mean[-1], f"{label}  {mean[-1]:.2f}", colour))
    lengths = findings.test_lengths(evaluations, train_length)
    ticks = {n / train_length: f"{n / train_length:g}x\n{n:,}" for n in lengths}
    axes.set_xscale("log", base=2)
    shown = _with_room(list(ticks), axes)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([ticks[x] for x in shown])
    axes.axvline(1.0, color=_FRAME, linewidth=1.0, linestyle=(0, (4, 3)), zorder=0)
    axes.annotate(
        "training length",
        (1.0, 1.0),
        xycoords=("data", "axes fraction"),
        xytext=(4, -3),
        textcoords="offset points",
        color=_FRAME,
        fontsize=9,
        verticalalignment="top",
    )
    _quiet(axes)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(_FRAME)
    axes.margins(y=0.12)  # room for the words "training length"
    _label_ends(axes, ends)
    axes.set_xlabel("test length: multiple of\nthe training length, tokens", color=_TEXT)
    axes.set_ylabel("bits per byte (lower is better)", color=_TEXT)


def colours(*, dark: bool = False) -> dict[str, str]:
    """The colours of a figure by name: of the methods, and of page, text, frame and grid."""
    light = {"background": _BACKGROUND, "text": _TEXT, "frame": _FRAME, "grid": _GRID}
    methods = {name: m.dark if dark else m.colour for name, m in METHODS.items()}
    return methods | (_DARK if dark else light)


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160, facecolor=_BACKGROUND)
    return buffer.getvalue()


def svg(figure: Figure, description: str) -> str:
    """The figure as an <svg> element, described in words, in the colours of the page."""
    buffer = io.StringIO()
    for label in figure.findobj(Text):
        label.set_path_effects([])  # which would turn letters into outlines: the page has its own
    no_metadata = dict.fromkeys(["Creator", "Date", "Format", "Type"])
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    text = buffer.getvalue()
    for name, colour in colours().items():
        text = re.sub(colour, f"var(--{name})", text, flags=re.IGNORECASE)
    alternative = f'role="img" aria-label="{escape(description)}"'
    return text[text.index("<svg") :].replace("<svg", f"<svg {alternative}", 1)


def svg_file(figure: Figure, description: str, *, dark: bool = False) -> str:
    """The figure as a file of its own, without a ground: for a light page, or for a dark one."""
    known = colours(dark=dark)
    return re.sub(r"var\(--([\w-]+)\)", lambda found: known[found[1]], svg(figure, description))


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(2, count)
    rows = math.ceil(count / columns)
    width = _WIDTH * columns if columns > 1 else _ALONE_WIDTH
    layout = ConstrainedLayoutEngine(h_pad=0.1)
    figure = Figure(figsize=(width, rows * _HEIGHT), layout=layout)
    panels = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for axes in panels[count:]:
        axes.remove()
    return figure, panels[:count]


def _quiet(axes: Axes) -> None:
    """A grid for y alone, and a frame below and on the left alone."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=_TEXT, labelleft=True)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def _with_room(ticks: list[float], axes: Axes) -> list[float]:
    """Ticks whose labels do not overlap, beginning with the largest."""
    room = math.log2(max(ticks) / min(ticks)) * _TICK_INCHES / (0.5 * _panel_inches(axes)[0])
    shown: list[float] = []
    for tick in sorted(ticks, reverse=True):
        if not shown or math.log2(shown[-1] / tick) >= room:
            shown.append(tick)
    return shown


def _panel_inches(axes: Axes) -> tuple[float, float]:
    """Width and height of a panel with everything around it."""
    figure, grid = axes.get_figure(root=True), axes.get_gridspec()
    assert figure is not None and grid is not None
    width, height = figure.get_size_inches()
    return width / grid.ncols, height / grid.nrows


def _label_ends(axes: Axes, ends: list[_LineEnd]) -> None:
    """Writes each name beside its line's end; of one that ends before the others, below it."""
    last = max((end.x for end in ends), default=0.0)
    low, high = axes.get_ylim()
    line_height = _NAME_INCHES / (0.68 * _panel_inches(axes)[1]) * (high - low)
    for (x, _, name, colour), height in _without_overlap(ends, line_height):
        axes.annotate(
            name,
            (x, height if x == last else height - 1.2 * line_height),
            fontsize=10,
            xytext=(9, 0),
            textcoords="offset points",
            color=colour,
            fontweight="bold",
            verticalalignment="center",
            annotation_clip=False,
            path_effects=[withStroke(linewidth=3, foreground=_BACKGROUND)],
        )


def _without_overlap(ends: list[_LineEnd], line_height: float) -> Iterator[tuple[_LineEnd, float]]:
    """Gives each label a height, as near to its line as the other labels allow."""
    groups: list[list[_LineEnd]] = []
    middles: list[float] = []
    for end in sorted(ends):  # by x, then y
        group, middle = [end], end.y
        # A group of labels that touches the one below joins it, around the mean of their lines.
        while (
            groups
            and end.x == groups[-1][0].x
            and middle - middles[-1] < (len(group) + len(groups[-1])) / 2 * line_height
        ):
            group = [*groups.pop(), *group]
            middles.pop()
            middle = fmean(end.y for end in group)
        groups.append(group)
        middles.append(middle)
    for group, middle in zip(groups, middles, strict=True):
        for number, end in enumerate(group):
            yield end, middle + (number - (len(group) - 1) / 2) * line_height
