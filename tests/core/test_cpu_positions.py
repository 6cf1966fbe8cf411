"""The compiled core where keys stand at given positions: the contract, on every target, and NumPy's front end."""

from itertools import product

import numpy as np
import pytest
import torch

import linbias
from cases import PLACED_CASES, long, make_inputs, short
from contract import check_case, check_certificate_holds, check_results, expected, rows
from linbias import cpu
from linbias.kernels import core
from positions import PLACED, Placed
from test_torch import DTYPES, TorchSubject

pytestmark = pytest.mark.skipif(core.target() is None, reason="the core is not compiled here")
ON_EVERY_TARGET = "stamps-alike gaps-long-symmetric resets-long-asymmetric gates-long-dropout"


@pytest.fixture
def forced_target():
    yield core.force_target
    core.force_target(None)


def is_quick(case, dtype):
    return case in short(PLACED_CASES) or dtype == (
        "bfloat16" if "symmetric" in case.name else "float32"
    )


@pytest.mark.parametrize(("case", "dtype"), rows(is_quick, *product(PLACED_CASES, DTYPES)))
def test_positions_keep_the_contract(case, dtype):
    check_case(TorchSubject("cpu"), case, dtype)


@pytest.mark.parametrize(
    ("case", "dtype", "target"),
    rows(
        lambda case, dtype, target: (
            dtype in ("float32", "bfloat16")
        ),  # others go one way everywhere
        *product(
            (case for case in PLACED_CASES if case.name in ON_EVERY_TARGET.split()),
            DTYPES,
            core.targets(),
        ),
    ),
)
def test_positions_keep_the_contract_on_every_target(case, dtype, target, forced_target):
    forced_target(target)
    check_case(TorchSubject("cpu"), case, dtype)


@pytest.mark.parametrize(("case", "dtype"), rows(is_quick, *product(PLACED_CASES, DTYPES)))
def test_results_that_nobody_differentiates_keep_the_contract(case, dtype):
    """Few queries of a long cache are decoded then."""
    inputs = expected(case, dtype)[0]  # which differentiates, where no test before has
    with torch.no_grad():
        found, _ = TorchSubject("cpu").forward(inputs, case, dtype)
    check_results({n: x.double().numpy() for n, x in found.items()}, case, dtype)


@pytest.mark.parametrize("case", [c for c in long(PLACED_CASES) if not c.dropout], ids=str)
def test_the_certificate_holds_at_positions(case):
    check_certificate_holds(TorchSubject("cpu"), case, 1e-2)


@pytest.mark.parametrize("call", PLACED, ids=str)
def test_numpy_arrays_take_positions(call: Placed):
    out, lse = cpu.attention(*call.arrays, **call.given, return_lse=True)
    expected_out, expected_lse = linbias.attention(*call.arrays, **call.given, return_lse=True)
    np.testing.assert_allclose(out, expected_out, atol=1e-12)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("call", [call for call in PLACED if "far" in call.name], ids=str)
def test_numpy_queries_far_from_all_keys_lose_no_digits_in_float32(call: Placed):
    q, k, v, slopes = call.arrays
    narrow = [x.astype(np.float32) for x in (q, k, v)]
    out, lse = cpu.attention(*narrow, slopes, **call.given, return_lse=True)
    expected_out, expected_lse = linbias.attention(*call.arrays, **call.given, return_lse=True)
    np.testing.assert_allclose(out, expected_out, atol=5e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=5e-6, rtol=1e-6)


def test_far_keys_are_left_out_by_where_they_stand():
    case = next(case for case in PLACED_CASES if case.name == "gates-long")
    inputs = make_inputs(case, "float32")
    q, k, v, x, xq = (
        torch.tensor(y)
        for y in (inputs.q, inputs.k, inputs.v, inputs.positions, inputs.query_positions)
    )
    options = {"query_positions": xq, "implementation": "cpu", "tolerance": 1e-6}
    kept = [
        linbias.torch.visited(q, k, v, [slope] * case.H, positions=x, **options).work_kept.max()
        for slope in (0.0, 1.0, 8.0)
    ]
    assert kept[0] == 1 and kept[2] < 0.3 and kept[2] < kept[1]
