"""Linear biases inside Flax: an `attention_fn` for the multi-head attention of `flax.linen` and `flax.nnx`.

Flax tells an attention function neither positions nor lengths, only a mask, so this module reads the mask
(`_read_mask`): where a query stands, which keys are padding, and whether it fits the variant.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from linbias import _checks
from linbias.jax.functional import Slopes, as_slopes, describe, describe_all, run
from linbias.variants import is_causal as is_causal_variant
from linbias.variants import variant_slopes


def attention_fn(
    variant: str = "causal",
    *,
    left: Slopes | None = None,
    right: Slopes | None = None,
    schedule: str = "paper",
    max_bias: float = 8.0,
    tolerance: float | None = None,
    implementation: str = "auto",
) -> Callable[..., Array]:
    """Make the `attention_fn=` of a Flax multi-head attention: linear biases, and no bias in memory.

    For `flax.linen.MultiHeadDotProductAttention` (`MultiHeadAttention`) and `flax.nnx.MultiHeadAttention`. The
    variants are those of `linbias.torch.MultiheadAttention`:

    | variant       | slopes (left, right)                                   | for                             |
    |---------------|--------------------------------------------------------|---------------------------------|
    | `causal`      | (m, inf)                                               | language models (the paper)     |
    | `symmetric`   | (m, m)                                                 | encoders                        |
    | `directional` | (m', inf) for half of the heads, (inf, m') for the     | encoders whose heads look one   |
    |               | other half; m' are the slopes of H/2 heads             | way only                        |
    | `asymmetric`  | (left, right), as given                                | encoders with learned slopes    |
    | `none`        | (0, 0)                                                 | cross-attention                 |
    | `none_causal` | (0, inf)                                               | comparison                      |

    A causal variant needs no causal mask; one does no harm. Further masks hide keys: a query that is left without
    any gives zeros. A single query stands at the last key that its mask shows: that is how a cache (`decode=True`)
    says how far it is filled. Several queries stand at the last keys. What a mask holds is looked at where it is
    known when tracing; `cpu` runs masks that come to a range of keys, `blocked` all others. Dropout draws another
    mask for every batch row and head, whatever `broadcast_dropout` says; `precision` is always the highest.

    Args:
        variant: See above.
        left: [H] or [B, H], at least 0 or inf: slopes instead of the variant's, learned ones for example.
        right: Likewise; only for a variant that is not causal.
        schedule: As for `linbias.slopes`.
        max_bias: As for `linbias.slopes`.
        tolerance: As for `linbias.jax.attention`.
        implementation: As for `linbias.jax.attention`.

    Returns:
        A function of query [..., T, H, D], key [..., S, G, D], value [..., S, G, E] and Flax's own keywords, which
        returns [..., T, H, E].

    Raises:
        ValueError: The variant or the schedule is unknown; when called, a mask or `is_causal` contradicts the
            variant, a shape does not fit, or dropout has no key.
        NotImplementedError: When called: the weights are asked for (`sow_weights`).

    Example:
        >>> from flax import linen
        >>> layer = linen.MultiHeadDotProductAttention(num_heads=2, attention_fn=attention_fn("symmetric"))
        >>> x = jnp.ones((1, 5, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 5, 8)

    Source: Press, Smith and Lewis, ICLR 2022; the Flax exercise among the project's seed documents.
    """
    variant_slopes("attention_fn", variant, 2, schedule, max_bias)  # refuses what is unknown
    causal = is_causal_variant(variant)
    if causal and right is not None:
        raise ValueError(
            f"attention_fn: right contradicts variant {variant!r}, which hides that side"
        )

    def attend(
        query: Array,
        key: Array,
        value: Array,
        mask: Array | None = None,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        broadcast_dropout: bool = True,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        is_causal: bool = False,
    ) -> Array:
        if module is not None:
            raise NotImplementedError(
                "attention_fn: sow_weights must be False: the weights are never all there at once"
            )
        if is_causal and not causal:
            raise ValueError(
                f"attention_fn: is_causal must be False for variant {variant!r}, got True"
            )
        dropout = 0.0 if deterministic else dropout_rate
        if dropout and dropout_rng is None:
            raise ValueError(f"attention_fn: dropout_rate {dropout} needs a dropout_rng, got None")
        dtype = dtype or jnp.result_type(query, key, value)
        batch = query.shape[:-3]
        q, k, v = (
            _flatten(name, x, batch, dtype)
            for name, x in zip("qkv", (query, key, value), strict=True)
        )
        own = variant_slopes("attention_fn", variant, q.shape[2], schedule, max_bias)
        given = (own[0] if left is None else left, own[1] if right is None else right)
        wide = np.float64 if q.dtype == np.float64 else np.float32
        sides = [as_slopes(s, wide) for s in given][: 1 if causal else 2]
        call = _checks.check(
            "attention_fn",
            *describe_all("attention_fn", q, k, v),
            *(describe("slopes", s, "attention_fn") for s in sides),
            causal=causal,
            dropout=dropout,
            tolerance=tolerance,
            layout="BTHD",
        )
        hidden, key_range = _read_mask(mask, batch, call, variant)
        out, _ = run(
            replace(call, mask=hidden is not None, key_range=key_range is not None),
            implementation,
            (q, k, v),
            (*sides, None)[:2],
            key_range=key_range,
            mask=hidden,
            dropout_key=dropout_rng if dropout else None,
        )
        return out.reshape(*batch, *out.shape[1:])

    return attend


def mha_alibi(seed: int, x: Array, num_heads: int, qkv_features: int) -> Array:
    """Attend with a fresh Flax multi-head attention and symmetric ALiBi: the exercise of the Flax seed document.

        slopes[h] = 2 ** (-8 * (h + 1) / H)        bias[h, i, j] = -slopes[h] * |i - j|

    Args:
        seed: Of the parameters.
        x: [T, width].
        num_heads: H.
        qkv_features: Width of queries, keys and values; a multiple of num_heads.

    Returns:
        [T * width], the flattened output.

    Raises:
        ValueError: x has not two axes, or qkv_features is no multiple of num_heads.

    Example:
        >>> mha_alibi(0, jnp.ones((3, 8)), num_heads=2, qkv_features=4).shape
        (24,)

    Source: the Flax exercise "ALiBi: Attention with Linear Biases" among the project's seed documents.
    """
    from flax import linen  # takes a second to import, and attention_fn does without

    if x.ndim != 2:
        raise ValueError(f"mha_alibi: x must have 2 axes, length, width, got {list(x.shape)}")
    if num_heads < 1 or qkv_features % num_heads:
        raise ValueError(
            f"mha_alibi: qkv_features must be a multiple of num_heads {num_heads}, got {qkv_features}"
        )
    layer = linen.MultiHeadDotProductAttention(
        num_heads=num_heads,
        qkv_features=qkv_features,
        attention_fn=attention_fn("symmetric", schedule="geometric"),
    )
    return layer.apply(layer.init(jax.random.key(seed), x), x).ravel()


def _flatten(name: str, x: Array, batch: tuple[int, ...], dtype: Any) -> Array:
    if x.ndim < 3 or x.shape[:-3] != batch:
        raise ValueError(
            f"attention_fn: {name} must be [..., length, heads, size] with batch axes {list(batch)}, got {list(x.shape)}"
        )
    return x.astype(dtype).reshape(math.prod(batch), *x.shape[-3:])


def _read_mask(
    mask: Any, batch: tuple[int, ...], call: _checks.Problem, variant: str
) -> tuple[Any, Any]:
    """Turn Flax's mask into a mask [B or 1, H or 1, T or 1, S] or None, and a key range [B, 2] or None."""
    if mask is None:
        return None, None
    full = (*batch, call.H, call.T, call.S)
    if mask.ndim > len(full) or any(
        n not in (1, m) for n, m in zip(mask.shape[::-1], full[::-1], strict=False)
    ):
        raise ValueError(f"attention_fn: mask must fit to {list(full)}, got {list(mask.shape)}")
    known = not isinstance(mask, jax.core.Tracer)
    lib = np if known else jnp
    mask = lib.asarray(mask) != 0
    mask = mask.reshape((1,) * (len(full) - mask.ndim) + mask.shape)
    if any(n > 1 for n in mask.shape[:-3]):
        mask = lib.broadcast_to(mask, (*batch, *mask.shape[-3:]))
    mask = mask.reshape(-1, *mask.shape[-3:])
    mask = lib.broadcast_to(mask, (*mask.shape[:-1], call.S))
    if call.T == 1:
        return _around_one_query(mask, call, lib)
    return _simplify(mask, call, variant) if known else (mask, None)


def _around_one_query(mask: Any, call: _checks.Problem, lib: Any) -> tuple[Any, Any]:
    """The query stands at the last key that any head sees; holes before it stay hidden."""
    seen = mask.any((1, 2))
    first, after = seen.argmax(1), seen[:, ::-1].argmax(1)
    end = lib.where(seen.any(1), call.S - after, first)
    key_range = lib.broadcast_to(lib.stack([first, end], 1), (call.B, 2))
    if lib is np and np.array_equal(
        np.broadcast_to(_inside(first, end, call.S), mask.shape), mask
    ):
        return None, key_range
    return mask, key_range


def _inside(first: Any, end: Any, S: int) -> Any:
    """[B, 1, 1, S]."""
    keys = np.arange(S)
    return ((keys >= first[:, None]) & (keys < end[:, None]))[:, None, None]


def _simplify(mask: Any, call: _checks.Problem, variant: str) -> tuple[Any, Any]:
    """Refuse a known mask that contradicts the variant; drop it where the variant or a key range says the same."""
    distance = np.arange(call.T)[:, None] + call.S - call.T - np.arange(call.S)
    own = distance >= 0 if call.causal else distance == distance
    visible = np.broadcast_to(mask & own, (*mask.shape[:2], call.T, call.S))
    if (mask.any((1, 2, 3)) & ~visible.any((1, 2, 3))).any():
        raise ValueError(
            f"attention_fn: mask must show keys that variant {variant!r} shows, got only later ones"
        )
    if not call.causal and _is_causal(visible, distance):
        causal = "none_causal" if variant == "none" else "causal"
        raise ValueError(
            f"attention_fn: mask must not be causal for variant {variant!r}, whose queries see later keys;"
            f" use variant={causal!r}"
        )
    if (visible == own).all():
        return None, None
    first = visible[:, 0, -1].argmax(1)
    end = np.full_like(first, call.S)
    if (visible == (own & _inside(first, end, call.S))).all():
        return None, np.broadcast_to(np.stack([first, end], 1), (call.B, 2))
    return mask, None


def _is_causal(visible: Any, distance: Any) -> bool:
    """No query sees a later key, though there are keys later than some query that sees any."""
    if (visible & (distance < 0)).any():
        return False
    later = (distance < 0) & visible.any(-2)[..., None, :]
    return bool((later & visible.any(-1, keepdims=True)).any())
