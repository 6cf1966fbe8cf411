"""The pictures of the pages in docs/ideas, drawn from the library's own numbers.

    python docs/pictures.py        # writes docs/ideas/*.svg; a test keeps them current

SVG written by hand: a few KB each, the same bytes on every machine, and a light card below, so that a picture can be read on a dark
page. Figures of results, and figures for papers, are made by Matplotlib elsewhere.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np
import numpy.typing as npt

import linbias
from linbias.example import TOKENS, K, Q, V
from linbias.variants import variant_slopes

FOLDER = Path(__file__).parent / "ideas"
INK, FAINT, GRID, HIDDEN = "#1c2733", "#5b6773", "#d5dbe1", "#eceff2"
COLORS = ("#b3261e", "#c2571a", "#a37b00", "#3f7d20", "#00796b", "#1565c0", "#5e35b1", "#8e2463")

Values = npt.NDArray[np.float64]


class Picture:
    """Shapes on a light card. Lengths are pixels at the picture's natural size."""

    def __init__(self, width: int, height: int, says: str) -> None:
        self.width, self.height, self.says = width, height, says
        self.parts: list[str] = []

    def text(
        self, x: float, y: float, words: str, size: int = 13, anchor: str = "start", fill: str = INK,
        bold: bool = False, turned: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        turn = f' transform="rotate(-90 {x:g} {y:g})"' if turned else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{weight}{turn}>'
            f"{escape(words)}</text>"
        )

    def boxes(self, boxes: Sequence[tuple[float, float, float, float]], fill: str) -> None:
        """Rectangles (x, y, width, height) of one color."""
        path = "".join(f"M{x:g} {y:g}h{w:g}v{h:g}h{-w:g}z" for x, y, w, h in boxes)
        self.parts.append(f'<path fill="{fill}" d="{path}"/>')

    def line(
        self,
        points: Sequence[tuple[float, float]],
        stroke: str,
        width: float = 1.5,
        dash: str = "",
    ) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<polyline points="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{dashed}/>'
        )

    def svg(self) -> str:
        says = escape(self.says)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}"'
            f' role="img" aria-label="{says}" font-family="system-ui, sans-serif">\n<title>{says}</title>\n'
            f'<rect x=".5" y=".5" width="{self.width - 1}" height="{self.height - 1}" rx="8" fill="#fff" stroke="{GRID}"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def shade(value: float, most: float) -> str:
    """White for 0, dark blue for `most` in size."""
    share = min(1.0, abs(value) / most) if most else 0.0
    low, high = (255, 255, 255), (21, 75, 140)
    return "#" + "".join(
        f"{round(a + share * (b - a)):02x}" for a, b in zip(low, high, strict=True)
    )


def matrix(
    picture: Picture, x: float, y: float, values: Values, cell: float, most: float, *,
    title: str = "", names: Sequence[str] = (), label: Callable[[float], str] | None = None, size: int = 12,
) -> None:  # fmt: skip
    """A matrix of colored cells; a value of -inf is hidden, and drawn grey."""
    picture.text(x, y - (24 if names else 10), title, bold=True)
    num_rows, num_columns = values.shape
    for column, name in enumerate(names[:num_columns]):
        picture.text(x + (column + 0.5) * cell, y - 6, name, 11, "middle", FAINT)
    boxes: dict[str, list[tuple[float, float, float, float]]] = {}
    words = []
    for row in range(num_rows):
        if names and x > 50:
            picture.text(x - 6, y + (row + 0.5) * cell + 4, names[row], 11, "end", FAINT)
        before = ""
        for column in range(num_columns):
            value = float(values[row, column])
            hidden = value == -math.inf
            fill = HIDDEN if hidden else shade(value, most)
            left, top = x + column * cell, y + row * cell
            if fill == before and not label:  # one box for cells that look the same
                corner, level, width, height = boxes[fill].pop()
                boxes[fill].append((corner, level, width + cell, height))
            else:
                boxes.setdefault(fill, []).append((left, top, cell - 1, cell - 1))
            before = fill
            if label and not hidden:
                ink = "#fff" if abs(value) > 0.55 * most else INK
                middle = left + (cell - 1) / 2, top + cell / 2 + size * 0.35
                words.append((*middle, label(value), size, "middle", ink))
    for fill, same in boxes.items():
        picture.boxes(same, fill)
    for word in words:
        picture.text(*word)


