"""The matrices of `linbias explain` for terminals of any width: weights and outputs, with the bias and without."""

import sys
from typing import Any, NamedTuple

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from linbias.cli.tables import NumberTable
from linbias.definition import Float64
from linbias.example import side_by_side
from linbias.explain import Explanation, printable
from linbias.methods import WEIGHTS

MOST_ROWS, MOST_COLUMNS = 64, 64  # more than this is for a file
_LONGEST_NAME = 12
_LIGHT, _DARK = (255, 255, 255), bytes.fromhex(WEIGHTS[0][1:])  # the colours of weights 0 and 1


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
        first, *others = self.matrices
        beside = Table.grid(padding=(0, 3, 0, 0))
        beside.add_row(_table(first, self.rows), *(_table(other, []) for other in others))
        endless = options.update(max_width=sys.maxsize)
        if console.measure(beside, options=endless).maximum <= options.max_width:
            yield beside
            return
        for matrix in self.matrices:
            yield from [Text("")] * (matrix is not first)
            yield _table(matrix, self.rows)


def too_large(trace: Explanation) -> bool:
    """Whether the matrices have more rows or columns than are printed."""
    T, S = trace.weights.shape[1:]
    return T > MOST_ROWS or S > MOST_COLUMNS


def of(trace: Explanation, plain: Explanation, heads: list[int]) -> RenderableType:
    """Weights per head, their average, and the output: each with the bias and without."""
    H, T, S = trace.weights.shape
    if too_large(trace):
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

    weights = [np.where(np.isinf(each.bias), np.nan, each.weights) for each in (trace, plain)]
    for h in heads:
        show(f"Weights of head {h}, {trace.slopes_in_words(h)}", names, *(w[h] for w in weights))
    if len(heads) == H > 1:
        hidden = np.isinf(trace.bias).all(0)
        means = [np.where(hidden, np.nan, each.weights.mean(0)) for each in (trace, plain)]
        show(f"Weights, average of the {H} heads", names, *means)
    outputs = [side_by_side(each.output[heads]) for each in (trace, plain)]
    columns = [str(number) for number in range(outputs[0].shape[1])]
    show(
        "Output, " + ("heads side by side" if len(heads) > 1 else f"head {heads[0]}"),
        columns,
        *outputs,
    )
    return Group(*shown)


def _table(matrix: Matrix, rows: list[str]) -> NumberTable:
    """The numbers under the names of their columns, and behind those of the rows, if they are given."""
    look: dict[str, Any] = {"title_style": "italic", "header_style": "dim", "padding": 0}
    table = NumberTable(title=f" {matrix.title}", box=None, **look)
    table.title_of_rest = "\n ..."
    heads = [_short(name) for name in matrix.columns]
    width = 1 + max(6, *map(cell_len, heads), *(len(_number(x)) for x in matrix.values.flat))
    for _ in rows[:1]:
        table.add_column()
    for head in heads:
        table.add_column(Text(" " * (width - cell_len(head)) + head), justify="right")
    for t, row in enumerate(matrix.values):
        cells = [Text(_number(x), _shade(x) if matrix.shaded else "") for x in row]
        table.add_row(*(Text(_short(name)) for name in rows[t : t + 1]), *cells)
    return table


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
    letters = "rgb(255,255,255)" if weight > 0.88 else "rgb(0,0,0)"
    return f"{letters} on rgb({red},{green},{blue})"


def _short(name: str) -> str:
    if cell_len(name) <= _LONGEST_NAME:
        return name
    return set_cell_size(name, _LONGEST_NAME - 1).rstrip() + "\N{HORIZONTAL ELLIPSIS}"
