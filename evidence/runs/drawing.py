"""How the reports draw: a line over seeds with its range, axes by length, and its file."""

import io
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

from linbias._run.files import write_whole
from linbias.methods import METHODS


def draw(
    axes: Axes,
    line: dict[Any, list[float]],
    style: str,
    method: str,
    label: str,
    shade: float = 0.18,
) -> None:
    """The mean over seeds, and their range as a shade, in the colour of a method."""
    colour = METHODS[method].colour
    mean = [statistics.fmean(values) for values in line.values()]
    axes.plot(list(line), mean, style, color=colour, label=label, markersize=4)
    low, high = [min(v) for v in line.values()], [max(v) for v in line.values()]
    axes.fill_between(list(line), low, high, color=colour, alpha=shade, linewidth=0)


def finish(axes: Axes, ticks: Sequence[int], title: str, x_label: str) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([f"{n:,}" for n in ticks])
    axes.set_title(title, loc="left", fontweight="bold", fontsize=11)
    axes.set_xlabel(x_label)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def on_a_log_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def save(figure: Figure, path: Path) -> None:
    image = io.BytesIO()
    figure.savefig(image, dpi=100)
    write_whole(path, image.getvalue())
