"""`window` and `query_range` of `linbias.jax`: the contract, what is visited, traced, refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import linbias
from cases import RANGED_CASES, short
from contract import check_case, rows
from jax_subject import IMPLEMENTATIONS, SIZES, JaxSubject, assert_close, random, steps
from linbias.jax import attention, attention_weights

BY_NAME = {case.name: case for case in RANGED_CASES}
CONTRACT = [
    *(("blocked", case) for case in RANGED_CASES),
    *((name, case) for name in ("cpu", "dense") for case in short(RANGED_CASES)),
    *(("cpu", BY_NAME[name]) for name in ("long-window-range", "long-scattered")),
]
QUICK = """blocked-scattered blocked-window-range-per-head blocked-long-scattered
dense-chunks-multi-query cpu-scattered cpu-window-per-batch cpu-window-dropout"""


@pytest.mark.parametrize(("implementation", "case"), rows(QUICK, *CONTRACT))
def test_contract(implementation, case):
    check_case(JaxSubject(implementation), case, "float64" if case.places else "float32")


def weighed(q, k, v, left, implementation, **options):
    """A number that depends on all of out and lse, for gradients; and these."""
    out, lse = attention(q, k, v, left, **options, implementation=implementation, return_lse=True)
    return (out**2).sum() + jnp.sin(jnp.where(lse == -jnp.inf, 0, lse)).sum(), (out, lse)


run = jax.jit(
    jax.value_and_grad(weighed, argnums=(0, 1, 2, 3), has_aux=True),
    static_argnames=("implementation", "causal", "window"),
)
LEFT = np.array([0.5, 0.1, 0.0, 2.0], np.float32)
B, T, H, D = SIZES


def shown(window, causal, placed):
    """[B, T, 2]: which keys each query sees within a window."""
    p = placed.get("query_start", np.zeros(B, int))[:, None] + np.arange(T)
    left, right = window
    first, end = (p - left if left >= 0 else 0 * p), p + right + 1
    end = 0 * p + T if right < 0 or causal else end
    return np.stack([first.clip(0, T), np.maximum(first, end).clip(0, T)], -1)


PLACED = {
    "whole": {},
    "ranged": {"key_range": np.array([[0, 9], [2, 7]]), "query_start": np.array([0, -3])},
    "far": {"query_start": np.array([2**30, -(2**30)])},
}
WINDOWS = [
    ((3, 2), False, "ranged"),
    ((3, 2), True, "whole"),
    ((0, -1), False, "whole"),
    ((-1, 1), False, "ranged"),
    ((2**31, 2**31), False, "far"),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("window", "causal", "placed"), rows(lambda *row: row[0][0] >= 3, *WINDOWS)
)
def test_a_window_is_the_range_that_it_means_bit_for_bit(implementation, window, causal, placed):
    given, placed = (*random(*SIZES), LEFT), PLACED[placed]
    ranges = shown(window, causal, placed)
    found, expected = (
        run(*given, implementation=implementation, causal=causal, **placed, **limits)
        for limits in ({"window": window}, {"query_range": ranges})
    )
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_window_and_ranges_hide_what_either_hides():
    (q, k, v), ranges = random(*SIZES), BY_NAME["scattered"].row_ranges[:, :T].clip(0, T)
    options = {"causal": False, "query_range": ranges, "window": (4, 1)}
    heads_second = [x.astype(float).swapaxes(1, 2) for x in (q, k)]
    expected = linbias.attention_weights(*heads_second, LEFT, **options)
    assert (expected.sum(-1) == 0).any()  # a query that sees nothing
    np.testing.assert_allclose(attention_weights(q, k, LEFT, **options), expected, atol=1e-6)
    found = attention(q, k, v, LEFT, **options, implementation="blocked").swapaxes(1, 2)
    np.testing.assert_allclose(found, expected @ v.swapaxes(1, 2), atol=1e-5)


LENGTH = 2048
POSITION = np.arange(LENGTH)
CHUNK, ONE = POSITION // 256 * 256, POSITION == 2000
NEAR = np.where(ONE, 9, POSITION - 700)


def of_rows(first, end):
    """query_range [LENGTH, 2]."""
    return np.stack(np.broadcast_arrays(first, end, POSITION)[:2], -1).clip(0, LENGTH)


@pytest.mark.parametrize(
    ("slope", "options", "expected"),
    [
        (0.0, {"window": (255, 0)}, [2, 0]),
        (0.0, {"window": (300, 0), "causal": True}, [3, 0]),
        (0.0, {"window": (300, 300)}, [3, 2]),
        (0.0, {"window": (-1, 5)}, [8, 1]),
        (0.5, {"window": (1500, 1500)}, [2, 1]),
        # Chunks of a tile each; the keys far before all queries, and after them.
        (0.0, {"query_range": of_rows(CHUNK, CHUNK + 256)}, [1, 0]),
        (0.0, {"query_range": of_rows(POSITION - 1279, POSITION - 1023)}, [2, 0]),
        (0.0, {"query_range": of_rows(POSITION + 1024, POSITION + 1279)}, [0, 2]),
        (0.0, {"query_range": of_rows(7, 7)}, [0, 0]),
        # One row sees nothing until the farthest band, and one has nothing to see: only the first
        # keeps its tile from stopping.
        (0.5, {"query_range": of_rows(NEAR, np.where(ONE, 12, LENGTH))}, [8, 1]),
        (0.5, {"query_range": of_rows(NEAR, np.where(ONE, 9, LENGTH))}, [2, 1]),
        (0.0, {"query_range": of_rows(NEAR, np.where(ONE, 9, LENGTH))}, [4, 7]),
        # One row sees nothing to its left, and to its right in the second band.
        (0.5, {"query_range": of_rows(np.where(POSITION == 1000, 1300, POSITION - 700), 2048)},
         [2, 2]),
    ],
)  # fmt: skip
def test_only_bands_that_some_row_sees_are_visited(slope, options, expected):
    q, k, v = random(1, LENGTH, 1, 8)
    assert steps(q, k, v, [slope], **{"causal": False, **options}) == [expected]


def test_the_only_keys_of_a_row_are_read_however_far_they_lie():
    """Its tile has seen all that matters to its other rows, and nothing of the row's own."""
    q, k, v = random(1, 700, 2, 8)
    ranges = of_rows(np.where(POSITION % 97 == 60, 3, 0), np.where(POSITION % 97 == 60, 5, LENGTH))
    run = partial(attention, q, k, v, [0.5, 2.0], query_range=ranges[:700].clip(0, 700))
    expected = run(implementation="dense")
    np.testing.assert_allclose(run(implementation="blocked"), expected, atol=1e-5)


