"""Existing ALiBi models of Transformers, fused: their weights, our attention, no mask [T, S].

family.py says what an architecture becomes (bloom.py, falcon.py, mpt.py) and how it attends;
mpt_model.py is MPT with what Transformers' class leaves out.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate
from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES

from linbias.models.fused import bloom, falcon, mpt
from linbias.models.fused.family import (
    MODEL_TYPES,
    NAME,
    Bias,
    Family,
    Options,
    adapt_calls,
    change_classes,
    keep_mask_for_generate,
    make_mask,
    restore_calls,
)

FAMILIES = dict(zip(MODEL_TYPES, (bloom.FAMILY, falcon.FAMILY, mpt.FAMILY), strict=True))
_BY_BODY: dict[type[nn.Module], Family] = {family.body: family for family in FAMILIES.values()}


def fuse(
    model: PreTrainedModel,
    implementation: str = "auto",
    *,
    slope_scale: float | Literal["interpolate"] | None = None,
    train_length: int | None = None,
    heads: Sequence[int] | None = None,
) -> PreTrainedModel:
    """Run attention of a BLOOM, Falcon (`alibi=True`) or MPT model on `linbias.torch.attention`.

    The model is changed in place, and no other; its weights and their names stay. Around
    attention runs Transformers' own code. Training, gradient checkpointing, padding (also between
    tokens), caches and `generate` work as before, for any length. Weights of attention
    (`output_attentions`) are computed beside it. Packed rows (`position_ids` that start anew)
    are read as those of `LinbiasForCausalLM`, outside of compiled graphs.
    `unfuse` undoes it.

    Args:
        model: With any head, or a body alone. Wrappers such as PEFT's may be around it.
        implementation: As in `linbias.torch.attention`.
        slope_scale: A positive factor on all slopes, or "interpolate", train_length / S for a text
            of S > train_length tokens.
        train_length: For "interpolate"; None: what the configuration says, if it does.
        heads: Which heads of the model its layers hold, where each process has some of them
            (tensor parallelism); None: all.

    Returns:
        The model.

    Raises:
        TypeError: model is no Transformers model.
        ValueError: It has no ALiBi, is fused already, or is of an architecture or version that is
            not known; or an option breaks a rule above.

    Example:
        >>> from transformers import BloomConfig, BloomForCausalLM
        >>> config = BloomConfig(vocab_size=50, hidden_size=32, n_head=4, n_layer=1)
        >>> fuse(BloomForCausalLM(config)).config._attn_implementation
        'linbias'

    Source of "interpolate": Al-Khateeb, Dey, Soboleva and Hestness, arXiv 2310.13017.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"fuse: model must be a Transformers model, got {type(model).__name__}")
    options = Options(
        implementation=implementation,
        slope_scale=slope_scale,
        train_length=train_length,
        heads=heads,
    )
    plan = []
    for body, family in _bodies(model, "fuse"):
        if hasattr(body, "unfused_implementation"):
            raise ValueError(
                f"fuse: model must not be fused, got a {type(body).__name__} that is: "
                "unfuse(model) comes first"
            )
        _check_config("fuse", body.config)
        bias = family.bias(body.config, options)
        for layer in family.layers(body):
            held, known = getattr(layer, family.num_heads_name), len(bias.slopes)
            if held != known:
                rule = f"be given where a layer holds {held} of the model's {known} heads"
                if heads is not None:
                    rule = f"name the {held} heads of each layer, got {len(heads)}"
                raise ValueError(f"fuse: heads must {rule}")
        plan.append((body, family, bias))
    for body, family, bias in plan:
        shared, own = body.config, copy.deepcopy(body.config)
        for module in model.modules():
            if vars(module).get("config") is shared:  # which another model may have as well
                vars(module)["config"] = own
        before = own._attn_implementation
        fused_by_loading = before == NAME and not mpt.always_fused(own)
        body.unfused_implementation = _default(body) if fused_by_loading else before
        _run_fused(body, family, bias)
    for module in _around(model):
        adapt_calls(module)
        # BLOOM's own already returns [B, S].
        if not hasattr(module, "create_masks_for_generate"):
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
    for body, family in bodies:
        before = vars(body).pop("unfused_implementation", _default(body))
        if mpt.always_fused(body.config):
            fuse_by_default(body)
            continue
        body.config._attn_implementation = before
        change_classes(body, {fused: own for own, fused in family.fused.items()})
        for layer in family.layers(body):
            del layer.fused_bias
    for module in _around(model):
        vars(module).pop("create_masks_for_generate", None)
        if not mpt.always_fused(module.config):
            restore_calls(module)
    return model


