"""Full masks: `attention_mask` [B, 1, T, S] says who sees whom, `position_ids` where all stand.

Draft trees of speculative decoding have them: siblings stand at one position, after their parent,
and no branch sees another. Depth first, positions fall. Here a and c follow the cached x and y:

    token           x y a b c       a sees    x y a
    position_ids    0 1 2 3 2       b sees    x y a b
                                    c sees    x y     c

All scores are computed, as many as the mask has values: nothing is near to far.
"""

from typing import Any, TypeGuard

import torch
from torch import Tensor
from transformers import Cache

from linbias.models.decoder.cache import attending_layer
from linbias.models.decoder.layout import FullMask, TokenLayout, check_integers
from linbias.torch.shard import shard_here

_HIDDEN = -1e4  # at most; the lowest float16 is -65,504


def is_full(attention_mask: Any) -> TypeGuard[Tensor]:
    return isinstance(attention_mask, Tensor) and attention_mask.ndim == 4


# Whether a mask keeps its rules is data, which no graph can hold.
@torch.compiler.disable
def read_full_mask(
    caller: str,
    attention_mask: Tensor,
    new_tokens: Tensor,
    cache: Cache | None,
    position_ids: Tensor | None,
) -> TokenLayout:
    """Check a full mask, and find where the tokens stand that a cache holds.

    Args:
        caller: Whom errors name.
        attention_mask: [1 or B, 1, T, S], S = cached + T. Bool: True where a token sees a key.
            Floating point: 0 there, and elsewhere at most -1e4, such as -inf.
        new_tokens: [B, T, ...], ids or embeddings; only shape and device are used.
        cache: Of earlier tokens.
        position_ids: [1 or B, T], where the new tokens stand in their text: the cached ones then
            stand in a row, from the first that is seen, and a call where that cannot be is
            refused. [1 or B, S]: where all stand. None: all in a row.
    """
    (B, T), device = new_tokens.shape[:2], new_tokens.device
    num_cached = 0 if cache is None else int(cache.get_seq_length())
    S, shape = num_cached + T, list(attention_mask.shape)
    whose = "a shard of a sequence" if shard_here() is not None else None
    if attending_layer(cache, 0) is not None or (cache is not None and cache.is_compileable):
        whose = f"a {type(cache).__name__}"
    if whose is not None:
        raise ValueError(
            f"{caller}: attention_mask must have shape [B, S] for {whose}, got {shape}"
        )
    if shape not in ([1, 1, T, S], [B, 1, T, S]):
        raise ValueError(
            f"{caller}: attention_mask must have shape [B, S] = {[B, S]} or [1 or B, 1, T, S] = "
            f"{[B, 1, T, S]}, got {shape}"
        )
    seen = _seen(caller, attention_mask[:, 0].to(device)).expand(B, T, S)
    first = (seen.any(1).cumsum(-1) == 0).sum(-1, keepdim=True)  # what stands before is padding
    keys = (torch.arange(S, device=device) - first).clamp(min=0)
    if position_ids is not None:
        check_integers(caller, "position_ids", position_ids)
        given = position_ids.to(device).long()
        if given.ndim != 2 or given.shape[0] not in (1, B) or given.shape[1] not in (T, S):
            raise ValueError(
                f"{caller}: position_ids must have shape [1 or B, T] or, with the cached tokens, "
                f"[1 or B, S] = {[B, S]}, got {list(given.shape)}"
            )
        given = given.expand(B, -1)
        if given.shape[1] < S:
            _check_cached(caller, seen, given, first)
        keys = torch.cat([keys[:, : S - given.shape[1]], given], dim=1)
    full = FullMask(seen, keys[:, num_cached:], keys)
    if len(found := (full.seen & (full.distances < 0)).nonzero()):
        b, t, s = found[0].tolist()
        raise ValueError(
            f"{caller}: attention_mask must hide what stands after a token, but shows at "
            f"[{b}, 0, {t}, {s}] position {int(keys[b, s])} to position {int(full.queries[b, t])}"
        )
    return TokenLayout(full.queries, full_mask=full)


def _seen(caller: str, mask: Tensor) -> Tensor:
    """A mask as bool, and its values checked."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(
            f"{caller}: attention_mask [B, 1, T, S] must be bool or floating point, got "
            f"{mask.dtype}"
        )
    seen = mask == 0
    if len(wrong := (~seen & ~(mask <= _HIDDEN)).nonzero()):
        b, t, s = wrong[0].tolist()
        raise ValueError(
            f"{caller}: attention_mask must be 0 where a token sees a key, and at most "
            f"{_HIDDEN:g} elsewhere, got {float(mask[b, t, s]):g} at [{b}, 0, {t}, {s}]"
        )
    return seen


def _check_cached(caller: str, seen: Tensor, new: Tensor, first: Tensor) -> None:
    """Check that the cached tokens stand in a row, as far as a branch can tell.

    Who stands at p sees p tokens before itself. Those in the cache are its first ones: an earlier
    draft there, beside which others stand, would leave a gap.
    """
    cached = seen[..., : seen.shape[-1] - new.shape[-1]]
    count, total = cached.sum(-1), seen.sum(-1)
    after = torch.arange(cached.shape[-1], device=seen.device) >= (first + count)[..., None]
    wrong = (cached & after).any(-1) | (total != new + 1)
    if len(found := (wrong & (count > 0)).nonzero()):
        b, t = found[0].tolist()
        raise ValueError(
            f"{caller}: position_ids [B, T] beside cached tokens must say how many tokens in a "
            f"row each one follows, got {int(new[b, t])} at [{b}, {t}], to which attention_mask "
            f"shows {int(count[b, t])} cached ones of {cached.shape[-1]} and "
            f"{int(total[b, t])} in all: position_ids [B, S] say where all stand"
        )
