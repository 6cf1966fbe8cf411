"""What else marks the texts of packed rows, as `DataCollatorWithFlattening` hands it to models:
read as `position_ids`, or held against them.

    position_ids    0 1 2 0 1 0 1 2 3      seq_idx         0 0 0 1 1 2 2 2 2
    cu_seq_lens_q   0 3 5 9                max_length_q    4
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from linbias.models.decoder.layout import check_integers, check_of_tokens

_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LENGTHS = ("max_length_q", "max_length_k")
_INDEX = "seq_idx"
MARKS = (*_BOUNDS, *_LENGTHS, _INDEX)


def takes_marks(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a forward that has an argument `position_ids` take the other marks too."""
    signature = inspect.signature(forward)
    names = tuple(signature.parameters)

    @wraps(forward)
    def with_marks(*args: Any, **kwargs: Any) -> Any:
        if not any(name in kwargs for name in MARKS):
            return forward(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        model = given.pop(names[0])
        return forward(model, **read_marks(type(model).__name__, given))

    with_marks.__signature__ = with_marks_in(signature)  # type: ignore[attr-defined]
    return with_marks


def with_marks_in(signature: inspect.Signature) -> inspect.Signature:
    """A signature with the marks in it, where Trainer reads which columns a model takes."""
    rest = [x for x in signature.parameters.values() if x.kind is x.VAR_KEYWORD]
    named = [x for x in signature.parameters.values() if x.kind is not x.VAR_KEYWORD]
    names = [x for x in ("position_ids", *MARKS) if x not in signature.parameters]
    marks = [inspect.Parameter(x, inspect.Parameter.KEYWORD_ONLY, default=None) for x in names]
    return signature.replace(parameters=[*named, *marks, *rest])


def read_marks(caller: str, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call with position_ids in the place of all other marks.

    Marks that name other texts than `position_ids`, or than each other, are a ValueError.
    """
    marks = {name: given[name] for name in MARKS if given.get(name) is not None}
    rest = {name: value for name, value in given.items() if name not in MARKS}
    if not marks:
        return rest
    tokens, mask = rest.get("input_ids"), rest.get("attention_mask")
    tokens = rest.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:  # which the model refuses
        return rest
    name, *_ = marks
    if torch.compiler.is_exporting():
        raise ValueError(f"{caller}: {name} must be None while a model is exported")
    if isinstance(mask, Tensor) and mask.ndim != 2:
        raise ValueError(f"{caller}: {name} must be None where attention_mask is not [B, S]")
    cache = rest.get("past_key_values")
    if rest.get("position_ids") is None and cache is not None and cache.get_seq_length():
        raise ValueError(f"{caller}: {name} needs position_ids beside a cache of earlier tokens")
    rest["position_ids"] = _position_ids(caller, marks, rest.get("position_ids"), tokens, mask)
    return rest


# Where a text starts is data, which no graph can hold.
@torch.compiler.disable
def _position_ids(
    caller: str,
    marks: dict[str, Any],
    position_ids: Tensor | None,
    tokens: Tensor,
    attention_mask: Tensor | None,
) -> Tensor:
    """[1 or B, T], as given or else counted from the start of each text."""
    (B, T), device = tokens.shape[:2], tokens.device
    starts = {}  # [B, T] each
    if position_ids is not None:
        starts["position_ids"] = _changes(caller, "position_ids", position_ids, B, T, 1).to(device)
    for name in _BOUNDS:
        if name in marks:
            starts[name] = _starts(caller, name, marks[name], B, T).to(device)
    if _INDEX in marks:
        starts[_INDEX] = _changes(caller, _INDEX, marks[_INDEX], B, T, 0).to(device)
    counts = torch.ones(B, T, dtype=torch.bool, device=device)  # padding starts nothing
    if attention_mask is not None and attention_mask.shape == (B, T):
        is_token = attention_mask.to(device) != 0
        counts[:, 1:] = is_token[:, 1:] & is_token[:, :-1]
        counts[:, :1] = False
    first, start = next(iter(starts.items()), ("", torch.zeros_like(counts)))
    for name, other in starts.items():
        if len(found := ((start != other) & counts).nonzero()):
            b, t = found[0].tolist()
            one = first if start[b, t] else name
            raise ValueError(
                f"{caller}: {name} must mark the same texts as {first}, got a start at "
                f"[{b}, {t}] of {one} alone"
            )
    start = (start & counts) | ~counts
    start[:, :1] = True
    index = torch.arange(T, device=device).expand(B, T)
    counted = index - torch.where(start, index, 0).cummax(-1).values
    longest = int(counted.max()) + 1 if counted.numel() else 0
    for name in _LENGTHS:
        given = torch.as_tensor(marks.get(name, longest)).flatten().tolist()
        if len(given) != 1 or not given[0] >= longest:
            raise ValueError(
                f"{caller}: {name} must be one number, at least that of the longest text, "
                f"{longest}, got {', '.join(map(str, given))}"
            )
    return counted if position_ids is None else position_ids


def _changes(caller: str, name: str, values: Tensor, B: int, T: int, step: int) -> Tensor:
    """[B, T]: where a value is not `step` more than the one before it."""
    check_of_tokens(caller, name, values, B, T)
    starts = torch.ones(B, T, dtype=torch.bool, device=values.device)
    starts[:, 1:] = values.diff(dim=1) != step
    return starts


def _starts(caller: str, name: str, bounds: Tensor, B: int, T: int) -> Tensor:
    """[B, T]: where texts start that end and begin at the bounds [texts + 1] of all rows."""
    check_integers(caller, name, bounds)
    known = bounds.long().cpu()
    in_order = known.ndim == 1 and len(known) > 0 and not (known.diff() < 0).any()
    if not in_order or known[0] != 0 or known[-1] != B * T:
        raise ValueError(
            f"{caller}: {name} must count up from 0 to B * T = {B * T}, got {known.tolist()!s:.80}"
        )
    starts = torch.zeros(B * T + 1, dtype=torch.bool)
    starts[known] = True
    starts = starts[:-1].view(B, T)
    if not starts[:, :1].all():
        row = int((~starts[:, 0]).nonzero()[0])
        raise ValueError(f"{caller}: {name} must have a bound where row {row} starts, {row * T}")
    return starts
