"""Time short and long inputs against PyTorch's attention, interleaved in one run, and the overhead of a call.

    python evidence/benchmarks/bench_short.py                                     # everything, about half an hour on 2 cores
    python evidence/benchmarks/bench_short.py --dtypes bfloat16 --lengths 128 256 --repeats 31
    python evidence/benchmarks/bench_short.py --overhead                          # what Python costs, a few seconds

Every length, head size, type and mode is a case of its own, of about 4,096 tokens in all. The last column is what counts: how
many times as fast as the faster peer, where the peers are scaled_dot_product_attention causal without a bias (less work, and
something else) and the same with the bias as a mask (left out where that takes more than 3 GB). `sdpa`, that mask as an
implementation of ours, is timed up to the same length. Records go to records, or where --records says.

On a CPU with a matrix unit, both sides without it:

    ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 MKL_ENABLE_INSTRUCTIONS=AVX512_E3 python evidence/benchmarks/bench_short.py --target avx512_bf16
"""

import argparse
import functools
import time
from pathlib import Path

import torch

import linbias
import linbias.torch
import record
from bench_attention import BenchCase, bench
from linbias.kernels import core
from linbias.torch.call import prepare
from linbias.torch.impl import cpu
from linbias.torch.operators.operator import Results

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
    parser.add_argument("--target", help="a CPU target of ours, instead of the best one here")
    parser.add_argument("--records", type=Path, help="default: evidence/records/...")
    parser.add_argument("--overhead", action="store_true", help="time a tiny call beside its core")
    options = parser.parse_args()
    core.force_target(options.target)
    options.device, options.inputs = "cpu", "random normal"
    options.records = options.records or record.default_path()
    if options.overhead:
        return overhead(options.records)
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
                        ours=("cpu", "sdpa")[: 1 + (length <= MASK_LENGTH)],
                        peers=peers,
                    )
                    q, k, v = torch.randn(3, case.B, options.heads, length, size).to(
                        getattr(torch, dtype)
                    )
                    options.repeats = repeats if length < 2048 else max(3, repeats // 3)
                    times = bench(case, q, k, v, slopes, options)
                    fastest = min(times[name] for name in peers)
                    print(
                        f"{case.name:26} {fastest / times['cpu']:.2f} x the faster peer",
                        flush=True,
                    )


def overhead(records: Path, rounds: int = 200, calls: int = 20) -> None:
    """The smallest call, whole and only the core's part of it: processor time, because other processes add to the other."""
    torch.set_num_threads(1)
    q, k, v = torch.randn(3, 1, 4, 16, 32)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    dout, plain = torch.randn_like(q), torch.nn.functional.scaled_dot_product_attention
    ours = functools.partial(linbias.torch.attention, implementation="cpu")
    arrays = prepare("attention", q, k, v, None)[0]._replace(precise=True)
    results = Results(*cpu.operators.forward(*arrays))
    call, alive = cpu.describe_call(arrays)
    forward, zeros = cpu._forward(results), [torch.zeros_like(x) for x in (*leaves, *results[1:3])]
    pointers = {
        f"d{name}": x.data_ptr()
        for name, x in zip(("q", "k", "v", "left", "right"), zeros, strict=True)
    }
    backward = core.Backward(
        dout=dout.data_ptr(), dlse=zeros[3].data_ptr(), saved=forward, **pointers
    )
    functions = {
        "core": lambda: core.forward(call, forward),
        "cpu": lambda: ours(q, k, v),
        "sdpa, no bias": lambda: plain(q, k, v, is_causal=True),
        "core, forward+backward": lambda: (core.forward(call, forward), core.backward(call, backward)),
        "cpu, forward+backward": lambda: torch.autograd.grad(ours(*leaves), leaves, dout),
        "sdpa, no bias, forward+backward": lambda: torch.autograd.grad(plain(*leaves, is_causal=True), leaves, dout),
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            function()
            start = time.process_time()
            for _ in range(calls):
                function()
            times[name].append((time.process_time() - start) / calls * 1e3)
    del alive
    for name, found in times.items():
        line = {
            "case": "overhead-16",
            "implementation": name,
            **record.spread(found),
            **record.here(),
        }
        record.write({**line, "time": "processor"}, records)
        print(f"{name:34} {line['p50_ms'] * 1e3:7.1f} us")
    for suffix in ("", ", forward+backward"):
        ours_ms, core_ms = (record.spread(times[n + suffix])["p50_ms"] for n in ("cpu", "core"))
        print(f"overhead{suffix:26} {(ours_ms - core_ms) * 1e3:7.1f} us")


if __name__ == "__main__":
    main()
