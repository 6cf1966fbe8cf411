"""`replace_attention`: the layers of a model of PyTorch's, exchanged in place."""

from collections.abc import Collection
from typing import Any

from torch import nn

from linbias.torch.layers.nn import MultiheadAttention


def replace_attention(
    model: nn.Module,
    variant: str = "symmetric",
    *,
    cross: Collection[str] = ("multihead_attn",),
    cross_variant: str = "none",
    **options: Any,
) -> list[str]:
    """Put a `MultiheadAttention` of this package, with the same weights, in the place of each of PyTorch's, in place.

    The masks of a call say which keys are seen, and the variant how scores fall: with a causal mask, `symmetric` is `causal`.
    Make the optimizer afterwards: the parameters are new. Weights saved from the model before still load.

    Args:
        model: Holds `torch.nn.MultiheadAttention` somewhere, as `torch.nn.Transformer` and its layers do.
        variant: Of self-attention, a name in the table of `MultiheadAttention`; by default that of its `from_torch`.
        cross: The last part of the names of layers that attend to another sequence, as those do whose keys and
            queries differ in width.
        cross_variant: Of those.
        options: learned (self-attention only), schedule, max_bias or implementation, as for `MultiheadAttention`.

    Returns:
        The names of the layers replaced.

    Raises:
        TypeError: model is such a layer itself, whose place nothing holds.
        ValueError: There is nothing to replace; a variant is unknown, or a layer has a key or value beside those of its sequence.

    Example:
        >>> model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
        >>> replace_attention(model)
        ['encoder.layers.0.self_attn', 'decoder.layers.0.self_attn', 'decoder.layers.0.multihead_attn']
        >>> model.decoder.layers[0].multihead_attn.variant
        'none'
    """
    if isinstance(model, nn.MultiheadAttention):
        raise TypeError(
            "replace_attention: model must hold layers of attention, got a torch.nn.MultiheadAttention itself "
            "(MultiheadAttention.from_torch(layer) makes ours of it)"
        )
    learned = options.pop("learned", None)
    made: dict[nn.Module, MultiheadAttention] = {}
    places = []
    for name, module in model.named_modules(remove_duplicate=False):
        if not name or not isinstance(module, nn.MultiheadAttention):
            continue
        if module not in made:
            other = name.rpartition(".")[2] in cross or module.kdim != module.embed_dim
            own = {"learned": False} if other else {"learned": learned}
            made[module] = MultiheadAttention.from_torch(
                module, cross_variant if other else variant, **own, **options
            )
        places.append((name, made[module]))
    if not places:
        ours = any(isinstance(module, MultiheadAttention) for module in model.modules())
        found = "with layers of linbias already" if ours else "without one"
        raise ValueError(
            f"replace_attention: model must hold a torch.nn.MultiheadAttention, got {type(model).__name__} {found}"
        )
    for name, layer in places:
        model.set_submodule(name, layer)
    return [name for name, _ in places]
