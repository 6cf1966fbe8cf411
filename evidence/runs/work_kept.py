"""How much of the causal work the certificate keeps, by layer and head, beside a perfect one.

    python evidence/runs/work_kept.py --model output/extrapolate/models/alibi-L128-s0

It rewrites the tables in docs/kernels.md. A perfect certificate knows the weights: it leaves the
far blocks of a tile that together hold at most `tolerance` of the probability of each of its rows.
Ours has to know without reading them. Both are the share of the visible query-key pairs that lie
in visited blocks, float32, for random normal inputs (8 heads of 64) and for the queries and keys
of a model.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "evidence" / "benchmarks"))

import linbias  # noqa: E402
from bench_attention import trained_inputs  # noqa: E402
from linbias._request import TOLERANCE  # noqa: E402
from linbias.kernels import core  # noqa: E402
from linbias.torch import visited  # noqa: E402
from markers import fill, parser_of  # noqa: E402
from markers import table as markdown  # noqa: E402

ROWS, KEYS = core.TILE_ROWS, core.BLOCK_KEYS


def perfect(q: Tensor, k: Tensor, slopes: Tensor) -> Tensor:
    """The share that the weights themselves ask for, [H]."""
    _, H, T, D = q.shape
    read, keys = torch.zeros(H), torch.arange(T)
    for h in range(H):
        for rows in keys.split(ROWS):
            stop, far = int(rows[-1]) + 1, int(rows[0]) // KEYS
            own = k[0, h // (H // k.shape[1]), :stop].double()
            scores = q[0, h, rows].double() @ own.T * D**-0.5
            distance = rows[:, None] - keys[:stop]
            scores = (scores - float(slopes[h]) * distance).masked_fill(distance < 0, -torch.inf)
            blocks = scores.softmax(-1)[:, : far * KEYS].unflatten(-1, (far, KEYS)).sum(-1)
            tails = blocks.cumsum(-1).amax(0)  # of the worst row, from the farthest block on
            first = KEYS * int((tails <= TOLERANCE["float32"]).sum())
            read[h] += (rows + 1 - first).sum()
    return read / (T * (T + 1) / 2)


def table(layers: dict[str, tuple[Tensor, Tensor, Tensor]]) -> str:
    """One line per layer: ours / perfect for every head, and their means."""
    heads = next(iter(layers.values()))[0].shape[1]
    slopes = torch.tensor(linbias.slopes(heads), dtype=torch.float32)
    rows = []
    for name, (q, k, v) in layers.items():
        kept = visited(q, k, v, slopes, implementation="cpu").work_kept[0] * 100
        best = perfect(q, k, slopes) * 100
        pairs = [*zip(kept, best, strict=True), (kept.mean(), best.mean())]
        rows.append([name, *(f"{a:.1f} / {b:.1f}" for a, b in pairs)])
        print(*rows[-1], flush=True)
    return markdown(["kept / perfect, %", *(f"head {h}" for h in range(heads)), "mean"], rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="an ALiBi model trained here")
    parser.add_argument("--length", type=int, default=8192, help="tokens")
    options = parser.parse_args()
    torch.manual_seed(0)
    noise = {"random normal": tuple(torch.randn(3, 1, 8, options.length, 64))}
    trained = trained_inputs(options.model, options.length)
    layers = {f"layer {index}": arrays for index, arrays in enumerate(trained)}
    text = (
        f"{options.length:,} tokens, float32, tolerance 2^-24, tiles of {ROWS} x {KEYS}; heads in"
        " the order of `linbias.slopes`. `python evidence/runs/work_kept.py`; the model: ALiBi"
        " of `linbias extrapolate --steps 450 --batch-size 8`."
    )
    content = "\n\n".join([table(noise), table(layers), text])
    fill("docs/kernels.md", {"work kept": content})


if __name__ == "__main__":
    main()
