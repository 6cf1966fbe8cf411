"""Figures for papers and notebooks, one call each: `bias`, `weights`, `reach`, `loss_by_length`.

Each returns a Matplotlib figure as wide as a column, with letters of 7 points, in colours that
colour-blind readers can distinguish and that differ in grey, too. Its `savefig` writes files for
papers: letters stay letters, dots are 300 per inch.
"""

from linbias import _extras

_extras.require("linbias.plots")

from linbias.plots.losses import loss_by_length
from linbias.plots.matrices import bias, weights
from linbias.plots.reach import reach

__all__ = ["bias", "loss_by_length", "reach", "weights"]
