"""Keys at given positions: the definition against loops over pairs, near to far, PyTorch, and what is refused."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import linbias.torch
from contract import rows
from linbias import cpu, near_to_far
from linbias.kernels import core
from positions import (
    PLACED,
    B,
    D,
    E,
    G,
    H,
    Placed,
    across_blocks,
    arguments,
    backward,
    check_torch,
    patterns,
    share_missing,
    truth,
)

LONG = across_blocks(140, 700)
FAR = tuple(call for call in PLACED if "far" in call.name)
BY_NAME = {call.name: call for call in PLACED}


@pytest.mark.parametrize("call", PLACED, ids=str)
def test_the_definition_equals_loops_over_pairs(call: Placed):
    out, lse = linbias.attention(*call.arrays, **call.given, return_lse=True)
    expected, expected_lse = truth(call)
    np.testing.assert_allclose(out, expected.astype(float), atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse.astype(float), atol=1e-12, rtol=1e-12)
    weights = linbias.attention_weights(*call.arrays[:2], call.arrays[3], **call.given)
    np.testing.assert_allclose(weights.sum(-1), np.isfinite(lse), atol=1e-12)


@pytest.mark.parametrize(
    "sides", ({}, {"causal": False}, {"causal": False, "right_slopes": [np.inf, 0.5, 0.0, 2.0]})
)
@pytest.mark.parametrize(("T", "start"), ((9, None), (4, None), (3, [2, 5])))
def test_counted_positions_are_the_default(sides, T, start):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, n, m, D)) for n, m in ((H, T), (G, 9), (G, 9)))
    dout = rng.normal(size=q.shape)
    options = {"query_start": start, **sides}
    counted = {"positions": np.tile(np.arange(9), (B, 1)), **options}
    out, found = linbias.attention(q, k, v, **options), linbias.attention(q, k, v, **counted)
    np.testing.assert_allclose(found, out, rtol=1e-13)
    expected = linbias.attention_backward(dout, q, k, v, **options)
    gradients = linbias.attention_backward(dout, q, k, v, **counted)
    for ours, theirs in zip(gradients[:5], expected[:5], strict=True):
        if theirs is not None:
            np.testing.assert_allclose(ours, theirs, atol=1e-13)
    assert gradients.dpositions.shape == (B, 9) and expected.dpositions is None


def test_the_trace_shows_real_distances():
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 3, 2))
    trace = linbias.explain(q, k, v, [2.0], positions=[0.0, 0.5, 4.0], causal=False)
    np.testing.assert_array_equal(trace.bias[0], [[0, -1, -8], [-1, 0, -7], [-8, -7, 0]])
    assert "0 " in trace.table() and "-7.0000" in trace.table()


def test_batch_axes_are_those_of_the_call():
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 3, 4, 7, 5))
    for shape in ((2, 3, 7), (2, 3, 4, 7)):
        x = np.cumsum(rng.random(shape), -1)
        out = linbias.attention(q, k, v, positions=x)
        alone = linbias.attention(q[1, 2], k[1, 2], v[1, 2], positions=x[1, 2])
        np.testing.assert_array_equal(out[1, 2], alone)
        gradients = linbias.attention_backward(q, q, k, v, positions=x)
        assert gradients.dpositions.shape == shape


ONE_ROW = ((), (1,), (1, H))


def of_one_row(
    lead: tuple[int, ...],
) -> tuple[list[np.ndarray], list[np.ndarray], tuple[int, ...]]:
    """q, k and v of three rows; positions [*lead, n] of keys and queries; and their shape where each row has its own."""
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(3, heads, 7, D)) for heads in (H, G, G)]
    x = np.cumsum(rng.random((*lead, 7)), -1)
    return arrays, [x, x + 1e-3], (3, H, 7) if len(lead) == 2 else (3, 7)


@pytest.mark.parametrize("lead", ONE_ROW, ids=str)
def test_positions_of_one_row_serve_all(lead):
    (q, k, v), places, shape = of_one_row(lead)
    own = [np.broadcast_to(x, shape) for x in places]
    names = ("positions", "query_positions")
    for function in (linbias.attention, cpu.attention):
        out, expected = (
            function(q, k, v, **dict(zip(names, x, strict=True))) for x in (places, own)
        )
        np.testing.assert_array_equal(out, expected)
    found, of_rows = (
        linbias.attention_backward(q, q, k, v, **dict(zip(names, x, strict=True)))[-2:]
        for x in (places, own)
    )
    for ours, theirs, x in zip(found, of_rows, places, strict=True):
        np.testing.assert_allclose(ours, theirs.sum(0).reshape(x.shape), atol=1e-12)
    # Batch axes of the call have 1 in the place of each.
    if lead == (1,):
        several = [x.reshape(3, 1, *x.shape[1:]) for x in (q, k, v)]
        out = linbias.attention(*several, positions=places[0][None])
        np.testing.assert_array_equal(out[:, 0], linbias.attention(q, k, v, positions=places[0]))


@pytest.mark.parametrize("implementation", ("dense", "sdpa", "blocked", "cpu"))
@pytest.mark.parametrize("lead", ONE_ROW, ids=str)
def test_torch_positions_of_one_row_serve_all_with_their_gradients(lead, implementation):
    arrays, places, shape = of_one_row(lead)
    q, k, v = map(torch.tensor, arrays)
    found = []
    for stands in (places, [np.broadcast_to(x, shape) for x in places]):
        leaves = [torch.tensor(x).requires_grad_() for x in stands]
        out = linbias.torch.attention(
            q, k, v, positions=leaves[0], query_positions=leaves[1], implementation=implementation
        )
        (3 * out).sin().sum().backward()
        found.append((out.detach(), *(x.grad for x in leaves)))
    torch.testing.assert_close(found[0][0], found[1][0])
    for ours, theirs in zip(found[0][1:], found[1][1:], strict=True):
        torch.testing.assert_close(ours, theirs.sum(0).view(ours.shape))


def test_stamps_that_float32_made_alike_are_warned_of():
    """Seconds since 1970, one apart: float32 counts them in steps of 128."""
    q = np.ones((2, 3, 4), np.float32)
    x = 1.7e9 + np.arange(3.0)
    words = r"attention: positions are float32, .* neighbours are alike, 1700000000.0 both; .* give float64 or int64 .*, or subtract the first stamp"
    tensor = torch.tensor(q)[None]
    for call in (
        lambda x: linbias.attention(q, q, q, positions=x),
        lambda x: cpu.attention(q, q, q, positions=x),
        lambda x: linbias.torch.attention(tensor, tensor, tensor, positions=torch.tensor(x)),
    ):
        with pytest.warns(UserWarning, match=words) as found:
            call(x.astype(np.float32))
        assert [warning.filename for warning in found] == [__file__]
        # Nothing is said of other types, of what may well be alike, and of what is never read.
        call(x)
        call(x.astype(np.int64))
        call(np.float32([2.0**24, 2.0**24, 2.0**25]))
    linbias.attention(
        q, q, q, positions=np.float32([0, 2e9, 2e9]), key_range=[0, 2], query_start=0
    )
    with pytest.warns(UserWarning, match="query_positions are float32"):
        linbias.attention(q, q, q, positions=x * 0, query_positions=np.float32(x), query_start=2)


@pytest.mark.parametrize("call", PLACED, ids=str)
def test_gradients_by_positions_equal_central_differences(call: Placed):
    rng = np.random.default_rng(7)
    dout, dlse = rng.normal(size=(B, H, call.T, E)), rng.normal(size=(B, H, call.T))
    gradients = backward(call, dout, dlse)
    x, xq = (
        None if array is None else array.astype(np.longdouble)
        for array in (call.positions, call.options.get("query_positions"))
    )
    assert gradients.dpositions.shape == x.shape
    assert (gradients.dquery_positions is None) == (xq is None)

    def loss() -> float:
        """Of loops over pairs, which take a place beyond a neighbour's for what it is."""
        out, lse = truth(call, x, xq)
        return (out * dout).sum() + (np.where(np.isfinite(lse), lse, 0.0) * dlse).sum()

    step = np.longdouble(1e-6)
    for array, gradient in ((x, gradients.dpositions), (xq, gradients.dquery_positions)):
        if array is None:
            continue
        inside = np.argwhere(np.abs(array) < 1e290)
        for index in map(tuple, rng.permutation(inside)[:12]):
            before, losses = array[index], []
            for sign in (1, -1):
                array[index] = before + sign * step
                losses.append(loss())
            array[index] = before
            expected = float((losses[0] - losses[1]) / (2 * step))
            assert gradient[index] == pytest.approx(expected, abs=2e-6, rel=1e-4), index
        unused = ~(np.abs(array) < 1e290)
        assert not gradient[unused].any()