class Axes:
    """A plot of lines: data coordinates to pixels, with ticks."""

    def __init__(
        self, picture: Picture, box: tuple[float, float, float, float], x: tuple[float, float], y: tuple[float, float],
        log_x: bool = False,
    ) -> None:  # fmt: skip
        self.picture, self.box, self.x_range, self.y_range, self.log_x = picture, box, x, y, log_x

    def at(self, x: float, y: float) -> tuple[float, float]:
        left, top, width, height = self.box
        low, high = self.x_range
        share = (
            math.log(x / low) / math.log(high / low) if self.log_x else (x - low) / (high - low)
        )
        bottom, upper = self.y_range
        return left + share * width, top + (1 - (y - bottom) / (upper - bottom)) * height

    def ticks(self, x: Sequence[float], y: Sequence[float], x_title: str, y_title: str) -> None:
        left, top, width, height = self.box
        for value in y:
            level = self.at(self.x_range[0], value)[1]
            self.picture.line([(left, level), (left + width, level)], GRID, 1)
            self.picture.text(left - 6, level + 4, f"{value:g}", 11, "end", FAINT)
        for value in x:
            where = self.at(value, self.y_range[0])[0]
            self.picture.line([(where, top + height), (where, top + height + 4)], FAINT, 1)
            self.picture.text(where, top + height + 17, f"{value:,g}", 11, "middle", FAINT)
        self.picture.text(left + width / 2, top + height + 36, x_title, 12, "middle", INK)
        self.picture.text(left - 40, top + height / 2, y_title, 12, "middle", INK, turned=True)

    def plot(self, x: Sequence[float], y: Sequence[float], stroke: str, dash: str = "") -> None:
        self.picture.line([self.at(a, b) for a, b in zip(x, y, strict=True)], stroke, 2, dash)


# The pictures


def steps() -> Picture:
    """Scores, bias, weights of the five tokens."""
    q, k, v = (np.array(x, float).reshape(5, 2, 2).swapaxes(0, 1) for x in (Q, K, V))
    trace = linbias.explain(q, k, v, linbias.slopes(2, "halving"), causal=False)
    picture = Picture(
        820, 292, "Scores plus bias, then softmax: weights of five tokens, slope one half"
    )
    for place, (title, values, most, digits) in enumerate(
        [
            ("scores, scaled", trace.scaled[0], 2.0, 2),
            ("bias, slope 1/2", 0.0 - trace.penalty[0], 2.6, 1),
            ("weights", trace.weight[0], 0.6, 2),
        ]
    ):
        x = 52 + place * 262
        matrix(
            picture, x, 60, values, 42, most, title=title, names=TOKENS,
            label=lambda value, digits=digits: f"{value:.{digits}f}",
        )  # fmt: skip
        if place < 2:
            picture.text(x + 222, 170, "+→"[place], 22, "middle", FAINT)
    picture.text(736, 286, "each row adds up to 1", 11, "middle", FAINT)
    picture.text(474, 286, "0 at the query itself", 11, "middle", FAINT)
    return picture


