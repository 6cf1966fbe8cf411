"""Time linbias.jax and what a JAX user can write today, interleaved in one run; and memory.

    python evidence/benchmarks/bench_jax.py
    python evidence/benchmarks/bench_jax.py --cases jax-forward-8192 --repeats 3

The peer is jax.nn.dot_product_attention with the bias [1, H, T, T] made beforehand. Float32, H=8,
D=64, causal. Every result is checked against the definition before it is timed. Memory: one
forward and backward pass.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import linbias
import linbias.jax
import record

H, D = 8, 64
PEER = "jax, bias"
CASES = {
    "jax-forward-2048": (2048, record.FORWARD, ("cpu", "blocked", PEER)),
    "jax-forward-8192": (8192, record.FORWARD, ("cpu", "blocked", PEER)),
    "jax-training-4096": (4096, record.BACKWARD, ("cpu", "blocked", PEER)),
    "jax-memory-32768": (32768, record.BACKWARD, ("cpu", "blocked")),
}


def function(name: str, T: int) -> Callable[..., jax.Array]:
    if name != PEER:
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


def with_gradients(run: Callable[..., jax.Array], dout: jax.Array) -> Any:
    return jax.jit(jax.grad(lambda q, k, v: (run(q, k, v) * dout).sum(), (0, 1, 2)))


def prepare_memory(name: str, T: int) -> Callable[[], Any]:
    """One forward and backward pass, compiled."""
    *arrays, dout = inputs(T)
    compiled = with_gradients(function(name, T), dout).lower(*arrays).compile()
    return lambda: jax.block_until_ready(compiled(*arrays))


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    here = {"threads": record.num_cores()}
    here["versions"] = record.here()["versions"] | {"jax": jax.__version__}
    for case in options.cases:
        T, mode, names = CASES[case]
        given = record.fields(case, (1, H, T, D), (1, H, T, D), "float32", mode)
        if "memory" in case:
            record.measure_memory(given, options, prepare_memory, names, T, here)
            continue
        *arrays, dout = inputs(T)
        timed: dict[str, Callable[[], Any]] = {}
        for name in names:
            run: Any = function(name, T)
            check(name, run(*arrays), *arrays)
            if mode == record.BACKWARD:
                run = with_gradients(run, dout)
            timed[name] = lambda run=run, given=arrays: jax.block_until_ready(run(*given))
        record.compare(given, timed, options, dict.fromkeys(names, here))


if __name__ == "__main__":
    main()
