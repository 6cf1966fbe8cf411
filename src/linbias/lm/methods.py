"""The position methods as reports show them: names, and colours.

The colours are Okabe and Ito's, which colour-blind readers can distinguish.
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