def heads() -> Picture:
    """The causal bias of some heads of eight, as factors on the weight."""
    picture = Picture(
        820,
        252,
        "What the bias leaves of a weight, for four of eight heads: steep heads see a few keys",
    )
    slopes = linbias.slopes(8)
    kept = np.exp(linbias.bias(slopes, 24, 24, right_slopes=[np.inf] * 8))
    for place, head in enumerate((0, 2, 4, 7)):
        values = np.where(np.triu(np.ones((24, 24)), 1) > 0, -np.inf, kept[head])
        title = f"head {head}, slope 1/{round(1 / slopes[head])}"
        matrix(picture, 20 + place * 200, 42, values, 7.5, 1.0, title=title)
    picture.text(
        20,
        242,
        "rows: queries; columns: keys; dark: the bias leaves the weight as it is; white: it leaves nothing; grey: hidden",
        12,
        fill=FAINT,
    )
    return picture


def reach() -> Picture:
    """exp(-slope * distance) against distance."""
    picture = Picture(
        820, 330, "What the bias leaves of a weight against distance, for eight heads"
    )
    axes = Axes(picture, (60, 24, 640, 250), (1, 2048), (0, 1), log_x=True)
    axes.ticks(
        [1, 4, 16, 64, 256, 1024],
        [0, 0.5, 1],
        "distance (tokens)",
        "factor exp(-slope * distance)",
    )
    x = [2 ** (i / 8) for i in range(89)]
    for head, slope in enumerate(linbias.slopes(8)):
        axes.plot(x, [math.exp(-slope * d) for d in x], COLORS[head])
        picture.text(
            716,
            40 + 24 * head,
            f"head {head}: 1/{round(1 / slope)}",
            12,
            fill=COLORS[head],
            bold=True,
        )
    return picture


def rows_alike() -> Picture:
    """The two ways to write a causal bias."""
    picture = Picture(
        820, 262, "Two matrices that differ by a number per row, and their one softmax"
    )
    away = linbias.bias([0.5], 5, 5, right_slopes=[np.inf])[0]
    index = np.where(np.isinf(away), -np.inf, 0.5 * np.arange(5.0))
    exp = np.exp(away)
    for place, (title, values, most) in enumerate(
        [
            ("- slope * distance", away, 2.6),
            ("slope * key index", index, 2.6),
            (
                "softmax of either",
                np.where(exp > 0, exp / exp.sum(1, keepdims=True), -np.inf),
                0.8,
            ),
        ]
    ):
        digits = 2 if place == 2 else 1
        matrix(
            picture, 24 + place * 272, 42, values, 40, most, title=title,
            label=lambda value, digits=digits: f"{value:.{digits}f}",
        )  # fmt: skip
    for row in range(5):
        picture.text(236, 67 + 40 * row, f"+ {0.5 * row:.1f}", 12, fill=FAINT)
    return picture


def variants() -> Picture:
    """The bias of each variant."""
    picture = Picture(
        820, 206, "The bias of the causal, symmetric, directional and asymmetric variants"
    )
    causal, symmetric = ([0.5], [math.inf]), ([0.5], [0.5])
    left, right = variant_slopes("pictures", "directional", 2, "halving")
    shown = [
        ("causal", causal),
        ("symmetric", symmetric),
        ("directional: left", (left[:1], right[:1])),
        ("directional: right", (left[1:], right[1:])),
        ("asymmetric", ([0.5], [1.0])),
    ]
    for place, (title, (a, b)) in enumerate(shown):
        values = linbias.bias(a, 7, 7, right_slopes=b)[0]
        matrix(
            picture, 20 + place * 160, 42, values, 20, 4.0, title=title, size=9,
            label=lambda value: f"{value:g}".replace("0.", "."),
        )  # fmt: skip
    picture.text(20, 198, "rows: queries; columns: keys; grey: hidden", 12, fill=FAINT)
    return picture


