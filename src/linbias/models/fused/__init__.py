"""Existing ALiBi models, fused: their own weights, `linbias.torch.attention` in every layer, and no mask [T, S].

    fuse, unfuse    what a user calls
    mask.py         what a fused model hands to its layers in place of a mask
    bias.py         its attention
    family.py       what is known of an architecture; bloom.py, falcon.py, mpt.py: three of them
    mpt_model.py    MPT with what Transformers' class leaves out

A model is fused by its configuration, `attn_implementation="linbias"`: Transformers then asks us for its mask, and
the attention layers that find our mask run fused. `fuse` sets that and gives the layers what a user chooses.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.models.falcon.modeling_falcon import FALCON_ATTENTION_CLASSES

from linbias.models.fused import bloom, falcon, mpt
from linbias.models.fused.bias import Bias
from linbias.models.fused.family import Family, Options
from linbias.models.fused.mask import NAME, make_mask
from linbias.torch.choice import IMPLEMENTATIONS

FAMILIES = {family.model_type: family for family in (bloom.FAMILY, falcon.FAMILY, mpt.FAMILY)}
_BY_BODY: dict[type[nn.Module], Family] = {family.body: family for family in FAMILIES.values()}
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

    The model is changed in place; its weights and their names stay. Everything around attention is Transformers' own
    code, so that training, gradient checkpointing, padding on either side, caches and `generate` work as before, for
    any length. Weights of attention (`output_attentions`) are computed beside it. `unfuse` undoes it. A model loaded
    with `from_pretrained(..., attn_implementation="linbias")`, after `import linbias.models`, is fused with
    the default options.

    Args:
        model: With any head, or a body alone. Wrappers such as PEFT's may be around it.
        rounding: "exact": slope * distance in float32, as the model was meant. "checkpoint": as Transformers' code
            for this architecture rounds it, which is what the weights met in use: Falcon rounds slope and product to
            bfloat16, BLOOM the product to the type of the model. What it rounds besides, scores of a bfloat16 model,
            is not repeated. MPT is the same either way.
        implementation: As in `linbias.torch.attention`.
        slope_scale: Multiply all slopes, which slows or hastens the fall of far scores: a positive factor, or
            "interpolate", train_length / S for a text of S > train_length tokens.
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
        bias = family.bias(body.config, options)
        for layer in _layers(body, family):
            _check_heads(getattr(layer, family.num_heads_name), bias, heads)
        plan.append((body, family, bias))
    for body, family, bias in plan:
        before = body.config._attn_implementation
        loaded_fused = before == NAME and not _always_fused(body)
        body.unfused_implementation = _default(body) if loaded_fused else before
        body.config._attn_implementation = NAME
        for layer in _layers(body, family):
            layer.fused_bias = bias
    return model


def unfuse(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `fuse`: the model runs on Transformers' own attention again.

    A `LinbiasMptForCausalLM`, which that cannot run, goes back to the default options.

    Args:
        model: A fused model, changed in place.

    Returns:
        The model.

    Raises:
        ValueError: It is not fused, or by nothing but its class.
    """
    bodies = _bodies(model, "unfuse")
    if any(
        _always_fused(body) and not hasattr(body, "unfused_implementation") for body, _ in bodies
    ):
        raise ValueError(
            f"unfuse: model must be one that Transformers can run, got a {type(model).__name__}, which is always fused"
        )
    if not any(body.config._attn_implementation == NAME for body, _ in bodies):
        raise ValueError("unfuse: model must be fused, got one that is not")
    for body, family in bodies:
        body.config._attn_implementation = getattr(body, "unfused_implementation", _default(body))
        if hasattr(body, "unfused_implementation"):
            del body.unfused_implementation
        for layer in _layers(body, family):
            if hasattr(layer, "fused_bias"):
                del layer.fused_bias
    return model


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
        advice = next(
            (
                f": {_INSTEAD[name]}"
                for module in model.modules()
                if (name := _name(module)) in _INSTEAD
            ),
            "",
        )
        raise ValueError(
            f"{caller}: model must contain one of {known} (Transformers' own classes), "
            f"got {type(model).__name__}{advice}"
        )
    return bodies


_LOAD_NATIVE = (
    "after `import linbias.models`, AutoModelForCausalLM.from_pretrained(folder) loads the folder without the code "
    "that lies in it"
)
_LOAD_ENCODER = (
    "linbias.models.from_pretrained(folder) loads the folder without the code that lies in it"
)
# By the name of a class that is not Transformers': what its owner can do instead.
_INSTEAD = {
    "MPTModel": "linbias.models.LinbiasMptForCausalLM.from_pretrained(folder) loads the folder without the code "
    "that lies in it, and runs fused",
    "RWModel": "AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False) loads Transformers' own Falcon",
    **dict.fromkeys(("BaichuanModel", "JAISModel", "BTLMModel"), _LOAD_NATIVE),
    "JinaBertModel": _LOAD_ENCODER,
    "linbias": "it runs on linbias' attention already",
}


def _name(module: nn.Module) -> str:
    """Of its class; "linbias" for all of ours."""
    cls = type(module)
    return "linbias" if cls.__module__.startswith("linbias.") else cls.__name__


def _layers(body: nn.Module, family: Family) -> Iterator[Any]:
    return (module for module in body.modules() if isinstance(module, family.attention))


def _check_heads(num_heads: int, bias: Bias, heads: Sequence[int] | None) -> None:
    if num_heads == len(bias.slopes):
        return
    if heads is not None:
        raise ValueError(
            f"fuse: heads must name the {num_heads} heads of each layer, got {len(heads)}"
        )
    raise ValueError(
        f"fuse: heads must be given where a layer holds {num_heads} of the model's {len(bias.slopes)} heads"
    )


def _always_fused(body: nn.Module) -> bool:
    return any(hasattr(module, "always_fused") for module in body.modules())


def _default(body: PreTrainedModel) -> str:
    """What Transformers runs a model on unless told otherwise."""
    return "sdpa" if body._supports_sdpa else "eager"


def _refuse(layer: nn.Module, *_: Any, **__: Any) -> Any:
    raise ValueError(
        f"linbias: attn_implementation='linbias' fuses models of type {', '.join(FAMILIES)}, got a layer "
        f"{type(layer).__name__}"
    )


AttentionInterface.register(NAME, _refuse)
AttentionMaskInterface.register(
    NAME, partial(make_mask, {name: family.bias for name, family in FAMILIES.items()})
)
FALCON_ATTENTION_CLASSES[NAME] = falcon.FAMILY.attention  # which it looks up by implementation
for _family in FAMILIES.values():
    _family.install()
