"""What `fuse` knows of an architecture of Transformers, and how its modules come to run fused.

Transformers asks the attention implementation of a model for its mask, once per forward pass. That
of a fused model answers with a `TokenLayout`, a few numbers per row instead of [B, 1, T, S], and
the modules that are given it become those of `Family.fused`, which know it.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig
from transformers.masking_utils import causal_mask_function
from transformers.utils import logging

from linbias.models.decoder.attend import How, attend
from linbias.models.decoder.cache import CACHE, use_growing_layers
from linbias.models.decoder.decoder import use_given_cache
from linbias.models.decoder.layout import (
    TokenLayout,
    check_mask,
    check_position_ids,
    check_room,
    fill_room,
    read_attention_mask,
    shown_with_marks,
    without_marks,
)
from linbias.models.decoder.pages import init_continuous_batching, take_pages
from linbias.models.decoder.positions import AttendOptions, LinearBias
from linbias.models.decoder.rows import find_texts
from linbias.models.decoder.slopes import ModelSlopes
from linbias.models.fields import POSITIVE
from linbias.torch.choice import IMPLEMENTATIONS
from linbias.torch.operators.values import readable

logger = logging.get_logger(__name__)

NAME = "linbias"  # as in attn_implementation="linbias"
MODEL_TYPES = ("bloom", "falcon", "mpt")
Attended = tuple[Tensor, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Bias(LinearBias):
    """How the scores of a model fall with distance."""

    slopes: ModelSlopes
    scale: float  # what q . k is multiplied by
    counts_hidden: bool = False
    implementation: str = "auto"

    def fall(self, q: Tensor, num_keys: int, options: AttendOptions) -> dict[str, Any]:
        slopes = self.slopes.left(q, num_keys, options.key_range)
        return {"slopes": slopes, "scale": self.scale}

    def weights(self, q: Tensor, k: Tensor, options: AttendOptions) -> Tensor:
        logger.warning_once(
            "output_attentions needs memory for all attention weights [B, H, T, S], and time to "
            "compute them, which fused attention itself does not"
        )
        return super().weights(q, k, options)


_IMPLEMENTATIONS = ("auto", *(module.NAME for module in IMPLEMENTATIONS))


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a user of `fuse` chooses; the arguments of `fuse` say what each means."""

    implementation: str = "auto"
    slope_scale: float | str | None = None
    train_length: int | None = None
    heads: Sequence[int] | None = None

    def __post_init__(self) -> None:
        scale = self.slope_scale
        if scale is not None and scale != "interpolate":
            if not POSITIVE.holds(scale):
                rule = "positive, 'interpolate' or None"
                raise ValueError(f"fuse: slope_scale must be {rule}, got {scale!r}")
        if (name := self.implementation) not in _IMPLEMENTATIONS:
            raise ValueError(
                f"fuse: implementation must be one of {_IMPLEMENTATIONS}, got {name!r}"
            )
        if self.train_length is not None and self.train_length < 1:
            raise ValueError(f"fuse: train_length must be at least 1, got {self.train_length}")

    def bias(
        self,
        slopes: NDArray[np.float64],
        scale: float,
        train_length: int | None,
        counts_hidden: bool = False,
    ) -> Bias:
        """That of a model: slopes [H], factor on q . k, and what its configuration says."""
        heads = range(len(slopes)) if self.heads is None else self.heads
        if outside := [head for head in heads if not 0 <= head < len(slopes)]:
            raise ValueError(f"fuse: heads must be in [0, {len(slopes)}), got {outside[0]}")
        chosen = slopes[list(heads)].tolist()
        length = self.train_length or train_length
        if self.slope_scale == "interpolate" and length is None:
            raise ValueError(
                "fuse: train_length must be given for slope_scale='interpolate', since the "
                "configuration does not say it"
            )
        scaled = ModelSlopes(chosen, self.slope_scale, length or 1)
        return Bias(
            slopes=scaled,
            scale=scale,
            counts_hidden=counts_hidden,
            implementation=self.implementation,
        )


