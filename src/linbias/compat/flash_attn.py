"""The functions of flash-attn 2 on our attention, on any device and in any float type.

Signatures, layouts [B, T, H, D] and [total, H, D], defaults (`causal=False`, no bias) and
alignment are those of flash-attn 2.8 (Dao, `flash_attn_interface.py`): query i stands at key
i + S - T, and with `alibi_slopes`

    score[i, j] = softmax_scale * q[i] . k[j] - alibi_slope * |i + S - T - j|

The arguments, of those functions that have them:

- `q`: [B, T, H, D], or [total_q, H, D] of sequences end to end, none of which sees another.
- `k`, `v`: [B, S, G, D], or [total_k, G, D], dtype and device of q. Query head h reads key/value
  head h // (H // G).
- `qkv`, `kv`: q, k and v, or k and v, stacked before the axis of the heads.
- `cu_seqlens_q`, `cu_seqlens_k`, or `cu_seqlens` for both: [sequences + 1], integers from 0 to the
  total that do not fall: where sequences begin.
- `max_seqlen_q`, `max_seqlen_k`, `max_seqlen`: the longest sequence, which is not read here.
- `dropout_p`: the probability that a weight is dropped, in [0, 1 - 2^-32]. Pass 0 in evaluation.
- `softmax_scale`: None means D ** -0.5.
- `causal`: hide the keys after the query.
- `window_size`: (left, right): a query sees so many keys before and after its own, and all of a
  side below 0. (..., 0) is causal, and causal hides the right side.
- `alibi_slopes`: [H] or [B, H], in any float type, at least 0. None means no bias.
- `block_table`: [B, max_pages], integers: k and v, or the caches, are then pages [num_pages,
  page_size, G, D], those of each sequence.
- `return_attn_probs`: return out, softmax_lse [B, H, T] or [H, total_q], float32 (float64 for
  float64), and None in the place of S_dmask.

What differs, in all functions:

- Slopes and softmax_lse are differentiable.
- softmax_lse is that of the scores above; flash-attn's causal kernels add
  alibi_slope * (i + S - T). A row that sees no key has zeros and softmax_lse = inf, as there.
- `dropout_p` draws another mask, by PyTorch's generator; `return_attn_probs` is refused with it.
- Not built, and refused by NotImplementedError: `softcap` above 0, and rotary embeddings.
- Pages may have any size, and with `block_table` nothing is differentiated.
- `deterministic` and `num_splits` change nothing: results always repeat bit for bit.
"""

from linbias import _extras

_extras.require("linbias.compat.flash_attn")

