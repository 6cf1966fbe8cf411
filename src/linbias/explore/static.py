"""What is shown where scripts do not run: the chapter's weights as a picture."""

from html import escape

from linbias import _matrix, example

CELL, NAMES, GAP, MARGIN = 64, 44, 40, 16  # sizes of the picture
PAPER, INK = "#faf8f3", "#23211d"  # as in style.css, for a picture that stands alone


def static_part() -> str:
    """HTML without scripts: in words what this is, and the chapter's weights."""
    parts = [
        "<h1>Attention with linear biases</h1>",
        "<p>ALiBi adds a bias to the score of each key, &minus;slope &times; distance, in place "
        "of positions. A model that was trained on short texts can then read longer ones.</p>",
        "<p>Scripts are off here. With them, you could change the slopes and the words of this "
        "example, compare how methods of giving positions do at lengths beyond the trained one, "
        "and see which keys need not be read.</p>",
        picture(),
    ]
    return "\n".join(parts)


def picture() -> str:
    """SVG of the chapter's weights, side by side; alone it stands on a light ground of its own."""
    matrices = _matrix.of_weights(example.trace(causal=False)[0])
    tokens, titles = matrices[0].columns, [f"Weights of {matrix.title}" for matrix in matrices]
    side = NAMES + CELL * len(tokens)
    width, height = len(matrices) * (side + GAP) - GAP, side + 24
    box = f"{-MARGIN} {-MARGIN} {width + 2 * MARGIN} {height + 2 * MARGIN}"
    size = f'width="{CELL}" height="{CELL}"'
    cells, marks = [], []
    for h, matrix in enumerate(matrices):
        left = h * (side + GAP) + NAMES
        marks.append(f'<text x="{left}" y="14">{escape(titles[h])}</text>')
        rows = zip(matrix.rows, matrix.texts(), matrix.shades(), strict=True)
        for t, (name, texts, shades) in enumerate(rows):
            top = NAMES + 24 + t * CELL
            middle = top + CELL / 2 + 5
            marks.append(_label(left - 8, middle, "end", name))
            marks.append(_label(left + (t + 0.5) * CELL, NAMES + 16, "middle", tokens[t]))
            for s, (text, shade) in enumerate(zip(texts, shades, strict=True)):
                x, opacity = left + s * CELL, f"{_matrix.DARKEST * shade:.3f}"
                cells.append(f'<rect x="{x}" y="{top}" {size} fill-opacity="{opacity}"/>')
                marks.append(_label(x + CELL / 2, middle, "middle", text))
    return (
        f'<svg class="picture" xmlns="http://www.w3.org/2000/svg" viewBox="{box}" width="{width}"'
        f' role="img" aria-label="{escape("; ".join(titles))}"'
        f' font-family="sans-serif" font-size="14" fill="{INK}"><rect class="ground"'
        f' x="{-MARGIN}" y="{-MARGIN}" width="100%" height="100%" fill="{PAPER}"/>'
        f'<g fill="{_matrix.OF_WEIGHTS.colour}">{"".join(cells)}</g>{"".join(marks)}</svg>'
    )


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'