@dataclass(frozen=True, kw_only=True)
class Family:
    """An architecture of Transformers."""

    body: type[nn.Module]  # asks for the mask, and holds the layers
    attention: type[nn.Module]  # of a layer
    arguments: str  # of the forward of `attention`, in the version that we know
    fused: Mapping[type[nn.Module], type[nn.Module]]  # what modules of an original class become
    bias: Callable[[Any, Options], Bias]  # of a configuration; ValueError if that is not ALiBi
    num_heads_name: str  # the attribute of a layer that says how many heads it holds

    @property
    def base(self) -> Any:
        """What its models have in common, such as `BloomPreTrainedModel`."""
        return self.body.__mro__[1]

    def why_unknown(self) -> str | None:
        """Why this version of Transformers cannot be fused; None if it can."""
        taken, known = list(inspect.signature(self.attention.forward).parameters), self.arguments
        if taken == known.split():
            return None
        return (
            f"{self.attention.__name__} of transformers {transformers.__version__} takes "
            f"{', '.join(taken)}, and linbias knows one that takes {', '.join(known.split())}"
        )

    def layers(self, body: nn.Module) -> list[Any]:
        """The attention of each layer, fused or not."""
        return [module for module in body.modules() if isinstance(module, self.attention)]


def change_classes(body: nn.Module, classes: Mapping[type[nn.Module], type[nn.Module]]) -> None:
    """Let modules be of other classes that know the same attributes."""
    module: Any
    for module in body.modules():
        if (kind := classes.get(type(module))) is not None:
            module.__class__ = kind
            if "_old_forward" in vars(module):  # what the hooks of accelerate call
                module._old_forward = MethodType(kind.forward, module)


class FusedAttention:
    """Attention of a family: `fused_forward` runs, which is given the layout as well."""

    fused_bias: Bias
    fused_forward: Callable[..., Attended]
    # Queries [B, H, T, D], keys and values [B, G, T, D] of what the first linear layer gives.
    split: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    layer_idx: int
    training: bool

    def forward(self, *args: Any, attention_mask: Any = None, **kwargs: Any) -> Attended:
        if not isinstance(attention_mask, TokenLayout):
            got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else None
            raise ValueError(
                f"{type(self).__name__}: attention_mask of a fused model must have shape [B, S], "
                f"got {got}, and its attn_implementation must be {NAME!r}"
            )
        if kwargs.get("output_attentions"):
            attention_mask = replace(attention_mask, need_weights=True)
        return self.fused_forward(attention_mask, *args, **kwargs)

    def gather(
        self, qkv: Tensor, layout: TokenLayout, cache: Cache | None, dropout: float
    ) -> Attended:
        """What each token gathers [B, T, H * D], and the weights [B, H, T, S] if asked."""
        if cache is not None:
            use_growing_layers(cache)
        how = How(
            method=self.fused_bias,
            layout=layout,
            cache=cache,
            layer=self.layer_idx,
            dropout=dropout if self.training else None,
        )
        return attend(*self.split(qkv), how)


def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | TokenLayout | None,
    config: PreTrainedConfig,
    device: torch.device,
    **_: Any,
) -> TokenLayout:
    """Answer Transformers' question for a mask, of `attention_mask` [B, S] bool or None.

    A mask that was made earlier stays. A static cache has `kv_length` > q_offset + q_length.
    """
    if _AT_WORK and (layout := _layout_of_call()) is not None:
        return layout
    if isinstance(attention_mask, TokenLayout):
        return attention_mask
    if config.model_type not in MODEL_TYPES:
        raise ValueError(
            f"linbias: attn_implementation={NAME!r} fuses models of type "
            f"{', '.join(MODEL_TYPES)}, got {config.model_type}"
        )
    if mask_function is not causal_mask_function:
        raise ValueError(
            f"linbias: the attention of a fused {config.model_type} model must be causal, "
            "without a mask of its own"
        )
    caller = f"{config.model_type} with attn_implementation={NAME!r}"
    if not isinstance(q_offset, Tensor) or readable(q_offset) is not None:
        q_offset = int(q_offset)
        if not torch.compiler.is_compiling():
            check_room(caller, q_offset + q_length, kv_length)
    return read_attention_mask(
        caller,
        attention_mask,
        torch.empty((), device=device).expand(batch_size, q_length),
        q_offset,
        has_cache=True,
        has_room=isinstance(q_offset, Tensor) or kv_length > q_offset + q_length,
        allows_holes=True,
    )


_PAGES = "init_continuous_batching"
_POSITION_IDS = inspect.Parameter("position_ids", inspect.Parameter.KEYWORD_ONLY, default=None)


def adapt_calls(model: Any) -> None:
    """Let a model read what Transformers' code drops: texts in a row, and pages."""
    name = _forward_name(model)
    if isinstance(vars(model).get(name), partial):
        return
    signature = inspect.signature(MethodType(type(model).forward, model))
    reading: Any = partial(_forward, model, tuple(signature.parameters))
    # Trainer and `generate` read there what a model takes.
    named = signature.parameters | {"position_ids": _POSITION_IDS}
    in_order = sorted(named.values(), key=lambda parameter: parameter.kind)
    reading.__signature__ = shown_with_marks(signature.replace(parameters=in_order))
    vars(model)[name] = reading
    if hasattr(model, "generate"):
        vars(model)["generate"] = partial(_generate, model)
        vars(model)[_PAGES] = partial(_init_continuous_batching, model)


