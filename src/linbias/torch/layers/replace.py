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
    """Put our `MultiheadAttention`, with the same weights, in the place of each of PyTorch's.

    Make the optimizer afterwards: the parameters are new. Weights saved from the model before
    still load.

    Args:
        model: Holds `torch.nn.MultiheadAttention` somewhere, as `torch.nn.Transformer` does.
        variant: Of self-attention, as for `MultiheadAttention`.
        cross: The last part of the names of layers that attend to another sequence, as those do
            whose keys and queries differ in width.
        cross_variant: Of those.
        options: learned (self-attention only), schedule, max_bias or implementation, likewise.

    Returns:
        The names of the layers replaced.

    Raises:
        TypeError: model is such a layer itself, whose place nothing holds.
        ValueError: There is nothing to replace, or `from_torch` refuses a variant or layer.

    Example:
        >>> model = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 2, 32), 1)
        >>> replace_attention(model)
        ['layers.0.self_attn', 'layers.0.multihead_attn']
        >>> model.layers[0].multihead_attn.variant
        'none'
    """
    if isinstance(model, nn.MultiheadAttention):
        raise TypeError(
            "replace_attention: model must hold layers of attention, got a"
            " torch.nn.MultiheadAttention itself (MultiheadAttention.from_torch(layer) makes ours"
            " of it)"
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
        kind = "with layers of linbias already" if ours else "without one"
        raise ValueError(
            "replace_attention: model must hold a torch.nn.MultiheadAttention,"
            f" got {type(model).__name__} {kind}"
        )
    for name, layer in places:
        model.set_submodule(name, layer)
    return [name for name, _ in places]
