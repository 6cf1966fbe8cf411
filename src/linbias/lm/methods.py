"""The position methods as reports show them: names, and colours.

The colours are Okabe and Ito's, which colour-blind readers can distinguish; those of dark pages are
the same hues, lighter.
"""

NAMES = {
    "alibi": "ALiBi",
    "sinusoidal": "sinusoidal",
    "rotary": "rotary",
    "learned": "learned",
    "t5": "T5 bias",
    "none": "no positions",
}
COLOURS = {
    "alibi": "#0072B2",
    "sinusoidal": "#D55E00",
    "rotary": "#009E73",
    "learned": "#CC79A7",
    "t5": "#B8860B",
    "none": "#666666",
}
DARK_COLOURS = {
    "alibi": "#5AB4F0",
    "sinusoidal": "#FF8B4A",
    "rotary": "#2CC996",
    "learned": "#E6A3C8",
    "t5": "#E3B341",
    "none": "#A8A8A8",
}
# Of what is no line: a light page's, and a dark page's.
PAGE_COLOURS = {
    "background": "#FFFFFF",
    "text": "#222222",
    "frame": "#888888",
    "grid": "#E6E6E6",
}
DARK_PAGE_COLOURS = {
    "background": "#16181C",
    "text": "#E4E4E4",
    "frame": "#9A9A9A",
    "grid": "#33363C",
}
