"""The ladder of docs/kernels.md: from the whole score matrix to the compiled kernel, each step timed.

    python runs/kernel_ladder.py            # rewrites the table in docs/kernels.md, appends records

B=1, H=8, D=64, causal, 4,096 tokens, float32 unless the step says otherwise, random normal inputs.
"""

import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from markers import fill  # noqa: E402

import linbias.torch  # noqa: E402
import record  # noqa: E402
from linbias.kernels import core  # noqa: E402

LENGTH = 4096


def steps(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """Name, why it is faster than the one before, and the call."""

    def run(name, target=None, threads=2, dtype=torch.float32, **options):
        arrays = [x.to(dtype) for x in (q, k, v)]

        def call():
            torch.set_num_threads(threads)
            core.force_target(target)
            linbias.torch.attention(*arrays, implementation=name, **options)

        return call

    have = core.targets()
    yield "dense", "the definition: the score matrix in memory", run("dense")
    yield (
        "blocked, every key",
        "tiles stay in cache, nothing of T x S in memory",
        run("blocked", tolerance=0.0),
    )
    yield "blocked", "the certificate leaves far keys", run("blocked")
    first = have[-1]
    yield (
        f"cpu, {first}, 1 thread, every key",
        "one pass per tile in registers",
        run("cpu", first, 1, tolerance=0.0),
    )
    for target in reversed([name for name in have[:-1] if "bf16" not in name]):
        yield (
            f"cpu, {target}, 1 thread, every key",
            "wider registers",
            run("cpu", target, 1, tolerance=0.0),
        )
    yield (
        "cpu, 2 threads, every key",
        "tiles shared out as threads get free",
        run("cpu", None, 2, tolerance=0.0),
    )
    yield "cpu, 2 threads", "the certificate, block by block", run("cpu")
    yield (
        "cpu, 2 threads, bfloat16",
        "products of pairs, where the CPU has them",
        run("cpu", dtype=torch.bfloat16),
    )


def main() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 8, LENGTH, 64)
    rows = list(steps(q, k, v))
    with torch.no_grad():
        times = record.interleave({name: call for name, _, call in rows}, repeats=5)
    core.force_target(None)
    torch.set_num_threads(2)
    lines = ["| step | why it is faster | ms | against the first |", "|---|---|---|---|"]
    first = record.spread(times[rows[0][0]])["p50_ms"]
    path = record.default_path()
    for name, why, _ in rows:
        spread = record.spread(times[name])
        lines.append(
            f"| {name} | {why} | {spread['p50_ms']:,.1f} | {first / spread['p50_ms']:,.1f} x |"
        )
        line = {"case": f"ladder-{LENGTH}", "implementation": name, "mode": "forward", "B": 1, "H": 8, "G": 8, "T": LENGTH,
                "S": LENGTH, "D": 64, "dtype": "bfloat16" if "bfloat16" in name else "float32", **spread, "repeats": 5,
                "inputs": "random normal", **record.here()}  # fmt: skip
        record.write(line, path)
    here = record.here()
    lines.append("")
    lines.append(
        f"{here['machine']}, torch {here['versions']['torch']}, {here['date']}, `python runs/kernel_ladder.py`."
    )
    fill("docs/kernels.md", {"ladder": "\n".join(lines)})
    print("\n".join(lines))


if __name__ == "__main__":
    main()
