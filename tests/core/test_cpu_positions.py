"""The compiled core where keys stand at given positions, on every target and for NumPy."""

from itertools import product

import numpy as np
import pytest
import torch

import linbias
from cases import PLACED_CASES, long, short
from contract import check_case, check_certificate_holds, check_results, expected, rows
from linbias import cpu
from linbias.kernels import core
from positions import PLACED
from test_torch import DTYPES, TorchSubject

pytestmark = pytest.mark.skipif(core.target() is None, reason="the core is not compiled here")
ON_EVERY_TARGET = (
    "stamps-alike gaps-long-symmetric resets-long-asymmetric gates-long-dropout".split()
)


def is_quick(case, dtype):
    return case in short(PLACED_CASES) or dtype == (
        "bfloat16" if "symmetric" in case.name else "float32"
    )


@pytest.mark.parametrize(("case", "dtype"), rows(is_quick, *product(PLACED_CASES, DTYPES)))
def test_positions_keep_the_contract(case, dtype):
    check_case(TorchSubject("cpu"), case, dtype)


@pytest.mark.parametrize(
    ("case", "dtype", "target"),
    rows(  # other types go one way everywhere
        lambda case, dtype, target: dtype in ("float32", "bfloat16"),
        *product([c for c in PLACED_CASES if c.name in ON_EVERY_TARGET], DTYPES, core.targets()),
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


@pytest.mark.parametrize(
    ("call", "dtype"),
    [
        *((call, "float64") for call in PLACED),
        *((call, "float32") for call in PLACED if "far" in call.name),
    ],
    ids=str,
)
def test_numpy_arrays_take_positions_and_lose_no_digits(call, dtype):
    q, k, v, slopes = call.arrays
    narrow = [x.astype(dtype) for x in (q, k, v)]
    allowed = {"float64": 1e-12, "float32": 5e-6}[dtype]
    results = cpu.attention(*narrow, slopes, **call.given, return_lse=True)
    expected_results = linbias.attention(*call.arrays, **call.given, return_lse=True)
    for ours, true in zip(results, expected_results, strict=True):
        np.testing.assert_allclose(ours, true, atol=allowed, rtol=allowed)
