"""The Triton kernels in Triton's interpreter, on small tiles; compiled: test_triton_gpu.py."""

import os
from dataclasses import replace
from itertools import cycle, product

import numpy as np
import pytest
import torch

import linbias.torch
from cases import RANGED_CASES, Case, by_name, short
from contract import (
    check_case,
    check_gradients_where_keys_share_a_part,
    check_hidden_keys_may_hold_anything,
    check_where_attained,
    expected,
    rows,
)
from linbias.kernels.triton import sizes
from linbias.kernels.triton.certificate import log_share
from linbias.kernels.triton.sizes import Sizes, Tile
from linbias.near_to_far import log_sums
from linbias.torch import call
from linbias.torch.call import prepare
from linbias.torch.impl import triton
from linbias.torch.operators.operator import Inputs
from positions import PLACED, across_blocks, arguments, check_torch, patterns, share_missing
from test_torch import TorchSubject, check_decoding

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles here: see test_triton_gpu.py", allow_module_level=True)

from interpreter import repaired
from linbias.kernels.triton import certificate, forward

# The interpreter computes with NumPy, which warns of inf - inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LITTLE = Sizes(Tile(32, 16, 4, 2), Tile(16, 16, 4, 2), Tile(16, 32, 4, 2), Tile(16, 16, 4, 2))


@pytest.fixture
def little_tiles(monkeypatch):
    """Tiles so small that short cases have several, in an interpreter that knows bounds."""
    monkeypatch.setattr(triton, "INTERPRETED", ("float16", "bfloat16", "float32"))
    monkeypatch.setattr(forward, "FEWEST_BLOCKS", 2)
    with sizes.forced(LITTLE), repaired():
        yield


def check(case: Case, dtype: str) -> None:
    """Once: in the interpreter a second run repeats the first."""
    check_case(TorchSubject("triton"), case, dtype, again=False)


def little(case: Case, H: int = 2, G: int = 1) -> Case:
    """The case with as few heads and batch rows as show what it is for."""
    if "range-per-head" in case.name:
        return replace(case, H=case.G)
    batched = case.key_range or case.query_start or "per_batch" in (case.left, case.right)
    if not batched and case.T * case.S > 1:  # one number has too little error to be a budget
        case = replace(case, B=min(case.B, 1))
    if case.left == "mixed":  # six slopes
        return case
    return replace(case, H=min(case.H, H), G=min(case.G, G))


SHORT = [case for case in short() if case.S < 100]
# What bfloat16 changes is the same for all cases of some sizes; `LONG` has their placements.
BFLOAT16 = {
    (c.T, c.S, c.D, c.causal, c.dropout > 0): c for c in reversed(SHORT) if c.left != "extreme"
}
PER_HEAD = {"G": 2, "key_range": (((50, 119), (5, 30)),), "query_start": (40,)}
LONG = (
    Case("long", B=1, T=65, S=131),
    Case("long-symmetric", B=1, T=40, S=90, causal=False),
    Case("long-asymmetric", B=1, T=40, S=130, causal=False, right="halved"),
    Case("long-range-symmetric", T=35, S=120, key_range=((50, 119), (5, 67)), causal=False),
    Case("long-range-chunk", T=35, S=120, key_range=((20, 119), (5, 120)), query_start=(70, 85)),
    Case("long-past-the-keys", B=1, T=35, S=120, query_start=(131,)),
    Case("long-before-the-keys", B=1, T=35, S=120, causal=False, query_start=(-61,)),
    Case("long-range-per-head", B=1, T=35, S=120, causal=False, right="halved", **PER_HEAD),
    Case("far-key-aligned", B=1, T=35, S=120, keys="far_aligned", causal=False),
    Case("keys-off-center", B=1, T=35, S=120, keys="off_center", dropout=0.2),
    Case("long-extreme-logits", B=1, T=33, S=97, logits=100.0),
)


QUICK = """T-above-S-float32 no-queries-float32 S-one-float32 slopes-mixed-float32
asymmetric-per-batch-float32 directional-float32 hidden-right-of-a-gap-float32 left-padding-float32
empty-range-float32 start-past-the-keys-float32 range-per-head-float32 T-one-bfloat16
range-per-head-dropout-float32 asymmetric-bfloat16 range-symmetric-float16"""
TWO_TYPES = ("float32", "bfloat16")
NAMES_16 = ("T-below-S", "asymmetric", "range-symmetric", "dropout")
CONTRACT = (
    *((case, "float32") for case in SHORT),
    *((case, "bfloat16") for case in BFLOAT16.values()),
    *((by_name(name), "float16") for name in NAMES_16),
)


