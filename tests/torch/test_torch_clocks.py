"""Keys in any order, queries with a clock of their own, and positions as callers have them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import linbias
from linbias._request import Request
from linbias.torch import any_order, attention, attention_weights, visited
from linbias.torch.call import _with_values, prepare
from linbias.torch.impl import cpu
from positions import as_tensors, check_definition

B, H, G, D = 2, 4, 2, 5
INF = np.inf
RNG = np.random.default_rng(0)
STEEP, SIDES = np.array([0.5, 0.1, 2.0, 0.0]), np.array([0.3, 1.0, 0.0, 0.7])
HALVES = {"slopes": np.array([INF, INF, 0.5, 0.1]), "right_slopes": np.array([INF, 1, INF, 0.2])}
RANGES = np.array([[1, 19], [0, 12]])


def times(*shape):
    return RNG.uniform(0, 20, shape)


def hidden(x):
    x[0, :1], x[1, 12:] = np.nan, -1e300
    return x


CASES = {
    "own-clocks": (17, 23, times(B, 17), times(B, 23)),
    "one-clock-for-all-rows": (17, 23, times(17), times(23)),
    "sorted-keys": (17, 23, times(B, 17), np.sort(times(B, 23))),
    "more-queries-than-keys": (40, 3, times(B, 40), times(B, 3)),
    "one-query": (1, 23, times(B, 1), times(B, 23)),
    "heads-of-keys": (7, 23, times(B, 7), times(B, H, 23)),
    "heads-of-queries": (7, 23, times(B, H, 7), times(23)),
    "ranges": (9, 23, times(B, 9), hidden(times(B, 23))),
    "ranges-of-heads": (9, 23, times(B, 9), times(B, 23)),
    "ties": (17, 23, np.round(times(B, 17) / 3), np.round(times(B, 23) / 3)),
    "keys-in-any-order": (23, 23, None, times(B, 23)),
    "the-last-keys-ask": (7, 23, None, np.round(times(B, 23) / 3)),
    "mask": (7, 9, times(B, 7), times(B, 9)),
    "numbers-of-a-mask": (7, 9, times(7), times(9)),
}
MORE = {
    "ranges": {"key_range": RANGES},
    "ranges-of-heads": {"key_range": np.array([[[1, 23], [0, 22]], [[2, 3], [0, 0]]])},
    "ties": HALVES,
    "the-last-keys-ask": HALVES,
    "mask": {"mask": RNG.random((B, 1, 7, 9)) < 0.7},
    "numbers-of-a-mask": {"mask": RNG.normal(size=(H, 7, 9))},
}


def call(name):
    """Arrays, slopes and options of a case."""
    T, S, asking, positions = CASES[name]
    options = {"causal": False, "right_slopes": SIDES, "positions": positions}
    if asking is not None:
        options["query_positions"] = asking
    options |= MORE.get(name, {})
    slopes = options.pop("slopes", STEEP)
    shapes = (B, H, T, D), (B, G, S, D), (B, G, S, 3)
    rng = np.random.default_rng(T * S)
    return [rng.normal(size=shape) for shape in shapes], slopes, options


@pytest.mark.parametrize("implementation", ("cpu", "dense", "sdpa"))
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_the_definition(name, implementation):
    if "mask" in name and implementation == "cpu":
        implementation = "auto"
    arrays, slopes, options = call(name)
    check_definition([*arrays, slopes], options, implementation, 1e-13)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_the_definition(name):
    (q, k, v), slopes, options = call(name)
    leaves, given = as_tensors([q, k, v, slopes], options)
    weights = attention_weights(*leaves[:2], leaves[3], **given).detach()
    truth = linbias.attention_weights(q, k, slopes, **options)
    np.testing.assert_allclose(weights, truth, atol=1e-13)


def test_sides_go_by_position_with_the_last_key_before_a_query_as_its_own():
    (q, k, v), _, options = call("own-clocks")
    x, xq = options["positions"], options["query_positions"]
    apart = (xq[..., None] - x[:, None])[:, None]
    fall = np.where(apart >= 0, STEEP[:, None, None] * apart, -SIDES[:, None, None] * apart)
    score = q @ np.repeat(k, H // G, 1).swapaxes(-1, -2) / np.sqrt(D) - fall
    weights = np.exp(score) / np.exp(score).sum(-1, keepdims=True)
    out = linbias.attention(q, k, v, STEEP, **options)
    np.testing.assert_allclose(out, weights @ np.repeat(v, H // G, 1), atol=1e-13)


def test_any_order_of_keys_and_queries_gives_the_same_rows():
    q, k, v = (torch.tensor(x) for x in call("keys-in-any-order")[0])
    x = torch.tensor(np.sort(times(B, 23)))
    in_order = attention(q, k, v, STEEP, causal=False, right_slopes=SIDES, positions=x)
    mixed = torch.randperm(23)
    options = {"causal": False, "right_slopes": SIDES, "positions": x[:, mixed]}
    found = attention(*(y[:, :, mixed] for y in (q, k, v)), STEEP, **options)
    torch.testing.assert_close(found, in_order[:, :, mixed])


@pytest.mark.parametrize("sizes", ((0, 2), (2, 0)))
def test_nothing_in_any_order_is_nothing(sizes):
    q = torch.ones(*sizes, 3, 4)
    options = {"causal": False, "positions": [0.0, 2, 1]}
    out, lse = attention(q, q, q, torch.ones(sizes[1]), **options, return_lse=True)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    assert attention_weights(q, q, torch.ones(sizes[1]), **options).shape == (*sizes, 3, 3)


@pytest.mark.parametrize("backwards", (False, True))
def test_arrays_in_order_keep_it_where_they_tie_on_any_device(backwards):
    """The values are read on another device, too: only what is in no order is sorted."""
    q = torch.ones(1, 1, 4, 5)
    x = torch.tensor([0.0, 1.0, 1.0, 2.0])
    given = {"causal": False, "positions": x.flip(0) if backwards else x, "query_positions": x}
    elsewhere = replace(prepare("attention", q, q, q, [1.0], **given)[1], device="cuda")
    asked = Request(q, q, q, **given)
    assert (
        _with_values("attention", replace(elsewhere, any_order=False), asked).any_order
        == backwards
    )


def test_far_keys_of_another_clock_stay_unread():
    q, k, v = torch.randn(3, 1, 2, 3000, 4)
    x, xq = (torch.rand(3000) * 3000 for _ in range(2))
    options = {"causal": False, "positions": x, "query_positions": xq}
    inputs, problem = prepare("attention", q, k, v, [0.5, 0.25], **options)
    assert problem.any_order
    inputs, _, _ = any_order.sort(inputs, problem)
    rows, keys, own = cpu.core.TILE_ROWS, cpu.core.BLOCK_KEYS, inputs.own_key[0, 0]
    visited = cpu.operators.run_forward(inputs).visited
    tiles = -(-3000 // rows)
    near = own[rows - 1 :: rows] // keys - own[::rows][: len(own[rows - 1 :: rows])] // keys + 1
    assert near.max() <= 4
    assert visited[:, :, :tiles].sum(-1).max() * keys <= 400


def test_dropout_keeps_its_share_and_differs_between_rows():
    q = torch.zeros(2, 4, 300, 5)
    v = torch.ones(2, 4, 300, 1)
    torch.manual_seed(0)
    out = attention(q, q, v, [0.0] * 4, causal=False, positions=torch.rand(2, 300), dropout=0.5)
    assert abs(out.mean() - 1) < 0.01 and out.std() > 0.01
    assert not torch.equal(out[0], out[1])


NANOSECONDS = 1_700_000_000_000_000_000 + np.cumsum(RNG.integers(1, 5 * 10**9, (B, 11)), 1)
NANOSECONDS[1] += 10**17
SECONDS = (NANOSECONDS - NANOSECONDS[:, :1]) / 1e9
FORMS = {
    "int64": (NANOSECONDS, 1e-9),
    "uint64": (NANOSECONDS.astype(np.uint64), 1e-9),
    "big-endian": (NANOSECONDS.astype(">i8"), 1e-9),
    "tensor": (torch.tensor(NANOSECONDS), 1e-9),
    "list": (NANOSECONDS.tolist(), 1e-9),
    "datetime64": (NANOSECONDS.astype("datetime64[ns]"), 1e-9),
    "timedelta64": (NANOSECONDS.astype("timedelta64[ns]"), 1e-9),
    "hundreds-of-nanoseconds": (NANOSECONDS.astype("timedelta64[100ns]"), 1e-7),
    "seconds": (SECONDS, 1.0),
    "reversed-twice": (SECONDS[:, ::-1].copy()[:, ::-1], 1.0),
}


@pytest.mark.parametrize("form", FORMS)
def test_time_stamps_lose_nothing_in_any_form(form):
    x, unit = FORMS[form]
    if form == "hundreds-of-nanoseconds":
        x = (NANOSECONDS // 100).astype("timedelta64[100ns]")
    q, k, v = RNG.normal(size=(3, B, H, 11, D))
    exact = linbias.attention(q, k, v, STEEP, positions=SECONDS)
    options = {"positions": x, "query_positions": x}
    np.testing.assert_allclose(
        attention(*map(torch.tensor, (q, k, v)), STEEP * unit, **options), exact, atol=1e-6
    )
    given = {n: np.asarray(y) for n, y in options.items()}
    out = linbias.attention(q, k, v, STEEP * unit, **given)
    np.testing.assert_allclose(out, exact, atol=1e-13 if "hundreds" not in form else 1e-6)


def test_stamps_of_padding_may_be_anything():
    q, k, v = (torch.tensor(x) for x in RNG.normal(size=(3, B, H, 11, D)))
    padded, times = NANOSECONDS.copy(), NANOSECONDS.astype("datetime64[ns]")
    padded[0, :3], times[0, :2], times[0, 2] = 0, "NaT", 0
    options = {"key_range": torch.tensor([[3, 11], [0, 11]])}
    exact = attention(q, k, v, STEEP, positions=SECONDS, **options)
    for x, unit in ((padded, 1e-9), (times, 1e-9)):
        out = attention(q, k, v, STEEP * unit, positions=x, **options)
        torch.testing.assert_close(out, exact)


ONES = torch.ones(1, 2, 3, 4)
NOT_IN_ORDER = [
    ({"positions": [0, 2, 1]}, "positions must not fall.*or say causal=False"),
    ({"positions": [0, 2, 1], "causal": False, "query_start": torch.tensor([0])}, "must not fall"),
    (
        {"positions": [0, 1, 2], "query_positions": [2, 1, 0]},
        "query_positions must be at least .*; causal=False without query_start finds them",
    ),
    ({"positions": torch.tensor([0, 1, 2**53 + 1])}, "integers within 2.53 of each"),
]
OF_ANOTHER_KIND = [
    ({"positions": torch.ones(3) > 0}, "positions must be float32, .*, got bool"),
    (
        {"positions": np.zeros(3, "M8[s]"), "query_positions": torch.ones(3)},
        r"of one kind, got datetime64\[s\] and float32",
    ),
]
REFUSED = [
    *((ValueError, *row) for row in NOT_IN_ORDER),
    *((TypeError, *row) for row in OF_ANOTHER_KIND),
    (
        NotImplementedError,
        {"positions": [0, 2, 1], "causal": False, "implementation": "blocked"},
        "blocked cannot run this call: it wants keys, .*, in the order of their positions",
    ),
]


@pytest.mark.parametrize(("kind", "options", "words"), REFUSED)
def test_what_cannot_be_placed_is_refused(kind, options, words):
    with pytest.raises(kind, match=words):
        attention(ONES, ONES, ONES, **options)


def test_visited_and_compilers_ask_for_order():
    options = {
        "positions": torch.tensor([0.0, 1, 2]),
        "query_positions": torch.tensor([2.0, 1, 0]),
    }
    with pytest.raises(ValueError, match="visited: keys, and queries among them, must come in"):
        visited(ONES, ONES, ONES, causal=False, **options)
    with pytest.raises(NotImplementedError, match=r"looked up under torch.compile and vmap, nor"):
        torch.func.vmap(
            lambda xq: attention(
                ONES, ONES, ONES, causal=False, **{**options, "query_positions": xq}
            )
        )(options["query_positions"][None])


def test_gradients_of_torch_func_are_those_of_autograd():
    arrays, slopes, options = call("own-clocks")
    (leaf, *others), given = as_tensors([*arrays, slopes], options)

    def loss(q):
        return attention(q, *others, **given).square().sum()

    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(leaf.detach()), leaf.grad)
