"""What ptxas makes of the Triton kernels' innermost loops: the table in docs/kernels.md. Needs no GPU.

python runs/kernel_code.py
"""

import json
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from markers import fill

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import triton_compile  # noqa: E402
from linbias.kernels.triton import sizes  # noqa: E402

DOCUMENT = ROOT / "docs" / "kernels.md"
CAPABILITY, HEAD_SIZES, KERNELS = 90, (64, 128), ("forward", "dq", "dkv")


def main() -> None:
    shared = triton_compile.SHARED_KIB[CAPABILITY] * 1024
    records = []
    for D in HEAD_SIZES:
        call = partial(triton_compile.launch_everything, D, torch.bfloat16, shared, False)
        tiles = sizes.choose(D, D, 2, shared)._asdict()
        for done in triton_compile.launched(call, CAPABILITY):
            name = done.kernel.removesuffix("_kernel")
            if name in KERNELS:
                records.append({**done._asdict(), "kernel": name, "D": D, "tile": tiles[name]})
    record = {"capability": CAPABILITY, "triton": version("triton"), "kernels": records}
    (ROOT / "records" / "kernel_code.json").write_text(json.dumps(record, indent=1) + "\n")
    fill(DOCUMENT, {"code": table(record)})


def table(record: dict) -> str:
    lines = ["| head size | forward | dq | dk and dv |", "|---|---|---|---|"]
    for D in HEAD_SIZES:
        cells = [far_loop(r) for r in record["kernels"] if r["D"] == D]
        lines.append(f"| {D} | {' | '.join(cells)} |")
    return "\n".join(lines) + (
        f"\n\nTriton {record['triton']}, sm_{record['capability']}a, bfloat16, causal, `python runs/kernel_code.py`."
    )


def far_loop(kernel: dict) -> str:
    """Instructions for 32 scores in the loop over keys on one side, and how many of 100 touch spilt registers."""
    rows, keys, num_warps, _ = kernel["tile"]
    number, spilt = min(kernel["loops"])  # the other one has masks
    return f"{number * 32 * num_warps / (rows * keys):.1f} ({spilt / number:.0%})"


if __name__ == "__main__":
    main()