@pytest.mark.parametrize(("case", "dtype"), rows(QUICK, *CONTRACT))
def test_contract(case, dtype, little_tiles, poisoned_memory):
    check(little(case), dtype)


@pytest.mark.parametrize(
    ("case", "dtype"),
    rows("long-asymmetric-float32 long-range-chunk-bfloat16", *product(LONG, TWO_TYPES)),
)
def test_contract_where_keys_are_left_out(case, dtype, little_tiles, poisoned_memory):
    heads = 2 if case.G == 2 else 1
    check(replace(case, H=heads, G=heads, left="steep"), dtype)


RANGED = {case.name: case for case in RANGED_CASES}
# As many blocks of keys as show what the long ones are for.
RANGED_LONG = (
    replace(RANGED["long-window"], T=67, S=601),
    replace(RANGED["long-window-both-sides"], T=45, S=601, query_start=(290,)),
    replace(RANGED["long-documents"], T=90, S=331),
    replace(RANGED["long-chunks"], T=67, S=601, query_start=(300,)),
    replace(RANGED["long-prefix"], T=50, S=331, query_start=(0, 211)),
    replace(RANGED["long-scattered"], T=40, S=331),
    replace(RANGED["long-window-range"], T=40, S=601, key_range=((300, 590), (5, 601))),
    replace(RANGED["long-window-dropout"], T=40, S=331),
    replace(RANGED["gates-in-documents"], T=90, S=331),
)
RANGED_QUICK = """documents-float32 chunks-multi-query-float32 scattered-float32
window-range-per-head-float32 one-side-hidden-in-chunks-float32 gaps-in-a-window-float32
window-dropout-bfloat16 long-window-both-sides-float32 long-documents-bfloat16"""
RANGED_16 = ("window-both-sides", "documents", "prefix-sees-itself", "window-dropout")


@pytest.mark.parametrize(
    ("case", "dtype"),
    rows(
        RANGED_QUICK,
        *((case, "float32") for case in RANGED_CASES if case.S < 100),
        *((RANGED[name], "bfloat16") for name in RANGED_16),
        *(
            (c, d)
            for c, d in product(RANGED_LONG, TWO_TYPES)
            if not (c.places and d == "bfloat16")
        ),
    ),
)
def test_each_query_sees_its_own_range_of_keys(case, dtype, little_tiles, poisoned_memory):
    check(little(case), dtype)


@pytest.mark.parametrize(
    "case",
    rows("long-documents", *((c,) for c in RANGED_LONG if not c.places and c.rows != "scattered")),
)
def test_each_query_sees_its_own_range_where_keys_are_left_out(case, little_tiles):
    """But where rows see far keys alone, of whose scores steep slopes leave few digits."""
    check(replace(little(case), left="steep"), "float32")


PLACED_CALLS = (*PLACED, *across_blocks(24, 100))
FEW_QUERIES = [c for c in PLACED_CALLS if c.T < 5]


@pytest.mark.parametrize(
    ("call", "dtype"),
    rows(
        "range-per-head-float32",
        *product(PLACED_CALLS, ("float32",)),
        *((c, "bfloat16") for c in PLACED_CALLS if c.name in ("long-even", "long-per-head")),
    ),
)
def test_keys_at_given_positions(call, dtype, little_tiles, poisoned_memory):
    allowed = {"float32": 2.0**-16, "bfloat16": 2.0**-5}[dtype]
    check_torch(call, "triton", getattr(torch, dtype), allowed)


