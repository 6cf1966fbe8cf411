"""Linear layers whose weights lie in the order in which oneDNN multiplies them: `prepack`.

oneDNN brings a weight into that order in every call, which for one token takes as long as the
product. Kept so, it is read at the rate of memory, and bias and GELU are one step with the
product. Training and `torch.compile` meet PyTorch's own layers. docs/kernels.md has the figures.
"""

import ctypes
import functools
import mmap
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.nn.modules.module import _has_any_global_hook
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.utils import logging

from linbias import _machine
from linbias.models.snapshot import Snapshot
from linbias.torch.operators.direct import untransformed

Model = TypeVar("Model", bound=nn.Module)
logger = logging.get_logger(__name__)

_SMALLEST = 2**18  # weights; a call of oneDNN takes 15 us longer to set out
_KINDS = (nn.Linear, FalconLinear)  # these very classes, and none that is derived from them
_ROWS = 64  # of an input to order for: any number above one gives the same order
_MADV_PAGEOUT = 21  # of Linux 5.4; the module mmap does not name it


def prepack(model: Model) -> Model:
    """Keep the weights of large linear layers in the order in which oneDNN multiplies.

    Call it last: after `load`, after `fuse`, after adapters are merged. docs/kernels.md says what
    that saves. Training, saving, and names of weights are as before: the layers keep their own. A
    layer whose own weight changes afterwards reads that again.

    The memory is that of the weights once more, but not for weights that are mapped from a
    safetensors file, as after loading a folder in its own type: the system takes their pages back.
    It takes two to four seconds for each GB.

    Args:
        model: On the CPU, in float32, or in bfloat16 on processors that multiply it (AVX512-BF16);
            other layers, and those with fewer than 262,144 weights or quantised ones, stay as they
            are, as do all where PyTorch was built without oneDNN.

    Returns:
        The model, which is changed in place; `unfuse` undoes it.

    Raises:
        TypeError: model is no `torch.nn.Module`.

    Example:
        >>> from transformers import BloomConfig, BloomForCausalLM
        >>> from linbias.models import fuse
        >>> config = BloomConfig(vocab_size=50, hidden_size=32, n_head=4, n_layer=1)
        >>> model = prepack(fuse(BloomForCausalLM(config)))

    Note:
        A change is seen by the next call, but for writes of a NumPy array that shares the weight's
        memory and, in weights that are mapped from a file, of parts through `.data`: then call
        `prepack` again. It logs how many layers it packed, and which not and why.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"prepack: model must be a torch.nn.Module, got {type(model).__name__}")
    keep_freed_memory()
    layers = list(_large_layers(model))
    others: dict[str, list[str]] = {}
    for name, module in layers:
        reason = _why_not_packable(module.weight)
        if reason is None:
            packed = Prepacked(module.weight)
            vars(module)[forward_name(module)] = partial(_forward, module, packed)
        else:
            others.setdefault(reason, []).append(repr(name))
    count = len(layers) - sum(map(len, others.values()))
    words = [f"; not {', '.join(names)}: {reason}" for reason, names in others.items()]
    logger.info(
        "prepack: packed %d of %d large linear layers%s", count, len(layers), "".join(words)
    )
    return model


def unpack(model: nn.Module) -> None:
    """Undo `prepack`."""
    for module in model.modules():
        name = forward_name(module)
        if _packed_of(vars(module).get(name)) is not None:
            del vars(module)[name]
            if name == "_old_forward":
                vars(module)[name] = MethodType(type(module).forward, module)


def linear_gelu(module: Any, input: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """`gelu(module(input), approximate=approximate)`; one step where module is prepacked."""
    packed = _packed_of(vars(module).get("forward"))
    if packed is not None and not (
        module._forward_hooks or module._forward_pre_hooks or _has_any_global_hook()
    ):
        own, bias = _parameters(module)
        if _is_plain(input, own, bias) and (weight := packed.of(own)) is not None:
            return _multiply(input, weight, bias, "gelu", approximate)
    return gelu(module(input), approximate=approximate)


class Prepacked:
    """One weight. Copies and pickles of it hold nothing: a copy of a model reads its own."""

    weight: Tensor | None = None

    def __init__(self, own: Tensor) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(own.detach(), _ROWS)
        give_back_pages(own)
        self._own = Snapshot(own)

    def of(self, own: Tensor | None) -> Tensor | None:
        """The weight in oneDNN's order, or None from when on the layer's own has changed."""
        if self.weight is not None and not self._own.shows(own):
            self.weight = None
        return self.weight

    def __getstate__(self) -> None:
        return None


def _large_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Linear)
            and type(module) in _KINDS
            and module.weight.numel() >= _SMALLEST
        ):
            yield name, module


def _why_not_packable(weight: Tensor) -> str | None:
    """None if oneDNN multiplies a weight fast, and its changes are seen."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "PyTorch was built without oneDNN"
    if type(weight) is not nn.Parameter:
        return f"the weight is no plain parameter but a {type(weight).__name__}"
    if weight.device.type != "cpu":
        return f"the weight is on {weight.device.type}"
    if weight.dtype not in _types():
        return f"this processor has no fast products of {str(weight.dtype).removeprefix('torch.')}"
    return "the weight was made in inference mode" if weight.is_inference() else None


