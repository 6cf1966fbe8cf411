"""The bias and the weights as matrices: queries downwards, keys to the right, a panel per head."""

import math
from collections.abc import Callable, Sequence
from typing import Never

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import Colormap, FuncNorm, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

import linbias.definition
from linbias import _matrix
from linbias._matrix import Matrix, Scale, average_of
from linbias._request import keywords
from linbias.definition import Float64
from linbias.explain import Explanation
from linbias.methods import BIAS
from linbias.plots.figure import STYLE, PaperFigure, figure_of, inches, laid_out

_RASTERED_FROM = 100  # keys: beyond, so many rectangles make files large
_MOST_TOKENS = 40  # names along an axis
_MOST_NUMBERS = 8  # keys, for numbers written into the cells
_LETTER = 0.055  # inches: the width of one in names


def bias(
    slopes: npt.ArrayLike,
    T: int,
    S: int | None = None,
    *,
    causal: bool = True,
    right_slopes: npt.ArrayLike | None = None,
    heads: Sequence[int] | None = None,
    tokens: Sequence[str] | None = None,
    width: float | str = "double",
    ax: Axes | None = None,
    **unknown: Never,
) -> Figure:
    """Draw what the bias adds to the scores: a matrix [T, S] for each head, hidden keys hatched.

    All panels share one scale of colours, by the cube root of the bias: flat heads can be seen
    beside steep ones.

    Args:
        slopes: [H], as for `linbias.bias`.
        T: Number of queries.
        S: Number of keys, at least 1; None means T.
        causal: Hide the keys after the query.
        right_slopes: Like slopes: slopes towards later keys, with causal=False; None means
            symmetric.
        heads: Only these, counted from 0.
        tokens: S names for the keys; written where there is room.
        width: Of the figure: "single" or "double" column, or inches.
        ax: Draw one head (choose it with heads) into these axes, in your own settings; a figure
            without a layout engine gets the constrained one.

    Returns:
        The figure.

    Raises:
        ValueError: A slope, head or width breaks its rule, or right_slopes contradicts causal.

    Example:
        >>> figure = bias(linbias.slopes(4), 32, width="single")
        >>> [panel.get_title() for panel in figure.axes[:2]]
        ['head 0, slope 1/4', 'head 1, slope 1/16']
    """
    if unknown:
        keywords.refuse_unknown("plots.bias", unknown, bias)
    if causal and right_slopes is not None:
        raise ValueError("plots.bias: right_slopes needs causal=False, got both")
    slopes = np.asarray(slopes, np.float64)
    if slopes.ndim != 1 or not len(slopes):
        raise ValueError(f"plots.bias: slopes must be [H], got {list(slopes.shape)}")
    sides = np.full_like(slopes, np.inf) if causal else right_slopes
    values = linbias.definition.bias(slopes, T, T if S is None else S, sides)
    titles = _matrix.titles(slopes, slopes if sides is None else sides)
    # Dark is the lowest bias of all heads; the cube root shows flat heads beside steep ones.
    lowest = float(values[np.isfinite(values)].min(initial=0.0)) or -1.0
    hidden_open = np.where(np.isinf(values), np.nan, values)
    first, scale = values.shape[2] - T, Scale(BIAS[0], lowest, 1 / 3)
    matrices = _matrices("plots.bias", hidden_open, titles, tokens, first, scale)
    return _draw("plots.bias", matrices, heads, width, ax)


def weights(
    weights: Explanation | npt.ArrayLike,
    *,
    heads: Sequence[int] | None = None,
    average: bool = False,
    tokens: Sequence[str] | None = None,
    width: float | str = "double",
    ax: Axes | None = None,
) -> Figure:
    """Draw attention weights: a matrix [T, S] for each head, with numbers in small ones.

    Args:
        weights: What `linbias.explain` gives, or an array [H, T, S] or [T, S], as from
            `linbias.attention_weights`; hidden keys are hatched where it is known that they are.
        average: Add a panel with the average over all heads.
        tokens: As for `bias`; None means those of the explanation.
        heads, width, ax: As for `bias`.

    Returns:
        The figure.

    Raises:
        ValueError: The weights have a batch axis, or a head or width breaks its rule.

    Example:
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 2, 5, 4))
        >>> words = "The cat sat on mat".split()
        >>> figure = weights(linbias.explain(q, k, v), average=True, tokens=words)
        >>> [panel.get_title() for panel in figure.axes[:3]]
        ['head 0, slope 1/16', 'head 1, slope 1/256', 'average']
    """
    if isinstance(weights, Explanation):
        values = np.where(np.isinf(weights.bias), np.nan, weights.weights)
        titles = _matrix.titles(weights.slopes, weights.right_slopes)
        tokens = weights.tokens if tokens is None else tokens
        first = int(weights.query_start) if weights.query_start.ndim == 0 else 0
    else:
        values = np.asarray(weights, np.float64)
        values = values[None] if values.ndim == 2 else values
        titles = [f"head {h}" for h in range(len(values))]
        first = values.shape[-1] - values.shape[-2]
    if values.ndim != 3:
        raise ValueError(f"plots.weights: weights must be [H, T, S], got {list(values.shape)}")
    matrices = _matrices("plots.weights", values, titles, tokens, first, _matrix.OF_WEIGHTS)
    if average:
        heads = [*(range(len(values)) if heads is None else heads), len(values)]
        matrices.append(average_of(matrices, "average"))
    return _draw("plots.weights", matrices, heads, width, ax)


