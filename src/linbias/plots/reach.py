"""How far each head looks: where its weight lies, and how far near to far reads."""

import math
from collections.abc import Sequence
from typing import Any, Never

import numpy as np
import numpy.typing as npt
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from linbias import near_to_far
from linbias._request import keywords
from linbias.definition import Array, Float64, attention_weights, distances
from linbias.methods import WEIGHTS
from linbias.plots.figure import STYLE, PaperFigure, inches, laid_out
from linbias.schedules import in_words
from linbias.schedules import slopes as slopes_of_paper

_COLOURS = (WEIGHTS[0], "#D28C76", "#E8C5BA", "#F5E7E2")  # dark holds the nearest weight
_READ = "#222222"
_TILES = 64  # of a head, that near to far runs in: the mark is as fine as they are


def reach(
    q: npt.ArrayLike,
    k: npt.ArrayLike,
    slopes: npt.ArrayLike | None = None,
    *,
    causal: bool = True,
    right_slopes: npt.ArrayLike | None = None,
    scale: float | None = None,
    shares: Sequence[float] = (0.5, 0.9, 0.99),
    tolerance: float = 2.0**-24,
    width: float | str = "single",
    ax: Axes | None = None,
    **unknown: Never,
) -> Figure:
    """Draw how near the keys are that hold 50, 90 and 99 percent of each head's weight.

    A bar counts tokens from the query's own position (1) outwards. It ends, in three shades, where
    the nearest keys hold each share of the weight. The mark is where `linbias.near_to_far` stops
    reading. All are medians over the queries, of causal attention over their second half.

    Args:
        q: [H, T, D].
        k: [G, S, D]; the last query stands at the last key.
        slopes, causal, right_slopes, scale: As for `linbias.attention`.
        shares: Of the weight, rising, one to four of them in (0, 1).
        tolerance: As for `near_to_far.attention`; with 0 everything is read, and there is no mark.
        width, ax: As for `bias`.

    Returns:
        The figure.

    Raises:
        TypeError, ValueError: As `linbias.attention`; there is a batch axis, or a share or width
            breaks its rule.

    Example:
        >>> q, k = np.random.default_rng(0).normal(size=(2, 4, 64, 16))
        >>> figure = reach(q, k)
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['head 0, slope 1/4', 'head 1, slope 1/16', 'head 2, slope 1/64', 'head 3, slope 1/256']
    """
    if unknown:
        keywords.refuse_unknown("plots.reach", unknown, reach)
    q, k = np.asarray(q), np.asarray(k)
    if q.ndim != 3 or not q.size:
        raise ValueError(f"plots.reach: q must be [H, T, D], got {list(q.shape)}")
    if not 0 < len(shares) <= 4 or sorted(set(shares)) != list(shares):
        raise ValueError(f"plots.reach: shares must be one to four, rising, got {shares}")
    if not (0 < shares[0] and shares[-1] < 1):
        raise ValueError(f"plots.reach: shares must be in (0, 1), got {shares}")
    slopes = slopes_of_paper(len(q)) if slopes is None else np.asarray(slopes, np.float64)
    q = q[:, q.shape[1] // 2 :] if causal else q
    options = {"causal": causal, "right_slopes": right_slopes, "scale": scale}
    holding = tokens_that_hold(q, k, slopes, shares, options)
    read = tokens_read(q, k, slopes, tolerance, options) if tolerance else None
    names = [f"head {h}, {in_words(slope)}" for h, slope in enumerate(slopes)]
    if ax is not None:
        _draw(ax, holding, read, shares, names, k.shape[1])
        return laid_out(ax)
    with rc_context(STYLE):
        size = (inches("plots.reach", width), 0.9 + 0.16 * len(q))
        figure = PaperFigure(figsize=size, layout="constrained")
        _draw(figure.subplots(), holding, read, shares, names, k.shape[1])
    return figure


def tokens_that_hold(
    q: Array, k: Array, slopes: Array, shares: Sequence[float], options: dict[str, Any]
) -> Float64:
    """[shares, H]: how many tokens from the query outwards hold a share of its weight (median)."""
    weight = attention_weights(q, k, slopes, **options)
    H, T, S = weight.shape
    distance = np.abs(distances(T, S))
    found = np.empty((len(shares), H, T))
    for t in range(T):
        order = np.argsort(distance[t], kind="stable")
        sums = np.cumsum(weight[:, t, order], axis=-1)
        for number, share in enumerate(shares):
            farthest = (sums < share).sum(-1).clip(max=S - 1)
            found[number, :, t] = distance[t, order[farthest]] + 1
    return np.median(found, axis=-1)


def tokens_read(
    q: Array, k: Array, slopes: Array, tolerance: float, options: dict[str, Any]
) -> Float64:
    """[H]: how many tokens from the query outwards near to far reads (median over queries)."""
    T, S = q.shape[1], k.shape[1]
    size = max(1, T // _TILES)
    v = np.zeros((*k.shape[:2], 1))
    visit = near_to_far.attention(
        q, k, v, slopes, tolerance=tolerance, rows=size, keys=size, **options
    )
    position = np.arange(S - T, S)
    found = []
    for tiles in visit.tiles[0]:
        first, end = (
            np.repeat([getattr(tile, name) for tile in tiles], size)[:T]
            for name in ("first", "end")
        )
        found.append(np.median(np.maximum(position - first, end - 1 - position) + 1))
    return np.array(found)


def _draw(
    ax: Axes,
    holding: Float64,
    read: Float64 | None,
    shares: Sequence[float],
    names: Sequence[str],
    num_keys: int,
) -> None:
    heads = np.arange(len(names))
    begin = np.ones(len(names)) * 0.9  # a head that looks at its own position only has a bar, too
    bars: list[Any] = []
    for share, end, colour in zip(shares, holding, _COLOURS, strict=False):
        look: dict[str, Any] = {"height": 0.72, "color": colour, "label": f"{share:.4g}"}
        bars.append(ax.barh(heads, end - begin, left=begin, **look))
        begin = end
    marks: list[Any] = []
    if read is not None:
        look = {"color": _READ, "markersize": 7, "markeredgewidth": 1.4, "label": "read to here"}
        marks = ax.plot(read, heads, "|", **look)
    ax.set_xscale("log", base=2)
    ax.set_xlim(0.9, 1.15 * num_keys)
    ticks = [4**power for power in range(int(math.log(num_keys, 4)) + 1)]
    ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_yticks(heads, names)
    ax.invert_yaxis()
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("tokens from the query outwards")
    above = {"loc": "lower center", "bbox_to_anchor": (0.4, 1.0), "ncols": 5, "frameon": False}
    narrow = {"handlelength": 1.0, "columnspacing": 1.0, "handletextpad": 0.4}
    ax.legend(handles=[*bars, *marks], title="share of the weight", **above, **narrow)
