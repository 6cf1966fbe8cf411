"""Write what each implementation can do into docs/torch.md and docs/jax.md, from the implementations' own records.

python evidence/runs/support.py
"""

from collections.abc import Sequence
from pathlib import Path

import linbias.jax.call
import linbias.torch.choice
from linbias._dispatch import Implementation
from linbias._request import FLOATS
from markers import fill

DOCUMENTS = {
    "docs/torch.md": linbias.torch.choice.IMPLEMENTATIONS,
    "docs/jax.md": linbias.jax.call.IMPLEMENTATIONS,
}


def table(implementations: Sequence[Implementation]) -> str:
    """One line per implementation, in the order in which "auto" asks."""
    lines = [
        "| implementation | runs on | how | memory | dtypes | head size | masks | derivatives |"
    ]
    lines.append("|---" * 8 + "|")
    for implementation in implementations:
        can = implementation.ABILITIES
        dtypes = "all four" if can.dtypes == FLOATS else ", ".join(can.dtypes)
        head = "any" if can.largest_head is None else f"up to {can.largest_head}"
        masks = "any" if "mask" in can.has else "key ranges"
        derivatives = "all" if can.higher_derivatives else "first"
        cells = (
            f"`{implementation.NAME}`",
            can.runs_on,
            can.how,
            can.memory,
            dtypes,
            head,
            masks,
            derivatives,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    for document, implementations in DOCUMENTS.items():
        fill(document, {"support": table(implementations)})
        print(Path(document).name)


if __name__ == "__main__":
    main()
