"""What all figures share: their width, their letters, and how they are saved and shown."""

import io
import re
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLUMNS = {"single": 3.3, "double": 6.9}  # inches, as most papers in two columns have them

STYLE = {
    "font.size": 7,
    "axes.titlesize": 7,
    "axes.labelsize": 7,
    "xtick.labelsize": 6,
    "ytick.labelsize": 6,
    "legend.fontsize": 6,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 3,
    "hatch.linewidth": 0.4,
    "hatch.color": "#BBBBBB",
}
# Letters stay letters, which readers can search and publishers accept: no outlines, no type 3.
_FILES = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none", "savefig.dpi": 300}


class PaperFigure(Figure):
    """A figure that notebooks show without `pyplot`, and whose files a paper can use."""

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """As Matplotlib's, with letters as letters, and dots, if any, 300 per inch."""
        with rc_context(_FILES):
            super().savefig(*args, **kwargs)

    def _repr_svg_(self) -> str:
        buffer = io.StringIO()
        self.savefig(buffer, format="svg")
        return re.sub(r"\s*\n\s*", " ", buffer.getvalue())  # a line in a notebook's file


def inches(function: str, width: float | str) -> float:
    """A width in inches from a number of them, or from the name of a column."""
    if isinstance(width, str):
        if width not in _COLUMNS:
            raise ValueError(
                f"{function}: width must be 'single', 'double' or inches, got {width!r}"
            )
        return _COLUMNS[width]
    if not width > 0:
        raise ValueError(f"{function}: width must be positive, got {width}")
    return float(width)


def figure_of(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def laid_out(ax: Axes) -> Figure:
    """The figure of a user's axes, in the constrained layout where it has none: names get room."""
    figure = figure_of(ax)
    if ax.get_subplotspec() is not None and figure.get_layout_engine() is None:
        figure.set_layout_engine("constrained")
    return figure