def _forward_name(module: nn.Module) -> str:
    """Where a module keeps a forward of its own: accelerate's hooks call another."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def restore_calls(model: Any) -> None:
    """Undo `adapt_calls`."""
    name = _forward_name(model)
    for replaced in (_PAGES, "generate"):
        vars(model).pop(replaced, None)
    if isinstance(vars(model).get(name), partial):
        del vars(model)[name]
        if name == "_old_forward":
            vars(model)[name] = MethodType(type(model).forward, model)


def _generate(model: Any, *args: Any, **kwargs: Any) -> Any:
    return type(model).generate(model, *args, **use_given_cache(type(model).__name__, kwargs))


def _init_continuous_batching(model: Any, *args: Any, **kwargs: Any) -> Any:
    layers = (module for module in model.modules() if isinstance(module, FusedAttention))
    methods = [layer.fused_bias for layer in layers]
    return init_continuous_batching(model, methods, *args, **kwargs)


# That of the call at work, where a mask [B, S] does not say it: heads pass nothing else on. The
# compiler cannot look there; it sees the list.
_LAYOUT: ContextVar[TokenLayout | None] = ContextVar("linbias.layout", default=None)
_AT_WORK: list[TokenLayout] = []


@torch.compiler.disable
def _layout_of_call() -> TokenLayout | None:
    return _LAYOUT.get()


def _forward(model: Any, arguments: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """That of the class of a model, which then asks `make_mask`."""
    caller = type(model).__name__
    if (pages := take_pages(kwargs)) is not None:
        return _forward_with_layout(model, kwargs, TokenLayout(pages.positions, pages=pages))
    kwargs = without_marks(caller, kwargs)
    given = dict(zip(arguments, args, strict=False)) | kwargs
    mask, position_ids = given.get("attention_mask"), given.get("position_ids")
    if not isinstance(mask, TokenLayout | None):
        check_mask(caller, mask)
    if position_ids is not None and (tokens := _tokens(given)) is not None:
        check_position_ids(caller, position_ids, *tokens.shape[:2])
        if _has_several_texts(**given):
            return _forward_with_rows(model, given)
    return type(model).forward(model, *args, **kwargs)


def _tokens(given: dict[str, Any]) -> Any:
    """The ids of a call, or else the embeddings."""
    ids = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


@torch.compiler.disable
def _forward_with_rows(model: Any, given: dict[str, Any]) -> Any:
    caller, tokens, cache = type(model).__name__, _tokens(given), given.get("cache")
    cache = given.get("past_key_values") if cache is None else cache
    mask, position_ids = given.pop("attention_mask", None), given.pop("position_ids", None)
    given["use_cache"] = bool(given.get("use_cache"))  # None is Transformers' own, True
    has_cache = cache is not None or given["use_cache"]
    start = 0 if cache is None else cache.get_seq_length()
    options: Any = {"position_ids": position_ids, "has_cache": has_cache}
    layout = read_attention_mask(caller, mask, tokens, start, **options)
    return _forward_with_layout(model, given, layout)


def _forward_with_layout(model: Any, given: dict[str, Any], layout: TokenLayout) -> Any:
    before = _LAYOUT.set(layout)
    _AT_WORK.append(layout)
    try:
        return type(model).forward(model, **given)
    finally:
        _AT_WORK.pop()
        _LAYOUT.reset(before)


def _has_several_texts(
    position_ids: Tensor,
    attention_mask: Any = None,
    past_key_values: Any = None,
    cache: Any = None,
    **_: Any,
) -> bool:
    """Whether position_ids mark several texts in a row, as `read_attention_mask` reads them."""
    cache, T = past_key_values if cache is None else cache, position_ids.shape[-1]
    if T < 2 or (cache is not None and readable(position_ids) is None):
        return False
    new = None
    if isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
        start = 0 if cache is None else int(cache.get_seq_length())
        new = attention_mask[:, start : start + T].to(position_ids.device) != 0
        position_ids = position_ids.expand(len(new), T)
    return find_texts(position_ids, new) is not None


def keep_mask_for_generate(
    config: Any, attention_mask: Tensor | None, **given: Any
) -> Tensor | None:
    """With a static cache, `generate` makes the mask of a forward pass; ours is made inside."""
    return fill_room(attention_mask, given[CACHE])