@pytest.mark.parametrize("call", PLACED, ids=str)
def test_near_to_far_equals_the_definition(call: Placed):
    out, lse = linbias.attention(*call.arrays, **call.given, return_lse=True)
    for tile, keys in ((2, 3), (16, 1)):
        visit = near_to_far.attention(
            *call.arrays, **call.given, tolerance=2.0**-53, rows=tile, keys=keys
        )
        np.testing.assert_allclose(visit.out, out, atol=1e-12)
        np.testing.assert_allclose(visit.lse, lse, atol=1e-12)


def test_near_to_far_one_scan_has_the_sums_over_all_pairs():
    x = np.sort(np.random.default_rng(0).integers(0, 30, (2, 40)).astype(float))
    inside = np.array([[False] * 3 + [True] * 30 + [False] * 7, [True] * 40])
    slope = np.array([0.0, 0.7])
    sums = near_to_far.log_sums(x, slope, inside)
    for b, j in np.ndindex(2, 33):
        counted = [s for s in range(j + 1) if inside[b, s]]
        expected = sum(np.exp(-slope[b] * (x[b, j] - x[b, s])) for s in counted)
        assert np.exp(sums[b, j]) == pytest.approx(expected, rel=1e-13)


def test_near_to_far_the_geometric_series_is_a_scan_over_counted_positions():
    sums = near_to_far.log_sums(np.arange(500.0), 0.1)
    exact = np.log(-np.expm1(-0.1 * np.arange(1, 501)) / -np.expm1(-0.1))
    np.testing.assert_allclose(sums, exact, atol=1e-14)
    assert (sums <= near_to_far.log_geometric(0.1, np.inf) + 1e-14).all()