@pytest.mark.parametrize(
    ("call", "bounded"),
    rows("gates-chunk-True chunk-False", *product(FEW_QUERIES, (True, False))),
)
def test_decoding_at_given_positions(call, bounded, little_tiles):
    arrays, given = arguments(call, torch.float32)
    bound = arrays[1].norm(dim=-1).amax(-1) * (1 + 1e-6) if bounded and call.S else None
    given["return_lse"] = True
    with torch.no_grad():
        ours = linbias.torch.attention(*arrays, **given, key_bound=bound, implementation="triton")
        truth = linbias.torch.attention(*arrays, **given, implementation="dense")
    torch.testing.assert_close(ours, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pattern", rows("forgets", *((name,) for name in patterns(150))))
def test_tails_are_those_of_one_scan_over_all_keys(pattern, little_tiles, monkeypatch):
    """In several chunks, with a range for each key/value head."""
    monkeypatch.setattr(certificate, "CHUNK", 4)
    x = np.tile(patterns(150)[pattern], (2, 1))
    q, k = torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 150, 8)
    left, right = [0.5, 0.01], [2.0, 0.3]
    ranges = np.array([[[0, 150], [21, 130]], [[60, 150], [1, 20]]])
    given = {"causal": False, "positions": torch.tensor(x), "key_range": torch.tensor(ranges)}
    inputs, _ = prepare("attention", q, k, k, left, right_slopes=right, **given)
    found = certificate.tails(triton._call(inputs), 16) * np.log(2)
    for b, h in np.ndindex(2, 2):
        first, end = ranges[b, h]
        to_left = log_sums(x[b, first:end], left[h])
        to_right = log_sums(-x[b, first:end][::-1], right[h])[::-1]
        for block in range(first // 16, -(-end // 16)):
            edges = min(block * 16 + 15, end - 1) - first, max(block * 16, first) - first
            for side, sums in enumerate((to_left, to_right)):
                assert found[side, b, h, block] == pytest.approx(sums[edges[side]], abs=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize(("pattern", "sides"), [*zip(patterns(150), cycle((1, 2)), strict=False)])
def test_the_mass_that_is_missing_at_given_positions_lies_just_below_the_tolerance(
    pattern, sides, little_tiles
):
    shares = [
        share_missing(pattern, 192, sides, tolerance, "triton") / tolerance
        for tolerance in 0.3 * 0.6 ** np.arange(6)
    ]
    assert max(shares) <= 1
    assert max(shares) > 0.05, "the bound says more than it must"


def as_tuples(numbers):
    return tuple(map(as_tuples, numbers)) if np.ndim(numbers) else int(numbers)


def drawn(seed: int) -> tuple[Case, Sizes]:
    """A case and tile sizes at random."""
    rng = np.random.default_rng(seed)
    G, group, T, S = (int(rng.integers(1, n)) for n in (3, 3, 40, 70))
    keys, rows = int(rng.choice([16, 32])), int(rng.choice([16, 32]))
    dkv = Tile(16, int(rng.choice([16, 32])), 4, 1)
    ranges = np.sort(rng.integers(0, S + 1, (2, 2) if rng.random() < 0.5 else (2, G, 2)))
    starts = rng.integers(-T - 30, S + 30, 2)
    case = Case(
        f"drawn-{seed}",
        H=G * group,
        G=G,
        T=T,
        S=S,
        D=int(rng.integers(1, 33)),
        E=int(rng.integers(1, 33)),
        causal=bool(causal := rng.random() < 0.6),
        left=str(rng.choice(["paper", "steep", "zero", "mixed"])),
        right=None if causal or rng.random() < 0.5 else str(rng.choice(["halved", "mixed"])),
        keys=str(rng.choice(["normal", "off_center", "far_aligned"])),
        key_range=as_tuples(ranges) if rng.random() < 0.6 else None,
        query_start=as_tuples(starts) if rng.random() < 0.6 else None,
        dropout=0.25 if rng.random() < 0.3 else 0.0,
    )
    tiles = Sizes(Tile(rows, keys, 4, 1), Tile(16, 16, 4, 1), dkv, Tile(16, 16, 4, 1))
    return case, tiles


@pytest.mark.parametrize("seed", rows("1 2 3", *((n,) for n in range(9))))
def test_drawn_cases_are_right_to_a_few_roundings(seed, little_tiles, poisoned_memory):
    """A wrong key or row shows; the budget, which knows no large scores, is for named cases."""
    case, tiles = drawn(seed)
    dtype, allowed = (("float32", 2.0**-16), ("bfloat16", 2.0**-5), ("float16", 2.0**-8))[seed % 3]
    inputs, truth, _ = expected(case, dtype)
    with sizes.forced(tiles):
        actual = TorchSubject("triton").run(inputs, case, dtype)
    for true_arrays, arrays in zip(truth, actual, strict=True):
        for name, array in arrays.items():
            seen = np.isfinite(true_arrays[name])
            assert np.array_equal(seen, np.isfinite(array)), name
            error = np.abs(array - true_arrays[name])[seen].max(initial=0)
            assert error <= allowed * np.abs(true_arrays[name][seen]).max(initial=1), name


RANGES = {
    "key_range": (((0, 197), (70, 150)), ((190, 193), (63, 130))),
    **{"query_start": (90, 194), "causal": False},
}
DECODING = (
    Case("one", T=1, S=197),
    Case("group", B=1, T=2, S=197, H=4, G=2, D=64, E=32),
    Case("both-sides", B=1, T=4, S=133, causal=False, right="halved"),
    Case("range", T=3, S=197, key_range=((0, 150), (70, 197))),
    Case("empty-range", T=1, S=53, key_range=((5, 7), (3, 3))),
    Case("past-the-keys", T=2, S=133, query_start=(135, 163)),
    Case("before-the-keys", T=2, S=133, causal=False, query_start=(-3, -40)),
    Case("range-per-head", T=3, S=197, H=4, G=2, left="mixed", right="halved", **RANGES),
)


@pytest.mark.parametrize(
    ("case", "dtype", "bounded"),
    rows(
        "one-bfloat16-True both-sides-bfloat16-False group-float32-False range-float16-True"
        " past-the-keys-bfloat16-True long-cache-scattered-float32-True"
        " window-one-query-bfloat16-False",
        *((case, "bfloat16", bounded) for case, bounded in product(DECODING, (False, True))),
        *((DECODING[1], "float32", bounded) for bounded in (False, True)),
        *((DECODING[3], "float16", bounded) for bounded in (False, True)),
        *product((c for c in RANGED_CASES if 0 < c.T < 5), TWO_TYPES, (False, True)),
    ),
)
def test_decoding_from_a_cache(case, dtype, bounded, little_tiles):
    check_decoding("triton", case if case.H == 4 else little(case), dtype, bounded)


def test_each_batch_row_has_its_own_key_bound(little_tiles):
    q, k, v = torch.zeros(2, 1, 1, 16), torch.zeros(2, 1, 512, 16), torch.randn(2, 1, 512, 16)
    q[..., 0], k[1, 0, 100, 0] = 8, 30  # a key far away whose score of 60 outweighs its bias
    given = {"slopes": [0.1], "key_bound": k.norm(dim=-1).amax(-1)}
    out, expected_out = (
        linbias.torch.attention(q, k, v, **given, implementation=name)
        for name in ("triton", "dense")
    )
    torch.testing.assert_close(out, expected_out)


@pytest.mark.parametrize("height", (20.0, 300.0))
def test_a_far_key_may_exceed_the_maximum_of_a_row(height, little_tiles):
    """By more bits than a float32 has."""
    q, k, v = torch.zeros(1, 1, 20, 16), torch.randn(1, 1, 600, 16), torch.randn(1, 1, 600, 16)
    q[..., 0], k[..., 0], k[0, 0, 100, 0] = 4, 0, height
    out, expected_out = (
        linbias.torch.attention(q, k, v, [0.05], implementation=name, scale=1.0)
        for name in ("triton", "dense")
    )
    torch.testing.assert_close(out, expected_out)


def test_weights_beside_a_maximum_that_stays_are_finite_in_float16(little_tiles):
    """Where the bound lets a key weigh as much as it may, and dropout enlarges it."""
    q, k, v = torch.zeros(3, 1, 1, 300, 16, dtype=torch.float16)
    q[..., 287, 0], k[..., 223, 0], v[..., 223, :] = 4, 4.36, 1
    for seed in range(3):  # of which one keeps the key, but for a chance of 0.1^3
        torch.manual_seed(seed)
        given = {"scale": 1.0, "dropout": 0.1, "implementation": "triton"}
        assert linbias.torch.attention(q, k, v, [0.1], **given).isfinite().all()


@pytest.mark.thorough
def test_a_key_bound_spares_reading_far_keys(little_tiles):
    """Far keys that nobody may read are NaN here."""
    q, k, v = (torch.randn(1, 2, n, 16) for n in (1, 512, 512))
    keys = torch.arange(512)
    both, counted = {"causal": False}, {"positions": keys[None].double() + 1e9}
    calls = (511, {}), (256, both), (256, {}), (-1, both), (511, counted), (256, both | counted)
    for start, options in calls:
        given = {"slopes": [0.5, 1.0], "query_start": torch.tensor([start]), **options}
        expected_out = linbias.torch.attention(q, k, v, **given, implementation="dense")
        far = (keys - start).abs() > 160
        if "causal" not in options:
            far |= keys > start + 31  # of the query's own block
        poisoned = (x.masked_fill(far[:, None], torch.nan) for x in (k, v))
        bound = k.norm(dim=-1).amax(-1)
        given |= {"key_bound": bound, "implementation": "triton"}
        out = linbias.torch.attention(q, *poisoned, **given)
        torch.testing.assert_close(out, expected_out)


LEAST, MOST = -(2**63), 2**63 - 1
UNREAD = {
    "farthest": ([[LEAST, MOST]] * 2, [MOST, LEAST], [[0, 53]] * 2, [2**30, -(2**30)]),
    "empty": ([[30, 20], [2**40, -7]], [7, 2**31 - 1], [[20, 20], [0, 0]], [7, 2**30]),
    "cut": ([[-5, 10], [50, 2**31]], [-(2**31), 2**32], [[0, 10], [50, 53]], [-(2**30), 2**30]),
}


@pytest.mark.parametrize(  # decoding, and forward
    ("T", "placed"), rows("2-farthest", *product((2, 37), UNREAD), (20, "cut"))
)
def test_positions_on_a_device_may_be_anything(T, placed, little_tiles, monkeypatch):
    """The kernels clamp them; `little_tiles` refuses stray addresses."""
    key_range, query_start, meant_range, meant_start = UNREAD[placed]
    monkeypatch.setattr(call, "known_values", lambda _: None)
    torch.manual_seed(0)
    arrays = [torch.randn(2, 2, n, 8, requires_grad=T > 4) for n in (T, 53, 53)]
    found = []
    for ranges, starts in ((key_range, query_start), (meant_range, meant_start)):
        places = {"key_range": torch.tensor(ranges), "query_start": torch.tensor(starts)}
        out = linbias.torch.attention(*arrays, causal=False, **places, implementation="triton")
        gradients = torch.autograd.grad(out.square().sum(), arrays) if T > 4 else ()
        found.append((out, *gradients))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


GAPS = {1_000_003: torch.float32, 2**30 - 53: torch.bfloat16, 37 - 2**30: torch.float32}


@pytest.mark.parametrize(  # decoding, and forward
    ("T", "gap"), rows(f"2-{37 - 2**30}", *product((2, 37), GAPS), (20, 2**30 - 53))
)
def test_a_gap_between_queries_and_keys_changes_lse_only(T, gap, little_tiles):
    """All keys lose the same to it, however large, so that weights and gradients stay."""
    dtype = GAPS[gap]
    torch.manual_seed(0)
    arrays = [torch.randn(1, 2, n, 8, dtype=dtype, requires_grad=T > 4) for n in (T, 53, 53)]
    slopes = torch.tensor([0.5, 0.01], requires_grad=T > 4)
    found = []
    for away in (0, gap):
        start = torch.tensor([53 + away if gap > 0 else away - T])
        given = {"causal": False, "query_start": start, "implementation": "triton"}
        out, lse = linbias.torch.attention(*arrays, slopes, **given, return_lse=True)
        gradients = ()
        if T > 4:
            leaves, loss = (*arrays, slopes), out.square().sum()
            gradients = torch.autograd.grad(loss, leaves, retain_graph=True)
        found.append(((out, *gradients), lse))
    for near, far in zip(found[0][0], found[1][0], strict=True):
        allowed = 2e-5 if near.dtype == torch.float32 else 2.0**-7
        torch.testing.assert_close(far, near, rtol=allowed, atol=allowed)
    lost = abs(gap) * slopes.detach().double()[:, None]
    lse, far_lse = found[0][1], found[1][1]
    torch.testing.assert_close(far_lse.double(), lse.double() - lost, rtol=2e-7, atol=1e-5)
    if T > 4:
        (dslopes,) = torch.autograd.grad(far_lse.sum(), slopes)
        expected_slopes = torch.full((2,), -abs(gap) * float(T))
        torch.testing.assert_close(dslopes, expected_slopes, rtol=1e-4, atol=0)


def inputs_of(left, tolerance=2.0**-24, T=160, **placement):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, len(left), n, 16) for n in (T, 160, 160))
    given = dict.fromkeys(("right", "key_range", "query_start", "key_bound", "seed"))
    given |= {n: torch.tensor(x) for n, x in placement.items()}
    numbers = {"scale": 0.25, "dropout": 0.0, "tolerance": tolerance, "precise": True}
    return Inputs(q, k, v, torch.tensor(left), **given, **numbers)


