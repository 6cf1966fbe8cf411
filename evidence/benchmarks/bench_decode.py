"""Time one decode step against a long cache.

    python evidence/benchmarks/bench_decode.py                 # S=65,536, H=32, G=8, D=128, bfloat16

Ours with a bound on the key norms (as a cache keeps it), ours without (all keys are read once for their norms), ours with all slopes
0 (nothing can be left unread), ours with positions that say what counting would, of each batch row and of each head, and PyTorch's
scaled_dot_product_attention without a bias (enable_gqa).
"""

import argparse
from pathlib import Path

import torch

import linbias
import linbias.torch
import record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=int, default=65536)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--records", type=Path)
    options = parser.parse_args()
    path = options.records or record.default_path()
    B, H, G, S, D = 1, 32, 8, options.cache, 128
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, heads, n, D).bfloat16() for heads, n in ((H, 1), (G, S), (G, S)))
    bound = k.float().norm(dim=-1).amax(-1) * 1.001
    zero = torch.zeros(H)
    counted = torch.arange(S, dtype=torch.float64).expand(B, S)
    of_heads = counted[:, None].repeat(1, H, 1)
    plain = torch.nn.functional.scaled_dot_product_attention
    functions = {
        "cpu, key_bound": lambda: linbias.torch.attention(
            q, k, v, key_bound=bound, implementation="cpu"
        ),
        "cpu": lambda: linbias.torch.attention(q, k, v, implementation="cpu"),
        "cpu, slopes 0": lambda: linbias.torch.attention(
            q, k, v, zero, key_bound=bound, implementation="cpu"
        ),
        "cpu, positions": lambda: linbias.torch.attention(
            q, k, v, key_bound=bound, positions=counted, implementation="cpu"
        ),
        "cpu, positions of heads": lambda: linbias.torch.attention(
            q, k, v, key_bound=bound, positions=of_heads, implementation="cpu"
        ),
        "sdpa, no bias": lambda: plain(q, k, v, enable_gqa=True),
    }
    expected = linbias.torch.attention(q, k, v, implementation="dense").float()
    for name in ("cpu, key_bound", "cpu", "cpu, positions", "cpu, positions of heads"):
        error = (functions[name]().float() - expected).abs().max().item()
        if not error < 2e-2:
            raise SystemExit(f"{name} is wrong by {error:.3g}")
    times = record.interleave(functions, options.repeats)
    first = record.spread(times["cpu, key_bound"])["p50_ms"]
    for name, values in times.items():
        line = {
            "case": f"decode-{S}", "implementation": name, "mode": "forward", "B": B, "H": H, "G": G, "T": 1, "S": S, "D": D,
            "dtype": "bfloat16", **record.spread(values), "repeats": options.repeats, "peak_memory_bytes": None,
            "flop": record.flop(B, H, 1, S, D), "bytes": record.moved_bytes(B, H, G, 1, S, D, 2), "work_kept": None,
            "inputs": "random normal", **record.here(),
        }  # fmt: skip
        record.write(line, path)
        print(f"{line['case']} {name:23} {line['p50_ms']:10.2f} ms  {line['p50_ms'] / first:6.2f}")


if __name__ == "__main__":
    main()
