"""What PyTorch's encoders look for in a layer of attention, and the names of its weights."""

from typing import Any, NoReturn

from torch import Tensor


class NoMatrix:
    """Stands for `in_proj_weight`, from which PyTorch's encoders compute attention without a bias.

    They leave to the layer what has a `__torch_function__`.
    """

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> NoReturn:
        raise TypeError(
            "MultiheadAttention: there is no in_proj_weight and no in_proj_bias: q_proj, k_proj"
            " and v_proj have their own"
        )


def take_weights(state_dict: dict[str, Tensor], prefix: str) -> bool:
    """Rename weights of a `torch.nn.MultiheadAttention`; say whether there were any."""
    names = [prefix + name for name in (*_RENAMED, "in_proj_weight", "in_proj_bias")]
    theirs = {name: state_dict.pop(name) for name in names if name in state_dict}
    for name, array in theirs.items():
        own = name.removeprefix(prefix)
        if own in _RENAMED:
            state_dict[prefix + _RENAMED[own]] = array
            continue
        for letter, part in zip("qkv", array.chunk(3), strict=True):
            state_dict[f"{prefix}{letter}_proj.{own.removeprefix('in_proj_')}"] = part.clone()
    return bool(theirs)


# Where keys or values have another width than queries.
_RENAMED = {f"{letter}_proj_weight": f"{letter}_proj.weight" for letter in "qkv"}
