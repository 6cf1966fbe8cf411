"""The functions of flash-attn 2 on our attention, on any device and in any float type.

Signatures, layouts [B, T, H, D] and [total, H, D], defaults (`causal=False`, no bias) and
alignment are those of flash-attn 2.8 (Dao, `flash_attn_interface.py`): query i stands at key
i + S - T, and with `alibi_slopes`

    score[i, j] = softmax_scale * q[i] . k[j] - alibi_slope * |i + S - T - j|

What differs, in all functions:

- `alibi_slopes` have any float type, are at least 0, and are differentiable, as is softmax_lse.
- softmax_lse is that of the scores above; flash-attn's causal kernels add
  alibi_slope * (i + S - T). A row that sees no key has zeros and softmax_lse = inf, as there.
- `return_attn_probs` gives None for S_dmask, and is refused with dropout.
- `dropout_p` draws another mask, by PyTorch's generator.
- Not built, and refused: `softcap`, rotary embeddings, paged caches.
- `deterministic` and `num_splits` change nothing: results always repeat bit for bit.
"""

from linbias import _extras

_extras.require("linbias.compat.flash_attn")

import itertools
import operator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from linbias import _request, _values
from linbias.torch import attention, attention_varlen
from linbias.torch.call import as_int64
from linbias.torch.operators.values import known_values, readable

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
    """Attend, with linear biases where `alibi_slopes` are given, as the module says.

    Args:
        q: [B, T, H, D], floating point.
        k, v: [B, S, G, D], dtype and device of q. Query head h reads key/value head h // (H // G).
        dropout_p: Probability that a weight is dropped, in [0, 1 - 2^-32]. Pass 0 in evaluation.
        softmax_scale: Factor on q . k. None means D ** -0.5.
        causal: Hide the keys after the query; the last query stands at the last key.
        window_size: (left, right): a query sees so many keys before and after its own, and all of
            a side below 0. (..., 0) is causal, and causal hides the right side.
        softcap: At most 0, which means none.
        alibi_slopes: [H] or [B, H], at least 0. None means no bias.
        deterministic: Changes nothing.
        return_attn_probs: Also return softmax_lse, and None in the place of S_dmask.

    Returns:
        out [B, T, H, D] in the dtype of q; with return_attn_probs out, softmax_lse [B, H, T]
        (float32; float64 for float64) and None.

    Raises:
        TypeError, ValueError: A dtype, shape or value breaks a rule above.
        NotImplementedError: The option is not built here.

    Example:
        >>> q = k = v = torch.ones(1, 5, 2, 8)
        >>> flash_attn_func(q, k, v, causal=True, alibi_slopes=torch.tensor([0.5, 0.25])).shape
        torch.Size([1, 5, 2, 8])
    """
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    return _attend("flash_attn_func", (q, k, v), options)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Run `flash_attn_func` on queries, keys and values that stand in one tensor.

    Args:
        qkv: [B, T, 3, H, D]: q, k and v.
        All others: As for `flash_attn_func`.

    Raises:
        TypeError, ValueError, NotImplementedError: As `flash_attn_func`.

    Example:
        >>> flash_attn_qkvpacked_func(torch.ones(1, 5, 3, 2, 8), causal=True).shape
        torch.Size([1, 5, 2, 8])
    """
    function = "flash_attn_qkvpacked_func"
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    return _attend(function, _unpacked(function, "qkv", qkv, 3, 5), options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Run `flash_attn_func` on keys and values that stand in one tensor.

    Args:
        q: [B, T, H, D].
        kv: [B, S, 2, G, D]: k and v.
        All others: As for `flash_attn_func`.

    Raises:
        TypeError, ValueError, NotImplementedError: As `flash_attn_func`.

    Example:
        >>> flash_attn_kvpacked_func(torch.ones(1, 5, 4, 8), torch.ones(1, 7, 2, 2, 8)).shape
        torch.Size([1, 5, 4, 8])
    """
    function = "flash_attn_kvpacked_func"
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    return _attend(function, (q, *_unpacked(function, "kv", kv, 2, 5)), options)


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
    """Run `flash_attn_func` on B sequences packed end to end; none sees another.

    Args:
        q: [total_q, H, D], floating point.
        k, v: [total_k, G, D], dtype and device of q.
        cu_seqlens_q: [B + 1], integers from 0 to total_q that do not fall: where sequences begin.
        cu_seqlens_k: [B + 1], likewise for k and v.
        max_seqlen_q, max_seqlen_k: At least the longest sequence; not needed otherwise.
        All others: As for `flash_attn_func`.
        block_table: None, since it is not built.

    Returns:
        out [total_q, H, D]; with return_attn_probs out, softmax_lse [H, total_q] and None.

    Raises:
        TypeError, ValueError, NotImplementedError: As `flash_attn_func`, or for wrong lengths.

    Example:
        >>> q = k = v = torch.ones(5, 2, 8)
        >>> lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, lengths, lengths, 3, 3, causal=True).shape
        torch.Size([5, 2, 8])
    """
    function = "flash_attn_varlen_func"
    _refuse_given(function, block_table=block_table)
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    lengths = {"_q": (cu_seqlens_q, max_seqlen_q), "_k": (cu_seqlens_k, max_seqlen_k)}
    return _attend_varlen(function, (q, k, v), lengths, options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """Run `flash_attn_varlen_func` on queries, keys and values that stand in one tensor.

    Args:
        qkv: [total, 3, H, D]: q, k and v.
        cu_seqlens: [B + 1], as cu_seqlens_q of `flash_attn_varlen_func`.
        max_seqlen: At least the longest sequence.
        All others: As for `flash_attn_func`.

    Raises:
        TypeError, ValueError, NotImplementedError: As `flash_attn_varlen_func`.

    Example:
        >>> lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(torch.ones(5, 3, 2, 8), lengths, 3).shape
        torch.Size([5, 2, 8])
    """
    function = "flash_attn_varlen_qkvpacked_func"
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    arrays = _unpacked(function, "qkv", qkv, 3, 4)
    return _attend_varlen(function, arrays, {"": (cu_seqlens, max_seqlen)}, options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
) -> Result:
    """Run `flash_attn_varlen_func` on keys and values that stand in one tensor.

    Args:
        q: [total_q, H, D].
        kv: [total_k, 2, G, D]: k and v.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: As for `flash_attn_varlen_func`.
        All others: As for `flash_attn_func`.

    Raises:
        TypeError, ValueError, NotImplementedError: As `flash_attn_varlen_func`.

    Example:
        >>> q, kv = torch.ones(5, 4, 8), torch.ones(9, 2, 2, 8)
        >>> of_q, of_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5], [0, 4, 9]))
        >>> flash_attn_varlen_kvpacked_func(q, kv, of_q, of_k, 3, 5).shape
        torch.Size([5, 4, 8])
    """
    function = "flash_attn_varlen_kvpacked_func"
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_attn_probs
    )
    lengths = {"_q": (cu_seqlens_q, max_seqlen_q), "_k": (cu_seqlens_k, max_seqlen_k)}
    return _attend_varlen(function, (q, *_unpacked(function, "kv", kv, 2, 4)), lengths, options)


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
        q: [B, T, H, D], floating point.
        k_cache, v_cache: [B, S, G, D], dtype and device of q; with cache_batch_idx any B.
        k, v: [B, T_new, G, D], both or neither: written at cache_seqlens, then not None.
        cache_seqlens: One number, or integers [B]: filled positions, padding included. None: all.
        cache_batch_idx: [B], integers: the rows of the caches, then copied, for each of q.
        cache_leftpad: [B], integers: the first position of a row that is no padding. None means 0.
        softmax_scale, causal, window_size, softcap, alibi_slopes: As for `flash_attn_func`.
        rotary_cos, rotary_sin, block_table: None, since they are not built.
        rotary_interleaved, num_splits: Change nothing.
        return_softmax_lse: Also return softmax_lse.

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
    _refuse_given(function, rotary_cos=rotary_cos, rotary_sin=rotary_sin, block_table=block_table)
    B, num_rows = len(q), len(k_cache)
    rows = _integers(function, "cache_batch_idx", cache_batch_idx, B, num_rows - 1)
    names = "k_cache", "v_cache"
    _check_arrays(function, q, k_cache, v_cache, names, B if rows is None else num_rows)
    S, new = k_cache.shape[1], _checked_new(function, q, k, v, k_cache, cache_seqlens)
    num_new = new[0].shape[1] if new else 0
    if isinstance(cache_seqlens, int | np.integer):
        cache_seqlens = torch.full((B,), int(cache_seqlens), device=q.device)
    end = _integers(function, "cache_seqlens", cache_seqlens, B, S - num_new, num_new)
    first = _integers(function, "cache_leftpad", cache_leftpad, B, S)
    options = _Options(
        0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax_lse
    )
    # Refuses what is wrong before anything is written.
    options.as_ours(function, B, q.shape[2], q.shape[1], S)
    if new and end is not None:
        at = torch.arange(B, device=q.device) if rows is None else rows
        places = at[:, None], end[:, None] + torch.arange(num_new, device=q.device)
        k_cache[places], v_cache[places] = new
        end = end + num_new
    key_range = None
    if end is not None or first is not None:
        end = torch.full((B,), S, device=q.device) if end is None else end
        first = torch.zeros_like(end) if first is None else torch.minimum(first, end)
        key_range = torch.stack([first, end], dim=1)
    if rows is not None:
        k_cache, v_cache = k_cache[rows], v_cache[rows]
    result = _attend(function, (q, k_cache, v_cache), options, key_range)
    return result[:2] if isinstance(result, tuple) else result


