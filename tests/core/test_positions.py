"""Keys at given positions: the definition, near to far, PyTorch, and what is refused."""

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
    G,
    H,
    across_blocks,
    arguments,
    backward,
    check_torch,
    patterns,
    share_missing,
)

PLACES = ("positions", "query_positions")
LONG = across_blocks(140, 700)
BY_NAME = {call.name: call for call in PLACED}


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


@pytest.mark.parametrize("shape", ((2, 3, 7), (2, 3, 4, 7), (1, 1, 7)), ids=str)
def test_batch_axes_are_those_of_the_call(shape):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 3, 4, 7, 5))
    x = np.cumsum(rng.random(shape), -1)
    out = linbias.attention(q, k, v, positions=x)
    own = np.broadcast_to(x, (2, 3, *shape[2:]))[1, 2]
    alone = linbias.attention(q[1, 2], k[1, 2], v[1, 2], positions=own)
    np.testing.assert_array_equal(out[1, 2], alone)
    assert linbias.attention_backward(q, q, k, v, positions=x).dpositions.shape == shape


@pytest.mark.parametrize("implementation", ("definition", "dense", "sdpa", "blocked", "cpu"))
@pytest.mark.parametrize("lead", ((), (1,), (1, H)), ids=str)
def test_positions_of_one_row_serve_all_with_their_gradients(lead, implementation):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(3, heads, 7, D)) for heads in (H, G, G))
    x = np.cumsum(rng.random((*lead, 7)), -1)
    own_shape = (3, H, 7) if len(lead) == 2 else (3, 7)

    def run(*places):
        """Out, and the gradients by the positions of keys and queries."""
        if implementation == "definition":
            options = dict(zip(PLACES, places, strict=True))
            np.testing.assert_allclose(
                cpu.attention(q, k, v, **options), linbias.attention(q, k, v, **options)
            )
            *_, dx, dxq = linbias.attention_backward(q, q, k, v, **options)
            return linbias.attention(q, k, v, **options), dx, dxq
        leaves = [torch.tensor(place).requires_grad_() for place in places]
        arrays, options = map(torch.tensor, (q, k, v)), dict(zip(PLACES, leaves, strict=True))
        out = linbias.torch.attention(*arrays, **options, implementation=implementation)
        out.backward(torch.tensor(q)[..., :D])
        return out.detach(), *(leaf.grad.numpy() for leaf in leaves)

    out, *gradients = run(x, x + 1e-3)
    expected, *of_rows = run(*(np.broadcast_to(place, own_shape) for place in (x, x + 1e-3)))
    np.testing.assert_allclose(out, expected, atol=1e-12)
    for ours, theirs in zip(gradients, of_rows, strict=True):
        np.testing.assert_allclose(ours, theirs.sum(0).reshape(x.shape), atol=1e-12)


def test_stamps_that_float32_made_alike_are_warned_of():
    """Seconds since 1970, one apart: float32 counts them in steps of 128."""
    q, x = np.ones((2, 3, 4), np.float32), 1.7e9 + np.arange(3.0)
    words = (
        "attention: positions are float32, .* neighbours are alike, 1700000000.0 both;"
        " .* give float64 or int64 .*, or subtract the first stamp"
    )
    for function, zeros in (
        (linbias.attention, q),
        (cpu.attention, q),
        (linbias.torch.attention, torch.tensor(q)[None]),
    ):
        to_places = torch.tensor if function is linbias.torch.attention else np.asarray
        for kind in (np.float32, np.float64, np.int64):
            places = to_places(x.astype(kind))
            if kind == np.float32:
                with pytest.warns(UserWarning, match=words) as found:
                    function(zeros, zeros, zeros, positions=places)
                assert [warning.filename for warning in found] == [__file__]
            else:  # where nothing is said
                function(zeros, zeros, zeros, positions=places)
    # Nothing is said of what may well be alike, and of what is never read.
    linbias.attention(q, q, q, positions=np.float32([2.0**24, 2.0**24, 2.0**25]))
    unread = {"key_range": [0, 2], "query_start": 0}
    linbias.attention(q, q, q, positions=np.float32([0, 2e9, 2e9]), **unread)
    with pytest.warns(UserWarning, match="query_positions are float32"):
        linbias.attention(q, q, q, positions=x * 0, query_positions=np.float32(x), query_start=2)


@pytest.mark.parametrize("call", PLACED, ids=str)
def test_near_to_far_equals_the_definition(call):
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


PATTERNS = patterns(400)


