"""What near-to-far implementations share: the form of their custom operators, for autograd,
compile and export.

An implementation fills arrays (`Fill`, `FillGradients`); `Operators` makes of that an operator
with a backward operator, fake kernels and a derivative. `torch.compile` and `torch.export` then
take it as one opaque step, `torch.func` takes it through the functions of
`linbias.torch.operators.transforms`, and a plain call does without it
(`linbias.torch.operators.direct`). The operators' schemas are made from the annotations of
`Inputs` and `Results`: a new argument is a line in `Inputs`.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, get_type_hints

import torch
from torch import Tensor

from linbias.torch.operators import flops, transforms
from linbias.torch.operators.direct import unobserved


class Inputs(NamedTuple):
    """What an implementation is given, checked: arrays, then numbers.

    "Wide" is float64 for float64 inputs and float32 otherwise.
    """

    q: Tensor  # [B, H, T, D]
    k: Tensor  # [B, G, S, D]
    v: Tensor  # [B, G, S, E]
    left: Tensor  # [H] or [B, H], wide
    right: Tensor | None = None  # likewise; None: causal
    key_range: Tensor | None = None  # [B, G, 2]; None: all keys
    query_start: Tensor | None = None  # [B], the position of query 0; None: S - T
    key_bound: Tensor | None = None  # [B, G]; only forward may use it
    seed: Tensor | None = None  # [] or [3], as of `dropout.keep_mask`; None: no dropout
    # [B or 1, H or 1, T or 1, S or 1], bool, or numbers to add; none if near to far.
    mask: Tensor | None = None
    # [B, 1 or H, S], float32, float64 or integers, 0 outside the range of keys; None: key s at s
    positions: Tensor | None = None
    query_positions: Tensor | None = None  # [B, 1 or H, T], likewise; None with positions only
    query_range: Tensor | None = None  # [B, T, 2], within the keys; None: all keys
    # [B, 1 or H, T], never falling: the key at which each query stands; None: query_start + t
    own_key: Tensor | None = None
    scale: float = 1.0
    dropout: float = 0.0
    tolerance: float = 0.0
    precise: bool = False  # the result will be differentiated: q, k, v or the slopes ask for it
    slope_gradients: bool = False  # backward: those of left and right are asked for


class Results(NamedTuple):
    """What forward gives.

    `out` is wide, because backward takes differences from it, unless an implementation mends those
    in another way or nothing will be differentiated. lse comes as row_max + log_sum, in the
    implementation's unit: their rounded sum would cost backward the digits of log_sum. `visited`
    counts the blocks that each tile visited beyond the near ones, to the left and to the right;
    backward visits the same. Behind all tiles an implementation that `counts_precise` counts up to
    the outermost block that it computed in full.
    """

    out: Tensor  # [B, H, T, E]
    row_max: Tensor  # [B, H, T], wide
    log_sum: Tensor  # [B, H, T], wide
    visited: Tensor  # [B, H, tiles + 1 or 2 tiles + 1, 2], int32, zeroed


class Gradients(NamedTuple):
    """What backward gives. Nothing is in it yet: who adds to it zeroes it first."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dleft: Tensor | None  # [B, H], wide; None where not asked for
    dright: Tensor | None
    # [B, H, S] and [B, H, T], wide; None where not asked for; in operators the last axis may be 0
    dpositions: Tensor | None
    dquery_positions: Tensor | None


class Fill(Protocol):
    def __call__(self, inputs: Inputs, results: Results) -> None: ...


class FillGradients(Protocol):
    """dout has the dtype of `saved.out`; no dlse stands for zeros."""

    def __call__(
        self,
        inputs: Inputs,
        dout: Tensor,
        dlse: Tensor | None,
        saved: Results,
        gradients: Gradients,
    ) -> None: ...