class _Options(NamedTuple):
    """What all functions take, under flash-attn's names."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int, int]
    softcap: float
    alibi_slopes: Tensor | None
    return_attn_probs: bool

    def as_ours(self, function: str, B: int, H: int, T: int, S: int) -> dict[str, Any]:
        """Checked arguments of our attention; B: rows of slopes, T, S: most queries and keys."""
        if self.softcap > 0:
            raise NotImplementedError(
                f"{function}: softcap must be at most 0 (none), since capped scores are not built,"
                f" got {self.softcap}"
            )
        if not 0 <= self.dropout_p <= _request.LARGEST_DROPOUT:
            raise ValueError(
                f"{function}: dropout_p must be in [0, 1 - 2^-32], got {self.dropout_p}"
            )
        if self.return_attn_probs and self.dropout_p:
            raise NotImplementedError(
                f"{function}: return_attn_probs must be False with dropout, since S_dmask of"
                f" length x length is not made; got dropout_p={self.dropout_p}"
            )
        return {
            "slopes": _slopes(function, self.alibi_slopes, B, H),
            **_window(function, self.causal, self.window_size, T, S),
            "scale": self.softmax_scale,
            "dropout": self.dropout_p,
            "return_lse": bool(self.return_attn_probs),
        }


def _attend(
    function: str, arrays: tuple[Tensor, ...], options: _Options, key_range: Tensor | None = None
) -> Result:
    q, k, v = arrays
    _check_arrays(function, q, k, v)
    ours = options.as_ours(function, q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    result = attention(q, k, v, **ours, key_range=key_range)
    if isinstance(result, Tensor):
        return result.transpose(1, 2).contiguous()
    return result[0].transpose(1, 2).contiguous(), _as_theirs(result[1]), None


def _attend_varlen(
    function: str,
    arrays: tuple[Tensor, ...],
    lengths: dict[str, tuple[Tensor, int]],
    options: _Options,
) -> Result:
    """Attend within sequences; lengths: offsets and the longest, by what follows their names."""
    q, k, v = arrays
    _check_arrays(function, q, k, v, axes="[total, H, D]")
    for (name, (offsets, longest)), total in zip(lengths.items(), (len(q), len(k)), strict=False):
        _check_offsets(function, name, offsets, longest, total)
    of_each = [*lengths.values()]
    (starts_q, longest_q), (starts_k, longest_k) = of_each[0], of_each[-1]
    ours = options.as_ours(function, len(starts_q) - 1, q.shape[1], int(longest_q), int(longest_k))
    result = attention_varlen(q, k, v, starts_q, starts_k, **ours)
    if isinstance(result, Tensor):
        return result
    return result[0], _as_theirs(result[1].T), None


def _as_theirs(lse: Tensor) -> Tensor:
    """inf where a row sees no key."""
    return lse.masked_fill(lse == -torch.inf, torch.inf).contiguous()


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


def _slopes(function: str, alibi_slopes: Any, B: int, H: int) -> Tensor | list[float]:
    if alibi_slopes is None:
        return [0.0] * H
    if not isinstance(alibi_slopes, Tensor) or not alibi_slopes.is_floating_point():
        kind = str(getattr(alibi_slopes, "dtype", type(alibi_slopes).__name__))
        raise TypeError(
            f"{function}: alibi_slopes must be a tensor of floating point,"
            f" got {kind.removeprefix('torch.')}"
        )
    if not _request.has_shape(alibi_slopes, (H,), (B, H)):
        raise ValueError(
            f"{function}: alibi_slopes must have shape [H] = {[H]} or [B, H] = {[B, H]},"
            f" got {list(alibi_slopes.shape)}"
        )
    if (values := known_values(alibi_slopes.double())) is not None:
        _values.check_slope_values(function, "alibi_slopes", values)
    return alibi_slopes


def _unpacked(function: str, name: str, packed: Any, number: int, axes: int) -> tuple[Tensor, ...]:
    """q, k and v, or k and v, of a tensor that has them on the axis before that of the heads."""
    form = f"[{'B, T' if axes == 5 else 'total'}, {number}, H, D]"
    if not isinstance(packed, Tensor):
        raise TypeError(f"{function}: {name} must be a torch.Tensor, got {type(packed).__name__}")
    if packed.dim() != axes or packed.shape[-3] != number:
        raise ValueError(f"{function}: {name} must have shape {form}, got {list(packed.shape)}")
    return packed.unbind(-3)


def _check_arrays(
    function: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    names: tuple[str, str] = ("k", "v"),
    num_rows: int | None = None,
    axes: str = "[B, T, H, D]",
) -> None:
    """q, k and v fit together; k and v may have another number of rows than q."""
    given: tuple[tuple[str, Any], ...] = ("q", q), (names[0], k), (names[1], v)
    for name, x in given:
        if not isinstance(x, Tensor):
            raise TypeError(f"{function}: {name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != axes.count(",") + 1:
            raise ValueError(f"{function}: {name} must have axes {axes}, got {list(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device or not x.is_floating_point():
            raise TypeError(
                f"{function}: {name} must hold floating point, in the dtype and on the device of"
                f" q, {q.dtype} on {q.device}, got {x.dtype} on {x.device}"
            )
    H, G = q.shape[-2], k.shape[-2]
    if H % G if G else H:
        raise ValueError(
            f"{function}: the heads of q must be a multiple of those of {names[0]},"
            f" got {H} and {G}"
        )
    rows = q.shape[:-3] if num_rows is None else (num_rows,)
    want = (*rows, *k.shape[-3:-1], q.shape[-1])
    for name, x in given[1:]:
        if tuple(x.shape) != want:
            raise ValueError(
                f"{function}: {name} must have shape {list(want)}, got {list(x.shape)}"
            )


def _checked_new(
    function: str,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    cache_seqlens: int | Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """The keys and values that are written into the caches, if there are any."""
    if k is None and v is None:
        return None
    if k is None or v is None:
        name = "k" if k is None else "v"
        raise ValueError(f"{function}: k and v must be given both or neither, got {name}=None")
    if cache_seqlens is None:
        raise ValueError(
            f"{function}: cache_seqlens must be given with k and v, which are written there,"
            " got None"
        )
    _check_arrays(function, q, k, v)
    if k.shape[2] != k_cache.shape[2]:
        raise ValueError(
            f"{function}: k must have the {k_cache.shape[2]} heads of k_cache, got {k.shape[2]}"
        )
    return k, v


def _integers(
    function: str, name: str, values: Any, B: int, most: int, num_new: int = 0
) -> Tensor | None:
    """Integers [B] between 0 and `most`, as int64; num_new: positions that must still fit."""
    if values is None:
        return None
    if not isinstance(values, Tensor) or values.is_floating_point() or values.dtype == torch.bool:
        kind = str(getattr(values, "dtype", type(values).__name__)).removeprefix("torch.")
        raise TypeError(f"{function}: {name} must hold integers, got {kind}")
    if not _request.has_shape(values, (B,)):
        raise ValueError(
            f"{function}: {name} must have shape [B] = {[B]}, got {list(values.shape)}"
        )
    values = as_int64(values)
    if known_values(values) is not None and ((values < 0) | (values > most)).any():
        room = f", so that {num_new} more fit into the cache" if num_new else ""
        raise ValueError(f"{function}: {name} must be in [0, {most}]{room}, got {values.tolist()}")
    return values


def _check_offsets(function: str, of: str, offsets: Any, longest: int, total: int) -> None:
    """Offsets start at 0, never fall and end at the total; no sequence is longer than was said."""
    name = f"cu_seqlens{of}"
    if not isinstance(offsets, Tensor) or offsets.is_floating_point() or offsets.dim() != 1:
        kind = str(getattr(offsets, "dtype", type(offsets).__name__)).removeprefix("torch.")
        raise TypeError(f"{function}: {name} must be integers [B + 1], got {kind}")
    if readable(offsets) is None:
        return
    starts = offsets.tolist()
    if not starts or starts[0] != 0 or starts[-1] != total or starts != sorted(starts):
        raise ValueError(
            f"{function}: {name} must start at 0, never fall and end at {total}, got {starts}"
        )
    most = max((b - a for a, b in itertools.pairwise(starts)), default=0)
    if most > longest:
        raise ValueError(
            f"{function}: max_seqlen{of} must be at least {most}, the longest sequence,"
            f" got {longest}"
        )


def _refuse_given(function: str, **options: object) -> None:
    """Refuse what is not built."""
    instead = {
        "rotary_cos": "rotate q and k before the call",
        "rotary_sin": "rotate q and k before the call",
        "block_table": "gather the pages of each sequence into k and v first",
    }
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(
                f"{function}: {name} must be None, since it is not built: {instead[name]};"
                f" got {type(value).__name__}"
            )