@pytest.mark.parametrize(
    ("pattern", "sides"),
    rows(
        "gates-1 plateaus-2 bursts-1 unix-times-2 one-place-2 jump-1", *product(PATTERNS, (1, 2))
    ),
)
def test_near_to_far_leaves_out_no_more_than_it_says_where_the_bound_is_attained(pattern, sides):
    """All keys alike and along the queries: what is left out is what the bound says of it."""
    x, q, k = PATTERNS[pattern], np.full((1, 24, 4), 0.5), np.full((1, 400, 4), 0.5)
    options = {"positions": x, "scale": 1.0, "causal": sides == 1}
    options["query_start"] = 400 - 24 if sides == 1 else 200
    shares = []
    for tolerance, slope in product(0.5 * 0.7 ** np.arange(14), (0.3, 1.0)):
        limits = {"tolerance": tolerance, "rows": 8, "keys": 1}
        visit = near_to_far.attention(q, k, k, [slope], **limits, **options)
        read = [(tile.first, tile.end) for tile in visit.tiles[0][0]]
        first, end = np.repeat(np.array(read).T[:, None], 8, axis=-1)
        lost = near_to_far.share_outside(q, k, first, end, [slope], **options)
        shares.append(lost.max() / tolerance)
    assert 0.3 < max(shares) <= 1 + 1e-9, "the bound says more or less than it must"


@pytest.mark.parametrize(
    ("implementation", "call"),
    [*product(("dense", "sdpa"), PLACED), *product(("blocked", "cpu"), PLACED + LONG)],
    ids=str,
)
def test_torch_equals_the_definition_with_every_gradient(call, implementation):
    check_torch(call, implementation, torch.float64, 1e-11)


@pytest.mark.parametrize("implementation", ("blocked", "cpu"))
@pytest.mark.parametrize("call", LONG, ids=str)
def test_torch_near_to_far_loses_no_digits_in_float32(call, implementation):
    """Also a billion from 0: where a key stands counts from the tile that reads it."""
    check_torch(call, implementation, torch.float32, 2.0**-17)


LARGE = ("unix-times", "two-ages", "gate-that-forgets-all", "left-padding")
HARD = [call for call in PLACED if "far" in call.name or call.name in LARGE]


@pytest.mark.parametrize("implementation", ("dense", "sdpa", "blocked", "cpu"))
@pytest.mark.parametrize("call", HARD, ids=str)
def test_torch_loses_no_digits_to_large_positions_in_narrow_types(call, implementation):
    """What all keys of a row lose alike does not round off what they differ by."""
    check_torch(call, implementation, torch.float32, 2.0**-17)
    arrays, given = arguments(call, torch.bfloat16)
    out = linbias.torch.attention(*arrays, **given, implementation=implementation)
    assert out.dtype == torch.bfloat16
    expected = linbias.attention(*call.arrays, **call.given)
    np.testing.assert_allclose(out.detach().double(), expected, atol=0.04)
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
    assert 0.1 < max(shares) <= 1 + 1e-6, "the bound says more or less than it must"


@pytest.mark.parametrize("implementation", ("blocked", "cpu"))
def test_torch_leaves_out_what_stands_far_away(implementation):
    """Of a long text whose gates forget, hardly anything is read."""
    x = torch.tensor(patterns(4096)["gates"])[None]
    q, k, v = torch.randn(3, 1, 2, 4096, 16, generator=torch.Generator().manual_seed(0))
    visit = linbias.torch.visited(q, k, v, [1.0, 0.0], positions=x, implementation=implementation)
    assert visit.work_kept[0, 0] < 0.2 and visit.work_kept[0, 1] == 1


@pytest.mark.parametrize("dtype", (torch.int32, torch.float32))
def test_torch_takes_positions_in_narrow_types(dtype):
    call = BY_NAME["integers"]
    arrays, given = arguments(call)
    found = linbias.torch.attention(*arrays, positions=given["positions"].to(dtype))
    expected = linbias.attention(*call.arrays, **call.given)
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
            q.detach(),
            k.detach(),
            v.detach(),
            slopes.detach(),
            right_slopes=right,
            **{**given, "positions": x, "query_positions": xq},
            implementation="dense",
        )

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
    with pytest.raises(TypeError, match="positions of nested tensors must be a contiguous jagged"):
        linbias.torch.attention(ragged, ragged, ragged, positions=positions)


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
            if name == "queries-between":  # compilers cannot look where queries stand
                T, S = arrays[0].shape[2], arrays[1].shape[2]
                given["query_start"] = torch.full((len(arrays[0]),), S - T)
            out = function(*arrays, **given)
            out.square().sum().backward()
            places = [given[n].grad for n in PLACES if n in given]
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
    options |= {"implementation": implementation, "return_lse": True}
    whole, some = (
        linbias.torch.attention(q, k, v, [1.0], tolerance=tolerance, **options)[1]
        for tolerance in (0.0, 1e-5)
    )
    assert (1 - (some - whole).exp()).max() <= 1e-5
