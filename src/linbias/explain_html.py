"""An `Explanation` as HTML for notebooks: the weights of each head, every step of its last row.

It stands on its own: no scripts, nothing loaded. Letters keep the notebook's colour and shades are
translucent, so that both fit a light and a dark notebook. Tokens are text and never markup.
"""

import base64
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from typing import Any

import numpy as np

from linbias import _matrix
from linbias._matrix import Matrix
from linbias.definition import Float64, Steps

Explanation = Any  # of linbias.explain, which imports this file

_MOST_CELLS = 12  # keys and queries of a table; larger matrices are pictures
_MOST_PIXELS = 256
_MOST_KEYS = 16  # of a row's table
_MOST_HEADS = 8  # that are open from the start

_STYLE = """
.linbias-explain { font-variant-numeric: tabular-nums; line-height: 1.3; overflow-x: auto; }
.linbias-explain .heads { display: flex; flex-wrap: wrap; gap: 1em 2em; }
.linbias-explain table { border-collapse: collapse; margin: 0; width: auto; font-size: 0.85em; }
/* A notebook's stripes would mix with the shades. */
.linbias-explain tr { background: none !important; }
.linbias-explain caption { text-align: left; caption-side: top; }
.linbias-explain :is(caption, th, td) { color: inherit; }
.linbias-explain :is(caption, figcaption) { font-weight: bold; padding: 0.3em 0; }
.linbias-explain :is(th, td) { padding: 0.2em 0.5em; text-align: right; border: 0 }
.linbias-explain th { font-weight: normal; opacity: 0.75; }
.linbias-explain td.hidden { text-align: center; opacity: 0.4; }
.linbias-explain img { width: 14em; image-rendering: pixelated; border: 1px solid #80808080; }
.linbias-explain figure { margin: 0; font-size: 0.85em; }
.linbias-explain p { margin: 0.5em 0; }
"""
_STEPS = {"q &middot; k": "raw", "scaled": "scaled", "bias": "bias", "scores": "scores"}


def html(explanation: Explanation) -> str:
    """The whole picture, as one <div>."""
    *batch, H, T, S = explanation.scores.shape
    of = f", the first of a batch {batch}" if batch else ""
    if batch:
        explanation = _first_of_batch(explanation)
    if not (H and T and S):
        return f"<p>{escape(repr(explanation))}</p>"
    matrices = _matrix.of_weights(explanation)
    draw = _table_of_weights if max(T, S) <= _MOST_CELLS else _picture_of_weights
    rows = [_table_of_row(explanation, head, matrix) for head, matrix in enumerate(matrices)]
    return (
        f'<div class="linbias-explain"><style>{_STYLE}</style>'
        f"<p>Attention with linear biases: {H} heads, {T} queries (rows), {S} keys (columns){of}."
        f"</p>{_some_open(list(map(draw, matrices)))}"
        f"<p>Every step of the last row:</p>{_some_open(rows)}</div>"
    )


def _first_of_batch(explanation: Explanation) -> Explanation:
    first = (0,) * (explanation.scores.ndim - 3)
    changed: dict[str, Any] = {
        name: getattr(explanation, name)[first] for name in ("q", *Steps._fields, "query_start")
    }
    for name in ("slopes", "right_slopes"):
        side = getattr(explanation, name)
        changed[name] = side[0] if side.ndim == 2 else side
    return replace(explanation, **changed)


def _some_open(parts: Sequence[str]) -> str:
    """The first parts side by side, and the rest to be opened."""
    first, rest = "".join(parts[:_MOST_HEADS]), "".join(parts[_MOST_HEADS:])
    more = f"<details><summary>{len(parts) - _MOST_HEADS} more</summary>"
    tail = f'{more}<div class="heads">{rest}</div></details>' if rest else ""
    return f'<div class="heads">{first}</div>{tail}'


def _name(token: str) -> str:
    return f"<bdi>{escape(token)}</bdi>"


def _table_of_weights(matrix: Matrix) -> str:
    rows = zip(map(_name, matrix.rows), map("".join, _cells(matrix)), strict=True)
    return table(escape(matrix.title), ["", *map(_name, matrix.columns)], rows)


