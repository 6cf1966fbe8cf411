"""Which implementation runs a call, and why not the others.

An implementation is a module with a `NAME` and `why_not(problem) -> str | None`: None means "I can", a string says
why not. A request by name is obeyed or refused with that string, never replaced.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from linbias._checks import Problem


class Implementation(Protocol):
    NAME: str

    def why_not(self, problem: Problem) -> str | None: ...


I = TypeVar("I", bound=Implementation)  # noqa: E741


def choose(function: str, requested: str, problem: Problem, implementations: Sequence[I]) -> I:
    """Return the implementation asked for by name, or for "auto" the first that can run the call.

    Raises:
        ValueError: No implementation has that name.
        NotImplementedError: The one asked for, or under "auto" every one, cannot run the call.
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
    reasons = []
    for implementation in implementations:
        reason = implementation.why_not(problem)
        if reason is None:
            return implementation
        reasons.append(f"{implementation.NAME}: {reason}")
    raise NotImplementedError(
        f"{function}: no implementation can run this call: {'; '.join(reasons)}"
    )
