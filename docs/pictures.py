"""The pictures of the pages in docs/ideas, drawn from the library's own numbers.

    python docs/pictures.py        # writes docs/ideas/*.svg; a test keeps what they say current

They stand on white, so that a picture can be read on any page, and their letters stay letters; the
site turns light and dark round on a dark page (_static/linbias.css).
"""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

import linbias
from linbias.definition import Float64
from linbias.example import TOKENS, trace
from linbias.methods import BIAS, METHODS, WEIGHTS
from linbias.schedules import variant_slopes

FOLDER = Path(__file__).parent / "ideas"
FAINT, HIDDEN = "#5b6773", "#f6f7f8"
SLOPES = LinearSegmentedColormap.from_list("slopes", [WEIGHTS[0], BIAS[0]])  # from steep to flat
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": FAINT,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "hatch.color": "#c9ced4",
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "linbias",
}


def panels(num: int, height: float, note: str = "") -> tuple[Figure, Sequence[Axes]]:
    figure = Figure((8.2, height), layout="constrained")
    axes = figure.subplots(1, num, squeeze=False)[0]
    figure.supxlabel(note, fontsize=9, color=FAINT)
    return figure, axes


def matrix(
    ax: Axes,
    values: Float64,
    most: float,
    title: str,
    digits: int | None = None,
    names: Sequence[str] = (),
    colour: str = BIAS[0],
) -> None:
    """Cells from white for 0 to dark for `most` in size; -inf is hidden, and hatched."""
    ramp = LinearSegmentedColormap.from_list("cells", ["#ffffff", colour])
    ax.imshow(np.ma.masked_invalid(np.abs(values)), ramp, vmin=0, vmax=most, interpolation="none")
    ax.patch.set(facecolor=HIDDEN, hatch="////")
    ax.set_title(title)
    ax.spines[:].set_visible(False)
    ax.set_xticks(range(len(names)), names)
    ax.set_yticks(range(len(names)), names)
    ax.tick_params(length=0)
    size = 7 if len(ax.get_figure().axes) > 3 else 9
    for (row, column), value in np.ndenumerate(values):
        if digits is not None and np.isfinite(value):
            ink = "white" if abs(value) > 0.9 * most else "black"
            text = f"{value:.{digits}f}".replace("-", "\N{MINUS SIGN}")
            ax.text(column, row, text, ha="center", va="center", color=ink, fontsize=size)


def steps() -> Figure:
    """Scores, bias, weights of the five tokens."""
    of, _ = trace(causal=False)
    note = "the bias is 0 at the query itself; each row of weights adds up to 1"
    figure, axes = panels(3, 3.1, note)
    matrix(axes[0], of.scaled[0], 2.0, "q · k, scaled", 2, TOKENS)
    matrix(axes[1], of.bias[0], 2.6, "+  bias, slope 1/2", 1, TOKENS)
    matrix(axes[2], of.weights[0], 0.6, "→  weights", 2, TOKENS, WEIGHTS[0])
    return figure


def heads() -> Figure:
    """The causal bias of some heads of eight, as factors on the weight."""
    note = (
        "rows: queries; columns: keys; dark: the bias leaves the weight as it is;"
        " white: it leaves nothing; hatched: hidden"
    )
    figure, axes = panels(4, 2.6, note)
    slopes = linbias.slopes(8)
    bias = linbias.bias(slopes, 24, 24, np.full(8, np.inf))
    for ax, head in zip(axes, (0, 2, 4, 7), strict=True):
        kept = np.where(np.isinf(bias[head]), -np.inf, np.exp(bias[head]))
        matrix(ax, kept, 1.0, f"head {head}, slope 1/{round(1 / slopes[head])}", colour=WEIGHTS[0])
    return figure


def reach() -> Figure:
    """exp(-slope * distance) against distance."""
    figure, (ax,) = panels(1, 3.3)
    distance = np.geomspace(1, 2048, 89)
    for head, slope in enumerate(linbias.slopes(8)):
        ax.semilogx(distance, np.exp(-slope * distance), color=SLOPES(head / 7), base=2,
                    label=f"head {head}: 1/{round(1 / slope)}")  # fmt: skip
    ax.set(xlabel="distance (tokens)", ylabel="factor exp(-slope * distance)", xlim=(1, 2048))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, labelcolor="linecolor")
    return figure


