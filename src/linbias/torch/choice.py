"""Which implementation "auto" takes, and why."""

import re
import types
from typing import NamedTuple

import torch

from linbias import _dispatch
from linbias._request import FLOATS, Described, Problem, Request, check
from linbias.torch.impl import blocked, cpu, dense, sdpa, triton

# As "auto" asks them. On the CPU `triton` comes last: its interpreter is there for tests.
IMPLEMENTATIONS: tuple[types.ModuleType, ...] = (triton, cpu, blocked, sdpa, dense)
_ON_CPU = (cpu, blocked, sdpa, dense, triton)
_ELSEWHERE = (triton, sdpa, blocked, dense, cpu)
# Numbers in a bias (256 MB) up to which, away from the CPU, one call of PyTorch's attention is
# preferred to many small ones; not measured.
_LARGEST_BIAS = 1 << 26


def asked_in_turn(problem: Problem) -> tuple[types.ModuleType, ...]:
    """The implementations in the order in which "auto" asks them."""
    compiling = torch.compiler.is_compiling()
    if compiling and _goes_to_onnx():  # which has no function for operators of ours
        return dense, *IMPLEMENTATIONS
    if problem.device == "cpu":
        return _ON_CPU
    if compiling:  # what is compiled, or exported, runs at other lengths, too
        return IMPLEMENTATIONS
    small = problem.B * problem.H * problem.T * problem.S <= _LARGEST_BIAS
    return _ELSEWHERE if small else IMPLEMENTATIONS


def _goes_to_onnx() -> bool:
    return torch.onnx.is_in_onnx_export()


# As torch.compiler.assume_constant_result, without loading the compiler, which cannot trace this.
setattr(_goes_to_onnx, "_dynamo_marked_constant", True)  # noqa: B010


class Choice(NamedTuple):
    """What "auto" takes for a call, and why none of the others (None for the one taken)."""

    name: str
    reasons: dict[str, str | None]


def explain_choice(call: str) -> Choice:
    """Tell what "auto" takes for a causal call, and why none of the others.

    Args:
        call: "B,H,T,S,D,dtype", and ",backward" where gradients are wanted.

    Raises:
        ValueError: The call is not of this form, or its sizes break a rule of `attention`.

    Example:
        >>> explain_choice("1,8,4096,4096,64,float64,backward").reasons["dense"]
        'cpu is faster, or needs less memory'
    """
    match = re.fullmatch(
        r"(\d+),(\d+),(\d+),(\d+),(\d+),(\w+?)(,backward)?", call.replace(" ", "")
    )
    if match is None or match[6] not in FLOATS:
        raise ValueError(
            f"doctor: call must be B,H,T,S,D,dtype[,backward] with dtype one of {FLOATS},"
            f" got {call!r}"
        )
    B, H, T, S, D = map(int, match.groups()[:5])
    q, k = (Described((B, H, n, D), match[6]) for n in (T, S))
    problem = check("doctor", Request(q=q, k=k, v=k), gradients=match[7] is not None)
    turn = asked_in_turn(problem)
    chosen = _dispatch.choose("attention", "auto", problem, turn)
    reasons: dict[str, str | None] = {}
    for implementation in turn:
        reason = implementation.why_not(problem)
        if reason is None and implementation is not chosen:
            reason = f"{chosen.NAME} is faster, or needs less memory"
        reasons[implementation.NAME] = reason
    return Choice(chosen.NAME, reasons)
