"""Where tokens stand: `attention_mask` and `position_ids` as a record of rows.

T = 5 tokens, none cached:

    attention_mask    span of the row    positions
    1 1 1 1 1         none               0 1 2 3 4
    0 0 1 1 1         [2, 5]             0 0 0 1 2
    1 1 1 0 0         [0, 3]             0 1 2 2 2
    1 1 0 0 1         [0, 3] in order    0 1 1 1 2

`rows.py` says what order that is, in which tokens of a row with a hole stand together.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils import _pytree as pytree
from transformers import Cache

from linbias.models.decoder.pages import Pages
from linbias.models.decoder.rows import Rows, find_texts
from linbias.torch.operators.values import readable
from linbias.torch.shard import shard_here


@dataclass(frozen=True)
class TokenLayout:
    """Where the new tokens of a batch stand, and which keys they may see.

    It is no tensor, though fused models are given it in the place of their mask: a layer that
    takes it for one stops with an error.
    """

    positions: Tensor  # [1 or B, T], of each in its text; padding repeats the nearest one's
    # The new tokens, and all beside a cache: a pair of records for each batch of texts.
    queries: tuple[Rows, ...] = (Rows(),)
    keys: tuple[Rows, ...] = (Rows(),)
    need_weights: bool = False
    pages: Pages | None = None  # where keys lie in the pages of an engine
    ndim: ClassVar[int] = 0  # models look whether a mask has two or four axes: neither

    @property
    def are_last(self) -> bool:
        """Whether the new tokens stand behind all others, none of which is padding."""
        rows = self.keys[0]
        return rows.span is None and rows.places is None

    @property
    def is_packed(self) -> bool:
        """Whether rows hold several texts."""
        return self.keys[0].batch is not None

    def last_queries(self, count: int) -> "TokenLayout":
        """The same for the last `count` new tokens alone; the keys stay. Not of packed rows."""
        T = self.positions.shape[1]
        if count == T:
            return self
        return replace(
            self,
            positions=self.positions[:, T - count :],
            queries=(self.queries[0].last(count, T),),
        )

    def pack(self, x: Tensor) -> Tensor:
        """Leave padding out: [N, ...] of x [B, T, ...]; but not in graphs, nor without padding."""
        kept = self._kept()
        return x if kept is None else x[kept]

    def unpack(self, x: Tensor) -> Tensor:
        """Undo `pack`: [B, T, ...] of x [N, ...], zero at padding."""
        if (kept := self._kept()) is None:
            return x
        whole = x.new_zeros(*kept.shape, *x.shape[1:])
        whole[kept] = x
        return whole

    def _kept(self) -> Tensor | None:
        rows = self.keys[0]
        if rows.span is None or rows.places is not None or readable(rows.span) is None:
            return None
        return rows.is_token(rows.span, self.positions.shape[1])

    def to(self, *args: Any, **kwargs: Any) -> "TokenLayout":
        """On another device, where one is named; a dtype, which MPT asks for, means nothing."""
        device = kwargs.get("device", args[0] if args else None)
        if device is None or isinstance(device, torch.dtype):
            return self
        parts = pytree.tree_map_only(Tensor, lambda x: x.to(device), dict(vars(self)))
        return replace(self, **parts)

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], *_: Any, **__: Any) -> Any:
        # Not a TypeError, which Python's operators would replace by a message of their own.
        raise ValueError(
            f"linbias: {getattr(function, '__name__', function)} was given the mask of a fused "
            "model as if it were a tensor: this layer does not know attn_implementation='linbias'"
        )


def fill_room(attention_mask: Tensor | None, cache: Cache) -> Tensor | None:
    """The mask [B, S] of `generate`, as long as a static cache: else each step compiles anew."""
    if attention_mask is None:
        return None
    room = getattr(cache, "self_attention_cache", cache).layers[0].get_max_length()
    return pad(attention_mask, (0, room - attention_mask.shape[1]))


# What `DataCollatorWithFlattening` hands to models beside `position_ids`, which say it all.
MARKS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def without_marks(caller: str, given: dict[str, Any]) -> dict[str, Any]:
    """The named arguments of a call but for `MARKS`, which are not read."""
    marks = [name for name in MARKS if given.get(name) is not None]
    if marks and given.get("position_ids") is None:
        raise ValueError(
            f"{caller}: position_ids must be given by name beside {marks[0]}, since they alone "
            "say where the texts of a packed row start, got None"
        )
    return {name: x for name, x in given.items() if name not in MARKS}


def shown_with_marks(signature: inspect.Signature) -> inspect.Signature:
    """A signature with `MARKS` in it: Trainer drops columns of a data set that it does not find
    there, and texts would see each other.
    """
    named = inspect.Parameter.KEYWORD_ONLY
    marks = {name: inspect.Parameter(name, named, default=None) for name in MARKS}
    shown = {**signature.parameters, **marks}.values()
    return signature.replace(parameters=sorted(shown, key=lambda parameter: parameter.kind))


def takes_marks(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Let a forward that has an argument `position_ids` take `MARKS` too."""

    @wraps(forward)
    def with_marks(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **without_marks(type(self).__name__, kwargs))

    shown = shown_with_marks(inspect.signature(forward))
    with_marks.__signature__ = shown  # type: ignore[attr-defined]
    return with_marks


