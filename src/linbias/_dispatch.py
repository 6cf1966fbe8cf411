"""What implementations can do, which one runs a problem, and why not the others.

An implementation is a module with a `NAME`, its `ABILITIES`, and `why_not(problem) -> str | None`:
None means "I can", a string says why not. A request by name is obeyed or refused with that string,
never replaced. What an install lacks altogether stands in `WHY_MISSING`, where a module has it: a
call that runs slower for it warns, once.

To add one: a module that has these and the front end's call, which takes its `Inputs`
(`torch/impl/dense.py` is the plainest), imports no other implementation and trusts `_request`; its
name in the front end's `IMPLEMENTATIONS`, in the order in which "auto" asks, in the contract test
(`IMPLEMENTATIONS` in tests/torch/test_torch.py or tests/jax/test_jax.py), whose budget is not
widened, and in evidence/benchmarks/bench_attention.py, with records before and after; a line in
DESIGN section 3. `python evidence/runs/support.py` writes the tables of docs/torch.md and
docs/jax.md.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from linbias._request import FLOATS, SPECIAL, Problem


@dataclass(frozen=True)
class Abilities:
    """What an implementation can do: declared once, asked by "auto", printed in the docs."""

    runs_on: str  # in words
    how: str  # likewise, for the docs
    memory: str  # above inputs and results
    devices: tuple[str, ...] = ()  # none named: every device
    dtypes: tuple[str, ...] = FLOATS
    largest_head: int | None = None
    has: tuple[str, ...] = ("positions", "dropout", "transformed")  # of `_request.SPECIAL`
    higher_derivatives: bool = False

    def lacks(self, problem: Problem) -> str | None:
        """Say what a problem asks for beyond these abilities, or None."""
        if self.devices and problem.device not in self.devices:
            return f"it runs on {self.runs_on}, and the arrays are on {problem.device}"
        if problem.dtype not in self.dtypes:
            return f"it takes {', '.join(self.dtypes)}, got {problem.dtype}"
        if self.largest_head is not None and max(problem.D, problem.E) > self.largest_head:
            return f"head sizes go up to {self.largest_head}, got {max(problem.D, problem.E)}"
        for name, reason in SPECIAL.items():
            if getattr(problem, name) and name not in self.has:
                return reason
        return None


class Implementation(Protocol):
    NAME: str
    ABILITIES: Abilities

    def why_not(self, problem: Problem) -> str | None: ...


I = TypeVar("I", bound=Implementation)  # noqa: E741


def _warn_once(function: str, running: str, not_built: str) -> None:
    if not _warned:
        _warned.append(function)
        warnings.warn(
            f"{function}: {running} runs in place of {not_built}, many times slower, because"
            " linbias was installed without its compiled core; linbias doctor says why",
            stacklevel=4,  # whoever called the function, by way of `choose`
        )


# As torch.compiler.assume_constant_result, without loading torch: no compiler traces a warning.
setattr(_warn_once, "_dynamo_marked_constant", True)  # noqa: B010
_warned: list[str] = []


def choose(function: str, requested: str, problem: Problem, implementations: Sequence[I]) -> I:
    """Return the implementation of this name, or for "auto" the first that can solve the problem.

    Raises:
        ValueError: No implementation has that name.
        NotImplementedError: It, or under "auto" every one, cannot solve the problem.
    """
    if requested != "auto":
        for implementation in implementations:
            if implementation.NAME == requested:
                reason = implementation.why_not(problem)
                if reason is not None:
                    raise NotImplementedError(
                        f"{function}: {requested} cannot run this call: {reason}"
                    )
                return implementation
        names = ("auto", *(implementation.NAME for implementation in implementations))
        raise ValueError(f"{function}: implementation must be one of {names}, got {requested!r}")
    reasons: list[str] = []
    not_built = None
    for implementation in implementations:
        reason = implementation.why_not(problem)
        if reason is None:
            if not_built is not None:
                _warn_once(function, implementation.NAME, not_built)
            return implementation
        if getattr(implementation, "WHY_MISSING", None) and not implementation.ABILITIES.lacks(
            problem
        ):
            not_built = implementation.NAME
        reasons.append(f"{implementation.NAME}: {reason}")
    raise NotImplementedError(
        f"{function}: no implementation can run this call: {'; '.join(reasons)}"
    )
