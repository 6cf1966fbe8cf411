"""Where tokens stand: `attention_mask` and `position_ids` as arguments of attention.

Every key keeps its place in the padded row: the key range hides the padding, and `query_start`
says where in the row the new tokens stand. T = 5 tokens, none cached:

    attention_mask    key_range    query_start    positions
    1 1 1 1 1         [0, 5]       0              0 1 2 3 4
    0 0 1 1 1         [2, 5]       0              0 0 0 1 2
    1 1 1 0 0         [0, 3]       0              0 1 2 2 2
    1 1 0 0 1         [0, 3]       0              0 1 1 1 2

Tokens of a row with a hole, such as the last, do not stand together: range and start are those of
the row in the order of `holes.py`, in which they do.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from linbias.models.decoder.holes import Holes
from linbias.models.decoder.packing import Packing, find_packing
from linbias.torch.operators.values import readable
from linbias.torch.shard import shard_here


class FullMask(NamedTuple):
    """Who sees whom, and where all stand, of a call with an attention_mask [B, 1, T, S]."""

    seen: Tensor  # [B, T, S]: whether a new token sees a key
    queries: Tensor  # [B, T]: where the new tokens stand
    keys: Tensor  # [B, S]: where all tokens stand

    @property
    def distances(self) -> Tensor:
        """[B, T, S]: how far each key lies before each query."""
        return self.queries[..., None] - self.keys[:, None]

    @property
    def key_range(self) -> Tensor:
        """[B, 2]: the range of keys that the longest branch of each row would have alone."""
        length = self.queries.amax(-1, keepdim=True) + 1
        return torch.cat([torch.zeros_like(length), length], dim=-1)

    def last_queries(self, count: int) -> "FullMask":
        """The same for the last `count` new tokens alone; the keys stay."""
        skipped = self.queries.shape[1] - count
        return self._replace(seen=self.seen[:, skipped:], queries=self.queries[:, skipped:])

    def to(self, device: torch.device | str | int) -> "FullMask":
        return FullMask(*(x.to(device) for x in self))


@dataclass(frozen=True)
class TokenLayout:
    """Where the new tokens of a batch stand, and which keys they may see.

    It is no tensor, though fused models are given it in the place of their mask: a layer that
    takes it for one stops with an error.
    """

    positions: Tensor  # [1 or B, T], of each in its text; padding repeats the nearest one's
    key_range: Tensor | None = None  # [B, 2]; None where every key is a token
    query_start: Tensor | None = None  # [B], likewise
    packing: Packing | None = None  # of rows that hold several texts
    full_mask: FullMask | None = None  # in the place of all that says what is seen
    is_token: Tensor | None = None  # [B, S]; None where every key is a token, and in packed rows
    holes: Holes | None = None  # of rows that have some, or may: in graphs
    need_weights: bool = False
    ndim: ClassVar[int] = 0  # models look whether a mask has two or four axes: neither

    @property
    def are_last(self) -> bool:
        """Whether the new tokens stand behind all others, none of which is padding."""
        placed = (self.key_range, self.query_start, self.packing, self.full_mask)
        return all(x is None for x in placed)

    def last_queries(self, count: int) -> "TokenLayout":
        """The same for the last `count` new tokens alone; the keys stay."""
        skipped = self.positions.shape[1] - count
        if skipped == 0:
            return self
        start, holes, positions = self.query_start, self.holes, self.positions[:, skipped:]
        if start is not None:
            start = start + (skipped if holes is None else holes.is_new[:, :skipped].sum(-1))
        if holes is not None:
            holes = holes.last_queries(count)
        full = None if self.full_mask is None else self.full_mask.last_queries(count)
        return replace(self, positions=positions, query_start=start, holes=holes, full_mask=full)

    def pack(self, x: Tensor) -> Tensor:
        """Leave padding out: [N, ...] of x [B, T, ...]; but not in graphs, nor without padding."""
        return x if self._kept is None else x[self._kept]

    def unpack(self, x: Tensor) -> Tensor:
        """Undo `pack`: [B, T, ...] of x [N, ...], zero at padding."""
        if self._kept is None:
            return x
        whole = x.new_zeros(*self._kept.shape, *x.shape[1:])
        whole[self._kept] = x
        return whole

    @property
    def _kept(self) -> Tensor | None:
        is_token = self.is_token
        return None if is_token is None or readable(is_token) is None else is_token

    def to(self, *args: Any, **kwargs: Any) -> "TokenLayout":
        """On another device, where one is named; a dtype, which MPT asks for, means nothing."""
        device = kwargs.get("device", args[0] if args else None)
        if device is None or isinstance(device, torch.dtype):
            return self
        parts = {name: x for name, x in vars(self).items() if hasattr(x, "to")}
        return replace(self, **{name: x.to(device) for name, x in parts.items()})

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


def check_integers(caller: str, name: str, x: Any) -> None:
    """Check that an argument is a tensor of integers."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{caller}: {name} must be a tensor, got {type(x).__name__}")
    if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise TypeError(f"{caller}: {name} must hold integers, got {x.dtype}")


