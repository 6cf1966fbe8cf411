"""`linbias.torch.attention`: implementations against the contract, and what only PyTorch has."""

import functools
from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention

import cases
import linbias
import linbias.torch
from budget import assert_within_budget
from cases import CASES, REPEATED, arguments, by_name, far_block, make_inputs, short
from contract import (
    SEED,
    check_case,
    check_certificate_holds,
    check_hidden_keys_may_hold_anything,
    check_results,
    expected,
    long_rows,
    rows,
)
from linbias.compat.flash_attn import flash_attn_with_kvcache
from linbias.torch.constant import constant
from positions import as_tensors, check_definition

IMPLEMENTATIONS = ("dense", "blocked", "cpu", "sdpa")
DTYPES = ("float64", "float32", "bfloat16", "float16")


class TorchSubject:
    def __init__(self, implementation: str, device: str = "cpu", fixed: tuple[str, ...] = ()):
        self.implementation = implementation
        self.device = device
        self.fixed = fixed  # arguments that take no gradient

    def forward(self, inputs, case, dtype, tolerance=None, layout="plain"):
        narrow = getattr(torch, dtype)
        wide = torch.float64 if dtype == "float64" else torch.float32
        leaves = {
            name: _lay_out(torch.tensor(array, dtype=narrow if name in "qkv" else wide), layout)
            .to(self.device)
            .requires_grad_(name not in self.fixed)
            for name in ("q", "k", "v", "left", "right")
            if (array := getattr(inputs, name)) is not None
        }
        for name in ("positions", "query_positions") if case.places else ():
            places = torch.tensor(getattr(inputs, name), device=self.device)
            leaves[name] = places.requires_grad_()
        placement = {n: torch.tensor(x, device=self.device) for n, x in case.placement.items()}
        seed = torch.tensor(SEED, device=self.device)
        with mock.patch("linbias.torch.call.draw_seed", lambda _: seed):
            options = {"causal": case.causal, "scale": case.scale, "dropout": case.dropout}
            options |= {"tolerance": tolerance, "implementation": self.implementation, **placement}
            out, lse = linbias.torch.attention(**arguments(leaves), **options, return_lse=True)
        assert (out.dtype, lse.dtype) == (narrow, wide)
        return {"out": out, "lse": lse}, leaves

    def run(self, inputs, case, dtype, *, tolerance=None, layout="plain"):
        results, leaves = self.forward(inputs, case, dtype, tolerance, layout)
        out, lse = results.values()
        seen = lse.detach() > -torch.inf
        dlse = torch.tensor(inputs.dlse, dtype=lse.dtype, device=self.device) * seen
        dout = torch.tensor(inputs.dout, dtype=out.dtype, device=self.device)
        torch.autograd.backward((out, lse), (dout, dlse))
        gradients = {name: leaf.grad for name, leaf in leaves.items()}
        return _to_numpy(results), _to_numpy(gradients)


