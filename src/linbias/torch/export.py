"""Exported programs in PyTorch's operators alone, for what knows no others, as ONNX does."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from linbias.torch.impl import blocked, cpu, dense, triton
from linbias.torch.operators.operator import Inputs, Operators
from linbias.torch.points import cpu as points_cpu
from linbias.torch.points import dense as points_dense
from linbias.torch.points.geometry import PointInputs


def decompositions() -> dict[Any, Callable[..., Any]]:
    """A table for `ExportedProgram.run_decompositions`: our operators as `dense` computes them.

    Translators such as `torch.onnx.export` have no function for them. Memory is length x length
    afterwards. `attention_varlen` has none, since only the values of offsets tell its sequences.

    Example:
        >>> table = decompositions()  # for program.run_decompositions(table)
        >>> torch.ops.linbias.cpu_forward.default in table
        True
    """
    near_to_far = (triton.operators, cpu.operators, blocked.operators)
    return {
        **{each.forward._opoverload: partial(_attention, each) for each in near_to_far},
        points_cpu.forward._opoverload: _attention_points,
    }


def _attention(operators: Operators, *arguments: Any) -> Any:
    inputs = Inputs._make(arguments)
    out, lse = dense.attention(inputs)
    assert lse is not None, "dense always gives it"
    results = operators.empty_results(inputs)
    return results._replace(
        out=out.to(results.out.dtype), row_max=lse / operators.unit, log_sum=torch.zeros_like(lse)
    )


def _attention_points(*arguments: Any) -> Any:
    inputs = PointInputs._make(arguments)
    out, lse = points_dense.attention(inputs)
    return points_cpu.empty_results(inputs)._replace(out=out.to(lse.dtype), row_max=lse)