import operator
from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linbias import _request
from linbias._request import Rule, axes
from linbias.torch import attention, attention_paged, attention_varlen, write_pages
from linbias.torch.call import as_int64, check_slopes, describe
from linbias.torch.operators.values import known_values
from linbias.torch.packed import placing
from linbias.torch.packed.paged import check_table

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, None]
_NO_WINDOW = (-1, -1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Attend, with linear biases where `alibi_slopes` are given.

    Args:
        All: As the module says.

    Raises:
        TypeError, ValueError: A dtype, shape or value breaks a rule of the module.
        NotImplementedError: The option is not built here.

    Example:
        >>> q = k = v = torch.ones(1, 5, 2, 8)
        >>> flash_attn_func(q, k, v, causal=True, alibi_slopes=torch.tensor([0.5, 0.25])).shape
        torch.Size([1, 5, 2, 8])
    """
    function = "flash_attn_func"
    sizes = _check_arrays(function, q=(q, "B T H D"), k=(k, "B S G D"), v=(v, "B S G D"))
    _refuse_unbuilt(function, softcap, dropout_p=dropout_p if return_attn_probs else 0.0)
    result = _attend(
        (q, k, v),
        _slopes(function, alibi_slopes, sizes),
        **_window(function, causal, window_size, sizes["T"], sizes["S"]),
        scale=softmax_scale,
        dropout=_request.check_dropout(function, dropout_p, "dropout_p"),
        return_lse=bool(return_attn_probs),
    )
    return result if isinstance(result, Tensor) else (*result, None)


_OPTIONS = list(signature(flash_attn_func).parameters.values())[3:]


def _with_options(packed: Callable[..., Result]) -> Callable[..., Result]:
    """Show a function that takes the options of `flash_attn_func` with them, after its own."""
    own = signature(packed)
    first = [p for p in own.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    packed.__signature__ = own.replace(parameters=first + _OPTIONS)  # type: ignore[attr-defined]
    return packed


@_with_options
def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Result:
    """Run `flash_attn_func` on queries, keys and values that stand in one tensor.

    Args:
        qkv: [B, T, 3, H, D].
        All others: As the module says.

    Raises:
        TypeError, ValueError, NotImplementedError: As `flash_attn_func`.

    Example:
        >>> flash_attn_qkvpacked_func(torch.ones(1, 5, 3, 2, 8), causal=True).shape
        torch.Size([1, 5, 2, 8])
    """
    _check_arrays("flash_attn_qkvpacked_func", qkv=(qkv, "B T 3 H D"))
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **options)


@_with_options
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Result:
    """Run `flash_attn_func` on keys and values that stand in one tensor.

    Args:
        kv: [B, S, 2, G, D].
        All others: As the module says.

    Raises:
        TypeError, ValueError, NotImplementedError: As `flash_attn_func`.

    Example:
        >>> flash_attn_kvpacked_func(torch.ones(1, 5, 4, 8), torch.ones(1, 7, 2, 2, 8)).shape
        torch.Size([1, 5, 4, 8])
    """
    _check_arrays("flash_attn_kvpacked_func", kv=(kv, "B S 2 G D"))
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """Run `flash_attn_func` on sequences packed end to end.

    Args:
        All: As the module says; dropout_p must be 0 with a block_table.

    Raises:
        TypeError, ValueError, NotImplementedError: As `flash_attn_func`, or for wrong lengths.

    Example:
        >>> q = k = v = torch.ones(5, 2, 8)
        >>> lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, lengths, lengths, 3, 3, causal=True).shape
        torch.Size([5, 2, 8])
    """
    function = "flash_attn_varlen_func"
    of_keys = "total_k G D" if block_table is None else "num_pages page_size G D"
    sizes = _check_arrays(function, q=(q, "total_q H D"), k=(k, of_keys), v=(v, of_keys))
    _refuse_unbuilt(function, softcap, dropout_p=dropout_p if return_attn_probs else 0.0)
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        describe(name, offsets, function)  # which refuses what is no tensor
    sizes["B"] = cu_seqlens_q.numel() - 1
    slopes = _slopes(function, alibi_slopes, sizes)
    num_keys = len(k)
    if block_table is not None:
        num_keys = k.shape[1] * _num_pages(function, block_table, sizes["B"])
    options = _window(function, causal, window_size, len(q), num_keys)
    options |= {"scale": softmax_scale, "return_lse": bool(return_attn_probs)}
    if block_table is None:
        options["dropout"] = _request.check_dropout(function, dropout_p, "dropout_p")
        result = attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, slopes, **options)
    elif dropout_p:
        raise ValueError(f"{function}: dropout_p must be 0 with a block_table, got {dropout_p}")
    else:
        lengths = placing.offsets(function, "cu_seqlens_k", cu_seqlens_k, None).diff()
        if len(lengths) != sizes["B"]:
            raise ValueError(
                f"{function}: cu_seqlens_q counts {sizes['B']} sequences but cu_seqlens_k"
                f" {len(lengths)}"
            )
        check_table(function, block_table, lengths, k)
        result = attention_paged(
            q, k, v, block_table, lengths, slopes, cu_seqlens_q=cu_seqlens_q, **options
        )
    if isinstance(result, Tensor):
        return result
    out, lse = result
    return out, _as_theirs(lse.T), None


@_with_options
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Result:
    """Run `flash_attn_varlen_func` on queries, keys and values that stand in one tensor.

    Args:
        qkv: [total, 3, H, D].
        All others: As the module says.

    Raises:
        TypeError, ValueError, NotImplementedError: As `flash_attn_varlen_func`.

    Example:
        >>> lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(torch.ones(5, 3, 2, 8), lengths, 3).shape
        torch.Size([5, 2, 8])
    """
    _check_arrays("flash_attn_varlen_qkvpacked_func", qkv=(qkv, "total 3 H D"))
    q, k, v = qkv.unbind(1)
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *lengths, *args, **options)


@_with_options
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *args: Any,
    **options: Any,
) -> Result:
    """Run `flash_attn_varlen_func` on keys and values that stand in one tensor.

    Args:
        kv: [total_k, 2, G, D].
        All others: As the module says.

    Raises:
        TypeError, ValueError, NotImplementedError: As `flash_attn_varlen_func`.

    Example:
        >>> q, kv = torch.ones(5, 4, 8), torch.ones(9, 2, 2, 8)
        >>> of_q, of_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5], [0, 4, 9]))
        >>> flash_attn_varlen_kvpacked_func(q, kv, of_q, of_k, 3, 5).shape
        torch.Size([5, 4, 8])
    """
    _check_arrays("flash_attn_varlen_kvpacked_func", kv=(kv, "total_k 2 G D"))
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *lengths, *args, **options)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Write new keys and values into caches, in place, and attend to what the caches then hold.

    Row b sees the keys cache_leftpad[b] .. cache_seqlens[b] + T_new - 1 of its cache, and its last
    query stands at the last of them. Nothing is differentiated. The caller adds T_new to
    cache_seqlens, as in flash-attn.

    Args:
        k_cache, v_cache: [B, S, G, D], dtype and device of q; with cache_batch_idx any B; with a
            block_table pages.
        k, v: [B, T_new, G, D], both or neither: written at cache_seqlens, then not None.
        cache_seqlens: One number, or integers [B]: filled positions, padding included. None: all.
        cache_batch_idx: [B], integers: the rows of the caches, then copied, for each of q.
        cache_leftpad: [B], integers: the first position of a row that is no padding. None means 0.
        block_table: As the module says; cache_batch_idx and cache_leftpad must be None with it,
            and cache_seqlens not.
        rotary_cos, rotary_sin: None, since they are not built.
        rotary_interleaved: Changes nothing.
        return_softmax_lse: Also return softmax_lse.
        All others: As the module says.

    Returns:
        out [B, T, H, D]; with return_softmax_lse also softmax_lse [B, H, T].

    Raises:
        TypeError, ValueError: A dtype, shape or value breaks a rule above (on a GPU values are not
            read), or the new keys do not fit into the caches.
        NotImplementedError: The option is not built here.

    Example:
        >>> k_cache, v_cache = torch.zeros(2, 1, 16, 2, 8)
        >>> q = k = v = torch.ones(1, 1, 2, 8)
        >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3, causal=True).shape
        torch.Size([1, 1, 2, 8])
        >>> k_cache[0, :5, 0, 0]
        tensor([0., 0., 0., 1., 0.])
    """
    function = "flash_attn_with_kvcache"
    _refuse_unbuilt(function, softcap, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    new: dict[str, tuple[Any, str]] = {}
    if k is not None or v is not None:
        if k is None or v is None or cache_seqlens is None:
            raise ValueError(
                f"{function}: k and v must be given both or neither, and with cache_seqlens, where"
                " they are written, got None"
            )
        new = {"k": (k, "B T_new G D"), "v": (v, "B T_new G D")}
    of_cache = "B S G D" if cache_batch_idx is None else "rows S G D"
    if block_table is not None:
        of_cache = "num_pages page_size G D"
        if cache_batch_idx is not None or cache_leftpad is not None or cache_seqlens is None:
            raise ValueError(
                f"{function}: with a block_table cache_seqlens must be given, and cache_batch_idx"
                " and cache_leftpad be None"
            )
    caches = {"k_cache": (k_cache, of_cache), "v_cache": (v_cache, of_cache)}
    sizes = _check_arrays(function, q=(q, "B T H D"), **caches, **new)
    B, T, num_new = sizes["B"], sizes["T"], sizes.get("T_new", 0)
    S = sizes.get("S", 0)
    if block_table is not None:
        S = sizes["page_size"] * _num_pages(function, block_table, B)
    rows = _integers(function, "cache_batch_idx", cache_batch_idx, B, len(k_cache) - 1)
    if isinstance(cache_seqlens, int | np.integer):
        cache_seqlens = torch.full((B,), int(cache_seqlens), device=q.device)
    end = _integers(function, "cache_seqlens", cache_seqlens, B, S - num_new, num_new)
    first = _integers(function, "cache_leftpad", cache_leftpad, B, S)
    # What is wrong is refused before anything is written.
    _request.check_scale(function, softmax_scale, "softmax_scale")
    slopes = _slopes(function, alibi_slopes, sizes)
    window = _window(function, causal, window_size, T, S)
    if block_table is not None and end is not None:
        check_table(function, block_table, end + num_new, k_cache)
        if k is not None and v is not None:
            row = end[:, None] + torch.arange(num_new, device=q.device)
            page = block_table.long().gather(1, row // sizes["page_size"])
            slots = page * sizes["page_size"] + row % sizes["page_size"]
            new_k, new_v = k.flatten(0, 1), v.flatten(0, 1)
            write_pages(new_k, new_v, k_cache, v_cache, slots.flatten())
        out, lse = attention_paged(
            q.flatten(0, 1),
            k_cache,
            v_cache,
            block_table,
            end + num_new,
            slopes,
            cu_seqlens_q=torch.arange(B + 1, device=q.device) * T,
            **window,
            scale=softmax_scale,
            return_lse=True,
        )
        out, lse = out.unflatten(0, (B, T)), lse.unflatten(0, (B, T)).mT
        return (out, _as_theirs(lse)) if return_softmax_lse else out
    if k is not None and v is not None and end is not None:
        at = torch.arange(B, device=q.device) if rows is None else rows
        places = at[:, None], end[:, None] + torch.arange(num_new, device=q.device)
        k_cache[places], v_cache[places] = k, v
        end = end + num_new
    key_range = None
    if end is not None or first is not None:
        end = torch.full((B,), S, device=q.device) if end is None else end
        first = torch.zeros_like(end) if first is None else torch.minimum(first, end)
        key_range = torch.stack([first, end], dim=1)
    if rows is not None:
        k_cache, v_cache = k_cache[rows], v_cache[rows]
    return _attend(
        (q, k_cache, v_cache),
        slopes,
        **window,
        key_range=key_range,
        scale=softmax_scale,
        return_lse=bool(return_softmax_lse),
    )


def _attend(
    arrays: tuple[Tensor, ...], slopes: Tensor | list[float], **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """Our attention in the layout [B, T, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in arrays)
    result = attention(q, k, v, slopes, **options)
    if isinstance(result, Tensor):
        return result.transpose(1, 2).contiguous()
    out, lse = result
    return out.transpose(1, 2).contiguous(), _as_theirs(lse)


def _check_arrays(function: str, **arrays: tuple[Any, str]) -> dict[str, int]:
    """The sizes of arrays by the letters of their axes, as they come with each: what has the same
    letter is as long, and all are of the dtype and on the device of the first.
    """
    like = next(iter(arrays))
    sizes: dict[str, int] = {}
    for name, (array, letters) in arrays.items():
        x, wanted = describe(name, array, function), describe(like, arrays[like][0], function)
        if x[1:] != wanted[1:] or x.dtype not in _request.FLOATS:
            raise TypeError(
                f"{function}: {name} must hold floating point, in the dtype and on the device of"
                f" {like}, {wanted.dtype} on {wanted.device}, got {x.dtype} on {x.device}"
            )
        rule = Rule(axes(letters), "floats")
        if len(x.shape) == len(rule.axes[0]):
            for letter, size in zip(rule.axes[0], x.shape, strict=True):
                if isinstance(letter, str):
                    sizes.setdefault(letter, size)
        unknown = {letter: letter for letter in letters.split()}
        _request.check_array(function, name, x, rule, {**unknown, **sizes})
    H, G = sizes.get("H", 0), sizes.get("G", 1)
    if H % G if G else H:
        raise ValueError(
            f"{function}: the heads of q must be a multiple of those of k, got {H} and {G}"
        )
    return sizes


def _refuse_unbuilt(
    function: str, softcap: float, dropout_p: float = 0.0, **options: object
) -> None:
    """Refuse what is not built; dropout_p: of a call with return_attn_probs."""
    if softcap > 0:
        raise NotImplementedError(
            f"{function}: softcap must be at most 0 (none), since capped scores are not built,"
            f" got {softcap}"
        )
    if dropout_p:
        raise NotImplementedError(
            f"{function}: return_attn_probs must be False with dropout, since S_dmask of"
            f" length x length is not made; got dropout_p={dropout_p}"
        )
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(
                f"{function}: {name} must be None, since it is not built: rotate q and k before"
                f" the call; got {type(value).__name__}"
            )


def _slopes(
    function: str, alibi_slopes: Tensor | None, sizes: dict[str, int]
) -> Tensor | list[float]:
    if alibi_slopes is None:
        return [0.0] * sizes["H"]
    described = describe("alibi_slopes", alibi_slopes, function)
    rule = _request.RULES["slopes"]
    _request.check_array(function, "alibi_slopes", described, rule, sizes)
    check_slopes(function, "alibi_slopes", alibi_slopes)
    return alibi_slopes


def _window(
    function: str, causal: bool, window_size: tuple[int, int], T: int, S: int
) -> dict[str, Any]:
    """`causal` and `window` of ours; flash-attn says causal by a window, too."""
    try:
        left, right = window_size
        left, right = operator.index(left), operator.index(right)
    except TypeError as error:
        raise TypeError(
            f"{function}: window_size must be two integers, (left, right), got {window_size!r}"
        ) from error
    # No key stands more than S - 1 before a query or T - 1 after it.
    left = left if 0 <= left < S - 1 else -1
    shown = right if 0 < right < T - 1 else -1
    window = None if left == shown == -1 else (left, shown)
    return {"causal": bool(causal) or right == 0, "window": window}


def _integers(
    function: str, name: str, values: Tensor | None, B: int, most: int, num_new: int = 0
) -> Tensor | None:
    """Integers [B] between 0 and `most`, as int64; num_new: positions that must still fit."""
    if values is None:
        return None
    rule = Rule(axes("B"), "integers")
    _request.check_array(function, name, describe(name, values, function), rule, {"B": B})
    values = as_int64(values)
    if known_values(values) is not None and ((values < 0) | (values > most)).any():
        room = f", so that {num_new} more fit into the cache" if num_new else ""
        raise ValueError(f"{function}: {name} must be in [0, {most}]{room}, got {values.tolist()}")
    return values


def _num_pages(function: str, table: Tensor, B: int) -> int:
    """How many pages a checked table [B, max_pages] has room for in a row."""
    described = describe("block_table", table, function)
    most: int | str = described.shape[1] if len(described.shape) == 2 else "max_pages"
    rule = Rule(axes("B max_pages"), "integers")
    _request.check_array(function, "block_table", described, rule, {"B": B, "max_pages": most})
    return int(most)


def _as_theirs(lse: Tensor) -> Tensor:
    """inf where a row sees no key."""
    return lse.masked_fill(lse == -torch.inf, torch.inf).contiguous()
