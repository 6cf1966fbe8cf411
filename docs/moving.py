"""The moving picture of the first page: what a growing slope does to the weights of one word.

    python docs/moving.py        # writes docs/slope.svg; a test keeps its numbers current

It needs no scripts, has no background, and stands still for readers who asked for less motion.
"""

from pathlib import Path

import linbias
from linbias import explore
from linbias.methods import WEIGHTS

FILE = Path(__file__).parent / "slope.svg"
WORDS = "The cat sat on the mat and the dog ran home".split()
SLOPES = [step / 20 for step in range(21)]  # 0 to 1
SECONDS = 12
INK = "#7a7367"  # to be read on white and on black: a picture does not know its page
WIDTH, LEFT, STEP, FLOOR, TALLEST = 760, 40, 62, 152, 100


def weights() -> list[list[float]]:
    """By slope, what the last word gives to each word, for content as the explorer makes it."""
    q, k, _ = explore.vectors(WORDS, num_heads=2)
    return [
        linbias.attention_weights(q[1:], k[1:], [slope])[0, -1].round(3).tolist()
        for slope in SLOPES
    ]


def keyframes(name: str, style: str, values: list[float]) -> str:
    """There and back, with a rest at either end."""
    rest, span = 6, 38 / (len(values) - 1)
    there = [(rest + i * span, value) for i, value in enumerate(values)]
    back = [(100 - at, value) for at, value in there]
    steps = [(0.0, values[0]), *there, *back[::-1], (100.0, values[0])]
    frames = "".join(f"{at:g}%{{{style.format(value)}}}" for at, value in steps)
    return f"@keyframes {name}{{{frames}}}"


def picture() -> str:
    """The file's text."""
    by_slope = weights()
    most = max(map(max, by_slope))
    style = [
        f"text{{font:15px system-ui,sans-serif;fill:{INK}}}.small{{font-size:12px}}"
        f".bar,.knob{{fill:{WEIGHTS[0]}}}",
        f"@media(prefers-color-scheme:dark){{.bar,.knob{{fill:{WEIGHTS[1]}}}}}",
        f".moves{{animation-duration:{SECONDS}s;animation-iteration-count:infinite;"
        "animation-timing-function:linear}",
        ".bar{transform-box:fill-box;transform-origin:bottom}",
        "@media(prefers-reduced-motion:reduce)"
        "{.moves{animation-play-state:paused;animation-delay:-3s}}",
    ]
    shapes = []
    for i, word in enumerate(WORDS):
        heights = [row[i] / most for row in by_slope]
        style.append(keyframes(f"bar{i}", "transform:scaleY({:.3f})", heights))
        style.append(
            keyframes(f"ink{i}", "opacity:{:.2f}", [0.35 + 0.65 * h**0.5 for h in heights])
        )
        middle = LEFT + STEP * (i + 0.5)
        shapes.append(
            f'<rect class="bar moves" x="{middle - 17:g}" y="{FLOOR - TALLEST}" width="34"'
            f' height="{TALLEST}" style="animation-name:bar{i}"/>'
            f'<text class="moves" x="{middle:g}" y="{FLOOR + 22}" text-anchor="middle"'
            f' style="animation-name:ink{i}">{word}</text>'
        )
    start, end = LEFT + 150, WIDTH - 190
    style.append(
        keyframes("knob", "transform:translateX({:.1f}px)", [s * (end - start) for s in SLOPES])
    )
    y = FLOOR + 62
    shapes.append(
        f'<line stroke="{INK}" x1="{start}" y1="{y}" x2="{end}" y2="{y}"'
        ' stroke-width="3" stroke-linecap="round"/>'
        f'<circle class="knob moves" cx="{start}" cy="{y}" r="8" style="animation-name:knob"/>'
        f'<text class="small" x="{start - 18}" y="{y + 4}" text-anchor="end">'
        "slope 0: content alone</text>"
        f'<text class="small" x="{end + 18}" y="{y + 4}">slope 1: the last words</text>'
    )
    title = "What &#8220;home&#8221; takes from each word, as the price of distance rises"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} 240" width="{WIDTH}"'
        ' height="240" role="img">'
        "<title>As the slope grows, the weights of one word move from what fits it best"
        " to the words next to it.</title>"
        f"<style>{''.join(style)}</style>"
        f'<text x="{LEFT}" y="30">{title}</text>{"".join(shapes)}</svg>\n'
    )


if __name__ == "__main__":
    FILE.write_text(picture(), encoding="utf-8")
