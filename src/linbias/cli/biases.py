"""The commands that print the definition's numbers: slopes, bias."""

from typing import Annotated

import numpy as np
import typer
from rich.text import Text

from linbias.cli import options
from linbias.cli.console import out, print_json

NumHeads = Annotated[int, typer.Argument(help="Number of heads.")]
Schedule = Annotated[
    str, typer.Option(help="How slopes fall from head to head: paper, geometric, halving or mpt.")
]
MaxBias = Annotated[float, typer.Option(help="The last slope of a power of two is 2^-this.")]

_FAR = 10  # the distance at which slopes are compared


def slopes(
    heads: NumHeads,
    schedule: Schedule = "paper",
    max_bias: MaxBias = 8.0,
    as_json: options.Json = False,
) -> None:
    """Print the slope of every head, and how far it lets the head see.

    \b
    [dim]linbias slopes 8[/]
    [dim]linbias slopes 12 --schedule geometric[/]
    """
    from linbias import schedules
    from linbias.cli.tables import NumberTable
    from linbias.explore.data import character

    values = schedules.slopes(heads, schedule, max_bias)
    if as_json:
        return print_json({"slopes": values.tolist(), "schedule": schedule, "max_bias": max_bias})
    added_at, left_at = f"bias\nat {_FAR}", f"factor\nat {_FAR}"
    title = f"Slopes of {heads} heads, schedule {schedule}"
    titles = ("head", "slope", "2 to the", added_at, left_at, "1/e at", "reach")
    table = NumberTable(*titles, title=title)
    for head, slope in enumerate(values):
        added = -_FAR * slope
        left = f"{np.exp(added):.2g}" if added < -5 else f"{np.exp(added):.3f}"
        numbers = (f"{slope:.6g}", f"{np.log2(slope):g}", f"{added:.4g}", left, f"{1 / slope:.4g}")
        table.add_row(str(head), *numbers, character(-added).lower())
    out.print(table)
    out.print(
        f"[dim]bias: what is added to a score at distance {_FAR}; factor: what that leaves of a "
        "weight; 1/e at: the distance that leaves 37%.[/]"
    )


def bias(
    heads: NumHeads,
    length: Annotated[int, typer.Argument(help="Number of tokens: queries and keys.")],
    head: Annotated[int | None, typer.Option(help="Only this head, counted from 0.")] = None,
    symmetric: Annotated[
        bool, typer.Option("--symmetric", help="Show the keys after the query, too.")
    ] = False,
    schedule: Schedule = "paper",
    max_bias: MaxBias = 8.0,
    as_json: options.Json = False,
) -> None:
    """Print what the bias adds to the scores: a row for each query, a column for each key.

    \b
    [dim]linbias bias 12 8 --head 3[/]
    [dim]linbias bias 2 5 --symmetric --schedule halving[/]
    """
    from linbias import definition, schedules
    from linbias._matrix import Matrix
    from linbias.cli import matrices
    from linbias.example import find_heads

    if length < 1:
        raise ValueError(f"bias: length must be at least 1, got {length}")
    if length > matrices.MOST_COLUMNS and not as_json:
        raise ValueError(
            f"bias: length must be at most {matrices.MOST_COLUMNS} to be printed, got {length} (--json writes any)"
        )
    chosen = find_heads(head, heads, "bias")
    values = schedules.slopes(heads, schedule, max_bias)[chosen]
    right = None if symmetric else np.full(len(values), np.inf)
    added = definition.bias(values, length, length, right_slopes=right)
    if as_json:
        rows = [[[None if np.isinf(x) else float(x) for x in row] for row in one] for one in added]
        return print_json({"slopes": values.tolist(), "bias": rows})
    names = [str(position) for position in range(length)]
    for h, slope, one in zip(chosen, values, added, strict=True):
        numbers = np.where(np.isinf(one), np.nan, one)
        out.print(Text(f"Bias of head {h}, {schedules.in_words(slope)}", style="bold"))
        out.print(matrices.Pair(Matrix("", numbers, names, names)))
        out.print()