N = 400
PATTERNS = patterns(N)


def _missing(x, q, k, slope, tolerance, sides, keys=8):
    """The largest share of a row's probability that was left unread."""
    T = 24
    start = N - T if sides == 1 else N // 2
    options = {"positions": x, "scale": 1.0, "query_start": start}
    if sides == 2:
        options |= {"causal": False}
    visit = near_to_far.attention(
        q[None], k[None], k[None], [slope], tolerance=tolerance, rows=8, keys=keys, **options
    )
    tiles = visit.tiles[0][0]
    first, end = (
        np.repeat([getattr(tile, name) for tile in tiles], 8)[:T] for name in ("first", "end")
    )
    return near_to_far.share_outside(
        q[None], k[None], first[None], end[None], [slope], **options
    ).max()


@pytest.mark.parametrize(
    ("pattern", "sides"),
    rows(
        "gates-1 plateaus-2 bursts-1 unix-times-2 one-place-2 jump-1", *product(PATTERNS, (1, 2))
    ),
)
def test_near_to_far_leaves_out_no_more_than_it_says_where_the_bound_is_attained(pattern, sides):
    """All keys alike and along the queries: what is left out is what the bound says of it."""
    q, k = np.full((24, 4), 0.5), np.full((N, 4), 0.5)
    shares = []
    for tolerance in 0.5 * 0.7 ** np.arange(14):
        for slope in (0.3, 1.0):
            share = _missing(PATTERNS[pattern], q, k, slope, tolerance, sides, keys=1)
            shares.append(share / tolerance)
    assert max(shares) <= 1 + 1e-9
    assert max(shares) > 0.3, "the bound says more than it must"


@pytest.mark.thorough
def test_near_to_far_leaves_out_no_more_than_it_says_under_attack():
    """A climb over positions, keys and queries towards what loses most, from random beginnings."""
    rng = np.random.default_rng(11)
    worst = 0.0
    for sides in (1, 2):
        for pattern in PATTERNS:
            x, tolerance = PATTERNS[pattern].copy(), float(10 ** rng.uniform(-6, -0.5))
            q = rng.normal(size=(24, 4)) * np.exp(rng.uniform(-1, 1))
            k = rng.normal(size=(N, 4)) if rng.random() < 0.5 else np.tile(q[0], (N, 1))
            best, slope = 0.0, float(np.exp(rng.uniform(-3, 1)))
            for _ in range(25):
                steps = np.diff(x, prepend=x[0])
                here = np.sort(rng.integers(0, N + 1, 2))
                steps[here[0] : here[1]] *= np.exp(rng.normal() * rng.choice([0.1, 1, 4]))
                tried = np.cumsum(steps)
                keys = k * np.exp(rng.normal() * 0.2)
                keys[slice(*np.sort(rng.integers(0, N + 1, 2)))] *= rng.choice([0.0, 1.0, 1.1])
                share = _missing(tried, q, keys, slope, tolerance, sides) / tolerance
                assert share <= 1 + 1e-9, (pattern, sides)
                if share >= best:
                    best, x, k = share, tried, keys
            worst = max(worst, best)
    assert worst > 0.1, "the attack came nowhere near the tolerance"


@pytest.mark.parametrize(
    ("implementation", "call"),
    [*product(("dense", "sdpa"), PLACED), *product(("blocked", "cpu"), PLACED + LONG)],
    ids=str,
)
def test_torch_equals_the_definition_with_every_gradient(call: Placed, implementation):
    check_torch(call, implementation, torch.float64, 1e-11)