def visited(left, **options):
    """The first key that each tile of each head visited, and one past the last."""
    inputs = inputs_of(left, **options)
    first, end, rows = triton.visited_keys(inputs, triton.operators.forward(*inputs)[3])
    assert rows == LITTLE.forward.rows
    return first[0], end[0]


def test_the_certificate_leaves_far_keys_of_steep_heads_only(little_tiles):
    first, end = visited([2.0, 0.0])
    assert end.tolist() == [[32, 64, 96, 128, 160]] * 2
    assert first[0].tolist() == [0, 16, 48, 80, 112]
    assert first[1].tolist() == [0] * 5


@pytest.mark.thorough
def test_keys_that_were_not_visited_do_not_count(little_tiles):
    """By what visited_keys says of chunks that look to both sides, with a range for each head."""
    placement = {"key_range": [[[3, 131], [20, 150]]], "query_start": [50]}
    inputs = inputs_of([2.0, 0.5], T=40, right=[1.0, 0.5], **placement)
    out, _, _, counts = triton.operators.forward(*inputs)
    first, end, rows = triton.visited_keys(inputs, counts)
    assert (end - first)[0, 0].max() < 128  # of the steep head
    keys = torch.arange(160)
    for tile in range(2):
        unseen = (keys < first[..., tile, None]) | (keys >= end[..., tile, None])
        changed = inputs._replace(v=inputs.v + 1e6 * unseen[..., None])
        mine = slice(tile * rows, (tile + 1) * rows)
        assert torch.equal(triton.operators.forward(*changed)[0][:, :, mine], out[:, :, mine])