@pytest.mark.parametrize("implementation", rows("blocked", *((n,) for n in IMPLEMENTATIONS)))
def test_traced_ranges_give_what_known_ones_give(implementation):
    """Under jit, with gradients, and over several ranges and starts by vmap; unchecked, they are
    moved to what is allowed.
    """
    given, starts = (*random(*SIZES), LEFT), np.array([[0, -30], [2, 3], [5, 4]])
    asked = np.random.default_rng(0).integers(-5, T + 6, (3, B, T, 2)).astype(np.int32)
    asked[0, 0, 0] = np.iinfo(np.int32).max, np.iinfo(np.int32).min
    first = asked[..., 0].clip(0, T)
    allowed = np.stack([first, np.maximum(first, asked[..., 1].clip(0, T))], -1)
    options = {"causal": False, "window": (6, 3)}
    traced = partial(run, *given, implementation=implementation, **options)
    together = jax.jit(jax.vmap(lambda r, s: traced(query_range=r, query_start=s)))(asked, starts)
    for i in range(3):
        expected = jax.value_and_grad(weighed, argnums=(0, 1, 2, 3), has_aux=True)(
            *given, "dense", query_range=allowed[i], query_start=starts[i], **options
        )
        assert_close(traced(query_range=asked[i], query_start=starts[i]), expected)
        assert_close(jax.tree.map(lambda x, i=i: x[i], together), expected)


def test_a_window_has_to_be_known_when_the_program_is_traced():
    with pytest.raises(TypeError, match=r"attention: window must be .*; got .*Trace"):
        jax.jit(lambda n: attention(*random(*SIZES), window=(n, 0)))(3)