def check_of_tokens(caller: str, name: str, x: Any, B: int, T: int) -> None:
    """Check that an argument holds an integer for each new token, of all rows or for all."""
    check_integers(caller, name, x)
    if x.shape not in ((1, T), (B, T)):
        raise ValueError(
            f"{caller}: {name} must have shape [1, T] or [B, T] = {[B, T]}, got {list(x.shape)}"
        )


def check_mask(caller: str, mask: Any) -> None:
    """Check that a mask [B, S] is a tensor, and none to add to scores: it has zeros at tokens."""
    if not isinstance(mask, Tensor):
        raise TypeError(f"{caller}: attention_mask must be a tensor, got {type(mask).__name__}")
    if mask.ndim != 2:
        raise ValueError(
            f"{caller}: attention_mask must have shape [B, S], got {list(mask.shape)}"
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
    """Turn an attention mask [B, S], S = num_cached + T, into positions, ranges and query_start.

    The tokens of each row must stand together, unless the caller allows holes; a row of padding
    alone has an empty range. Where nothing is padded, ranges and starts are None, the fast path.
    Without a cache, numbers that start anew within a row mark several texts. In graphs no values
    are read: ranges are always given, and holes too, or where they are not allowed, a row with
    one is a RuntimeError of the compiled program.

    Args:
        caller: Whom errors name.
        attention_mask: Any dtype; 0 marks padding. None: no padding.
        new_tokens: [B, T, ...], ids or embeddings; only shape and device are used.
        num_cached: Number of earlier tokens, which a cache holds.
        position_ids: [1 or B, T], integers: the number of each new token in its text, or None.
        has_cache: Whether a cache holds the tokens, or shall hold them.
        has_room: Whether it holds more keys than tokens, as a static one does.
        allows_holes: Whether the caller puts rows in order as `holes` of the layout say, of which
            range and start then are. Not for a shard of a sequence.

    Example:
        >>> ids = torch.tensor([[7, 7, 5, 6]])
        >>> read_attention_mask("model", torch.tensor([[0, 0, 1, 1]]), ids, num_cached=0).key_range
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
    check_of_tokens(caller, "position_ids", position_ids, B, T)
    layout = replace(layout, positions=position_ids.long())
    if readable(position_ids) is None:
        if has_cache:
            return layout
        if torch.compiler.is_exporting():
            raise ValueError(
                f"{caller}: position_ids must be None while a model is exported: "
                "their values cannot be read"
            )
    new = None if layout.is_token is None else layout.is_token[:, -T:]
    packing = None if T < 2 else find_packing(position_ids.expand(B, T), new)
    if packing is None:
        return layout
    if has_cache:
        raise ValueError(
            f"{caller}: position_ids must count on from token to token where there is a cache, "
            "got several texts in a row (use_cache=False reads them)"
        )
    return TokenLayout(layout.positions, packing=packing)


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
    if is_token is None and not has_room:
        return TokenLayout(index)
    query_start = torch.zeros(B, dtype=torch.int64, device=device) + num_cached
    if is_token is None:
        key_range = torch.stack([torch.zeros_like(query_start), query_start + T], dim=-1)
        return TokenLayout(index, key_range, query_start)
    num_before, index = is_token.cumsum(-1), index.expand(B, T)  # tokens up to each place
    positions = (num_before.gather(1, index) - 1).clamp(min=0)
    num_tokens = is_token.sum(-1, keepdim=True)
    if may_have_holes:
        is_new = is_token.gather(1, index)
        first = torch.zeros_like(num_tokens)
        query_start = num_tokens[:, 0] - is_new.sum(-1)
        holes = Holes.of(is_token, is_new)
    else:
        first, holes = (num_before == 0).sum(-1, keepdim=True), None
    key_range = torch.cat([first, first + num_tokens], dim=-1)
    return TokenLayout(positions, key_range, query_start, is_token=is_token, holes=holes)


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