def row_ranges(*ranges, T=160):
    """query_range [1, T, 2]: tile after tile, the range of its rows."""
    each = np.repeat(np.array(ranges), LITTLE.forward.rows, 0)
    return each[None, :T].tolist()


def test_a_tile_ends_with_the_keys_that_its_rows_see(little_tiles):
    """Flat heads: nothing else stops them. Blocks of 16 keys."""
    ranges = row_ranges((0, 160), (20, 64), (5, 100), (0, 20), (50, 50))
    first, end = visited([0.0, 0.0], query_range=ranges)
    assert first.tolist() == [[0, 16, 0, 0, 128]] * 2
    assert end.tolist() == [[32, 64, 96, 128, 160]] * 2
    ranges = row_ranges((0, 160), (20, 64), (5, 100), (140, 160), (50, 50))
    first, end = visited([0.0, 0.0], query_range=ranges, right=[0.0, 0.0])
    assert first.tolist() == [[0, 16, 0, 96, 128]] * 2
    assert end.tolist() == [[160, 64, 112, 160, 160]] * 2


def test_rows_that_see_nothing_further_out_let_their_tile_stop(little_tiles):
    """Every other row sees no key at all, or the near ones only."""
    first, _ = visited([2.0])
    ranges = np.tile([[0, 160]], (160, 1))
    ranges[::2] = [[0, 0]]
    assert torch.equal(visited([2.0], query_range=[ranges.tolist()])[0], first)
    ranges[::2, 0] = np.arange(160)[::2] // 32 * 32
    ranges[::2, 1] = 160
    assert torch.equal(visited([2.0], query_range=[ranges.tolist()])[0], first)