def table(caption: str, columns: Iterable[str], rows: Iterable[tuple[str, str]]) -> str:
    """A table of HTML: the heads of all columns, and of each row its head and its other cells."""
    heads = "".join(f'<th scope="col">{name}</th>' if name else "<td></td>" for name in columns)
    lines = "".join(f'<tr><th scope="row">{name}</th>{cells}</tr>' for name, cells in rows)
    return (
        f"<table><caption>{caption}</caption>"
        f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table>"
    )


def _cells(matrix: Matrix) -> list[list[str]]:
    assert matrix.scale is not None
    red, green, blue = matrix.scale.rgb()

    def cell(text: str, shade: float) -> str:
        if np.isnan(shade):
            return '<td class="hidden" title="hidden">&middot;</td>'
        opacity = f"{_matrix.DARKEST * shade:.3f}"
        return f'<td style="background: rgba({red}, {green}, {blue}, {opacity})">{text}</td>'

    rows = zip(matrix.texts(), matrix.shades(), strict=True)
    return [list(map(cell, *row)) for row in rows]


def _picture_of_weights(matrix: Matrix) -> str:
    T, S = matrix.values.shape
    step = -(-max(T, S) // _MOST_PIXELS)
    # A pixel shows the largest weight of its block, so that nothing is lost in an average.
    rows, columns = -(-T // step), -(-S // step)
    padded = np.zeros((rows * step, columns * step))
    padded[:T, :S] = np.nan_to_num(matrix.values)
    pixels = padded.reshape(rows, step, columns, step).max((1, 3))
    block = "" if step == 1 else f" A pixel is the largest of {step} x {step}."
    title = escape(matrix.title)
    text = f"Weights of {title}, {T} queries by {S} keys."
    data = f"data:image/png;base64,{_png(pixels)}"
    return (
        f"<figure><figcaption>{title}</figcaption>"
        f'<img alt="{text}" title="{text}{block}" src="{data}"></figure>'
    )


def _png(weights: Float64) -> str:
    """The colour of weights, as opaque as each shade: a PNG in base64."""
    height, width = weights.shape
    pixels = np.empty((height, 1 + 4 * width), np.uint8)
    pixels[:, 0] = 0  # each line begins with its filter: none
    colours = pixels[:, 1:].reshape(height, width, 4)
    colours[..., :3] = _matrix.SMALL_WEIGHTS.rgb()
    colours[..., 3] = np.round(255 * _matrix.SMALL_WEIGHTS.shades(weights))

    def chunk(kind: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + check

    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)  # 8 bits of each colour, alpha
    data = chunk(b"IDAT", zlib.compress(pixels.tobytes(), 9))
    whole = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + data + chunk(b"IEND", b"")
    return base64.b64encode(whole).decode()


def _table_of_row(explanation: Explanation, head: int, matrix: Matrix) -> str:
    """The last row's steps, of all keys or of those with the most weight."""
    weights = explanation.weights[head, -1]
    keys = np.sort(np.argsort(-weights, kind="stable")[:_MOST_KEYS])
    (cells,) = _cells(matrix._replace(values=matrix.values[-1:, keys]))
    lines = []
    for s, cell in zip(keys, cells, strict=True):
        steps = [getattr(explanation, step)[head, -1, s] for step in _STEPS.values()]
        numbers = "".join(f"<td>{_number(value)}</td>" for value in steps)
        lines.append((_name(matrix.columns[s]), numbers + cell))
    caption = f"{escape(matrix.title)}, query {_name(matrix.rows[-1])}"
    steps_of_keys = table(caption, ["key", *_STEPS, "weights"], lines)
    rest = len(weights) - len(keys)
    others = f"<p>The other {rest:,} keys hold {1 - weights[keys].sum():.4f}.</p>" if rest else ""
    values = " ".join(f"{value:.4f}" for value in explanation.output[head, -1][:_MOST_KEYS])
    dots = " ..." if explanation.output.shape[-1] > _MOST_KEYS else ""
    return f"<div>{steps_of_keys}{others}<p>output [{values}{dots}]</p></div>"


def _number(value: float) -> str:
    shown = "&infin;" if np.isinf(value) else f"{abs(value):.4f}"
    return f"&minus;{shown}" if value < 0 else shown
