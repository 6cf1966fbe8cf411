"""Measure the memory that attention needs above its inputs, forward and backward, each in a fresh process.

python evidence/benchmarks/bench_memory.py                 # 32,768 tokens, H=8, D=64, float32
python evidence/benchmarks/bench_memory.py --length 8192 --implementations dense blocked
"""

import argparse
import multiprocessing
import time
from pathlib import Path

import torch

import linbias.torch
import record


def run(implementation: str, length: int, heads: int, size: int, results) -> None:
    """One forward and backward pass; report its time and the peak above what was there with the inputs."""
    q, k, v, dout = torch.randn(4, 1, heads, length, size)
    for x in (q, k, v):
        x.requires_grad_()
    small = [x[:, :, :64].detach().requires_grad_() for x in (q, k, v)]  # load what loads lazily
    linbias.torch.attention(*small, implementation=implementation).sum().backward()
    before = record.memory_bytes()
    start = time.perf_counter()
    out = linbias.torch.attention(q, k, v, implementation=implementation)
    out.backward(dout)
    elapsed = (time.perf_counter() - start) * 1e3
    peak = record.memory_bytes(peak=True)
    results.put((elapsed, max(0, peak - before)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--implementations", nargs="+", default=["blocked"])
    parser.add_argument("--records", type=Path)
    options = parser.parse_args()
    path = options.records or record.default_path()
    B, H, T, D = 1, options.heads, options.length, options.head_size
    context = multiprocessing.get_context("spawn")
    for implementation in options.implementations:
        results = context.Queue()
        process = context.Process(target=run, args=(implementation, T, H, D, results))
        process.start()
        elapsed, peak = results.get()
        process.join()
        line = {
            "case": f"memory-{T}", "implementation": implementation, "mode": "forward+backward",
            "B": B, "H": H, "G": H, "T": T, "S": T, "D": D, "dtype": "float32",
            **record.spread([elapsed]), "repeats": 1, "peak_memory_bytes": peak,
            "flop": record.flop(B, H, T, T, D) * 7 // 2, "bytes": 3 * record.moved_bytes(B, H, H, T, T, D, 4),
            "work_kept": None, "inputs": "random normal", **record.here(),
        }  # fmt: skip
        record.write(line, path)
        inputs = 4 * H * T * D * 4
        print(
            f"{implementation}: {elapsed / 1e3:.1f} s forward + backward at {T:,} tokens, {peak / 2**30:.2f} GiB"
            f" above its inputs ({inputs / 2**30:.2f} GiB, gradients and output included in the former)"
        )


if __name__ == "__main__":
    main()