def sharing() -> Picture:
    """How many keys share the weight, by length."""
    picture = Picture(
        820, 330, "How many keys share a head's weight at growing length, for three slopes"
    )
    axes = Axes(picture, (70, 24, 560, 250), (64, 65536), (0, 5), log_x=True)
    axes.ticks(
        [64, 512, 4096, 32768],
        range(6),
        "length (tokens)",
        "keys that share the weight (powers of 10)",
    )
    lengths = [2**i for i in range(6, 17)]
    for color, (name, slope) in zip(
        (COLORS[5], COLORS[3], COLORS[0]),
        (("slope 1/256", 1 / 256), ("slope 1/4096", 1 / 4096), ("slope 0 (no bias)", 0.0)),
        strict=True,
    ):
        shared = [math.log10(keys_sharing(slope, length)) for length in lengths]
        axes.plot(lengths, shared, color)
        picture.text(640, axes.at(65536, shared[-1])[1] + 4, name, 12, fill=color)
    return picture


def keys_sharing(slope: float, length: int) -> float:
    """exp(entropy) of the last query's weights where no key's content stands out."""
    score = -slope * np.arange(length)
    weight = np.exp(score) / np.exp(score).sum()
    return float(np.exp(-(weight * np.log(weight)).sum()))


def rotary() -> Picture:
    """What distance does to the score of one fixed pair, rotated and biased."""
    picture = Picture(
        820, 330, "The part of a score that distance decides: rotary positions and a linear bias"
    )
    axes = Axes(picture, (60, 24, 620, 250), (0, 512), (-4, 6))
    axes.ticks([0, 128, 256, 384, 512], range(-4, 7, 2), "distance (tokens)", "score")
    edge = axes.at(128, 0)[0]
    picture.boxes([(60, 24, edge - 60, 250)], "#eef3f9")
    picture.text(76, 266, "seen in training", 11, fill=FAINT)
    x = list(range(513))
    axes.plot(x, [rotated_score(d) for d in x], COLORS[1])
    axes.plot(x[:257], [-d / 64 for d in x[:257]], COLORS[5])
    picture.text(690, 70, "rotary:", 12, fill=COLORS[1], bold=True)
    picture.text(690, 88, "a sum of waves", 12, fill=COLORS[1])
    picture.text(690, 240, "bias, slope 1/64:", 12, fill=COLORS[5], bold=True)
    picture.text(690, 258, "a straight line", 12, fill=COLORS[5])
    return picture


def rotated_score(distance: int, size: int = 32, base: float = 10000.0) -> float:
    """q . k / sqrt(size) for q = k = ones, rotated `distance` apart."""
    frequency = base ** -(np.arange(size // 2) / (size // 2))
    return float(2 * np.cos(frequency * distance).sum() / math.sqrt(size))


def blocks_read() -> Picture:
    """Which blocks near to far reads."""
    picture = Picture(
        820,
        316,
        "The blocks of keys that three heads read, out of all that a causal query may see",
    )
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 1, 1024, 8))
    for place, slope in enumerate((1 / 2, 1 / 8, 1 / 32)):
        visit = linbias.near_to_far.attention(q, k, v, [slope], rows=32, keys=32)
        read = np.full((32, 32), -np.inf)
        for row, tile in enumerate(visit.tiles[0][0]):
            read[row, : row + 1] = 0.0
            read[row, tile.first // 32 : -(-tile.end // 32)] = 1.0
        share = (read == 1).sum() / (read >= 0).sum()
        x = 20 + place * 268
        matrix(
            picture, x, 42, read, 7.5, 1.0, title=f"slope 1/{round(1 / slope)}: {share:.0%} read"
        )
    picture.text(
        20,
        306,
        "1,024 tokens in blocks of 32: dark is read, white is left out, grey is hidden by the causal mask",
        12,
        fill=FAINT,
    )
    return picture


PICTURES: dict[str, Callable[[], Picture]] = {
    "steps": steps,
    "heads": heads,
    "reach": reach,
    "rows-alike": rows_alike,
    "variants": variants,
    "sharing": sharing,
    "rotary": rotary,
    "blocks-read": blocks_read,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
        print(FOLDER / f"{name}.svg")