class Operators:
    """The operators linbias::<name>_forward and linbias::<name>_backward of an implementation.

    Attributes:
        forward: Of the fields of `Inputs`, to those of `Results`; differentiable.
        backward: Of dout, dlse and the fields of `Results` and `Inputs`, to those of `Gradients`.
    """

    def __init__(
        self,
        name: str,
        fill: Fill,
        fill_gradients: FillGradients,
        tile_rows: Callable[[int], int],
        *,
        unit: float = 1.0,
        out_is_wide: bool = True,
        visited_on_device: bool = False,
        counts_precise: bool = False,
        narrows: tuple[torch.dtype, ...] = (),
    ) -> None:
        """Define them.

        Args:
            name: Of the implementation.
            fill: Computes forward.
            fill_gradients: Computes backward.
            tile_rows: Query rows per tile, given the query heads per key/value head.
            unit: Of row_max and log_sum, in nats.
            out_is_wide: Forward gives `out` in the wide dtype; otherwise in q's.
            visited_on_device: `visited` lies where q does; otherwise on the CPU.
            counts_precise: Blocks may be computed in fewer digits than the inputs have.
            narrows: Types of q for which `out` is in q's type where it will not be differentiated:
                written once, not twice.
        """
        self.name, self.unit = name, unit
        self._fill, self._fill_gradients, self._tile_rows = fill, fill_gradients, tile_rows
        self._out_is_wide, self._narrows = out_is_wide, narrows
        self._visited_on_device, self.counts_precise = visited_on_device, counts_precise
        of_backward = ("dout", "dlse", *Results._fields, *Inputs._fields)
        self.forward = torch.library.custom_op(
            f"linbias::{name}_forward",
            self._operate,
            mutates_args=(),
            schema=f"({parameters(Inputs)}) -> {returns(Results)}",
        )
        self.backward = torch.library.custom_op(
            f"linbias::{name}_backward",
            self._operate_backward,
            mutates_args=(),
            schema=(
                f"(Tensor dout, Tensor dlse, {parameters(Results)}, {parameters(Inputs)})"
                f" -> {returns(Gradients)}"
            ),
        )
        self.forward.register_fake(lambda *arguments: self.empty_results(Inputs._make(arguments)))
        self.backward.register_fake(
            lambda _dout, _dlse, *arguments: self.empty_gradients(_records(arguments)[1])
        )
        self.forward.register_autograd(
            functools.partial(self._differentiate, self.backward), setup_context=_save_operator
        )
        self.backward.register_autograd(self._refuse)
        for operator, names in ((self.forward, Inputs._fields), (self.backward, of_backward)):
            operator.register_vmap(transforms.vmap_rule(operator, names))
        # For `torch.func`, which refuses the derivative of a custom operator.
        backward_once = transforms.function(
            self.backward, of_backward, _save_nothing, self._refuse, self._refuse_forward_mode
        )
        self._forward_once = transforms.function(
            self.forward,
            Inputs._fields,
            _save_operator,
            functools.partial(self._differentiate, backward_once),
            self._refuse_forward_mode,
        )

    def attention(self, inputs: Inputs, with_lse: bool = True) -> tuple[Tensor, Tensor | None]:
        """Run a call the shortest way that all who look on still see: out in q's dtype, lse."""
        arrays: tuple[Any, ...] = inputs[:_NUM_ARRAYS]
        if unobserved(*arrays):
            if inputs.precise:
                result = _Direct.apply(*_differentiable_of(inputs), self, inputs, with_lse)
                return result if with_lse else (result, None)
            results = self.run_forward(inputs)
        elif not transforms.active():
            if not torch.compiler.is_compiling():
                flops.tell_counter(self.forward, self.backward, len(Results._fields))
            results = Results._make(self.forward(*inputs))
        elif not torch.compiler.is_compiling():
            # Under nested transforms a tensor does not say what is asked of those that it wraps.
            results = Results._make(self._forward_once(*inputs._replace(precise=True)))
        else:
            if transforms.forward_mode():  # the compiler would take the tangents for zero
                self._refuse_forward_mode()
            results = Results._make(self.forward(*inputs))
        return _as_dtype(results.out, inputs.q.dtype), self.lse_of(results) if with_lse else None

    def run_forward(self, inputs: Inputs) -> Results:
        results = self.empty_results(inputs)
        self._fill(inputs, results)
        return results

    def run_backward(
        self,
        dout: Tensor,
        dlse: Tensor | None,
        saved: Results,
        inputs: Inputs,
        gradients: Gradients,
    ) -> Gradients:
        # Transforms and hooks of saved tensors may give views; kernels take them for contiguous.
        saved = Results._make(x.contiguous() for x in saved)
        with without_autocast(inputs.q.device):
            self._fill_gradients(inputs, dout, dlse, saved, gradients)
        return gradients

    def lse_of(self, results: Results) -> Tensor:
        lse = results.row_max + results.log_sum
        return lse if self.unit == 1 else lse * self.unit

    def empty_gradients(
        self, inputs: Inputs, slopes: bool = True, places: bool = True
    ) -> Gradients:
        q, k, v, left = inputs[:4]
        rows_first = torch.contiguous_format  # whatever the strides of q, k and v
        placed = inputs.positions is not None
        num_keys, num_queries = (k.shape[2], q.shape[2]) if placed else (0, 0)
        return Gradients(
            dq=torch.empty_like(q, memory_format=rows_first),
            dk=torch.empty_like(k, memory_format=rows_first),
            dv=torch.empty_like(v, memory_format=rows_first),
            dleft=left.new_empty(q.shape[:2]) if slopes else None,
            dright=left.new_empty(q.shape[:2]) if slopes else None,
            dpositions=left.new_empty((*q.shape[:2], num_keys)) if places else None,
            dquery_positions=left.new_empty((*q.shape[:2], num_queries)) if places else None,
        )

    def empty_results(self, inputs: Inputs) -> Results:
        q, k, v, left = inputs[:4]
        B, H, T, _ = q.shape
        num_tiles = -(-T // self._tile_rows(H // max(1, k.shape[1])))
        # One more than there are: a size of 1 would tie an exported program to short sequences.
        num_counts = num_tiles * (2 if self.counts_precise else 1) + 1
        wide = self._out_is_wide and (inputs.precise or q.dtype not in self._narrows)
        out_like = left if wide else q
        rows = left.new_empty((B, H, T))
        device = q.device if self._visited_on_device else _CPU
        return Results(
            out=out_like.new_empty((B, H, T, v.shape[3])),
            row_max=rows,
            log_sum=torch.empty_like(rows),
            visited=torch.zeros((B, H, num_counts, 2), dtype=torch.int32, device=device),
        )

    def _operate(self, *arguments: Any) -> Results:
        with without_autocast(arguments[0].device):
            return self.run_forward(Inputs._make(arguments))

    def _operate_backward(self, dout: Tensor, dlse: Tensor, *arguments: Any) -> Gradients:
        saved, inputs = _records(arguments)
        return self.run_backward(dout, dlse, saved, inputs, self.empty_gradients(inputs))

    def _differentiate(
        self,
        backward: Callable[..., Any],
        ctx: Any,
        dout: Tensor,
        _drow_max: Tensor,
        dlog_sum: Tensor,
        _dvisited: Tensor,
    ) -> tuple[Tensor | None, ...]:
        inputs, results = _saved(ctx)
        gradients = _for_arguments(inputs, backward(dout, dlog_sum, *results, *inputs))
        of = dict(zip(DIFFERENTIABLE, gradients, strict=True))
        return tuple(of.get(name) for name in Inputs._fields)

    def _refuse(self, *_: Any) -> Any:
        raise NotImplementedError(
            f"attention: {self.name} gives first derivatives only;"
            " implementation='dense' gives all"
        )

    def _refuse_forward_mode(self, *_: Any) -> Any:
        raise NotImplementedError(
            f"attention: {self.name} has no forward-mode derivative; implementation='dense' has it"
        )


class _Direct(torch.autograd.Function):
    """Attention with its derivative and without its operators."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor | tuple[Tensor, Tensor]:
        # `inputs` holds those before, too, which are arguments for autograd to see.
        operators: Operators
        inputs: Inputs
        *_differentiable, operators, inputs, with_lse = given
        results = operators.run_forward(inputs)
        _save(ctx, inputs, results)
        ctx.operators = operators
        out = _as_dtype(results.out, inputs.q.dtype)
        return (out, operators.lse_of(results)) if with_lse else out

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        (inputs, results), operators = _saved(ctx), ctx.operators
        dlog_sum = dlse if dlse is None or operators.unit == 1 else dlse * operators.unit
        dout = _as_dtype(dout, results.out.dtype)
        # Whoever wants a second derivative hears of it from the operator.
        if torch.is_grad_enabled() or not unobserved(dout, dlse):
            if dlog_sum is None:
                dlog_sum = torch.zeros_like(results.log_sum)
            gradients = operators.backward(dout, dlog_sum, *results, *inputs)
        else:
            places = any(ctx.needs_input_grad[_POSITIONS : len(DIFFERENTIABLE)])
            gradients = operators.empty_gradients(inputs, inputs.slope_gradients, places)
            operators.run_backward(dout, dlog_sum, results, inputs, gradients)
        return *_for_arguments(inputs, gradients), None, None, None


def _as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    ctx.numbers = inputs[_NUM_ARRAYS:]
    ctx.save_for_backward(*inputs[:_NUM_ARRAYS], *output)


def _save_operator(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _save(ctx, inputs, output)
    # row_max counts as a constant, so that the gradient of log_sum is that of lse.
    ctx.mark_non_differentiable(output[1], output[3])


def _save_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None: ...


def _saved(ctx: Any) -> tuple[Inputs, Results]:
    # Read once: activation checkpointing recomputes them at the first touch.
    tensors = ctx.saved_tensors
    inputs = Inputs._make((*tensors[:_NUM_ARRAYS], *ctx.numbers))
    if ctx.needs_input_grad[_LEFT] or ctx.needs_input_grad[_RIGHT]:
        inputs = inputs._replace(slope_gradients=True)
    return inputs, Results._make(tensors[_NUM_ARRAYS:])


def _records(arguments: Sequence[Any]) -> tuple[Results, Inputs]:
    """Of an operator's arguments, whose schema was made of the fields of both."""
    saved = len(Results._fields)
    return Results._make(arguments[:saved]), Inputs._make(arguments[saved:])


def _for_arguments(inputs: Inputs, gradients: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Those of `DIFFERENTIABLE`, in the shapes in which these were given."""
    dq, dk, dv, dleft, dright, *of_places = gradients
    sides: list[Tensor | None] = [None, None]
    if inputs.slope_gradients:
        for side, (slope, d) in enumerate(((inputs.left, dleft), (inputs.right, dright))):
            if slope is not None:  # an infinite slope hides its side and has no gradient
                total = d if slope.dim() == 2 else d.sum(0)
                sides[side] = total.masked_fill(slope == torch.inf, 0.0)
    places: list[Tensor | None] = [None, None]
    given = inputs.positions, inputs.query_positions
    for i, (place, d) in enumerate(zip(given, of_places, strict=True)):
        if isinstance(place, Tensor) and place.is_floating_point() and d is not None:
            places[i] = d.sum_to_size(place.shape).to(place.dtype)
    return dq, dk, dv, *sides, *places


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Where autocast is on, it would take the wide products back to 16 bits."""
    return torch.autocast(device.type, enabled=False) if autocasts(device) else _NOTHING


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for what lies there; asked of all devices first, which is quick."""
    return (
        torch._C._is_any_autocast_enabled()
        and device.type != "meta"
        and torch.is_autocast_enabled(device.type)
    )


_CPU = torch.device("cpu")
_NOTHING = contextlib.nullcontext()
_SCHEMA_TYPES: dict[object, str] = {
    **{Tensor: "Tensor", float: "float", int: "SymInt", bool: "bool", str: "str"},
    **{Tensor | None: "Tensor?", float | None: "float?", tuple[int, int] | None: "SymInt[]?"},
}


def parameters(record: type[Any]) -> str:
    """The fields of a record as parameters of an operator's schema."""
    return ", ".join(
        f"{_SCHEMA_TYPES[hint]} {name}" for name, hint in get_type_hints(record).items()
    )


def returns(record: type[Any]) -> str:
    return f"({', '.join('Tensor' for _ in record._fields)})"


DIFFERENTIABLE = ("q", "k", "v", "left", "right", "positions", "query_positions")
_differentiable_of = attrgetter(*DIFFERENTIABLE)
_NUM_ARRAYS = Inputs._fields.index("scale")
# The slopes are as far on among the fields of `Inputs` as among what autograd sees directly.
_LEFT, _RIGHT, _POSITIONS = map(DIFFERENTIABLE.index, ("left", "right", "positions"))
