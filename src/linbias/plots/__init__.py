"""Figures for papers and notebooks, one call each: `bias`, `weights`, `reach`, `loss_by_length`.

Each returns a Matplotlib figure as wide as a column, with letters of 7 points, in colours that colour-blind readers
can distinguish and that differ in grey, too.
"""

from linbias import _extras

_extras.require("linbias.plots")

from linbias.plots.figure import DOUBLE_COLUMN, SINGLE_COLUMN, save
from linbias.plots.losses import loss_by_length
from linbias.plots.matrices import bias, weights
from linbias.plots.reach import reach

__all__ = [
    "DOUBLE_COLUMN",
    "SINGLE_COLUMN",
    "bias",
    "loss_by_length",
    "reach",
    "save",
    "weights",
]
