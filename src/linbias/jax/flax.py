"""Linear biases inside Flax: an `attention_fn` for its multi-head attention (`linen` and `nnx`).

Flax gives an attention function neither positions nor lengths, only a mask, so this module reads
it: where a query stands, which keys are padding, and whether it fits the variant.
"""

import math
from collections.abc import Callable
from typing import Any, Never

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from linbias import _extras
from linbias._request import keywords, seen
from linbias.jax.call import Slopes, prepare, run
from linbias.jax.operator import own_code
from linbias.schedules import is_causal as is_causal_variant
from linbias.schedules import variant_slopes

_extras.require("linbias.jax.flax")


def attention_fn(
    variant: str = "causal",
    *,
    slopes: Slopes | None = None,
    right_slopes: Slopes | None = None,
    schedule: str = "paper",
    max_bias: float = 8.0,
    window: tuple[int, int] | None = None,
    tolerance: float | None = None,
    implementation: str = "auto",
    **unknown: Never,
) -> Callable[..., Array]:
    """Make the `attention_fn=` of a Flax multi-head attention: linear biases, no bias in memory.

    For `flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention`.

    | variant       | slopes, right_slopes                       | for                           |
    |---------------|--------------------------------------------|-------------------------------|
    | `causal`      | (m, inf)                                   | language models (the paper)   |
    | `symmetric`   | (m, m)                                     | encoders                      |
    | `directional` | half of the heads (m', inf), half (inf,    | encoders whose heads look one |
    |               | m'); m' are the slopes of H/2 heads        | way only                      |
    | `asymmetric`  | as given                                   | encoders with learned slopes  |
    | `none`        | (0, 0)                                     | cross-attention               |
    | `none_causal` | (0, inf)                                   | comparison                    |

    m is `linbias.slopes(H, schedule, max_bias)`. A causal variant needs no causal mask. A query
    that a mask leaves without keys gives zeros. A single query stands at the last key that its
    mask shows, which is how far a cache (`decode=True`) is filled; of several the last stands at
    key S - 1. Masks that are known when tracing and come to one range of keys per batch row run on
    all implementations, others on `blocked`. Dropout draws another mask for every batch row and
    head, whatever `broadcast_dropout` says; `precision` is always the highest.

    Args:
        variant: See above.
        slopes: [H] or [B, H], at least 0 or inf: instead of the variant's, learned ones say.
        right_slopes: Likewise; only for a variant that is not causal.
        schedule, max_bias: As for `linbias.slopes`.
        window: As for `linbias.jax.attention`, beside what the variant and the mask hide.
        tolerance, implementation: As for `linbias.jax.attention`.

    Returns:
        A function of query [..., T, H, D], key [..., S, G, D], value [..., S, G, E] and Flax's own
        keywords, which returns [..., T, H, E].

    Raises:
        ValueError: The variant or the schedule is unknown; when called, a mask or `is_causal`
            contradicts the variant, a shape does not fit, or dropout has no key.
        NotImplementedError: When called: the weights are asked for (`sow_weights`).

    Example:
        >>> from flax import linen
        >>> attend = attention_fn("symmetric")
        >>> layer = linen.MultiHeadDotProductAttention(num_heads=2, attention_fn=attend)
        >>> x = jnp.ones((1, 5, 8))
        >>> layer.apply(layer.init(jax.random.key(0), x), x).shape
        (1, 5, 8)

    Source: Press, Smith and Lewis, ICLR 2022.
    """
    if unknown:
        keywords.refuse_unknown("attention_fn", unknown, attention_fn)
    variant_slopes("attention_fn", variant, 2, schedule, max_bias)  # refuses what is unknown
    causal = is_causal_variant(variant)
    if causal and right_slopes is not None:
        raise ValueError(
            f"attention_fn: right_slopes contradicts variant {variant!r}, which hides that side"
        )
    limits = seen.check_window("attention_fn", window, causal)

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
        given = zip("qkv", (query, key, value), strict=True)
        q, k, v = (_flatten(name, x, batch, dtype) for name, x in given)
        own = variant_slopes("attention_fn", variant, q.shape[2], schedule, max_bias)
        inputs, problem = prepare(
            "attention_fn",
            q,
            k,
            v,
            own[0] if slopes is None else slopes,
            causal=causal,
            right_slopes=None if causal else own[1] if right_slopes is None else right_slopes,
            dropout=dropout,
            dropout_key=dropout_rng,
            tolerance=tolerance,
            window=window,
            **_read_mask(mask, batch, q, k, variant, limits),
        )
        out, _ = run("attention_fn", inputs, problem, implementation)
        return out.reshape(*batch, *out.shape[1:])

    return attend


