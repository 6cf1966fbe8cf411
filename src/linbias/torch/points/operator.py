"""The custom operators of implementations of `attention_points` that give first derivatives.

For compilers an operator is one opaque step, as in linbias.torch.operators.operator.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from linbias.torch.addresses import without_lost_threads
from linbias.torch.points.geometry import NUM_ARRAYS, PointInputs


class Results(NamedTuple):
    """What forward gives. lse comes in two parts, whose rounded sum would cost backward digits."""

    out: Tensor  # [B, H, T, E], wide
    row_max: Tensor  # [B, H, T], wide; -inf where a query sees no key
    log_sum: Tensor  # [B, H, T], wide
    visited: Tensor  # [B, H, tiles], int32: blocks that each tile visited, in its order of them
    away: Tensor  # [B, H, T], wide: from which distance on those of a query were counted


Gradients = tuple[Tensor, Tensor, Tensor, Tensor]  # of q, k and v in their dtype, and of slopes

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor slopes, Tensor points, Tensor? query_points,"
    " Tensor? num_points, Tensor? seed, bool manhattan, SymInt global_tokens, float scale,"
    " float dropout, float tolerance"
)


class PointOperators:
    """The operators linbias::points_<name>_forward and _backward of an implementation.

    `fill` is given the results of queries that see no key, and finds those of all others;
    `visited` has num_tiles as its last axis. `find_gradients` takes the inputs, dout, dlse, and
    what forward gave.
    """

    def __init__(
        self,
        name: str,
        fill: Callable[[PointInputs, Results], None],
        find_gradients: Callable[[PointInputs, Tensor, Tensor, Results], Gradients],
        num_tiles: Callable[[PointInputs], int],
    ) -> None:
        self._name, self._fill, self._num_tiles = name, fill, num_tiles
        self._find_gradients = find_gradients
        self.forward = torch.library.custom_op(
            f"linbias::points_{name}_forward",
            lambda *arguments: self.run(PointInputs._make(arguments)),
            mutates_args=(),
            schema=f"({_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        )
        self._backward = torch.library.custom_op(
            f"linbias::points_{name}_backward",
            self._operate_backward,
            mutates_args=(),
            schema="(Tensor dout, Tensor dlse, Tensor out, Tensor row_max, Tensor log_sum,"
            f" Tensor visited, Tensor away, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
        )
        self.forward.register_fake(
            lambda *arguments: self.empty_results(PointInputs._make(arguments))
        )
        self._backward.register_fake(_empty_gradients)
        self.forward.register_autograd(self._differentiate, setup_context=_save)
        self._backward.register_autograd(self._refuse)

    def attention(self, inputs: PointInputs) -> tuple[Tensor, Tensor]:
        """Return out [B, H, T, E] in q's dtype and lse [B, H, T], wide."""
        results = Results(*self.forward(*inputs))
        lse = results.row_max + results.log_sum - inputs.slopes[..., None] * results.away
        return results.out.to(inputs.q.dtype), lse

    def run(self, inputs: PointInputs) -> Results:
        results = self.empty_results(inputs)
        self._fill(inputs, results)
        return results

    def empty_results(self, inputs: PointInputs) -> Results:
        """Those of queries that see no key."""
        (B, H, T, _), E, slopes = inputs.q.shape, inputs.v.shape[3], inputs.slopes
        row_max = slopes.new_full((B, H, T), -torch.inf)
        visited = torch.zeros(B, H, self._num_tiles(inputs), dtype=torch.int32)
        out, log_sum = slopes.new_zeros(B, H, T, E), torch.zeros_like(row_max)
        return Results(out, row_max, log_sum, visited, away=torch.zeros_like(row_max))

    def _operate_backward(self, dout: Tensor, dlse: Tensor, *arguments: Any) -> Gradients:
        saved, inputs = Results._make(arguments[:5]), PointInputs._make(arguments[5:])
        with without_lost_threads():
            return self._find_gradients(inputs, dout, dlse, saved)

    def _differentiate(
        self, ctx: Any, dout: Tensor, _drow_max: Tensor, dlog_sum: Tensor, *_: Tensor
    ) -> tuple[Tensor | None, ...]:
        arrays, saved = ctx.saved_tensors[:NUM_ARRAYS], ctx.saved_tensors[NUM_ARRAYS:]
        gradients = self._backward(dout, dlog_sum, *saved, *arrays, *ctx.numbers)
        return *gradients, *[None] * (len(PointInputs._fields) - len(gradients))

    def _refuse(self, *_: Any) -> Any:
        raise NotImplementedError(
            f"attention_points: {self._name} gives first derivatives only;"
            " implementation='dense' gives all"
        )


def _empty_gradients(*arguments: Any) -> Gradients:
    inputs = PointInputs._make(arguments[7:])
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])
    return dq, dk, dv, torch.empty_like(inputs.slopes)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:NUM_ARRAYS], *output)
    ctx.numbers = inputs[NUM_ARRAYS:]
    # row_max counts as a constant, so that the gradient of log_sum is that of lse.
    ctx.mark_non_differentiable(output[1], *output[3:])
