"""What implementations can do, which one runs a problem, and why not the others.

An implementation is a module with a `NAME`, its `ABILITIES`, and `why_not(problem) -> str | None`: None means "I can",
a string says why not. A request by name is obeyed or refused with that string, never replaced.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from linbias._checks import FLOATS, Problem


@dataclass(frozen=True)
class Abilities:
    """What an implementation can do wherever it runs: declared once, asked by "auto", printed in the docs."""

    runs_on: str  # in words
    how: str  # likewise, for the docs
    memory: str  # above inputs and results
    devices: tuple[str, ...] = ()  # none named: every device
    dtypes: tuple[str, ...] = FLOATS
    largest_head: int | None = None
    mask: bool = False
    dropout: bool = True
    transforms: bool = True
    higher_derivatives: bool = False

    def lacks(self, problem: Problem) -> str | None:
        """Say what a problem asks for beyond these abilities, or None."""
        if self.devices and problem.device not in self.devices:
            return f"it runs on {self.runs_on}, and the arrays are on {problem.device}"
        if problem.dtype not in self.dtypes:
            return f"it takes {', '.join(self.dtypes)}, got {problem.dtype}"
        if self.largest_head is not None and max(problem.D, problem.E) > self.largest_head:
            return f"head sizes go up to {self.largest_head}, got {max(problem.D, problem.E)}"
        if problem.mask and not self.mask:
            return "it takes a key_range but no mask"
        if problem.dropout and not self.dropout:
            return "its dropout would draw another mask"
        if problem.transformed and not self.transforms:
            return "it does not run under transforms such as vmap"
        return None


class Implementation(Protocol):
    NAME: str
    ABILITIES: Abilities

    def why_not(self, problem: Problem) -> str | None: ...


I = TypeVar("I", bound=Implementation)  # noqa: E741


def choose(function: str, requested: str, problem: Problem, implementations: Sequence[I]) -> I:
    """Return the implementation asked for by name, or for "auto" the first that can solve the problem.

    Raises:
        ValueError: No implementation has that name.
        NotImplementedError: The one asked for, or under "auto" every one, cannot solve the problem.
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
