"""Existing ALiBi models of Transformers, fused: their own weights, `linbias.torch.attention` in every layer, no mask [T, S].

fuse, unfuse    what a user calls
family.py       what is known of an architecture, and what its modules become; bloom.py, falcon.py, mpt.py: three of them
bias.py         its attention
mpt_model.py    MPT with what Transformers' class leaves out
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any, Literal

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES

from linbias.models.fused import bloom, falcon, mpt
from linbias.models.fused.bias import Bias
from linbias.models.fused.family import (
    MODEL_TYPES,
    NAME,
    Family,
    Options,
    change_classes,
    check_texts,
    keep_mask_for_generate,
    make_mask,
    stop_checking_texts,
)
from linbias.models.prepacked import unpack
from linbias.torch.choice import IMPLEMENTATIONS

FAMILIES = dict(zip(MODEL_TYPES, (bloom.FAMILY, falcon.FAMILY, mpt.FAMILY), strict=True))
_BY_BODY: dict[type[nn.Module], Family] = {family.body: family for family in FAMILIES.values()}
_GENERATE = tuple(family.language_model for family in FAMILIES.values())
_ROUNDINGS = ("exact", "checkpoint")


def fuse(
    model: PreTrainedModel,
    rounding: Literal["exact", "checkpoint"] = "exact",
    implementation: str = "auto",
    *,
    slope_scale: float | Literal["interpolate"] | None = None,
    train_length: int | None = None,
    heads: Sequence[int] | None = None,
) -> PreTrainedModel:
    """Run the attention of an existing BLOOM, Falcon (with `alibi=True`) or MPT model on `linbias.torch.attention`.

    The model is changed in place, and no other; its weights and their names stay. Around attention runs Transformers' own
    code, but for BLOOM's GELU, in one pass. Training, gradient checkpointing, padding on either side, caches and `generate` work as before, for any length.
    Weights of attention (`output_attentions`) are computed beside it. A call whose `position_ids` mark several texts in a row
    (packed batches) is refused. `unfuse` undoes it.

    Args:
        model: With any head, or a body alone. Wrappers such as PEFT's may be around it.
        rounding: "exact": slope * distance in float32. "checkpoint": as Transformers' code for this architecture rounds it,
            which is what the weights met in use: Falcon rounds slope and product to bfloat16, BLOOM the product to the type
            of the model (its rounding of scores is not repeated). MPT is the same either way.
        implementation: As in `linbias.torch.attention`.
        slope_scale: Multiply all slopes: a positive factor, or "interpolate", train_length / S for a text of
            S > train_length tokens.
        train_length: For "interpolate"; None: what the configuration says, if it does.
        heads: Which heads of the model its layers hold, where each process has some of them (tensor parallelism);
            None: all.

    Returns:
        The model.

    Raises:
        TypeError: model is no Transformers model.
        ValueError: It has no ALiBi, is fused already, or is of an architecture or version that is not known; or an
            option breaks a rule above.

    Example:
        >>> from transformers import BloomConfig, BloomForCausalLM
        >>> model = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=32, n_head=4, n_layer=1))
        >>> fuse(model).config._attn_implementation
        'linbias'

    Source of "interpolate": Al-Khateeb, Dey, Soboleva and Hestness, arXiv 2310.13017.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse: model must be a Transformers model, got {type(model).__name__}")
    if rounding not in _ROUNDINGS:
        raise ValueError(f"fuse: rounding must be one of {_ROUNDINGS}, got {rounding!r}")
    if slope_scale is not None and slope_scale != "interpolate":
        if isinstance(slope_scale, str | bool) or not 0 < slope_scale < float("inf"):
            raise ValueError(
                f"fuse: slope_scale must be positive, 'interpolate' or None, got {slope_scale!r}"
            )
    if slope_scale is not None and rounding == "checkpoint":
        raise ValueError("fuse: slope_scale must be None with rounding='checkpoint'")
    if implementation not in (known := ("auto", *(module.NAME for module in IMPLEMENTATIONS))):
        raise ValueError(f"fuse: implementation must be one of {known}, got {implementation!r}")
    if train_length is not None and train_length < 1:
        raise ValueError(f"fuse: train_length must be at least 1, got {train_length}")
    options = Options(rounding, implementation, slope_scale, train_length, heads)
    plan = []
    for body, family in _bodies(model, "fuse"):
        if hasattr(body, "unfused_implementation"):
            raise ValueError(
                f"fuse: model must not be fused, got a {type(body).__name__} that is: unfuse(model) comes first"
            )
        _check_config("fuse", body.config)
        bias = family.bias(body.config, options)
        for layer in family.layers(body):
            _check_heads(getattr(layer, family.num_heads_name), bias, heads)
        plan.append((body, family, bias))
    for body, family, bias in plan:
        _own_config(model, body)
        before = body.config._attn_implementation
        fused_by_loading = before == NAME and not mpt.always_fused(body.config)
        body.unfused_implementation = _default(body) if fused_by_loading else before
        _run_fused(body, family, bias)
    for module in _around(model):
        check_texts(module)
        # BLOOM's own already returns [B, S].
        if isinstance(module, _GENERATE) and not hasattr(module, "create_masks_for_generate"):
            vars(module)["create_masks_for_generate"] = keep_mask_for_generate
    return model