def _lay_out(array: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with other strides."""
    if array.dim() != 4 or layout == "plain":
        return array
    if layout == "heads last":  # as a projection gives it: [B, T, H, D] seen as [B, H, T, D]
        return array.transpose(1, 2).contiguous().transpose(1, 2)
    padded = array.new_full((*array.shape[:3], 2 * array.shape[3] + 1), torch.nan)
    padded[..., 1::2] = array  # every second element, between NaN
    return padded[..., 1::2]


def _to_numpy(tensors):
    return {
        name: tensor if tensor is None else tensor.detach().cpu().double().numpy()
        for name, tensor in tensors.items()
    }


OURS = ("dense", "blocked", "cpu")  # with our dropout, and without products of hidden keys


def pairs(cases, of_sdpa):
    """Implementations and cases: for `sdpa` those that its mask makes, without dropout."""
    of_sdpa = [case for case in of_sdpa if not case.dropout]
    return [(i, case) for i in OURS for case in cases] + [("sdpa", case) for case in of_sdpa]


def is_quick(implementation, case):
    """For `make check` are the long cases of `dense`, and those that repeat parts of others."""
    return case in short() or (implementation != "dense" and case.name not in REPEATED)


@pytest.mark.parametrize(("implementation", "case"), rows(is_quick, *pairs(CASES, short())))
def test_contract_in_float32(implementation, case, poisoned_memory):
    check_case(TorchSubject(implementation), case, "float32")


OTHER_DTYPES = ("float64", "bfloat16", "float16")
SHORT = [case for case in short() if case.name != "slopes-extreme"]
SDPA = [
    by_name(n) for n in ("T-above-S", "asymmetric-per-batch", "right-padding", "extreme-logits")
]


def is_its_turn(implementation, case, dtype):
    """`make test` runs every case in one dtype after the other, `make check` in all of them."""
    cases = SDPA if implementation == "sdpa" else SHORT
    return OTHER_DTYPES[cases.index(case) % 3] == dtype


@pytest.mark.parametrize(
    ("implementation", "case", "dtype"),
    rows(is_its_turn, *((*pair, dtype) for pair in pairs(SHORT, SDPA) for dtype in OTHER_DTYPES)),
)
def test_contract_in_other_dtypes(implementation, case, dtype, poisoned_memory):
    if dtype == "float16" and case.logits > 100:
        pytest.skip("q overflows float16")
    check_case(TorchSubject(implementation), case, dtype)


# Dtypes in which `make test` runs long cases, whose truth tests share.
SHARED = {"long": ("float32",), "long-symmetric": ("float32", "bfloat16")}


DECODING = (
    by_name("long-cache", T=1),
    by_name("long-cache", T=4, D=64, E=32, H=6, G=2),
    by_name("long-cache", T=2, causal=False, right="halved"),
    by_name("long-cache", T=1, causal=False, left="hidden", right="paper"),
    by_name("long-cache", T=3, key_range=((0, 1500), (700, 2053))),
    by_name("long-cache", T=4, key_range=((5, 7), (3, 3))),
)


def check_decoding(implementation, case, dtype, bounded):
    """A call without gradients, with a `key_bound` or without, is within the budget."""
    inputs = expected(case, dtype)[0]
    arrays = {n: torch.tensor(getattr(inputs, n), dtype=getattr(torch, dtype)) for n in "qkv"}
    given = {"slopes": inputs.left, "right_slopes": inputs.right, "causal": case.causal}
    given |= {n: torch.tensor(x) for n, x in case.placement.items()}
    if bounded:
        given["key_bound"] = arrays["k"].double().norm(dim=-1).amax(-1) * 1.001
    results = linbias.torch.attention(
        **arrays, **given, implementation=implementation, return_lse=True
    )
    check_results(_to_numpy(dict(zip(("out", "lse"), results, strict=True))), case, dtype)


@pytest.mark.parametrize("bounded", (False, True))
@pytest.mark.parametrize(
    ("index", "dtype"),
    rows(lambda index, dtype: dtype in ("float32", DTYPES[index % 4]), *product(range(6), DTYPES)),
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decoding_from_a_long_cache(implementation, index, dtype, bounded):
    check_decoding(implementation, DECODING[index], dtype, bounded)


def test_a_key_bound_spares_reading_far_keys():
    """Far keys that nobody may read are NaN here."""
    q, k, v = (torch.randn(1, 2, n, 16) for n in (1, 4096, 4096))
    bound = k.norm(dim=-1).amax(-1)
    expected_out = linbias.torch.attention(q, k, v, [0.5, 0.25])
    k[:, :, :2048], v[:, :, :2048] = torch.nan, torch.nan
    out = linbias.torch.attention(q, k, v, [0.5, 0.25], key_bound=bound, implementation="cpu")
    torch.testing.assert_close(out, expected_out)


@pytest.mark.parametrize(
    ("implementation", "name", "dtype"),
    rows(
        lambda i, name, dtype: is_quick(i, by_name(name)) and dtype in SHARED.get(name, DTYPES),
        *product(
            IMPLEMENTATIONS,
            ("multi-query", "symmetric", "long", "long-symmetric", "dropout"),
            DTYPES,
        ),
    ),
)
def test_without_gradients_the_result_is_within_the_budget_too(implementation, name, dtype):
    """The compiled core takes faster products then, where the CPU has them."""
    case = by_name(name)
    if implementation == "sdpa":
        case = replace(case, dropout=0.0)
    inputs = expected(case, dtype)[0]
    with torch.no_grad():
        results = TorchSubject(implementation).forward(inputs, case, dtype)[0]
    check_results(_to_numpy(results), case, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    rows(
        lambda name, dtype: dtype in SHARED.get(name, DTYPES),
        *product(("long", "long-symmetric", "right-padding"), DTYPES),
    ),
)
def test_gradients_of_sdpa_with_fixed_slopes(name, dtype):
    """PyTorch takes other code then: a fused backward."""
    case = by_name(name)
    inputs, truth, plains = expected(case, dtype)
    gradients = TorchSubject("sdpa", fixed=("left",)).run(inputs, case, dtype)[1]
    assert gradients["left"] is None
    for n in "qkv":
        plain = [p[1][n] for p in plains]
        assert_within_budget(n, gradients[n], truth[1][n], plain, dtype)


@pytest.mark.parametrize("layout", ("heads last", "every second element"))
@pytest.mark.parametrize("name", ("T-below-S", "symmetric", "filled-cache"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strides_do_not_matter(implementation, name, layout):
    check_case(TorchSubject(implementation), by_name(name), "float32", layout)


LONG = [case for case in CASES if case.T * case.S > 5000 and not case.dropout]


@pytest.mark.parametrize("case", long_rows(LONG))
@pytest.mark.parametrize("implementation", ("blocked", "cpu"))
def test_dropped_mass_is_at_most_the_tolerance(implementation, case):
    """Smaller tolerances: test_torch_visited.py. Near the bound: test_dropped_mass.py."""
    check_certificate_holds(TorchSubject(implementation), case, 1e-2)


VANISHING = [
    *(("float32", *sizes) for sizes in cases.VANISHING),
    *(("float64", *sizes) for sizes in cases.VANISHING_WIDE),
]


@pytest.mark.parametrize(("dtype", "q_size", "k_size"), VANISHING)
@pytest.mark.parametrize("implementation", ("blocked", "cpu"))
def test_keys_count_although_squares_of_entries_vanish(implementation, dtype, q_size, k_size):
    arrays, slope, scale = far_block(q_size, k_size)
    expected_out = linbias.attention(*arrays, [slope], scale=scale)
    tensors = [torch.tensor(x, dtype=getattr(torch, dtype))[None] for x in arrays]
    given = {"scale": scale, "implementation": implementation}
    out = linbias.torch.attention(*tensors, [slope], **given)
    np.testing.assert_allclose(out[0], expected_out, atol=1e-5)
    if implementation == "cpu":
        return
    # The bound is a number, not NaN: far keys of a steep head are left out all the same.
    steep = linbias.torch.visited(*tensors, [1.0], **given)
    assert (steep.end - steep.first).max() < 1000


@pytest.mark.parametrize("implementation", ("dense", "blocked", "cpu"))
@pytest.mark.parametrize("start", (60, 3))
def test_a_key_that_an_infinite_slope_hides_may_hold_nan(implementation, start):
    """And so may a query that sees no other keys."""
    q, k, v = torch.randn(3, 1, 1, 40, 4, dtype=torch.float64)
    options = {"slopes": [torch.inf], "right_slopes": torch.tensor([0.1]), "causal": False}
    options |= {"query_start": torch.tensor([start]), "return_lse": True}
    run = functools.partial(linbias.torch.attention, **options, implementation=implementation)
    expected = run(q, k, v)
    k[..., 0, 1] = torch.nan
    q[..., 39, 2] = torch.nan  # it stands behind the last key
    for found, wanted in zip(run(q, k, v), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("where", ("q", "k", "v"))
@pytest.mark.parametrize("value", (torch.nan, torch.inf))
@pytest.mark.parametrize("implementation", OURS)
def test_values_that_are_not_finite_show_in_every_row_that_sees_them(implementation, where, value):
    arrays = {name: torch.randn(1, 2, 600, 8) for name in "qkv"}
    arrays[where][0, 1, 3, 2] = value
    out = linbias.torch.attention(**arrays, slopes=[0.5, 0.5], implementation=implementation)
    assert torch.isfinite(out[0, 0]).all()
    rows = torch.isfinite(out[0, 1]).all(-1)
    is_nan = value != value
    if where == "q":
        assert rows.sum() >= 599 and not (is_nan and rows[3])
    elif where == "v" or is_nan:
        assert not rows[3:].any()
    if where == "k" and is_nan:
        assert rows[:3].all()


def test_later_keys_change_no_bit_of_the_tiles_before_them():
    """The certificate of `blocked` knows the keys to the left of a tile only."""
    q, k, v = torch.randn(3, 2, 4, 700, 8)
    first = linbias.torch.attention(q, k, v, implementation="blocked")
    k[:, :, 600:], v[:, :, 600:] = 7.0, -7.0
    changed = linbias.torch.attention(q, k, v, implementation="blocked")
    assert torch.equal(changed[:, :, :512], first[:, :, :512])
    assert not torch.equal(changed[:, :, 600:], first[:, :, 600:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_keys_outside_the_key_range_may_hold_anything(implementation):
    check_hidden_keys_may_hold_anything(TorchSubject(implementation), by_name("range-symmetric"))


def test_dropout_obeys_the_seed_and_keeps_the_mean():
    q, k, v = torch.zeros(1, 1, 64, 4), torch.zeros(1, 1, 64, 4), torch.ones(1, 1, 64, 1)
    run = functools.partial(linbias.torch.attention, q, k, v, [0.0], dropout=0.25, causal=False)
    torch.manual_seed(5)
    first, second = run(), run()
    torch.manual_seed(5)
    assert torch.equal(run(), first)
    assert not torch.equal(second, first)
    # 4,096 weights: the mean of kept / (1 - p) has a standard deviation of 0.009.
    assert abs(first.mean().item() - 1) < 0.05


def test_autocast_casts_as_scaled_dot_product_attention_does():
    q, k, v = torch.randn(3, 1, 2, 9, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = linbias.torch.attention(q, k.bfloat16(), v, return_lse=True)
        assert out.dtype == torch.nn.functional.scaled_dot_product_attention(q, k, v).dtype
        assert linbias.torch.attention(q.double(), k.double(), v.double()).dtype == torch.float64
    assert lse.dtype == torch.float32
    expected = linbias.torch.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert torch.equal(out, expected)


def test_constant_slopes_stay_on_their_device():
    """The meta device stands for a GPU; what tracers and transforms see must not stay."""
    device = torch.device("meta")

    def make(dtype=torch.float32):
        return constant((0.5, 0.25, 0.125), dtype, device)

    torch.func.grad(lambda x: x * make().sum())(torch.ones((), device=device))
    with torch.inference_mode():
        kept = make()
    assert type(kept) is torch.Tensor and not kept.is_inference()
    assert make() is kept and torch.func.debug_unwrap(kept) is kept
    with FakeTensorMode():
        assert type(make()) is FakeTensor
    assert make(torch.float64).dtype == torch.float64


@pytest.mark.parametrize("inference", (False, True))
def test_slopes_that_changed_since_the_last_call_are_checked_again(inference):
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    with torch.inference_mode(inference):
        slopes = torch.tensor([0.5, 0.25])
        for wrong in (slopes.clone(), slopes):
            linbias.torch.attention(q, k, v, slopes)
            wrong[1] = -0.25
            with pytest.raises(ValueError, match=r"slopes must be at least 0 .*, got -0.25"):
                linbias.torch.attention(q, k, v, wrong)
        with pytest.raises(ValueError, match="right_slopes must be"):
            linbias.torch.attention(q, k, v, causal=False, right_slopes=slopes)


UNCOUNTED = {
    "data": lambda slopes: slopes.data.fill_(-0.25),
    "SGD": lambda slopes: torch.optim.SGD([slopes], lr=1.0, fused=True).step(),
    "AdamW": lambda slopes: torch.optim.AdamW([slopes], lr=1.0, fused=True).step(),
}


@pytest.mark.parametrize("change", UNCOUNTED.values(), ids=UNCOUNTED)
def test_changes_of_slopes_that_pytorch_does_not_count_are_checked(change):
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    slopes = torch.nn.Parameter(torch.tensor([0.5, 0.25]))
    slopes.grad = torch.ones(2)
    linbias.torch.attention(q, k, v, slopes)
    change(slopes)
    with pytest.raises(ValueError, match=r"slopes must be at least 0 \(or inf\), got -0"):
        linbias.torch.attention(q, k, v, slopes)


@pytest.mark.parametrize("bounded", (False, True))
@pytest.mark.parametrize("S", (1, 37, 64, 65))
@pytest.mark.parametrize("start", (-300, -1, 0, 36, 70))
def test_one_query_stands_anywhere_around_few_keys(start, S, bounded):
    """Before, among and behind them: the core asks about all blocks but that of the query."""
    q, k, v = torch.randn(3, 2, 2, S, 20, dtype=torch.float64)
    q, starts = q[:, :, :1] * 3, torch.tensor([start, start + 1])
    bound = k.norm(dim=-1).amax(-1) * 1.001 if bounded else None
    given = {"slopes": [0.5, 0.01], "causal": False, "query_start": starts}
    out = linbias.torch.attention(q, k, v, **given, key_bound=bound, implementation="cpu")
    given["query_start"] = starts.numpy()
    truth = linbias.attention(*(x.numpy() for x in (q, k, v)), **given)
    np.testing.assert_allclose(out, truth, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("default", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("kind", (list, tuple, np.array))
def test_slopes_are_not_rounded_to_the_default_dtype(kind, default):
    q, k, v = torch.randn(3, 1, 2, 50, 8, dtype=torch.float64)
    lengths = torch.tensor([0, 50])
    expected = linbias.torch.attention(q, k, v, torch.tensor([0.1, 0.3], dtype=torch.float64))
    torch.set_default_dtype(default)
    try:
        out = linbias.torch.attention(q, k, v, kind([0.1, 0.3]))
        packed = (x[0].transpose(0, 1) for x in (q, k, v))
        parts = linbias.torch.attention_varlen(*packed, lengths, lengths, kind([0.1, 0.3]))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(out, expected)
    torch.testing.assert_close(parts.transpose(0, 1), expected[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", OURS)
def test_the_largest_dropout_keeps_hardly_any_weight(implementation):
    q, k, v = torch.randn(3, 2, 2, 50, 8)
    out = linbias.torch.attention(q, k, v, dropout=1 - 2**-32, implementation=implementation)
    assert (out == 0).all()


MASKS = {
    "every pair its own": (2, 6, 7, 11),
    "the same for all": (7, 11),
    "keys of a row": (2, 1, 1, 11),
    "nothing": (1, 1, 1, 1),
}


@pytest.mark.parametrize("shape", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("implementation", ("dense", "sdpa"))
def test_a_mask_hides_keys_beside_everything_else_that_does(implementation, shape):
    """Against the definition and its gradients, with a range, and with rows that see nothing."""
    inputs = make_inputs(by_name("filled-cache"), "float64")
    rng = np.random.default_rng(1)
    mask = rng.random(shape) < 0.5 if len(shape) < 4 or shape[3] > 1 else np.zeros(shape, bool)
    if shape[-2:] == (7, 11):
        mask[..., 3, :] = False
    if shape == (2, 1, 1, 11):
        mask[1, ..., 2:4] = False
    given = {"causal": False, "right_slopes": inputs.left / 2, "mask": mask}
    given["key_range"] = np.array([[0, 9], [2, 4]])
    arrays = [inputs.q, inputs.k, inputs.v, inputs.left]
    out, lse = linbias.attention(*arrays, **given, return_lse=True)
    assert np.isneginf(lse).any() and (out[np.isneginf(lse)] == 0).all()
    check_definition(arrays, given, implementation, 1e-13)
    if implementation == "dense":
        (q, k, _, left), given_here = as_tensors(arrays, given)
        weights = linbias.torch.attention_weights(q, k, left, **given_here)
        wanted = linbias.attention_weights(*arrays[:2], arrays[3], **given)
        np.testing.assert_allclose(weights.detach(), wanted, atol=1e-12)


def test_the_bias_that_sdpa_keeps_serves_its_own_slopes_only():
    q, k, v = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64)
    left, right = torch.tensor([[0.5, 0.1], [2.0, 0.0]], dtype=torch.float64)

    def run(left, right, implementation):
        given = {"causal": False, "right_slopes": right, "implementation": implementation}
        return linbias.torch.attention(q, k, v, left, **given)

    for slopes in ((left, right), (right, left), (left, left), (right, right)):
        torch.testing.assert_close(run(*slopes, "sdpa"), run(*slopes, "dense"))
    for learned in (0, 1):  # of slopes whose bias is kept by now
        found = []
        for implementation in ("sdpa", "dense"):
            leaves = [x.clone().requires_grad_(i == learned) for i, x in enumerate((left, right))]
            loss = run(*leaves, implementation).square().sum()
            found += torch.autograd.grad(loss, leaves[learned])
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", ("float64", "float32", "bfloat16"))
@pytest.mark.parametrize("implementation", ("sdpa", "dense"))
def test_numbers_of_a_mask_are_added_to_the_scores(implementation, dtype):
    """The bias as a mask gives what slopes give; it may be learned, and hides where it is -inf."""
    inputs = make_inputs(by_name("T-below-S"), dtype)
    arrays = inputs.q, inputs.k, inputs.v
    (H, T), S = inputs.q.shape[1:3], inputs.k.shape[2]
    bias = linbias.bias(inputs.left, T, S, right_slopes=[torch.inf] * H)
    flat = {"slopes": [0.0] * H, "causal": False}
    expected = linbias.attention(*arrays, inputs.left)
    np.testing.assert_allclose(linbias.attention(*arrays, **flat, mask=bias), expected, atol=1e-6)
    assert linbias.explain(*arrays, **flat, mask=bias).weights.max() <= 1

    q, k, v = (torch.tensor(x, dtype=getattr(torch, dtype)) for x in arrays)
    mask = torch.tensor(bias).to(q.dtype if dtype == "float64" else torch.float32).requires_grad_()
    given = {**flat, "mask": mask, "implementation": implementation}
    out, lse = linbias.torch.attention(q, k, v, **given, return_lse=True)
    wanted = linbias.torch.attention(q, k, v, inputs.left, implementation="dense", return_lse=True)
    accuracy = {"bfloat16": 2**-6, "float32": 1e-5}.get(dtype, 1e-12)
    for found, truth in zip((out, lse), wanted, strict=True):
        torch.testing.assert_close(found, truth, rtol=accuracy, atol=accuracy)
    (gradient,) = torch.autograd.grad(out.square().sum(), mask)
    given |= {"mask": mask.double(), "implementation": "dense"}
    wide = linbias.torch.attention(q.double(), k.double(), v.double(), **given)
    (truth,) = torch.autograd.grad(wide.square().sum(), mask)
    torch.testing.assert_close(gradient, truth, rtol=4 * accuracy, atol=4 * accuracy)
    weights = linbias.torch.attention_weights(q, k, flat["slopes"], causal=False, mask=mask)
    assert (weights[:, mask == -torch.inf] == 0).all()


def test_a_learned_mask_has_gradients_as_finite_differences_say():
    q, k, v = (torch.randn(1, 2, n, 3, dtype=torch.float64) for n in (4, 5, 5))
    mask = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    for implementation in ("sdpa", "dense"):
        run = functools.partial(linbias.torch.attention, implementation=implementation)
        assert torch.autograd.gradcheck(lambda x, run=run: run(q, k, v, mask=x), (mask,))


def test_a_mask_goes_where_it_can_be_used():
    q, mask = torch.randn(1, 2, 5, 8), torch.ones(5, 5, dtype=torch.bool).tril()
    run = functools.partial(linbias.torch.attention, q, q, q)
    torch.testing.assert_close(run(mask=mask), run())
    assert (
        run(mask=mask, dropout=0.5).shape == q.shape
    )  # by dense: PyTorch would draw another mask
    for name in ("cpu", "blocked", "triton"):
        for given in (mask, mask.float()):
            with pytest.raises(NotImplementedError, match=f"{name} .*no mask"):
                run(implementation=name, mask=given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("implementation", ("dense", "blocked"))
def test_contract_on_a_gpu(implementation, case, dtype):
    if dtype == "float16" and case.logits > 100:
        pytest.skip("q overflows float16")
    check_case(TorchSubject(implementation, "cuda"), case, dtype)


def test_every_case_name_is_unique():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("T", (7, 5))
def test_masks_of_pytorch_without_values_are_refused_with_what_says_the_same(T):
    q, k, v = torch.randn(2, 3, T, 8), *torch.randn(2, 2, 3, 7, 8)
    starts = {causal_lower_right: None, causal_upper_left: torch.zeros(2, dtype=torch.int64)}
    for make, start in starts.items():
        mask = make(T, 7)
        wanted = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = linbias.torch.attention(q, k, v, [0.0] * 3, query_start=start)
        torch.testing.assert_close(out, wanted)
        for implementation in ("auto", "dense"):
            options = {"causal": False, "mask": mask, "implementation": implementation}
            with pytest.raises(TypeError, match=r"attention: mask must be a .*CausalBias is not"):
                linbias.torch.attention(q, k, v, **options)
        module, x = linbias.torch.MultiheadAttention(8, 2, batch_first=True), q[:, 0]
        for name in ("attn_mask", "mask"):
            with pytest.raises(TypeError, match=rf"MultiheadAttention: {name} must .*is_causal"):
                module(x, x, x, **{name: make(T, T)})


class Subclass(torch.Tensor):
    pass


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_subclasses_that_are_no_arrays_are_refused_by_name_and_others_run():
    q, k, v = torch.randn(3, 1, 2, 5, 8)
    found = linbias.torch.attention(*(x.as_subclass(Subclass) for x in (q, k, v)))
    torch.testing.assert_close(found.as_subclass(torch.Tensor), linbias.torch.attention(q, k, v))
    for name in ("q", "k", "v", "slopes", "key_range"):
        given = {"q": q, "k": k, "v": v, "slopes": torch.ones(2)}
        given["key_range"] = torch.tensor([[0, 5]])
        given[name] = masked_tensor(given[name], given[name] == given[name])
        with pytest.raises(TypeError, match=rf"attention: {name} must .*MaskedTensor is not;"):
            linbias.torch.attention(**given)


@pytest.mark.parametrize("dtype", ("uint8", "int8", "uint16", "uint32", "uint64"))
def test_narrow_and_unsigned_integers_place_queries_as_wide_ones_do(dtype):
    """Also where sequences are packed, counted in points, and in the names of flash-attn."""
    q, k, v = torch.randn(1, 2, 300, 4), *torch.randn(2, 1, 2, 100, 4)

    def run(dtype):
        def whole(*numbers):
            return torch.tensor(numbers, dtype=getattr(torch, dtype))

        ranges = {"key_range": whole([0, 100])}, {"query_start": whole(90), "window": (30, 0)}
        ranges = *ranges, {"query_range": whole([20, 90]).expand(1, 300, 2)}
        for options in (*ranges, functools.reduce(dict.__or__, ranges)):
            for name in ("cpu", "blocked", "dense", "sdpa"):
                yield linbias.torch.attention(q, k, v, **options, implementation=name)
        lengths = whole(0, 40, 100)
        packed = (x[0].transpose(0, 1)[:100] for x in (q, k, v))
        placed = {"key_range": whole([0, 40], [0, 50]), "query_start": whole(0, 9)}
        yield linbias.torch.attention_varlen(*packed, lengths, lengths, **placed)
        yield linbias.torch.attention_points(k, k, v, torch.rand(100, 2), num_points=whole(90))
        cache = torch.zeros(2, 1, 300, 2, 4)
        yield flash_attn_with_kvcache(
            q[:, :, :1].transpose(1, 2), *cache, cache_seqlens=whole(100)
        )

    torch.manual_seed(0)
    expected = list(run("int64"))
    torch.manual_seed(0)
    for found, wanted in zip(run(dtype), expected, strict=True):
        assert torch.equal(found, wanted)


def test_integers_that_only_uint64_holds_are_refused():
    q = torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match="attention: query_start must be within"):
        linbias.torch.attention(q, q, q, query_start=torch.tensor([2**64 - 1], dtype=torch.uint64))


def test_a_window_of_floats_is_refused_after_the_same_of_integers():
    q = torch.ones(1, 2, 3, 4)
    for window in ((1, 0), (-1, -1)):
        linbias.torch.attention(q, q, q, window=window)
        for other in (tuple(map(float, window)), tuple(map(bool, window))):
            with pytest.raises(TypeError, match=r"^attention: window must be \(left, right\)"):
                linbias.torch.attention(q, q, q, window=other)