def test_rows_that_saw_nothing_yet_do_not_let_their_tile_stop(little_tiles):
    """All rows but one lose nothing to keys that far; that one sees no others."""
    ranges = np.tile([[0, 160]], (160, 1))
    ranges[150] = [0, 3]
    first, _ = visited([2.0], query_range=[ranges.tolist()])
    assert first[0].tolist() == [0, 16, 48, 80, 0]


@pytest.mark.parametrize("causal", rows("False", (False,), (True,)))
def test_blocks_that_no_row_of_a_tile_sees_are_not_read(causal, little_tiles):
    """They are NaN here, the near ones among them; nor does backward read them."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 8) for n in (64, 160, 160))
    seen = ((96, 111), (3, 30)) if causal else ((128, 160), (16, 40))
    ranges = torch.tensor(row_ranges(*seen, T=64))
    start = torch.tensor([112] if causal else [48])
    read = torch.zeros(160, dtype=torch.bool)
    for first, end in seen:
        read[first // 16 * 16 : -(-end // 16) * 16] = True
    poisoned = [q, *(x.masked_fill(~read[:, None], torch.nan) for x in (k, v))]
    found = []
    for arrays, name in (((q, k, v), "dense"), (poisoned, "triton")):
        arrays = [x.requires_grad_() for x in arrays]
        given = {"query_range": ranges, "query_start": start, "causal": causal, "tolerance": 0.0}
        out = linbias.torch.attention(*arrays, [0.1], **given, implementation=name)
        dq, dk, dv = torch.autograd.grad(out.square().sum(), arrays)
        found.append((out, dq, dk[:, :, read], dv[:, :, read]))
    for truth, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)


def test_tiles_that_see_no_key_visited_none(little_tiles):
    first, end = visited([1.0], T=40, key_range=[[[7, 7]]], query_start=[0])
    assert torch.equal(first, end)


@pytest.mark.parametrize(("scale", "key", "query"), [(1e24, 1e-23, 1.0), (1e6, 2e-23, 4e18)])
def test_keys_whose_squares_underflow_are_not_forgotten(scale, key, query, little_tiles):
    q, k, v = (torch.zeros(1, 1, 160, size) for size in (16, 16, 4))
    q[...] = query
    k[:, :, 0], v[:, :, 0] = key, 1.0
    ours, truth = (
        linbias.torch.attention(q, k, v, [1.0], scale=scale, implementation=name)
        for name in ("triton", "dense")
    )
    torch.testing.assert_close(ours, truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("slope", "tolerance"), [(9.0, 0.0), (np.nan, 2.0**-24)])
def test_no_tolerance_and_no_slope_visit_every_key(slope, tolerance, little_tiles):
    first, end = visited([slope], tolerance=tolerance)
    assert (first == 0).all() and end[0].tolist() == [32, 64, 96, 128, 160]


@pytest.mark.parametrize(
    ("keys", "tolerance"),
    rows("far_aligned-0.01", *product(("normal", "far_aligned"), (1e-2, 1e-4))),
)
def test_dropped_mass_is_at_most_the_tolerance(keys, tolerance, little_tiles):
    case = Case("mass", B=1, H=2, G=2, T=40, S=160, causal=False, left="steep", keys=keys)
    inputs, truth, _ = expected(case, "float32")
    lse = TorchSubject("triton").forward(inputs, case, "float32", tolerance)[0]["lse"]
    loss = -torch.expm1(lse.detach().double() - torch.from_numpy(truth[0]["lse"]))
    assert loss.max() <= tolerance + 1e-5
    assert loss.min() >= -1e-5


@pytest.mark.parametrize("causal", (True, False))
def test_gradients_lose_what_the_tolerance_allows_where_keys_share_a_part(causal, little_tiles):
    case = Case("shared", B=1, H=2, G=1, T=40, S=160, causal=causal, left="steep")
    check_gradients_where_keys_share_a_part(TorchSubject("triton"), case, "float32", 1e2, 2.0**-6)


@pytest.mark.parametrize(  # decoding, and forward
    ("T", "pattern"), rows("1-equal 20-equal", *product((1, 20), ("equal", "far")))
)
def test_the_mass_that_is_missing_lies_just_below_the_tolerance(pattern, T, little_tiles):
    def run(q, k, v, slopes, query_start, **options):
        q, k, v = (torch.tensor(x, dtype=torch.float32) for x in (q, k, v))
        bound = k.norm(dim=-1).amax(-1) * (1 + 1e-6)
        placed = {"query_start": torch.tensor(query_start), "key_bound": bound}
        found = linbias.torch.attention(
            q, k, v, slopes, **placed, **options, implementation="triton", return_lse=True
        )
        return found[1].double().numpy()

    if pattern == "equal":
        check_where_attained(run, pattern, T, 192, 1, 0.4, (0.2, 0.08, 0.02), slope=0.04)
    else:
        check_where_attained(run, pattern, T, 640, 1, -1, (0.1,), slope=0.05)


def test_two_sides_share_the_tolerance():
    shares = [log_share(*asked) for asked in ((0.25, False), (0.25, True), (0.0, True))]
    assert shares == [-2, -3, -np.inf]


@pytest.mark.parametrize("where", rows("k", *"qkv"))
def test_values_that_are_not_finite_show_in_all_that_meets_them(where, little_tiles):
    """However steep the head: in rows and gradients of every row and key, and in no other head."""
    torch.manual_seed(0)
    arrays = {name: torch.randn(1, 2, 160, 8) for name in "qkv"}
    arrays[where][0, 1, 3, 2] = torch.nan
    leaves = {name: array.requires_grad_() for name, array in arrays.items()}
    out = linbias.torch.attention(**leaves, slopes=[3.0, 3.0], implementation="triton")
    dq, dk, dv = torch.autograd.grad(out.sum(), leaves.values())
    assert all(torch.isfinite(x[0, 0]).all() for x in (out, dq, dk, dv))
    meets = slice(3, 4) if where == "q" else slice(3, None)
    for found in (out, dq):
        assert not torch.isfinite(found[0, 1, meets]).all(-1).any()
    if where == "q":
        assert not torch.isfinite(dk[0, 1, :4]).all(-1).any()


def test_keys_outside_the_key_range_may_hold_anything(little_tiles):
    case = little(by_name("range-symmetric"))
    check_hidden_keys_may_hold_anything(TorchSubject("triton"), case)


@pytest.mark.parametrize(
    "layout", ["heads last", pytest.param("every second element", marks=pytest.mark.thorough)]
)
def test_strides_do_not_matter(layout, little_tiles):
    check_case(TorchSubject("triton"), little(by_name("symmetric")), "float32", layout)


def test_slope_gradients_are_left_out_where_no_one_asks(little_tiles):
    leaves = [torch.randn(1, 2, 20, 8, requires_grad=True) for _ in "qkv"]
    left = torch.tensor([0.5, 0.25], requires_grad=True)
    gradients = []
    for slopes in (left, left.detach()):
        out = linbias.torch.attention(*leaves, slopes, implementation="triton")
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_operator_passes_opcheck_and_compiles_whole(little_tiles):
    q, k, v = (torch.randn(1, n, 9, 8, requires_grad=True) for n in (2, 1, 1))
    left = torch.rand(2, requires_grad=True)
    arrays = dict.fromkeys(("right", "key_range", "query_start", "key_bound", "seed"))
    inputs = Inputs(q, k, v, left, **arrays, scale=0.3, dropout=0.0, tolerance=1e-7, precise=True)
    torch.library.opcheck(triton.operators.forward, tuple(inputs))

    def run(q, k, v, left):
        return linbias.torch.attention(q, k, v, left, implementation="triton").square().sum()

    leaves, compiled = (q, k, v, left), torch.compile(run, fullgraph=True, backend="aot_eager")
    both = (torch.autograd.grad(f(*leaves), leaves) for f in (run, compiled))
    for eager, traced in zip(*both, strict=True):
        torch.testing.assert_close(traced, eager)


@pytest.mark.parametrize("T", (1, 3))
def test_jacobians_of_one_row_and_of_expanded_arrays(T, little_tiles):
    q, k, v = torch.randn(1, 1, T, 16), torch.randn(1, 1, 1, 16), torch.randn(1, 1, 40, 16)
    k = k.expand(v.shape)

    def jacobian(name):
        attend = linbias.torch.attention
        return torch.func.jacrev(lambda q: attend(q, k, v, [0.5], implementation=name)[..., :2])(q)

    torch.testing.assert_close(jacobian("triton"), jacobian("dense"))