def _matrices(
    function: str,
    values: Float64,
    titles: Sequence[str],
    tokens: Sequence[str] | None,
    query_start: int,
    scale: Scale,
) -> list[Matrix]:
    """What is drawn: a matrix for each head, with the names of tokens where they are given."""
    T, S = values.shape[1:]
    if tokens is not None and len(tokens) != S:
        raise ValueError(f"{function}: tokens must name the {S} keys, got {len(tokens)}")
    columns = [_matrix.printable(str(token)) for token in tokens or ()]
    rows = _matrix.query_names(columns, query_start, T) if columns else ()
    return [
        Matrix(title, head, rows, columns, scale, digits=2)
        for title, head in zip(titles, values, strict=True)
    ]


def _draw(
    function: str,
    matrices: Sequence[Matrix],
    heads: Sequence[int] | None,
    width: float | str,
    ax: Axes | None,
) -> Figure:
    """Panels of equal size with one colour bar, or one panel in axes that are given."""
    H, (T, S) = len(matrices), matrices[0].values.shape
    chosen = list(range(H) if heads is None else heads)
    if not T or not S:
        raise ValueError(f"{function}: there must be a query and a key, got T={T}, S={S}")
    if not chosen or not all(0 <= head < H for head in chosen):
        raise ValueError(f"{function}: heads must be in [0, {H}), got {chosen}")
    if ax is not None:
        if len(chosen) != 1:
            raise ValueError(
                f"{function}: ax takes one head, got {len(chosen)}: choose with heads"
            )
        cell = ax.get_position().width * figure_of(ax).get_size_inches()[0] / S
        _panel(ax, matrices[chosen[0]], cell)
        return laid_out(ax)
    across = inches(function, width)
    columns = min(len(chosen), max(1, int(across / 1.6)))
    rows = math.ceil(len(chosen) / columns)
    each = 0.8 * across / columns  # the rest is for ticks and the colour bar
    height = min(max(each * T / S, 0.5), 3 * each) + 0.3
    with rc_context(STYLE):
        figure = PaperFigure(figsize=(across, rows * height + 0.2), layout="constrained")
        panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
        for panel, head in zip(panels, chosen, strict=False):
            image = _panel(panel, matrices[head], each / S)
            panel.label_outer()
        for number in range(len(chosen), len(panels)):
            panels[number].set_axis_off()
            panels[number - columns].tick_params(labelbottom=True)
        name = function.rpartition(".")[2]
        bar = figure.colorbar(image, ax=panels, label=name, aspect=14 * rows, pad=0.02)
        scale = matrices[0].scale
        if scale and scale.full < 0:  # its own ticks would crowd at the end
            first = math.floor(math.log10(-scale.full))
            bar.set_ticks([0.0, *(-(10.0**power) for power in range(first - 2, first + 1))])
        bar.outline.set_visible(False)
        if not matrices[0].columns:
            figure.supxlabel("key", fontsize=7)
            figure.supylabel("query", fontsize=7)
    return figure


def _colours(scale: Scale) -> tuple[Normalize, Colormap]:
    """A scale as Matplotlib has it, from its lowest number to its highest."""
    low, high = sorted([0.0, scale.full])
    colours = ["#FFFFFF", scale.colour]
    colormap = LinearSegmentedColormap.from_list("", colours if high else colours[::-1])
    if scale.power == 1:
        return Normalize(low, high), colormap
    power = scale.power

    def to(exponent: float) -> Callable[[Float64], Float64]:
        return lambda x: np.sign(x) * np.abs(x) ** exponent

    return FuncNorm((to(power), to(1 / power)), low, high), colormap


def _panel(ax: Axes, matrix: Matrix, cell: float) -> QuadMesh:
    """One matrix, whose cells are so many inches wide; returns what a colour bar needs."""
    assert matrix.scale is not None
    T, S = matrix.values.shape
    norm, colormap = _colours(matrix.scale)
    ax.patch.set(facecolor="#F6F6F6", edgecolor="#CCCCCC", hatch="//////")
    image = ax.pcolormesh(
        np.arange(S + 1) - 0.5,
        np.arange(T + 1) - 0.5,
        np.ma.masked_invalid(matrix.values),
        cmap=colormap,
        norm=norm,
        rasterized=S > _RASTERED_FROM,
        edgecolors="face",
        linewidth=0.1,  # closes the hair lines that viewers draw between rectangles
    )
    ax.set(xlim=(-0.5, S - 0.5), ylim=(T - 0.5, -0.5), aspect="equal", title=matrix.title)
    if matrix.columns and S <= _MOST_TOKENS:
        rotation = 90 if max(map(len, matrix.columns)) * _LETTER > cell else 0
        ax.set_xticks(range(S), matrix.columns, parse_math=False, rotation=rotation)
        ax.set_yticks(range(T), matrix.rows, parse_math=False)
        ax.tick_params(length=0)
    else:
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True, min_n_ticks=1))
    if S <= _MOST_NUMBERS and T <= _MOST_NUMBERS:
        _write_numbers(ax, matrix, cell)
    return image


def _write_numbers(ax: Axes, matrix: Matrix, cell: float) -> None:
    texts, white = matrix.texts(), matrix.wants_white()
    size = min(6, 88 * cell / max(len(text) for row in texts for text in row))
    for t, s in np.argwhere(~np.isnan(matrix.values)):
        text, colour = texts[t][s], "white" if white[t, s] else "#222222"
        written = text.replace("-", "\N{MINUS SIGN}")
        ax.text(s, t, written, ha="center", va="center", fontsize=size, color=colour)