def unfuse(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `fuse`: the model runs on Transformers' own attention again.

    An MPT model that Transformers cannot run goes back to the default options.

    Args:
        model: A fused model, changed in place.

    Returns:
        The model.

    Raises:
        ValueError: It is not fused, or by nothing but its class.
    """
    bodies = _bodies(model, "unfuse")
    fused_by_class = (body for body, _ in bodies if not hasattr(body, "unfused_implementation"))
    if any(mpt.always_fused(body.config) for body in fused_by_class):
        raise ValueError(
            "unfuse: model must be one that Transformers can run, got a "
            f"{type(model).__name__}, which is always fused"
        )
    if not any(body.config._attn_implementation == NAME for body, _ in bodies):
        raise ValueError("unfuse: model must be fused, got one that is not")
    unpack(model)
    for body, family in bodies:
        before = getattr(body, "unfused_implementation", _default(body))
        if hasattr(body, "unfused_implementation"):
            del body.unfused_implementation
        if mpt.always_fused(body.config):
            fuse_by_default(body)
            continue
        body.config._attn_implementation = before
        change_classes(body, {fused: own for own, fused in family.fused.items()})
        for layer in family.layers(body):
            del layer.fused_bias
    for module in _around(model):
        vars(module).pop("create_masks_for_generate", None)
        stop_checking_texts(module)
    return model


def _check_config(caller: str, config: Any) -> None:
    """Check that a fused model of this configuration can be saved."""
    if config.output_attentions:
        raise ValueError(
            f"{caller}: output_attentions of the configuration must be False, got True, with which Transformers saves "
            "no model but on its own attention; calls take output_attentions=True"
        )


def _own_config(model: nn.Module, body: Any) -> None:
    """Give a body, and what is around and in it, a configuration that no other model shares."""
    shared, own = body.config, copy.deepcopy(body.config)
    module: Any
    for module in model.modules():
        if vars(module).get("config") is shared:
            module.config = own


def _around(model: nn.Module) -> list[Any]:
    """The bodies of a model, and the models of their families that hold one."""
    kinds = tuple(_base(family) for family in FAMILIES.values())
    return [module for module in model.modules() if isinstance(module, kinds)]


def _base(family: Family) -> type[nn.Module]:
    """What the models of a family have in common, such as `BloomPreTrainedModel`."""
    return family.body.__mro__[1]


def fuse_by_default(body: Any) -> None:
    """Run a body fused, with the default options of `fuse`."""
    _check_config(f"attn_implementation={NAME!r}", body.config)
    family = _BY_BODY[type(body)]
    _run_fused(body, family, family.bias(body.config, Options()))


def _run_fused(body: Any, family: Family, bias: Bias) -> None:
    AttentionMaskInterface.register(NAME, make_mask)
    body.config._attn_implementation = NAME
    family.set_bias(body, bias)


def install() -> None:
    """Let Transformers build BLOOM, Falcon and MPT fused where `attn_implementation="linbias"` asks for it."""
    if NAME in FALCON_ATTENTION_CLASSES:
        return
    AttentionMaskInterface.register(NAME, make_mask)
    AttentionInterface.register(NAME, _refuse)
    FALCON_ATTENTION_CLASSES[NAME] = falcon.FAMILY.attention  # which it looks up by implementation
    for family in FAMILIES.values():
        if family.why_unknown() is None:
            _fuse_when_built(family)
            if not hasattr(family.language_model, "create_masks_for_generate"):
                family.language_model.create_masks_for_generate = _keep_mask_if_fused  # type: ignore[attr-defined]


def _fuse_when_built(family: Family) -> None:
    base: Any = _base(family)
    body = family.body
    build_any, build = base.__init__, body.__init__

    @functools.wraps(build_any)
    def build_checked(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        build_any(self, config, *args, **kwargs)
        if self.config._attn_implementation == NAME:
            check_texts(self)

    @functools.wraps(build)
    def build_fused(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        build(self, config, *args, **kwargs)
        if self.config._attn_implementation == NAME:
            fuse_by_default(self)

    base.__init__ = build_checked
    body.__init__ = build_fused  # type: ignore[method-assign]


def _keep_mask_if_fused(self: Any, config: Any, attention_mask: Any, **kwargs: Any) -> Any:
    if config._attn_implementation == NAME:
        return keep_mask_for_generate(config, attention_mask, **kwargs)
    return create_masks_for_generate(config, attention_mask=attention_mask, **kwargs)


def _bodies(model: nn.Module, caller: str) -> list[tuple[Any, Family]]:
    """The parts of a model that can be fused: what makes the mask, and holds the layers."""
    bodies = []
    for module in model.modules():
        family = _BY_BODY.get(type(module))
        if family is not None:
            if (why := family.why_unknown()) is not None:
                raise ValueError(f"{caller}: {why}")
            bodies.append((module, family))
    if not bodies:
        known = ", ".join(body.__name__ for body in _BY_BODY)
        advice = [f": {_INSTEAD[x]}" for x in map(_name, model.modules()) if x in _INSTEAD]
        raise ValueError(
            f"{caller}: model must contain one of {known} (Transformers' own classes), "
            f"got {type(model).__name__}{''.join(advice[:1])}"
        )
    return bodies


# By the name of a class that is not Transformers': what its owner can do instead.
_OTHERS = ("MPTModel", "RWModel", "BaichuanModel", "JAISModel", "JinaBertModel")
_LOAD = "loads the folder without the code that lies in it, and runs fused"
_INSTEAD = {
    **dict.fromkeys(_OTHERS, f"linbias.models.load(folder) {_LOAD}"),
    "linbias": "it runs on linbias' attention already",
}


def _name(module: nn.Module) -> str:
    """Of its class; "linbias" for all of ours."""
    cls = type(module)
    return "linbias" if cls.__module__.startswith("linbias.") else cls.__name__


def _check_heads(num_heads: int, bias: Bias, heads: Sequence[int] | None) -> None:
    if num_heads == len(bias.slopes):
        return
    rule = f"be given where a layer holds {num_heads} of the model's {len(bias.slopes)} heads"
    if heads is not None:
        rule = f"name the {num_heads} heads of each layer, got {len(heads)}"
    raise ValueError(f"fuse: heads must {rule}")


def _default(body: PreTrainedModel) -> str:
    """What Transformers runs a model on unless told otherwise."""
    return "sdpa" if body._supports_sdpa else "eager"


def _refuse(layer: nn.Module, *_: Any, **__: Any) -> Any:
    raise ValueError(
        f"linbias: attn_implementation='linbias' fuses models of type {', '.join(MODEL_TYPES)}, got a layer "
        f"{type(layer).__name__}"
    )
