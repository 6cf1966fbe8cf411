"""A language model with other slopes, for a while: what does it do beyond the trained length?"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from linbias.models.decoder.slopes import ModelSlopes, SlopeScale
from linbias.models.fields import SHARED
from linbias.models.limits import stated_length


@contextmanager
def with_slopes(
    model: PreTrainedModel, slope_scale: SlopeScale, *, train_length: int | None = None
) -> Iterator[None]:
    """Scale the slopes of a causal model with ALiBi within the block, as `fuse` would.

    Example:
        >>> from linbias.models import LinbiasConfig, LinbiasForCausalLM
        >>> model = LinbiasForCausalLM(LinbiasConfig(hidden_size=32, num_attention_heads=2)).eval()
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> with with_slopes(model, 0.5):
        ...     scaled = model(ids).logits
        >>> torch.equal(scaled, model(ids).logits)
        False
    """
    if not SHARED["slope_scale"].holds(slope_scale):
        raise ValueError(
            f"evaluate: slope_scale must be {SHARED['slope_scale'].words}, got {slope_scale!r}"
        )
    if train_length is not None and train_length < 1:
        raise ValueError(f"evaluate: train_length must be at least 1, got {train_length}")
    if slope_scale == "interpolate" and (train_length or stated_length(model.config)) is None:
        raise ValueError(
            "evaluate: train_length must be given for slope_scale='interpolate', "
            "since the configuration does not say it"
        )
    kept: list[tuple[Any, str, Any]] = []
    for module in model.modules():
        if isinstance(slopes := getattr(module, "slopes", None), ModelSlopes):
            kept.append((module, "slopes", slopes))
            module.slopes = slopes.scaled(slope_scale, train_length)
        elif (bias := getattr(module, "fused_bias", None)) is not None:
            kept.append((module, "fused_bias", bias))
            module.fused_bias = replace(bias, slopes=bias.slopes.scaled(slope_scale, train_length))
    if not kept:
        raise ValueError(
            f"evaluate: slope_scale must be left out for a {type(model).__name__}, "
            "which has no ALiBi that runs on linbias"
        )
    try:
        yield
    finally:
        for module, name, before in kept:
            setattr(module, name, before)