@pytest.mark.parametrize("implementation", ("dense", "sdpa", "blocked", "cpu"))
@pytest.mark.parametrize(
    "name", ("unix-times", "two-ages", "gate-that-forgets-all", "left-padding")
)
def test_torch_narrow_results_lose_nothing_to_large_positions(name, implementation):
    call = BY_NAME[name]
    expected = linbias.attention(*call.arrays, **call.given)
    for dtype, budget in ((torch.float32, 5e-6), (torch.bfloat16, 0.04)):
        arrays, given = arguments(call, dtype)
        out = linbias.torch.attention(*arrays, **given, implementation=implementation)
        assert out.dtype == dtype
        np.testing.assert_allclose(out.detach().double(), expected, atol=budget)


@pytest.mark.parametrize("implementation", ("blocked", "cpu"))
@pytest.mark.parametrize("call", LONG, ids=str)
def test_torch_near_to_far_loses_no_digits_in_float32(call: Placed, implementation):
    """Also a billion from 0: where a key stands counts from the tile that reads it."""
    check_torch(call, implementation, torch.float32, 2.0**-17)


@pytest.mark.parametrize("implementation", ("dense", "sdpa", "blocked", "cpu"))
@pytest.mark.parametrize("call", FAR, ids=str)
def test_torch_queries_far_from_all_keys_lose_no_digits_in_float32(call: Placed, implementation):
    """What all keys of a row lose alike does not round off what they differ by."""
    check_torch(call, implementation, torch.float32, 2.0**-17)
    weights = {
        dtype: linbias.torch.attention_weights(q, k, slopes, **given).detach().double()
        for dtype in (torch.float32, torch.float64)
        for (q, k, _, slopes), given in (arguments(call, dtype),)
    }
    np.testing.assert_allclose(weights[torch.float32], weights[torch.float64], atol=2.0**-17)


@pytest.mark.parametrize("sides", (1, 2))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_torch_blocked_leaves_out_no_more_than_it_says_where_the_bound_is_attained(pattern, sides):
    shares = [
        share_missing(pattern, 2000, sides, tolerance, "blocked") / tolerance
        for tolerance in 0.5 * 0.7 ** np.arange(12)
    ]
    assert max(shares) <= 1 + 1e-6
    assert max(shares) > 0.1, "the bound says more than it must"


def test_torch_blocked_reads_what_near_to_far_says_must_be_read():
    """The scan serves: of a long text whose gates forget, hardly anything is read."""
    x = torch.tensor(patterns(4096)["gates"])[None]
    q, k, v = torch.randn(3, 1, 2, 4096, 16, generator=torch.Generator().manual_seed(0))
    kept = linbias.torch.visited(q, k, v, [1.0, 0.0], positions=x, implementation="blocked")
    assert kept.work_kept[0, 0] < 0.2 and kept.work_kept[0, 1] == 1


def test_torch_takes_positions_in_float32_and_integers():
    call = BY_NAME["integers"]
    expected = linbias.attention(*call.arrays, **call.given)
    for dtype in (torch.int32, torch.int64, torch.float32):
        arrays, given = arguments(call)
        given["positions"] = given["positions"].to(dtype)
        found = linbias.torch.attention(*arrays, **given)
        np.testing.assert_allclose(found.detach(), expected, atol=1e-12)


def test_torch_weights_are_those_of_the_definition():
    for call in PLACED:
        (q, k, _, slopes), given = arguments(call)
        weights = linbias.torch.attention_weights(q, k, slopes, **given)
        expected = linbias.attention_weights(*call.arrays[:2], call.arrays[3], **call.given)
        np.testing.assert_allclose(weights.detach(), expected, atol=1e-13)


def test_torch_gradients_by_positions_are_right_to_second_order():
    call = BY_NAME["queries-between"]
    (q, k, v, slopes), given = arguments(call)
    right = given.pop("right_slopes").detach()

    def run(x, xq):
        return linbias.torch.attention(
            q.detach(), k.detach(), v.detach(), slopes.detach(), right_slopes=right,
            **{**given, "positions": x, "query_positions": xq}, implementation="dense",
        )  # fmt: skip

    places = given["positions"], given["query_positions"]
    assert torch.autograd.gradcheck(run, places)
    assert torch.autograd.gradgradcheck(run, places)