def mha_alibi(seed: int, x: ArrayLike, num_heads: int, qkv_features: int) -> Array:
    """Attend with a fresh Flax attention and symmetric ALiBi: the Flax seed document's exercise.

        slopes[h] = 2 ** (-8 * (h + 1) / H)        bias[h, i, j] = -slopes[h] * |i - j|

    Args:
        seed: Of the parameters.
        x: [T, width], an array or lists.
        num_heads: H.
        qkv_features: Width of queries, keys and values; a multiple of num_heads.

    Returns:
        [T * width], the flattened output.

    Raises:
        ValueError: x has not two axes, or qkv_features is no multiple of num_heads.

    Example:
        >>> mha_alibi(0, jnp.ones((3, 8)), num_heads=2, qkv_features=4).shape
        (24,)

    Source: the Flax exercise "ALiBi: Attention with Linear Biases".
    """
    from flax import linen  # takes a second to import, and attention_fn does without

    x = jnp.asarray(x)
    if x.ndim != 2:
        raise ValueError(f"mha_alibi: x must have 2 axes, length, width, got {list(x.shape)}")
    if num_heads < 1 or qkv_features % num_heads:
        raise ValueError(
            f"mha_alibi: qkv_features must be a multiple of num_heads {num_heads},"
            f" got {qkv_features}"
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
            f"attention_fn: {name} must be [..., length, heads, size] with batch axes"
            f" {list(batch)}, got {list(x.shape)}"
        )
    return x.astype(dtype).reshape(math.prod(batch), *x.shape[-3:])


@own_code()
def _read_mask(
    mask: Any,
    batch: tuple[int, ...],
    q: Array,
    k: Array,
    variant: str,
    window: tuple[int, int],
) -> dict[str, Any]:
    """Turn Flax's mask into a key range, a start and, where these do not say it all, a mask."""
    (B, T, H, _), S = q.shape, k.shape[1]
    if mask is None or S == 0:
        return {}
    known = not isinstance(mask, jax.core.Tracer)
    lib = np if known else jnp
    mask = _with_four_axes(lib.asarray(mask) != 0, batch, (H, T, S), lib)
    shown = mask.any((1, 2))
    first, after = shown.argmax(1), shown[:, ::-1].argmax(1)
    end = lib.where(shown.any(1), S - after, first)
    # One query stands at the last key shown: that is how a cache says how far it is filled. It
    # would see the same from farther right, but large distances cost the scores digits.
    start = end - 1 if T == 1 else lib.full(len(mask), S - T)
    options = {
        "key_range": lib.broadcast_to(lib.stack([first, end], 1), (B, 2)),
        "query_start": lib.broadcast_to(start, (B,)),
    }
    if known:
        keys = np.arange(S)
        distance = (start[:, None] + np.arange(T))[:, None, :, None] - keys
        visible = (
            distance >= 0 if is_causal_variant(variant) else np.full_like(distance, True, bool)
        )
        _refuse_contradictions(mask, visible, distance, variant)
        for limit, away in zip(window, (distance, -distance), strict=True):
            if limit >= 0:
                visible = visible & (away <= limit)
        inside = (keys >= first[:, None]) & (keys < end[:, None])
        if ((mask & visible) == (inside[:, None, None] & visible)).all():
            # The mask shows what the variant and the window show anyway.
            return {} if inside.all() and (start == S - T).all() else options
    return {**options, "mask": mask}


def _with_four_axes(
    mask: Any, batch: tuple[int, ...], sizes: tuple[int, int, int], lib: Any
) -> Any:
    """A mask that broadcasts to [*batch, H, T, S] -> [B or 1, H or 1, T or 1, S]."""
    full = (*batch, *sizes)
    sizes_fit = (n in (1, m) for n, m in zip(mask.shape[::-1], full[::-1], strict=False))
    if mask.ndim > len(full) or not all(sizes_fit):
        raise ValueError(f"attention_fn: mask must fit to {list(full)}, got {list(mask.shape)}")
    mask = mask.reshape((1,) * (len(full) - mask.ndim) + mask.shape)
    if any(n > 1 for n in mask.shape[:-3]):
        mask = lib.broadcast_to(mask, (*batch, *mask.shape[-3:]))
    mask = mask.reshape(-1, *mask.shape[-3:])
    return lib.broadcast_to(mask, (*mask.shape[:-1], sizes[2]))


def _refuse_contradictions(mask: Any, visible: Any, distance: Any, variant: str) -> None:
    """Refuse a known mask that leaves nothing, or is causal, where the variant is not."""
    shown = mask & visible
    if (mask.any((1, 2, 3)) & ~shown.any((1, 2, 3))).any():
        raise ValueError(
            f"attention_fn: mask must show keys that variant {variant!r} shows,"
            " got only later ones"
        )
    # Causal: no query sees a later key, though there are keys later than some query that sees any.
    later = (distance < 0) & shown.any(-2)[..., None, :] & shown.any(-1, keepdims=True)
    is_causal = later.any() and not (shown & (distance < 0)).any()
    if is_causal and not is_causal_variant(variant):
        causal = "none_causal" if variant == "none" else "causal"
        raise ValueError(
            f"attention_fn: mask must not be causal for variant {variant!r}, whose queries see"
            f" later keys; use variant={causal!r}"
        )
