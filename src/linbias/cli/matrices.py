"""The matrices of `linbias explain` for terminals of any width: weights and outputs, with the bias and without."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from linbias.definition import Float64
from linbias.example import side_by_side
from linbias.explain import Explanation, printable

_MOST_ROWS, _MOST_COLUMNS = 64, 64  # more than this is for a file
_LONGEST_NAME = 12
_GAP = "   "
_LIGHT, _DARK = (247, 251, 255), (8, 81, 156)  # the colours of weights 0 and 1


class Matrix(NamedTuple):
    """Numbers under a title; NaN where a key is hidden."""

    title: str
    columns: list[str]
    values: Float64
    shaded: bool


class Pair:
    """Matrices with the same rows, side by side where all fit, else one above the other.

    A matrix that is wider than the terminal goes on below with further columns.
    """

    def __init__(self, rows: list[str], matrices: list[Matrix]) -> None:
        self.rows = rows
        self.matrices = matrices

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = [_short(name) for name in self.rows]
        room = options.max_width - max(map(cell_len, names))
        if sum(_width(matrix) for matrix in self.matrices) + len(_GAP) <= room:
            yield from _beside(names, self.matrices)
            return
        parts = [part for matrix in self.matrices for part in _parts(matrix, room)]
        for number, part in enumerate(parts):
            yield from [Text("")] * bool(number)
            yield from _beside(names, [part])


def of(trace: Explanation, plain: Explanation, heads: list[int]) -> RenderableType:
    """Weights per head, their average, and the output: each with the bias and without."""
    H, T, S = trace.weight.shape
    if T > _MOST_ROWS or S > _MOST_COLUMNS:
        return (
            f"{T:,} queries and {S:,} keys are too many to print.\n"
            "--query shows one row, --csv and --json write all of them."
        )
    names = [printable(name) for name in trace.names()]
    positions = range(int(trace.query_start), int(trace.query_start) + T)
    rows = [names[p] if 0 <= p < S else str(p) for p in positions]
    shown: list[RenderableType] = []

    def show(title: str, columns: list[str], with_bias: Float64, without: Float64) -> None:
        shaded = columns is names
        pair = [
            Matrix("with bias", columns, with_bias, shaded),
            Matrix("without bias", columns, without, shaded),
        ]
        shown.extend([Text(title, style="bold"), Pair(rows, pair), Text("")])

    weights = [np.where(np.isinf(each.penalty), np.nan, each.weight) for each in (trace, plain)]
    for h in heads:
        show(f"Weights of head {h}, {trace.slopes_in_words(h)}", names, *(w[h] for w in weights))
    if len(heads) == H > 1:
        hidden = np.isinf(trace.penalty).all(0)
        means = [np.where(hidden, np.nan, each.weight.mean(0)) for each in (trace, plain)]
        show(f"Weights, average of the {H} heads", names, *means)
    outputs = [side_by_side(each.output[heads]) for each in (trace, plain)]
    columns = [str(number) for number in range(outputs[0].shape[1])]
    show(
        "Output, " + ("heads side by side" if len(heads) > 1 else f"head {heads[0]}"),
        columns,
        *outputs,
    )
    return Group(
        *shown, Text("--query shows every step of a row, --symmetric the later keys too.", "dim")
    )


def _cell_width(matrix: Matrix) -> int:
    numbers = [len(_number(value)) for value in matrix.values.flat]
    return 1 + max(6, *(cell_len(_short(name)) for name in matrix.columns), *numbers)


def _width(matrix: Matrix) -> int:
    return max(_cell_width(matrix) * len(matrix.columns), 1 + len(matrix.title))


def _parts(matrix: Matrix, room: int) -> list[Matrix]:
    """Split a matrix into parts that fit the room, each with as many columns as possible."""
    size = max(1, room // _cell_width(matrix))
    title, columns, values, shaded = matrix
    return [
        Matrix(title if first == 0 else "...", columns[first:end], values[:, first:end], shaded)
        for first in range(0, len(columns), size)
        for end in [first + size]
    ]


def _beside(names: list[str], matrices: list[Matrix]) -> Iterator[Text]:
    """The lines of matrices: titles, heads of the columns, and rows with a name in front."""
    width = max(map(cell_len, names))
    blocks = [_block(matrix) for matrix in matrices]
    for number, name in enumerate(["", "", *names]):
        line = Text(set_cell_size(name, width), no_wrap=True)
        for place, block in enumerate(blocks):
            line.append(_GAP if place else "").append_text(block[number])
        line.rstrip()
        yield line


def _block(matrix: Matrix) -> list[Text]:
    """The lines of one matrix, equally long."""
    cell, width = _cell_width(matrix), _width(matrix)
    heads = [_short(name) for name in matrix.columns]
    lines = [
        Text(f" {matrix.title}", "italic"),
        Text("".join(" " * (cell - cell_len(name)) + name for name in heads), "dim"),
    ]
    for row in matrix.values:
        line = Text()
        for value in row:
            line.append(_number(value).rjust(cell), _shade(value) if matrix.shaded else None)
        lines.append(line)
    for line in lines:
        line.pad_right(width - line.cell_len)
    return lines


def _number(value: float) -> str:
    return "." if np.isnan(value) else f"{value:.4f}"


def _shade(weight: float) -> str:
    """Choose a background that is the darker the larger the weight is, and none where a key is hidden."""
    if np.isnan(weight):
        return "dim"
    red, green, blue = (
        round(light + (dark - light) * float(weight))
        for light, dark in zip(_LIGHT, _DARK, strict=True)
    )
    letters = "rgb(255,255,255)" if weight > 0.75 else "rgb(0,0,0)"
    return f"{letters} on rgb({red},{green},{blue})"


def _short(name: str) -> str:
    if cell_len(name) <= _LONGEST_NAME:
        return name
    return set_cell_size(name, _LONGEST_NAME - 1).rstrip() + "\N{HORIZONTAL ELLIPSIS}"
