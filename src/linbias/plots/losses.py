"""Loss by test length: the paper's figure, from the records of `linbias extrapolate`."""

import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from linbias.plots.figure import STYLE, PaperFigure, inches, laid_out

if TYPE_CHECKING:
    from linbias.lm.report.records import EvaluationRecord


def loss_by_length(
    results: "str | os.PathLike[str] | Sequence[EvaluationRecord]",
    *,
    train_length: int | None = None,
    width: float | str = "single",
    ax: Axes | None = None,
) -> Figure:
    """Draw bits per byte against test length, a line per position method.

    Lines are means over the seeds, bands their range. The training length is marked, and the names
    stand beside the lines' ends.

    Args:
        results: The folder of a `linbias extrapolate`, or evaluation records
            (`ExtrapolationResults.evaluations`).
        train_length: Which training length, where several were compared; None means a panel for
            each.
        width, ax: As for `bias`; into axes, one training length.

    Returns:
        The figure.

    Raises:
        ModuleNotFoundError: What `linbias.lm` needs is not installed.
        ValueError: The folder holds no finished results, nothing was trained at train_length, or
            width is unknown.

    Example:
        >>> loss_by_length("output/extrapolate")  # doctest: +SKIP
        >>> loss_by_length(run.evaluations, width=3.0).savefig("loss.pdf")  # doctest: +SKIP

    Source: Press, Smith and Lewis, ICLR 2022, figure 4.
    """
    from linbias.lm.report import figures, findings
    from linbias.lm.report.summary import read_run

    if isinstance(results, str | os.PathLike):
        results = read_run("plots.loss_by_length", Path(results)).evaluations
    records = list(results)
    if not records:
        raise ValueError("plots.loss_by_length: results must hold an evaluation, got none")
    lengths = findings.train_lengths(records)
    if train_length is not None:
        if train_length not in lengths:
            raise ValueError(
                f"plots.loss_by_length: train_length must be one of {lengths}, got {train_length}"
            )
        lengths = [train_length]
    if ax is not None:
        if len(lengths) != 1:
            raise ValueError(
                f"plots.loss_by_length: ax takes one training length, got {lengths}: choose with "
                "train_length"
            )
        figures.draw_loss_by_length(ax, records, lengths[0], figures.COLUMN)
        return laid_out(ax)
    across = inches("plots.loss_by_length", width)
    columns = min(len(lengths), max(1, int(across / 2.6)))
    rows = -(-len(lengths) // columns)
    with rc_context(STYLE):
        size = (across, rows * min(2.4, 0.72 * across / columns))
        figure = PaperFigure(figsize=size, layout="constrained")
        panels = figure.subplots(rows, columns, sharey=True, squeeze=False).flat
        for panel, length in zip_longest(panels, lengths):
            if length is None:
                panel.remove()
                continue
            figures.draw_loss_by_length(panel, records, length, figures.COLUMN)
            if len(lengths) > 1:
                panel.set_title(f"trained on {length:,} tokens")
    return figure
