"""Write what each implementation can do into docs/torch.md and docs/jax.md.

python evidence/runs/support.py
"""

from collections.abc import Sequence

import linbias.jax.call
import linbias.torch.choice
from linbias._dispatch import Implementation
from linbias._request import FLOATS
from markers import fill
from markers import table as markdown

DOCUMENTS = {
    "docs/torch.md": linbias.torch.choice.IMPLEMENTATIONS,
    "docs/jax.md": linbias.jax.call.IMPLEMENTATIONS,
}


def table(implementations: Sequence[Implementation]) -> str:
    """One line per implementation, in the order in which "auto" asks."""
    head = "implementation|runs on|how|memory|dtypes|head size|masks|derivatives".split("|")
    rows = []
    for implementation in implementations:
        can = implementation.ABILITIES
        dtypes = "all four" if can.dtypes == FLOATS else ", ".join(can.dtypes)
        size = "any" if can.largest_head is None else f"up to {can.largest_head}"
        masks = "any" if "mask" in can.has else "key ranges"
        derivatives = "all" if can.higher_derivatives else "first"
        kinds = [dtypes, size, masks, derivatives]
        rows.append([f"`{implementation.NAME}`", can.runs_on, can.how, can.memory, *kinds])
    return markdown(head, rows)


def main() -> None:
    for document, implementations in DOCUMENTS.items():
        fill(document, {"support": table(implementations)})


if __name__ == "__main__":
    main()