def variants() -> Figure:
    """The bias of each variant."""
    slopes, right = variant_slopes("pictures", "directional", 2, "halving")
    shown: dict[str, tuple[Any, Any]] = {
        "causal": ([0.5], [np.inf]),
        "symmetric": ([0.5], [0.5]),
        "directional: one half": (slopes[:1], right[:1]),
        "the other half": (slopes[1:], right[1:]),
        "asymmetric": ([0.5], [1.0]),
    }
    figure, axes = panels(5, 2.2, "rows: queries; columns: keys; hatched: hidden")
    for ax, (title, sides) in zip(axes, shown.items(), strict=True):
        matrix(ax, linbias.bias(sides[0], 5, 5, sides[1])[0], 4.0, title, 1)
    return figure


def rotary() -> Figure:
    """The score of q = k = ones, rotated `distance` apart in 16 pairs; and a bias instead."""
    distance = np.arange(513)
    frequency = 10000.0 ** -(np.arange(16) / 16)
    figure, (ax,) = panels(1, 3.3)
    ax.axvspan(0, 128, color="#f0ede5", label="seen in training")
    waves = 2 * np.cos(np.outer(distance, frequency)).sum(1) / np.sqrt(32)
    ax.plot(distance, waves, color=METHODS["rotary"].colour, label="rotary: a sum of waves")
    ax.plot(
        distance[:257],
        -distance[:257] / 64,
        color=METHODS["alibi"].colour,
        label="bias, slope 1/64: a straight line",
    )
    ax.set(xlabel="distance (tokens)", ylabel="score", xlim=(0, 512), ylim=(-4, 6))
    ax.legend(frameon=False)
    return figure


def blocks_read() -> Figure:
    """Which blocks near to far reads."""
    note = (
        "1,024 tokens in blocks of 32: dark is read, white is left out,"
        " hatched is hidden by the causal mask"
    )
    figure, axes = panels(3, 3.4, note)
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 1024, 8))
    for ax, slope in zip(axes, (1 / 2, 1 / 8, 1 / 32), strict=True):
        visit = linbias.near_to_far.attention(q, k, v, [slope], rows=32, keys=32)
        read = np.full((32, 32), -np.inf)
        for row, tile in enumerate(visit.tiles[0][0]):
            read[row, : row + 1] = 0.0
            read[row, tile.first // 32 : -(-tile.end // 32)] = 1.0
        share = (read == 1).sum() / (read >= 0).sum()
        matrix(ax, read, 1.2, f"slope 1/{round(1 / slope)}: {share:.0%} read")
    return figure


PICTURES = {
    picture.__name__.replace("_", "-"): picture
    for picture in (steps, heads, reach, variants, rotary, blocks_read)
}


def compact(svg: str) -> str:
    """Leave out metadata, round paths to a tenth of a point, and keep a curve on one line."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<!DOCTYPE.*?>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"(?<=base64,)[^\"]+", lambda code: re.sub(r"\s", "", code[0]), svg)
    numbers = re.compile(r"-?\d+\.\d+")
    svg = re.sub(
        r'(?<= )d="[^"]*"',
        lambda d: numbers.sub(lambda n: f"{round(float(n[0]), 1):g}", " ".join(d[0].split())),
        svg,
    )
    svg = re.sub(r">\s+<", "><", " ".join(svg.split()))
    return re.sub(r'(?=<g id="(?:axes|legend|line2d)_)', "\n", svg) + "\n"


def write(name: str, path: Path) -> None:
    drawn = io.StringIO()
    with rc_context(STYLE):
        PICTURES[name]().savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    path.write_text(compact(drawn.getvalue()), encoding="utf-8")


if __name__ == "__main__":
    for name in PICTURES:
        write(name, FOLDER / f"{name}.svg")
        print(FOLDER / f"{name}.svg")