def check_position_ids(caller: str, x: Any, B: int, T: int) -> None:
    """Check that there is an integer for each of T tokens, of all rows or for all."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{caller}: position_ids must be a tensor, got {type(x).__name__}")
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{caller}: position_ids must hold integers, got {x.dtype}")
    if x.shape not in ((1, T), (B, T)):
        raise ValueError(
            f"{caller}: position_ids must have shape [1 or B, {T}], B = {B}, got {list(x.shape)}"
        )


def check_mask(caller: str, mask: Any) -> None:
    """Check that a mask [B, S] is a tensor, and none to add to scores: it has zeros at tokens."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{caller}: attention_mask must be a tensor, got {type(mask).__name__}")
    if mask.ndim != 2:
        advice = " (linbias.torch.attention takes a mask of queries and keys)" * (mask.ndim == 4)
        raise ValueError(
            f"{caller}: attention_mask must have shape [B, S], got {list(mask.shape)}{advice}"
        )
    if mask.is_floating_point() and readable(mask) is not None:
        if len(wrong := mask[~(mask >= 0)]):
            raise ValueError(
                f"{caller}: attention_mask [B, S] must be 0 at padding and positive at tokens, "
                f"got {float(wrong[0])}"
            )


def check_room(caller: str, num_keys: int, room: int) -> None:
    """Check that a static cache has room for all tokens."""
    if num_keys > room:
        raise ValueError(
            f"{caller}: past_key_values must have room for {num_keys} tokens, "
            f"got a static cache of {room}"
        )


def read_attention_mask(
    caller: str,
    attention_mask: Tensor | None,
    new_tokens: Tensor,
    num_cached: int | Tensor,
    *,
    position_ids: Tensor | None = None,
    has_cache: bool = False,
    has_room: bool = False,
    allows_holes: bool = False,
) -> TokenLayout:
    """Turn an attention mask [B, S], S = num_cached + T, into positions and rows.

    The tokens of each row must stand together, unless the caller allows holes; a row of padding
    alone has an empty span. Where nothing is padded there is no span, the fast path. Without a
    cache, numbers that start anew within a row mark several texts. In graphs no values are read:
    spans are always given, and tokens put in order too, or where no holes are allowed, a row with
    one is a RuntimeError of the compiled program.

    Args:
        caller: Whom errors name.
        attention_mask: Any dtype; 0 marks padding. None: no padding.
        new_tokens: [B, T, ...], ids or embeddings; only shape and device are used.
        num_cached: Number of earlier tokens, which a cache holds.
        position_ids: [1 or B, T], integers: the number of each new token in its text, or None.
        has_cache: Whether a cache holds the tokens, or shall hold them.
        has_room: Whether it holds more keys than tokens, as a static one does.
        allows_holes: Whether the caller puts rows in order. Not for a shard of a sequence.

    Example:
        >>> ids = torch.tensor([[7, 7, 5, 6]])
        >>> layout = read_attention_mask("model", torch.tensor([[0, 0, 1, 1]]), ids, num_cached=0)
        >>> layout.keys[0].span
        tensor([[2, 4]])
    """
    B, T = new_tokens.shape[:2]
    if not isinstance(num_cached, Tensor) or readable(num_cached) is not None:
        num_cached = int(num_cached)
    if (shared := shard_here()) is not None:
        shared.expect(position_ids)
        position_ids, allows_holes = None, False
    is_token = _is_token(caller, attention_mask, B, num_cached + T, has_room)
    may_have_holes = _may_have_holes(caller, is_token, allows_holes)
    layout = _layout(is_token, new_tokens, num_cached, has_room, may_have_holes)
    if position_ids is None:
        return layout
    check_position_ids(caller, position_ids, B, T)
    layout = replace(layout, positions=position_ids.long())
    if readable(position_ids) is None:
        if has_cache:
            return layout
        if torch.compiler.is_exporting():
            raise ValueError(
                f"{caller}: position_ids must be None while a model is exported: "
                "their values cannot be read"
            )
    new = None if is_token is None else is_token[:, -T:]
    texts = None if T < 2 else find_texts(position_ids.expand(B, T), new)
    if texts is None:
        return layout
    if has_cache:
        raise ValueError(
            f"{caller}: position_ids must count on from token to token where there is a cache, "
            "got several texts in a row (use_cache=False reads them)"
        )
    return TokenLayout(layout.positions, texts, texts)


