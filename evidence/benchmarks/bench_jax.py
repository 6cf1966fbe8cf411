"""Time linbias.jax and what a JAX user can write today, interleaved in one run; and memory, each in a fresh process.

    python evidence/benchmarks/bench_jax.py                          # every case below, records to records
    python evidence/benchmarks/bench_jax.py --cases jax-forward-8192 --repeats 3

The peer is jax.nn.dot_product_attention with the bias [1, H, T, T] made beforehand. Float32, H=8, D=64, causal.
Every result is checked against the NumPy definition before it is timed. Memory: one forward and backward pass.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import linbias
import linbias.jax
import record

H, D = 8, 64
CASES = {
    "jax-forward-2048": (2048, False, ("cpu", "blocked", "jax, bias")),
    "jax-forward-8192": (8192, False, ("cpu", "blocked", "jax, bias")),
    "jax-training-4096": (4096, True, ("cpu", "blocked", "jax, bias")),
    "jax-memory-32768": (32768, True, ("cpu", "blocked")),
}


def function(name: str, T: int) -> Callable[..., jax.Array]:
    if name != "jax, bias":
        return jax.jit(lambda q, k, v: linbias.jax.attention(q, k, v, implementation=name))
    left = jnp.asarray(linbias.slopes(H), jnp.float32)[:, None, None]
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    bias = jnp.where(distance < 0, -jnp.inf, -left * distance)[None]
    peer = jax.jit(jax.nn.dot_product_attention)
    return lambda q, k, v: peer(q, k, v, bias)


def inputs(T: int) -> list[jax.Array]:
    draws = np.random.default_rng(0).standard_normal((4, 1, T, H, D), np.float32)
    return [jnp.asarray(x) for x in draws]


def check(name: str, out: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    for t in (0, q.shape[1] // 3, q.shape[1] - 1):
        rows = (q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1])
        expected = linbias.attention(*(np.asarray(x, float).swapaxes(1, 2) for x in rows))
        error = np.abs(np.asarray(out)[:, t] - expected[:, :, 0]).max()
        if not error < 2e-5:
            raise SystemExit(f"{name} is wrong: row {t} is off by {error:.3g}")


def measure_time(case: str, repeats: int, wanted: list[str] | None, path: Path) -> None:
    T, backward, names = CASES[case]
    q, k, v, dout = inputs(T)
    timed: dict[str, Callable[[], Any]] = {}
    for name in wanted or names:
        run = function(name, T)
        check(name, run(q, k, v), q, k, v)
        if backward:
            gradients = jax.jit(jax.grad(lambda *a, run=run: (run(*a) * dout).sum(), (0, 1, 2)))
            run = gradients
        timed[name] = lambda run=run: jax.block_until_ready(run(q, k, v))
    times = record.interleave(timed, repeats)
    first = record.spread(next(iter(times.values())))["p50_ms"]
    for name, values in times.items():
        line = fields(case, name, T, backward) | record.spread(values) | {"repeats": repeats}
        record.write(line, path)
        print(f"{case} {name:10} {line['p50_ms']:10.1f} ms  {line['p50_ms'] / first:6.2f}")


def fields(case: str, name: str, T: int, backward: bool) -> dict[str, Any]:
    here = record.here()
    here["threads"] = record.num_cores()
    here["versions"] |= {"jax": jax.__version__}
    return {
        "case": case, "implementation": name, "mode": "forward+backward" if backward else "forward",
        "B": 1, "H": H, "G": H, "T": T, "S": T, "D": D, "dtype": "float32", "peak_memory_bytes": None,
        "flop": record.flop(1, H, T, T, D) * (7 if backward else 2) // 2,
        "bytes": record.moved_bytes(1, H, H, T, T, D, 4) * (3 if backward else 1),
        "work_kept": None, "inputs": "random normal", **here,
    }  # fmt: skip


def run_alone(name: str, T: int, results: Any) -> None:
    q, k, v, dout = inputs(T)
    run = function(name, T)
    gradients = jax.jit(jax.grad(lambda *a: (run(*a) * dout).sum(), (0, 1, 2)))
    compiled = gradients.lower(q, k, v).compile()
    before = record.memory_bytes()
    start = time.perf_counter()
    jax.block_until_ready(compiled(q, k, v))
    elapsed = (time.perf_counter() - start) * 1e3
    peak = record.memory_bytes(peak=True)
    results.put((elapsed, max(0, peak - before)))


def measure_memory(case: str, wanted: list[str] | None, path: Path) -> None:
    T, backward, names = CASES[case]
    context = multiprocessing.get_context("spawn")
    for name in wanted or names:
        results = context.Queue()
        process = context.Process(target=run_alone, args=(name, T, results))
        process.start()
        elapsed, peak = results.get()
        process.join()
        line = fields(case, name, T, backward) | record.spread([elapsed])
        record.write(line | {"repeats": 1, "peak_memory_bytes": peak}, path)
        bias = 4 * H * T * T / 2**30
        print(
            f"{case} {name:10} {elapsed:10.1f} ms, {peak / 2**30:.2f} GiB above its inputs (a bias: {bias:.0f} GiB)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--implementations", nargs="+", help="only these")
    parser.add_argument("--records", type=Path)
    options = parser.parse_args()
    path = options.records or record.default_path()
    for case in options.cases:
        if "memory" in case:
            measure_memory(case, options.implementations, path)
        else:
            measure_time(case, options.repeats, options.implementations, path)


if __name__ == "__main__":
    main()
