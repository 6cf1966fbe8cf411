"""A language model with other slopes, for a while: to see what scaling them does beyond the trained length."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from linbias.models.fields import SHARED
from linbias.models.fused import fuse, unfuse
from linbias.models.slopes import ModelSlopes, SlopeScale


@contextmanager
def with_slopes(
    model: PreTrainedModel,
    slope_scale: SlopeScale,
    *,
    train_length: int | None = None,
    fused: bool = False,
) -> Iterator[None]:
    """Scale the slopes of a model within the block.

    Args:
        model: One of linbias that has ALiBi; or with `fused` one that `linbias.models.fuse` takes. It is as
            before after the block.
        slope_scale: As in `linbias.models.fuse`.
        train_length: For "interpolate"; None: what the configuration says, if it does.
        fused: Fuse the model within the block.

    Raises:
        ValueError: The model has no slopes to scale, or cannot be fused, or an option breaks its rule.

    Example:
        >>> from transformers import BloomConfig, BloomForCausalLM
        >>> model = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_head=4, n_layer=1))
        >>> with with_slopes(model, 0.5, fused=True):
        ...     model.config._attn_implementation
        'linbias'
    """
    if not SHARED["slope_scale"].holds(slope_scale):
        raise ValueError(
            f"evaluate: slope_scale must be {SHARED['slope_scale'].words}, got {slope_scale!r}"
        )
    if train_length is not None and train_length < 1:
        raise ValueError(f"evaluate: train_length must be at least 1, got {train_length}")
    if fused:
        fuse(model, slope_scale=slope_scale, train_length=train_length)  # type: ignore[arg-type]
        try:
            yield
        finally:
            unfuse(model)
        return
    layers: list[tuple[Any, ModelSlopes]] = [
        (module, module.slopes)
        for module in model.modules()
        if isinstance(getattr(module, "slopes", None), ModelSlopes)
    ]
    if not layers:
        raise ValueError(
            f"evaluate: slope_scale must be left out for a {type(model).__name__}, which has no ALiBi of linbias "
            "(fuse gives it to BLOOM, Falcon and MPT)"
        )
    try:
        for layer, before in layers:
            layer.slopes = before.scaled(slope_scale, train_length)
        yield
    finally:
        for layer, before in layers:
            layer.slopes = before
