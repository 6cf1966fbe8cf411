"""Far blocks in shorter floats, in Triton's interpreter; compiled: test_triton_gpu.py."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

import linbias.torch
from budget import assert_within_budget
from cases import Case, make_inputs, round_to
from contract import SEED, check_case, rows
from linbias.kernels.triton import sizes
from linbias.torch.impl import triton
from plain import plain_attention
from test_torch import TorchSubject
from truth import true_attention

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles here: see test_triton_gpu.py", allow_module_level=True)

from interpreter import repaired
from linbias.kernels.triton import forward
from test_triton import LITTLE

# The interpreter computes with NumPy, which warns of inf - inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

COARSE = LITTLE._replace(coarse=True)


@pytest.fixture
def num_coarse(monkeypatch):
    """The switch on, and tiles so small that short cases have several: how many blocks the calls
    since the last question took in shorter floats.
    """
    calls = []
    fill = forward.forward

    def counted(call, out, row_max, log_sum, visited):
        fill(call, out, row_max, log_sum, visited)
        num_tiles = -(-call.q.shape[2] // call.sizes.forward.rows)
        counts = visited.split(num_tiles, 2)
        calls.append(int((counts[0] - counts[1]).clamp(min=0).sum()))

    def since() -> int:
        total = sum(calls)
        calls.clear()
        return total

    monkeypatch.setattr(triton, "INTERPRETED", ("float16", "bfloat16", "float32"))
    monkeypatch.setattr(forward, "FEWEST_BLOCKS", 2)
    monkeypatch.setattr(forward, "forward", counted)
    with sizes.forced(COARSE), repaired():
        yield since


STEEP = {"B": 1, "H": 2, "G": 1, "T": 40, "S": 180, "left": "steep"}
BOTH = {**STEEP, "causal": False}
FLAT = {"B": 1, "H": 2, "G": 1, "T": 35, "S": 431}
CASES = (
    Case("causal", **STEEP),
    Case("symmetric", **BOTH, query_start=(70,)),
    Case("asymmetric", **BOTH, right="halved", query_start=(60,)),
    Case("range", **{**BOTH, "B": 2}, key_range=((20, 150), (5, 180)), query_start=(80, 70)),
    Case("prefix", **STEEP, rows="prefix"),
    Case("gaps", **STEEP, places="gaps"),
    Case("gaps-symmetric", **BOTH, places="gaps"),
    Case("flat", **FLAT),
    Case("past-the-keys", **FLAT, query_start=(440,)),
    Case("keys-off-center", **FLAT, keys="off_center"),
    Case("small-scores", **FLAT, logits=0.1),
    Case("large-head", **STEEP, D=64),
)


@pytest.mark.parametrize("case", rows("asymmetric gaps", *((case,) for case in CASES)))
def test_float32_is_as_exact_with_far_blocks_in_bfloat16(case, num_coarse):
    check_case(TorchSubject("triton"), case, "float32", again=False)
    assert num_coarse() > 0


NARROW = {**FLAT, "S": 250, "D": 32, "E": 32, "logits": 0.1}
NARROW_CASES = (
    Case("causal", **NARROW),
    Case("symmetric", **{**NARROW, "causal": False}, query_start=(100,)),
    Case("gaps", **NARROW, places="gaps"),
)


@pytest.mark.parametrize(
    ("case", "dtype"),
    rows(
        "causal-bfloat16",
        *((case, "bfloat16") for case in NARROW_CASES),
        (NARROW_CASES[0], "float16"),
    ),
)
def test_sixteen_bits_are_as_exact_with_far_blocks_in_eight(case, dtype, num_coarse):
    check_case(TorchSubject("triton"), case, dtype, again=False)
    assert num_coarse() > 0


@pytest.mark.thorough
def test_keys_that_share_a_part_lose_no_more_than_plain_attention(num_coarse):
    case = CASES[0]
    inputs = make_inputs(case, "float32")
    q, k = round_to(inputs.q / 1e2, "float32"), round_to(inputs.k + 1e2, "float32")
    inputs = replace(inputs, q=q, k=k)
    truth = true_attention(inputs, case, seed=SEED)
    keys = np.arange(case.S)
    plains = [
        plain_attention(inputs, case, torch.float32, SEED, turn, order)
        for turn, order in ((0, keys), (4, keys[::-1].copy()), (8, keys))
    ]
    found = TorchSubject("triton").run(inputs, case, "float32")
    assert num_coarse() > 0
    for kind in (0, 1):
        for name, true in truth[kind].items():
            others = [plain[kind][name] for plain in plains]
            assert_within_budget(name, found[kind][name], true, others, "float32", 2.0**-24)


def results(arrays, **options):
    """Out, lse and the gradients with the switch on, then without it."""
    options |= {"implementation": "triton", "return_lse": True}
    found = []
    for chosen in (COARSE, LITTLE):
        with sizes.forced(chosen):
            leaves = [x.clone().requires_grad_() for x in arrays]
            both = linbias.torch.attention(*leaves, [0.5, 0.25], **options)
            loss = both[0].sum() + both[1].sum()
            found.append([*both, *torch.autograd.grad(loss, leaves)])
    return found


def drawn(dtype="float32"):
    torch.manual_seed(0)
    D = 16 if dtype == "float32" else 32  # 8 bits ask for more
    return [torch.randn(1, 2, n, D).to(getattr(torch, dtype)) for n in (40, 200, 200)]


def largest_score(arrays) -> None:
    """|scores| up to 1e8, of far keys alone."""
    arrays[1][:, :, :16] *= 1e8 / (arrays[0] @ arrays[1][:, :, :16].mT).abs().max() * 16**0.5


def common_score(arrays) -> None:
    """All keys share a part, so that far ones hold little for all their scores of thousands."""
    arrays[1] += 1e3


def long_query(arrays) -> None:
    arrays[0][..., 3::32, :] *= 8  # in every tile scores above 2^5


def query_not_a_number(arrays) -> None:
    arrays[0][..., 3::32, 5] = torch.nan


def far_key_infinite(arrays) -> None:
    arrays[1][0, :, 2, 5] = torch.inf


def far_value_not_a_number(arrays) -> None:
    arrays[2][0, :, 2, 5] = torch.nan


SPARED = (("tolerance", 0.0), ("tolerance", 1e-8), ("dropout", 0.1))
SPOILT = (
    largest_score,
    common_score,
    long_query,
    query_not_a_number,
    far_key_infinite,
    far_value_not_a_number,
)


@pytest.mark.parametrize(
    "spoil",
    [
        x if x in (common_score, long_query) else pytest.param(x, marks=pytest.mark.thorough)
        for x in SPOILT
    ],
)
def test_what_could_overflow_or_is_not_finite_makes_all_blocks_precise(spoil, num_coarse):
    arrays = drawn()
    spoil(arrays)
    for ours, precise in zip(*results(arrays), strict=True):
        torch.testing.assert_close(ours, precise, rtol=0, atol=0, equal_nan=True)
    assert num_coarse() == 0


@pytest.mark.parametrize(
    ("name", "number", "dtype"),
    rows(
        "tolerance-1e-08-float32",
        *((name, number, dtype) for dtype in ("float32", "bfloat16") for name, number in SPARED),
    ),
)
def test_small_tolerances_and_dropout_make_all_blocks_precise(name, number, dtype, num_coarse):
    arrays = [(x * 0.2).requires_grad_() for x in drawn(dtype)]
    linbias.torch.attention(*arrays, [0.5, 0.25], implementation="triton", **{name: number})
    assert num_coarse() == 0
    linbias.torch.attention(*arrays, [0.5, 0.25], implementation="triton")
    assert num_coarse() > 0


@pytest.mark.parametrize("size", rows("1e-15", (1e-15,), (1e15,)))
def test_eight_bits_neither_overflow_nor_vanish(size, num_coarse):
    q, k, v = (x * 0.2 for x in drawn("bfloat16"))
    arrays = (q * size, k / size, v * size)
    for ours, precise in zip(*results(arrays), strict=True):
        largest = precise.abs().max()
        assert largest > 0 and (ours - precise).abs().max() <= 2.0**-6 * largest
    assert num_coarse() > 0


@pytest.mark.parametrize("dtype", rows("bfloat16", ("float32",), ("bfloat16",)))
def test_backward_takes_the_same_blocks_in_shorter_floats(dtype, num_coarse):
    leaves = [(x * 0.2).requires_grad_() for x in drawn(dtype)]
    out = linbias.torch.attention(*leaves, [0.5, 0.25], implementation="triton")
    assert num_coarse() > 0
    coarse = torch.autograd.grad(out.square().sum(), leaves, retain_graph=True)
    with sizes.forced(LITTLE):
        precise = torch.autograd.grad(out.square().sum(), leaves)
    allowed = 2e-6 if dtype == "float32" else 2.0**-6
    for ours, other in zip(coarse, precise, strict=True):
        assert not torch.equal(ours, other)
        torch.testing.assert_close(ours, other, rtol=0, atol=allowed * other.abs().max())


def test_visited_says_which_keys_are_precise(num_coarse):
    options = {"causal": False, "implementation": "triton"}
    found = linbias.torch.visited(*drawn(), [0.5, 0.25], **options)
    near = (160 + torch.arange(0, 40, LITTLE.forward.rows)) // LITTLE.forward.keys
    assert num_coarse() > 0 and (found.first < found.precise_first).any()
    assert (found.first <= found.precise_first).all()
    assert (found.precise_first <= near * LITTLE.forward.keys).all()
    ranges = torch.tensor([0, 60]).expand(40, 2)  # beyond near blocks, of which none is read
    far = linbias.torch.visited(*drawn(), [0.5, 0.25], query_range=ranges, **options)
    assert (far.precise_first < 60).all()
    with sizes.forced(LITTLE):
        whole = linbias.torch.visited(*drawn(), [0.5, 0.25], **options)
    assert torch.equal(whole.precise_first, whole.first)
    assert torch.equal(whole.precise_end, whole.end)


def test_two_sides_share_what_shorter_floats_may_hold(num_coarse):
    arrays = [torch.randn(1, 1, n, 16) * 0.2 for n in (40, 600, 600)]
    one, both = (
        linbias.torch.visited(*arrays, [0.05], implementation="triton", **sides).precise_first
        for sides in ({}, {"causal": False, "right_slopes": [8.0]})
    )
    assert num_coarse() > 0 and (both <= one).all() and (both < one).any()


def test_it_is_on_where_a_device_has_shown_it(monkeypatch):
    q = torch.zeros(1, 1, 32, 32)
    assert not sizes.COARSE and not triton._sizes(q, q).coarse
    monkeypatch.setattr(sizes, "COARSE", {("float32", (0, 0))})
    assert triton._sizes(q, q).coarse and not triton._sizes(q.half(), q.half()).coarse
