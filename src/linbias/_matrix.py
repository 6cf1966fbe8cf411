"""Matrices to look at: what stands in each cell, and how dark it is.

The terminal and SVG paint them, and decide nothing of that again.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from linbias.definition import Float64
from linbias.methods import WEIGHTS
from linbias.schedules import in_words

HIDDEN = "."  # what stands in the cell of a hidden key
DARKEST = 0.75  # opacity of a full shade: letters stay legible on light and on dark
_LIGHT = (255.0, 255.0, 255.0)  # a shade of 0, on paper
_READABLE = 0.179  # on a ground of this luminance white letters are as legible as black ones


class Scale(NamedTuple):
    """From numbers to shades, of which 0 is the ground and 1 the full colour."""

    colour: str  # "#RRGGBB"
    full: float  # the number of a full shade

    def shades(self, values: npt.ArrayLike) -> Float64:
        """The shade of each number, between 0 and 1."""
        shades: Float64 = (np.asarray(values, np.float64) / self.full).clip(0.0, 1.0)
        return shades

    def rgb(self) -> tuple[int, ...]:
        """Red, green and blue of the full colour."""
        return tuple(bytes.fromhex(self.colour[1:]))


OF_WEIGHTS = Scale(WEIGHTS[0], 1.0)


class Matrix(NamedTuple):
    """A matrix to look at: queries downwards, keys or entries of the output to the right.

    Attributes:
        title: Above it.
        values: [T, S], NaN where a key is hidden.
        rows, columns: Their names; none where positions are enough.
        scale: None for numbers without shades.
    """

    title: str
    values: Float64
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    scale: Scale | None = None

    def texts(self) -> list[list[str]]:
        """What stands in each cell."""
        return [[HIDDEN if np.isnan(x) else f"{x:.4f}" for x in row] for row in self.values]

    def shades(self) -> Float64:
        """How dark each cell is, NaN where a key is hidden; without a scale none is."""
        return (
            np.full_like(self.values, np.nan)
            if self.scale is None
            else self.scale.shades(self.values)
        )

    def grounds(self) -> Float64:
        """[T, S, 3], the colour of each cell on paper, from 0 to 255."""
        full = np.array(_LIGHT if self.scale is None else self.scale.rgb())
        return _LIGHT + (full - _LIGHT) * np.nan_to_num(self.shades())[..., None]

    def wants_white(self) -> npt.NDArray[np.bool_]:
        """Where white letters are more legible on paper than black ones."""
        share = self.grounds() / 255
        linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
        wanted: npt.NDArray[np.bool_] = linear @ (0.2126, 0.7152, 0.0722) < _READABLE
        return wanted


def printable(token: str) -> str:
    """A token on one line: line ends, tabs and what else has no picture, as Python writes them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in token)


def titles(left: npt.ArrayLike, right: npt.ArrayLike) -> list[str]:
    """What stands above the matrix of each head."""
    pairs = np.broadcast(np.asarray(left, np.float64), np.asarray(right, np.float64))
    return [f"head {h}, {in_words(float(m), float(n))}" for h, (m, n) in enumerate(pairs)]


def query_names(names: Sequence[str], start: int, num_queries: int) -> list[str]:
    """The names of queries from key `start` on; beyond the keys, their positions."""
    positions = range(start, start + num_queries)
    return [names[p] if 0 <= p < len(names) else str(p) for p in positions]


def of_weights(explanation: Any) -> list[Matrix]:
    """The weights of each head of a `linbias.Explanation` without a batch axis."""
    values = np.where(np.isinf(explanation.bias), np.nan, explanation.weights)
    names = [printable(name) for name in explanation.names()]
    queries = query_names(names, int(explanation.query_start), values.shape[-2])
    heads = zip(titles(explanation.slopes, explanation.right_slopes), values, strict=True)
    return [Matrix(title, head, queries, names, OF_WEIGHTS) for title, head in heads]


def average_of(matrices: Sequence[Matrix], title: str) -> Matrix:
    """The mean of all heads; a key is hidden where it is hidden in all of them."""
    values = np.array([matrix.values for matrix in matrices])
    mean = np.where(np.isnan(values).all(0), np.nan, np.nan_to_num(values).mean(0))
    return matrices[0]._replace(title=title, values=mean)
