"""How exact is the bias far out? `python evidence/runs/numerics.py` writes the table of
docs/numerics.md.

One query at the end of 1,024 to 1,048,576 keys, D=64, random normal inputs, float32; errors of the
output against float64, relative to its largest entry. `slope * key_index` is the form of the
authors' code and of kernels after it: a row constant apart, but rounded at the size of the
position.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "evidence" / "benchmarks"))

import linbias.torch  # noqa: E402
import record  # noqa: E402
from markers import fill, table  # noqa: E402

LENGTHS = (2**10, 2**13, 2**16, 2**18, 2**20)
SLOPES = (2.0**-1, 2.0**-4, 2.0**-8)


def by_key_index(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slopes: torch.Tensor
) -> torch.Tensor:
    """softmax(scale * q k + slope * key index) v, all in the dtype of q."""
    score = q @ k.mT * q.shape[-1] ** -0.5
    score = score + slopes[:, None, None] * torch.arange(k.shape[2], dtype=q.dtype)
    return torch.softmax(score, -1) @ v


def main() -> None:
    torch.manual_seed(0)
    slopes = torch.tensor(SLOPES)
    rows = []
    for S in LENGTHS:
        q, k, v = (torch.randn(1, len(SLOPES), n, 64) for n in (1, S, S))
        wide = [x.double() for x in (q, k, v)]
        exact = linbias.torch.attention(*wide, slopes.double(), tolerance=0.0)
        forms = {
            "cpu": linbias.torch.attention(q, k, v, slopes, implementation="cpu"),
            "blocked": linbias.torch.attention(q, k, v, slopes, implementation="blocked"),
            "slope * key_index": by_key_index(q, k, v, slopes),
        }
        for name, out in forms.items():
            error = (out.double() - exact).abs().amax((0, 2, 3)) / exact.abs().amax((0, 2, 3))
            rows.append([f"{S:,}", name, *(f"{e:.1e}" for e in error.tolist())])
    here = record.here()
    where = f"{here['machine']}, torch {here['versions']['torch']}, {here['date']}"
    lines = table(["keys", "form", *(f"slope 1/{round(1 / m)}" for m in SLOPES)], rows)
    text = f"{lines}\n\n{where}, `python evidence/runs/numerics.py`."
    fill("docs/numerics.md", {"numerics": text})
    print(text)


if __name__ == "__main__":
    main()