@pytest.mark.parametrize("implementation", ("dense", "sdpa", "blocked", "cpu"))
@pytest.mark.parametrize("name", ("queries-between", "queries-far-beyond"))
def test_torch_gradients_by_query_positions_alone(name, implementation):
    """Nothing else asks for gradients."""
    call = BY_NAME[name]
    arrays, given = arguments(call)
    arrays = [x.detach() for x in arrays]
    given = {n: x.detach() if torch.is_tensor(x) else x for n, x in given.items()}
    given["query_positions"].requires_grad_()
    out, lse = linbias.torch.attention(
        *arrays, **given, implementation=implementation, return_lse=True
    )
    assert out.requires_grad and lse.requires_grad
    dout, dlse = np.sin(out.detach().numpy()), np.cos(lse.detach().numpy())
    torch.autograd.backward((out, lse), (torch.tensor(dout), torch.tensor(dlse)))
    expected = backward(call, dout, dlse).dquery_positions
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(given["query_positions"].grad, expected, atol=1e-11)
    alone = linbias.torch.attention(*arrays, **given, implementation=implementation)
    (found,) = torch.autograd.grad(alone, given["query_positions"], torch.tensor(dout))
    expected = backward(call, dout, 0 * dlse).dquery_positions
    np.testing.assert_allclose(found, expected, atol=1e-11)


def test_torch_others_say_that_positions_are_not_built(monkeypatch):
    x = torch.ones(1, 2, 4, 4)
    positions = torch.zeros(1, 4)
    monkeypatch.setattr(core, "ABILITIES", replace(core.ABILITIES, has=()))
    with pytest.raises(
        NotImplementedError, match=r"cpu cannot run .*: positions are not built yet"
    ):
        linbias.torch.attention(x, x, x, positions=positions, implementation="cpu")
    ragged = torch.nested.nested_tensor([torch.ones(3, 2, 4)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(ValueError, match="positions cannot be given with nested tensors"):
        linbias.torch.attention(ragged, ragged, ragged, positions=positions)


def test_torch_sdpa_keeps_no_bias_of_positions():
    call = BY_NAME["stamps"]
    q, k, v, slopes = map(torch.tensor, call.arrays)
    for x in (torch.tensor(call.positions), torch.tensor(call.positions) * 2):
        out, expected = (
            linbias.torch.attention(q, k, v, slopes, positions=x, implementation=name)
            for name in ("sdpa", "dense")
        )
        torch.testing.assert_close(out, expected)


def test_torch_auto_with_dropout_and_under_transforms():
    call = BY_NAME["stamps"]
    arrays, given = arguments(call)
    assert linbias.torch.attention(*arrays, **given, dropout=0.5).isfinite().all()

    def loss(x):
        return linbias.torch.attention(*arrays, positions=x).square().sum()

    x = given["positions"].detach()
    (expected,) = torch.autograd.grad(loss(given["positions"]), given["positions"])
    torch.testing.assert_close(torch.func.grad(loss)(x), expected)
    stacked = torch.stack([x, 2 * x])
    together = torch.func.vmap(lambda x: linbias.torch.attention(*arrays, positions=x))(stacked)
    for found, x in zip(together, stacked, strict=True):
        torch.testing.assert_close(found, linbias.torch.attention(*arrays, positions=x))


@pytest.mark.thorough
def test_torch_compiled_with_every_gradient():
    compiled = torch.compile(linbias.torch.attention, fullgraph=True, backend="aot_eager")
    for name in ("gates-chunk", "left-padding", "queries-between"):
        found = []
        for function in (linbias.torch.attention, compiled):
            arrays, given = arguments(BY_NAME[name])
            out = function(*arrays, **given)
            out.square().sum().backward()
            places = [given[n].grad for n in ("positions", "query_positions") if n in given]
            found.append([out, *(x.grad for x in arrays), *places])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("implementation", ("blocked", "cpu"))
@pytest.mark.parametrize("backwards", (False, True))
def test_torch_keys_that_gather_far_away_are_summed_from_their_own_side(implementation, backwards):
    # Seen from the other side, thousands of keys at one place count as one.
    x = torch.cat([torch.arange(256.0) / 25, torch.full((8192,), 16.0)]).double()
    start = 0
    if backwards:
        x, start = -x.flip(0), len(x) - 4
    q, k, v = torch.zeros(1, 1, 4, 8).double(), *torch.zeros(2, 1, 1, len(x), 8).double()
    options = {"causal": False, "positions": x[None], "query_start": torch.tensor([start])}
    whole, some = (
        linbias.torch.attention(
            *(q, k, v, [1.0]),
            tolerance=t,
            implementation=implementation,
            return_lse=True,
            **options,
        )[1]
        for t in (0.0, 1e-5)
    )
    assert (1 - (some - whole).exp()).max() <= 1e-5
