"""What the page shows where scripts do not run: a picture of the chapter's weights, and its tables."""

from collections.abc import Sequence
from fractions import Fraction
from html import escape

import numpy as np
import numpy.typing as npt

from linbias import example
from linbias.explain_html import table
from linbias.explore.data import character
from linbias.schedules import slopes

CELL, NAMES, GAP = 64, 44, 40  # sizes of the picture
DARKEST = 0.55  # opacity of the largest weight: its number stays readable, light or dark


def static_part() -> str:
    """HTML without scripts: the weights of both heads, their mean, the outputs, and the slopes of eight heads."""
    trace, tokens = example.trace(causal=False)
    names = [
        f"Weights of head {h}, slope {_fraction(m)}" for h, m in enumerate(trace.slopes.tolist())
    ]
    output = np.concatenate(list(trace.output), axis=1)
    parts = [
        "<h1>Attention with linear biases</h1>",
        "<p>ALiBi adds a bias to the score of each key, &minus;slope &times; distance, in place of positions. A model "
        "that was trained on short texts can then read longer ones.</p>",
        "<p>Scripts are off here. With them, you could change the slopes and the words of this example, compare how "
        "methods of giving positions do at lengths beyond the trained one, and see which keys need not be read.</p>",
        _picture(tokens, trace.weights, names),
        *(_table(n, tokens, tokens, _fixed(w)) for n, w in zip(names, trace.weights, strict=True)),
        _table("Mean of both heads", tokens, tokens, _fixed(trace.weights.mean(0))),
        _table("Outputs", [f"dim-{i}" for i in range(output.shape[1])], tokens, _fixed(output)),
        _slopes(),
    ]
    return "\n".join(parts)


def _fixed(rows: npt.NDArray[np.float64]) -> list[list[str]]:
    return [[f"{value:.4f}" for value in row] for row in rows]


def _slopes() -> str:
    rows = [
        [_fraction(m), f"{-10 * m:g}".replace("-", "\N{MINUS SIGN}"), character(10 * m)]
        for m in slopes(8).tolist()
    ]
    columns = ["slope", "bias at distance 10", "character"]
    return _table("Slopes of eight heads", columns, [f"head {h}" for h in range(8)], rows)


def _fraction(slope: float) -> str:
    return str(Fraction(slope))


def _table(
    caption: str, columns: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    lines = zip(map(escape, names), cells, strict=True)
    shown = table(escape(caption), ["", *map(escape, columns)], lines)
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">{shown}</div>'


def _picture(tokens: Sequence[str], weights: npt.NDArray[np.float64], names: Sequence[str]) -> str:
    """The weights of each head as squares of the accent's colour, one matrix beside the other."""
    side = NAMES + CELL * len(tokens)
    width, height = len(weights) * (side + GAP) - GAP, side + 24
    marks = []
    for h, (matrix, name) in enumerate(zip(weights, names, strict=True)):
        left = h * (side + GAP)
        marks.append(f'<text x="{left + NAMES}" y="14">{escape(name)}</text>')
        for t, row in enumerate(matrix):
            top = NAMES + 24 + t * CELL
            marks.append(_label(left + NAMES - 8, top + CELL / 2 + 5, "end", tokens[t]))
            marks.append(_label(left + NAMES + (t + 0.5) * CELL, NAMES + 16, "middle", tokens[t]))
            for s, weight in enumerate(row):
                x, share = left + NAMES + s * CELL, DARKEST * (weight / weights.max()) ** 0.5
                marks.append(
                    f'<rect x="{x}" y="{top}" width="{CELL}" height="{CELL}" fill-opacity="{share:.3f}"/>'
                )
                marks.append(_label(x + CELL / 2, top + CELL / 2 + 5, "middle", f"{weight:.4f}"))
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape("; ".join(names))}">'
        f"{''.join(marks)}</svg>"
    )


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