def _check_config(caller: str, config: Any) -> None:
    """Check that a fused model of this configuration can be saved."""
    if config.output_attentions:
        raise ValueError(
            f"{caller}: output_attentions of the configuration must be False, got True, with "
            "which Transformers saves no model but on its own attention; calls take "
            "output_attentions=True"
        )


def _around(model: nn.Module) -> list[Any]:
    """The bodies of a model, and the models of their families that hold one."""
    kinds = tuple(family.base for family in FAMILIES.values())
    return [module for module in model.modules() if isinstance(module, kinds)]


def fuse_by_default(body: Any) -> None:
    """Run a body fused, with the default options of `fuse`."""
    _check_config(f"attn_implementation={NAME!r}", body.config)
    family = _BY_BODY[type(body)]
    _run_fused(body, family, family.bias(body.config, Options()))


def _run_fused(body: Any, family: Family, bias: Bias) -> None:
    AttentionMaskInterface.register(NAME, make_mask)
    body.config._attn_implementation = NAME
    change_classes(body, family.fused)
    for layer in family.layers(body):
        layer.fused_bias = bias


def install() -> None:
    """Let `attn_implementation="linbias"` build BLOOM, Falcon and MPT fused."""
    if NAME in FALCON_ATTENTION_CLASSES:
        return
    AttentionMaskInterface.register(NAME, make_mask)
    AttentionInterface.register(NAME, _refuse)
    FALCON_ATTENTION_CLASSES[NAME] = falcon.FAMILY.attention  # which it looks up by implementation
    for family in FAMILIES.values():
        if family.why_unknown() is None:
            _when_built(family.base, adapt_calls)
            _when_built(family.body, fuse_by_default)
            # BLOOM's language model has its own.
            family.base.create_masks_for_generate = _keep_mask_if_fused


def _when_built(kind: Any, act: Callable[[Any], None]) -> None:
    """Let a class act on each of its models that is built fused."""
    build = kind.__init__

    @functools.wraps(build)
    def build_and_act(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        build(self, config, *args, **kwargs)
        if self.config._attn_implementation == NAME:
            act(self)

    kind.__init__ = build_and_act


def _keep_mask_if_fused(self: Any, config: Any, attention_mask: Any, **kwargs: Any) -> Any:
    if config._attn_implementation == NAME:
        return keep_mask_for_generate(config, attention_mask, **kwargs)
    return create_masks_for_generate(config, attention_mask=attention_mask, **kwargs)


def _bodies(model: nn.Module, caller: str) -> list[tuple[Any, Family]]:
    """The parts of a model that can be fused: what makes the mask, and holds the layers."""
    modules = model.modules()
    bodies = [(module, _BY_BODY[type(module)]) for module in modules if type(module) in _BY_BODY]
    for _, family in bodies:
        if (why := family.why_unknown()) is not None:
            raise ValueError(f"{caller}: {why}")
    if not bodies:
        known = ", ".join(body.__name__ for body in _BY_BODY)
        raise ValueError(
            f"{caller}: model must contain one of {known} (Transformers' own classes), "
            f"got {type(model).__name__}{_advice(model)}"
        )
    return bodies


# Classes of code that lies in a folder, instead of which `load` has one of its own.
_REMOTE = {"MPTModel", "RWModel", "BaichuanModel", "JinaBertModel"}


def _advice(model: nn.Module) -> str:
    """What the owner of a model that is not Transformers' can do instead of fusing it."""
    for kind in map(type, model.modules()):
        if kind.__module__.startswith("linbias."):
            return ": it runs on linbias' attention already"
        if kind.__name__ in _REMOTE:
            return (
                ": linbias.models.load(folder) loads the folder without the code that lies in it"
            )
    return ""


def _default(body: PreTrainedModel) -> str:
    """What Transformers runs a model on unless told otherwise."""
    return "sdpa" if body._supports_sdpa else "eager"


def _refuse(layer: nn.Module, *_: Any, **__: Any) -> Any:
    raise ValueError(
        f"linbias: attn_implementation='linbias' fuses models of type {', '.join(MODEL_TYPES)}, "
        f"got a layer {type(layer).__name__}"
    )
