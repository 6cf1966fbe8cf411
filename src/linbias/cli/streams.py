"""The command about endless streams: windows."""

import math
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape

from linbias.cli import options
from linbias.cli.console import out, print_json

_MOST_HEADS = 12  # a column each, up to here


def windows(
    model: options.Model,
    tolerance: Annotated[
        float, typer.Option(help="Share of a row's weight that keys beyond the window may hold.")
    ] = 2.0**-24,
    as_json: options.Json = False,
) -> None:
    """Print how many of the nearest keys each head of a model can need, whatever the text: from its weights alone.

    \b
    [dim]linbias windows output/train[/]
    [dim]linbias windows bigscience/bloom-560m --tolerance 1e-4[/]
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"--tolerance: must be in (0, 1), got {tolerance}")
    from linbias.lm.checkpoints import readable_model
    from linbias.models.loading import Files, load
    from linbias.models.windows import weights_windows

    loaded = load(Files.at("windows", readable_model("windows", model)))
    found = weights_windows(loaded)
    kept = found.windows(tolerance)
    if as_json:
        numbers = {"windows": kept, "lead": found.lead, "slopes": found.slopes}
        lists = {
            name: [[x if math.isfinite(x) else None for x in row] for row in array.tolist()]
            for name, array in numbers.items()
        }
        return print_json(
            {"model": model, "tolerance": tolerance, **lists, "why_not": found.why_not}
        )
    _print_table(kept, found.slopes)
    for layer, reason in found.why_not.items():
        out.print(f"Layer {layer} has no window: {reason}.")
    out.print(escape(_in_words(kept, tolerance)), soft_wrap=True)


def _print_table(kept: Any, slopes: Any) -> None:
    """A row per layer: its heads, or where they are many, the smallest, middle and largest window."""
    from linbias.cli.tables import NumberTable
    from linbias.schedules import written

    num_heads = kept.shape[1]
    same = (slopes == slopes[0]).all()
    if num_heads <= _MOST_HEADS and same:
        heads = [f"head {head}\n{written(slope)}" for head, slope in enumerate(slopes[0])]
        columns = kept
    else:
        heads = ["smallest", "median", "largest"]
        columns = np.array([[row.min(), np.median(row), row.max()] for row in kept])
    table = NumberTable("layer", *heads, "sum", title="Keys that a head can need")
    for layer, (cells, row) in enumerate(zip(columns, kept, strict=True)):
        table.add_row(str(layer), *map(_keys, cells), _keys(row.sum()))
    out.print(table)


def _keys(count: float) -> str:
    return f"{count:,.0f}" if math.isfinite(count) else "all"


def _in_words(kept: Any, tolerance: float) -> str:
    """What the windows together mean."""
    if not np.isfinite(kept).all():
        return f"{np.isfinite(kept).sum():,} of {kept.size:,} heads have a window; the others need all keys."
    total = kept.sum()
    return (
        f"{total:,.0f} keys over {kept.size} heads: a cache of all keys is larger from {total / kept.size:,.0f} tokens on. "
        f"Keys beyond a window hold at most {tolerance:.2g} of any row's weight, for every text."
    )
