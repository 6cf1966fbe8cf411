"""What the tests of `linbias.jax` share: the contract's subject, and arrays to call with."""

import functools
from dataclasses import dataclass
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linbias
from cases import arguments
from contract import SEED
from linbias import _request
from linbias.jax import attention, call
from linbias.jax.call import prepare
from linbias.jax.impl import blocked, cpu

IMPLEMENTATIONS = ("dense", "blocked", "cpu")
HEADS_SECOND = ("out", "q", "k", "v", "dout", "lse", "dlse")  # what JAX wants [B, T, H, ...]
ARRAYS = ("q", "k", "v", "left", "right", "positions", "query_positions")


@functools.cache
def has_float16() -> bool:
    """Whether XLA rounds to float16 on this processor, which it does not without F16C."""
    try:
        jax.jit(lambda x: x.astype(jnp.float16))(jnp.ones(3, jnp.float32))
    except jax.errors.JaxRuntimeError:
        return False
    return True


@dataclass(frozen=True)
class JaxSubject:
    implementation: str
    seed: int = SEED

    @functools.cache  # noqa: B019  # compiling takes the time: cases of the same sizes and options share a program
    def program(self, differentiated, **options):
        def attend(leaves, placement):
            out, lse = attention(
                **arguments(leaves),
                **placement,
                **options,
                dropout_key=jax.random.key(0),
                implementation=self.implementation,
                return_lse=True,
            )
            return {"out": out, "lse": lse}

        def run(leaves, placement, dout, dlse):
            results, pull = jax.vjp(lambda leaves: attend(leaves, placement), leaves)
            dlse = jnp.where(results["lse"] > -jnp.inf, dlse, 0)
            return results, pull({"out": dout, "lse": dlse})[0]

        return jax.jit(run if differentiated else attend)

    def run(self, inputs, case, dtype, *, tolerance=None, layout="plain", differentiated=True):
        assert layout == "plain", "JAX arrays have no strides"
        if dtype == "float16" and not has_float16():
            pytest.skip("XLA has no float16 on this processor")
        wide = "float64" if dtype == "float64" else "float32"
        known_dropout = mock.patch.object(call, "draw_seed", lambda _: jnp.uint32(self.seed))
        with jax.enable_x64(dtype == "float64"), known_dropout:
            arrays = {
                name: to_jax(name, array, dtype if name in ("q", "k", "v", "dout") else wide)
                for name in (*ARRAYS, "dout", "dlse")
                if (array := getattr(inputs, name)) is not None
            }
            dout, dlse = (arrays.pop(name) for name in ("dout", "dlse"))
            options = {"causal": case.causal, "scale": case.scale, "dropout": case.dropout}
            program = self.program(differentiated, tolerance=tolerance, **options)
            if not differentiated:
                return to_numpy(program(arrays, case.placement)), {}
            results, gradients = program(arrays, case.placement, dout, dlse)
            assert (results["out"].dtype, results["lse"].dtype) == (dtype, wide)
            assert {n: (g.dtype, g.shape) for n, g in gradients.items()} == {
                n: (x.dtype, x.shape) for n, x in arrays.items()
            }
        return to_numpy(results), to_numpy(gradients)


def to_jax(name, array, dtype):
    return jnp.asarray(array.swapaxes(1, 2) if name in HEADS_SECOND else array, dtype)


def to_numpy(arrays):
    arrays = {name: np.asarray(array).astype(np.float64) for name, array in arrays.items()}
    return {n: a.swapaxes(1, 2) if n in HEADS_SECOND else a for n, a in arrays.items()}


def random(B, T, H, D, seed=0):
    return np.random.default_rng(seed).normal(size=(3, B, T, H, D)).astype(np.float32)


def numpy_attention(q, k, v, *args, **options):
    out = linbias.attention(
        *(np.asarray(x, float).swapaxes(1, 2) for x in (q, k, v)), *args, **options
    )
    return out.swapaxes(1, 2)


def steps(q, k, v, left, **options):
    """Bands that `blocked` visits for each head, to the left and to the right."""
    inputs, _ = prepare(
        "test", q, k, v, left, causal=options.pop("causal", True), right_slopes=None, **options
    )
    return num_steps(inputs).tolist()


@jax.jit  # here, so that calls of the same sizes share a program
def num_steps(inputs):
    return blocked._forward(inputs)[2].num_steps


def assert_close(found, wanted, allowed=1e-4):
    """Whether two trees of arrays agree."""
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=allowed, atol=allowed)


SIZES = (2, 9, 4, 8)

needs_core = pytest.mark.skipif(
    cpu.why_not(_request.Problem(1, 1, 1, 1, 1, 1, 1, "float32", "cpu", True, 1.0, 0.0))
    is not None,
    reason="linbias._xla is not compiled here",
)
