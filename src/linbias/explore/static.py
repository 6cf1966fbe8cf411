"""What is shown where scripts do not run: a picture of the chapter's weights, and in the page its tables."""

from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

from linbias import example
from linbias.explain_html import table
from linbias.explore.data import character
from linbias.methods import WEIGHTS
from linbias.schedules import in_words, slopes, written

CELL, NAMES, GAP, MARGIN = 64, 44, 40, 16  # sizes of the picture
PAPER, INK = "#faf8f3", "#23211d"  # as in style.css, for a picture that stands alone
DARKEST = 0.55  # opacity of the largest weight: its number stays readable, light or dark


def static_part() -> str:
    """HTML without scripts: the weights of both heads, their mean, the outputs, and the slopes of eight heads."""
    trace, tokens = example.trace(causal=False)
    names = _names(trace.slopes)
    output = np.concatenate(list(trace.output), axis=1)
    parts = [
        "<h1>Attention with linear biases</h1>",
        "<p>ALiBi adds a bias to the score of each key, &minus;slope &times; distance, in place of positions. A model "
        "that was trained on short texts can then read longer ones.</p>",
        "<p>Scripts are off here. With them, you could change the slopes and the words of this example, compare how "
        "methods of giving positions do at lengths beyond the trained one, and see which keys need not be read.</p>",
        picture(),
        *(
            scrolling_table(n, tokens, tokens, _fixed(w))
            for n, w in zip(names, trace.weights, strict=True)
        ),
        scrolling_table("Mean of both heads", tokens, tokens, _fixed(trace.weights.mean(0))),
        scrolling_table(
            "Outputs", [f"dim-{i}" for i in range(output.shape[1])], tokens, _fixed(output)
        ),
        _slopes(),
    ]
    return "\n".join(parts)


def _names(slopes: npt.NDArray[np.float64]) -> list[str]:
    return [f"Weights of head {h}, {in_words(m)}" for h, m in enumerate(slopes.tolist())]


def _fixed(rows: npt.NDArray[np.float64]) -> list[list[str]]:
    return [[f"{value:.4f}" for value in row] for row in rows]


def _slopes() -> str:
    rows = [
        [written(m), f"{-10 * m:g}".replace("-", "\N{MINUS SIGN}"), character(10 * m)]
        for m in slopes(8).tolist()
    ]
    columns = ["slope", "bias at distance 10", "character"]
    return scrolling_table("Slopes of eight heads", columns, [f"head {h}" for h in range(8)], rows)


def scrolling_table(
    caption: str, columns: Sequence[str], names: Sequence[str], rows: Sequence[Sequence[str]]
) -> str:
    """A table of text with a row for each name, which scrolls in itself where it is too wide."""
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    lines = zip(map(escape, names), cells, strict=True)
    shown = table(f"<span>{escape(caption)}</span>", ["", *map(escape, columns)], lines)
    return f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">{shown}</div>'


def picture() -> str:
    """SVG of the chapter's weights, one matrix beside the other; by itself it stands on a light ground of its own."""
    trace, tokens = example.trace(causal=False)
    weights, names = trace.weights, _names(trace.slopes)
    side = NAMES + CELL * len(tokens)
    width, height = len(weights) * (side + GAP) - GAP, side + 24
    box = f"{-MARGIN} {-MARGIN} {width + 2 * MARGIN} {height + 2 * MARGIN}"
    cells, marks = [], []
    for h, (matrix, name) in enumerate(zip(weights, names, strict=True)):
        left = h * (side + GAP)
        marks.append(f'<text x="{left + NAMES}" y="14">{escape(name)}</text>')
        for t, row in enumerate(matrix):
            top = NAMES + 24 + t * CELL
            marks.append(_label(left + NAMES - 8, top + CELL / 2 + 5, "end", tokens[t]))
            marks.append(_label(left + NAMES + (t + 0.5) * CELL, NAMES + 16, "middle", tokens[t]))
            for s, weight in enumerate(row):
                x, share = left + NAMES + s * CELL, DARKEST * (weight / weights.max()) ** 0.5
                cells.append(
                    f'<rect x="{x}" y="{top}" width="{CELL}" height="{CELL}" fill-opacity="{share:.3f}"/>'
                )
                marks.append(_label(x + CELL / 2, top + CELL / 2 + 5, "middle", f"{weight:.4f}"))
    return (
        f'<svg class="picture" xmlns="http://www.w3.org/2000/svg" viewBox="{box}" width="{width}" role="img"'
        f' aria-label="{escape("; ".join(names))}" font-family="sans-serif" font-size="14" fill="{INK}">'
        f'<rect class="ground" x="{-MARGIN}" y="{-MARGIN}" width="100%" height="100%" fill="{PAPER}"/>'
        f'<g fill="{WEIGHTS[0]}">{"".join(cells)}</g>{"".join(marks)}</svg>'
    )


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