def _layout(
    is_token: Tensor | None,
    new_tokens: Tensor,
    num_cached: int | Tensor,
    has_room: bool,
    may_have_holes: bool,
) -> TokenLayout:
    """What the mask alone says."""
    (B, T), device = new_tokens.shape[:2], new_tokens.device
    index = torch.arange(T, device=device)[None] + num_cached
    if is_token is None:
        if not has_room:
            return TokenLayout(index)
        end = torch.zeros(B, dtype=torch.int64, device=device) + (num_cached + T)
        span = torch.stack([torch.zeros_like(end), end], dim=-1)
        return TokenLayout(index, (Rows(span - num_cached),), (Rows(span),))
    num_before, index = is_token.cumsum(-1), index.expand(B, T)  # tokens up to each place
    positions = (num_before.gather(1, index) - 1).clamp(min=0)
    if may_have_holes:
        queries, keys = Rows.in_order(is_token.gather(1, index)), Rows.in_order(is_token)
        return TokenLayout(positions, (queries,), (keys,))
    first = (num_before == 0).sum(-1)
    span = torch.stack([first, first + is_token.sum(-1)], dim=-1)
    return TokenLayout(positions, (Rows(span - num_cached),), (Rows(span),))


def _is_token(
    caller: str, attention_mask: Tensor | None, B: int, S: int | Tensor, has_room: bool
) -> Tensor | None:
    """[B, S], or None where no token is padding."""
    if attention_mask is None:
        return None
    check_mask(caller, attention_mask)
    # That of a static cache may be as long as its room.
    if has_room and isinstance(S, int):
        attention_mask = attention_mask[:, :S]
    shape = attention_mask.shape
    if shape[0] != B or (isinstance(S, int) and shape[1] != S):
        raise ValueError(
            f"{caller}: attention_mask must have shape [B, S] = {[B, S]}, got {list(shape)}"
        )
    is_token = attention_mask != 0
    if has_room and not isinstance(S, int):
        is_token = is_token & (torch.arange(shape[1], device=is_token.device) < S)
    return None if readable(is_token) is not None and is_token.all() else is_token


def _may_have_holes(caller: str, is_token: Tensor | None, allowed: bool) -> bool:
    """Whether a row has a hole, or may: in graphs; an error where that is not allowed."""
    if is_token is None or (allowed and readable(is_token) is None):
        return is_token is not None
    starts = is_token.clone()
    starts[:, 1:] &= ~is_token[:, :-1]
    num_runs = starts.sum(-1)
    rule = f"{caller}: attention_mask must mark one unbroken run of tokens per row"
    if readable(is_token) is None:
        torch._assert_async((num_runs <= 1).all(), rule)
        return False
    has_holes = bool((num_runs > 1).any())
    if has_holes and not allowed:
        row = int((num_runs > 1).int().argmax())
        raise ValueError(f"{rule}, got {int(num_runs[row])} runs in row {row}")
    return has_holes
