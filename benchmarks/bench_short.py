"""Time the compiled core at every length from 128 tokens on, against PyTorch's attention, interleaved in one run.

    python benchmarks/bench_short.py                                     # everything, about half an hour on 2 cores
    python benchmarks/bench_short.py --dtypes bfloat16 --lengths 128 256 --repeats 31

Every length, head size, type and mode is a case of its own, of about 4,096 tokens in all. The last column is what counts: how
many times as fast as the faster peer, where the peers are scaled_dot_product_attention causal without a bias (less work, and
something else) and the same with the bias as a mask (left out where that takes more than 3 GB). Records go to records, or
where --records says.
"""

import argparse
from pathlib import Path

import torch

import linbias
import record
from bench_attention import BenchCase, bench

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
NUM_TOKENS = 4096  # of all sequences of a case together
MASK_LENGTH = 2048  # beyond it the mask is several times slower than no bias, and minutes of the run would go to it


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--head-sizes", type=int, nargs="+", default=(64, 32))
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument(
        "--modes", nargs="+", choices=("forward", "backward"), default=("forward", "backward")
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15, help="a third of it from 2,048 on")
    parser.add_argument("--records", type=Path, help="default: records/...")
    options = parser.parse_args()
    options.device, options.inputs = "cpu", "random normal"
    options.records = options.records or record.default_path()
    repeats = options.repeats
    slopes = torch.tensor(linbias.slopes(options.heads), dtype=torch.float32)
    torch.manual_seed(0)
    for dtype in options.dtypes:
        for mode in options.modes:
            for size in options.head_sizes:
                for length in options.lengths:
                    peers = ("sdpa mask", "sdpa, no bias")[length > MASK_LENGTH :]
                    case = BenchCase(
                        f"{dtype}-{mode}-D{size}-{length}",
                        length,
                        B=max(1, NUM_TOKENS // length),
                        dtype=dtype,
                        backward=mode == "backward",
                        ours=("cpu",),
                        peers=peers,
                    )
                    q, k, v = torch.randn(3, case.B, options.heads, length, size).to(
                        getattr(torch, dtype)
                    )
                    options.repeats = repeats if length < 2048 else max(3, repeats // 3)
                    times = bench(case, q, k, v, slopes, options)
                    fastest = min(ms for name, ms in times.items() if name != "cpu")
                    print(
                        f"{case.name:26} {fastest / times['cpu']:.2f} x the faster peer",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