def forward_name(module: nn.Module) -> str:
    """Where a module keeps a forward of its own: accelerate's hooks call another."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def _packed_of(forward: Any) -> Prepacked | None:
    """What a layer with this forward reads in the place of its weight, if it is prepacked."""
    if isinstance(forward, partial) and forward.func is _forward:
        packed: Prepacked = forward.args[1]
        return packed
    return None


def _forward(module: nn.Linear, packed: Prepacked, input: Tensor) -> Tensor:
    own, bias = _parameters(module)
    if _is_plain(input, own, bias) and (weight := packed.of(own)) is not None:
        return _multiply(input, weight, bias)
    return type(module).forward(module, input)


def _parameters(module: nn.Module) -> tuple[Any, Tensor | None]:
    """The weight and the bias, looked up faster than as attributes."""
    return module._parameters.get("weight"), module._parameters.get("bias")


def _multiply(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "none",
    approximate: str = "",
) -> Tensor:
    operator: Any = torch.ops.mkldnn._linear_pointwise
    output: Tensor = operator(input, weight, bias, activation, [], approximate)
    return output


def _is_plain(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether a call is on the CPU, and neither autograd nor anything else takes part."""
    return (
        weight is not None
        and not torch.is_grad_enabled()
        and untransformed(input, weight, bias)
        and not torch.is_autocast_enabled("cpu")
        and input.dtype == weight.dtype
        and input.dtype in _types()
        and input.is_cpu
        and weight.is_cpu
        and input.numel() > 0
    )


@functools.cache
def _types() -> tuple[torch.dtype, ...]:
    """Those that oneDNN has fast products for: it may be held to less than the processor has."""
    has_bfloat16 = "avx512_bf16" in _machine.cpu_features()
    if has_bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return (torch.float32, torch.bfloat16)
    return (torch.float32,)


@functools.cache
def keep_freed_memory() -> None:
    """Have the C library keep memory that one step or layer frees for the next.

    glibc gives larger arrays back to the system when freed: fetching them anew took 6% of a
    training step. It stops so for arrays up to the largest ever freed, 32 MiB at most (mallopt(3),
    M_MMAP_THRESHOLD): one of that size is. Elsewhere nothing happens.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")  # whatever the default device is


def give_back_pages(x: Tensor) -> None:
    """Advise the system to drop the pages of an array that is mapped from a file."""
    if not sys.platform.startswith("linux") or not _is_mapped_from_a_file(x.data_ptr()):
        return
    start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    size = (x.data_ptr() + x.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if size > 0:
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _MADV_PAGEOUT)


def _is_mapped_from_a_file(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        area, _, _, _, inode, *_ = line.split(maxsplit=5)
        start, end = (int(bound, 16) for bound in area.split("-"))
        if start <= address < end:
            return inode != "0"
    return False
