"""Keys that share a large part, as those of trained models do: what gradients lose depends on how
keys differ, not on what they have in common.
"""

from itertools import product

import pytest

from cases import CASES, PLACED_CASES, RANGED_CASES
from contract import SHARED, check_gradients_where_keys_share_a_part, rows
from jax_subject import JaxSubject
from linbias.kernels import core
from test_torch import TorchSubject

NAMES = """long long-symmetric long-range long-past-the-keys long-dropout long-window gates-long
    gaps-long-symmetric""".split()
LONG = [case for case in CASES + PLACED_CASES + RANGED_CASES if case.name in NAMES]
IN_LARGE_BLOCKS = [case for case in LONG if case.name in NAMES[:4]]


@pytest.mark.skipif(core.target() is None, reason="the core is not compiled here")
@pytest.mark.parametrize(
    ("case", "dtype", "shared", "target"),
    rows(
        lambda case, dtype, shared, target: (
            shared == (1e4 if dtype == "float64" else 1e2) and target == core.target()
        ),
        *product(LONG, ("float64", "float32"), SHARED, core.targets()),
        *product(LONG, ("bfloat16",), SHARED[:1], core.targets()),
    ),
)
def test_the_compiled_core_loses_what_the_tolerance_allows(
    case, dtype, shared, target, forced_target
):
    forced_target(target)
    check_gradients_where_keys_share_a_part(TorchSubject("cpu"), case, dtype, shared, 2.0**-6)


@pytest.mark.parametrize(
    ("implementation", "case", "shared"),
    rows(
        lambda implementation, case, shared: case.name == "long" and shared == 1e4,
        *product(("blocked", "jax blocked"), IN_LARGE_BLOCKS, SHARED),
        *product(("jax cpu",), LONG, SHARED),
    ),
)
def test_other_implementations_lose_what_the_tolerance_allows(implementation, case, shared):
    framework, _, name = implementation.rpartition(" ")
    subject = JaxSubject(name) if framework else TorchSubject(name)
    check_gradients_where_keys_share_a_part(subject, case, "float64", shared, 2.0**-6)
