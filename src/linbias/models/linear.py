"""Linear layers in the faster of the ways that PyTorch has: on AMD's processors oneDNN, in one step with bias and GELU.

PyTorch multiplies float32 matrices by MKL, which is made for Intel's processors; its oneDNN, which multiplies its
bfloat16 ones after a pass that fills in the bias, is at home on both. On Intel's only bfloat16 goes other ways: one row, a
generated token, as the product of a matrix and a vector, which reads weights as they lie faster than oneDNN's, which wants them
packed; and of several rows those with a GELU after them, in one step.
Only reading without gradients changes, and training and `torch.compile` meet PyTorch's own layers. docs/kernels.md has the figures.
Whichever way, what a layer returns is memory that the layer before gave back (`keep_freed_memory`).
"""

import functools
from functools import partial
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.nn.modules.module import _has_any_global_hook

from linbias import _machine
from linbias.torch.direct import untransformed

_SMALLEST = 2**18  # weights; a call of oneDNN takes 15 us longer to set out


def read_faster(model: nn.Module, kinds: tuple[type[nn.Linear], ...] = (nn.Linear,)) -> None:
    """Let a model's large linear layers read in another way where that is faster: those of these very classes, which do as `nn.Linear` does."""
    keep_freed_memory()
    if not (_is_faster() or _rows_are_faster()):
        return
    forward = _forward if _is_faster() else _forward_row
    for module in model.modules():
        if not isinstance(module, nn.Linear) or type(module) not in kinds:
            continue
        if module.weight.numel() >= _SMALLEST:
            vars(module)[forward_name(module)] = partial(forward, module)


def read_as_before(model: nn.Module) -> None:
    """Undo `read_faster`."""
    for module in model.modules():
        name = forward_name(module)
        forward = vars(module).get(name)
        if isinstance(forward, partial) and forward.func in (_forward, _forward_row):
            del vars(module)[name]
            if name == "_old_forward":
                vars(module)[name] = MethodType(type(module).forward, module)


def forward_name(module: nn.Module) -> str:
    """Where a module keeps a forward of its own: the hooks of accelerate stand before it and call another."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


@functools.cache
def _is_faster() -> bool:
    return _machine.made_by_amd() and torch.backends.mkl.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # fmt: skip


@functools.cache
def _rows_are_faster() -> bool:
    return "avx512_bf16" in _machine.cpu_features() and not _machine.made_by_amd() and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # fmt: skip


@functools.cache
def keep_freed_memory() -> None:
    """Have the C library keep memory that one step or layer frees for the next.

    glibc gives larger arrays back to the system as soon as they are freed. Fetching them anew, page by page, took 6% of a
    training step, and 20% of the time in which an encoder read 512 tokens. It stops doing so for arrays up to the largest that was ever freed,
    32 MiB at most: one of that size is. Elsewhere nothing happens.

    Source:
        mallopt(3), M_MMAP_THRESHOLD: the dynamic threshold.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")  # models are made on meta, too


def linear_gelu(module: Any, input: Tensor, approximate: Literal["none", "tanh"]) -> Tensor:
    """`gelu(module(input), approximate=approximate)`, in one step where the module is a layer whose way of reading has one."""
    forward = vars(module).get("forward")
    if (
        isinstance(forward, partial)
        and (forward.func is _forward or (forward.func is _forward_row and _are_rows(input)))
        and not (module._forward_hooks or module._forward_pre_hooks or _has_any_global_hook())
        and _is_plain(input, module.weight, module.bias)
    ):
        return _read(module, input, "gelu", approximate)
    return gelu(module(input), approximate=approximate)


def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    if _is_plain(input, module.weight, module.bias):
        return _read(module, input, "none", "")
    return type(module).forward(module, input)


def _are_rows(input: Tensor) -> bool:
    return input.dtype == torch.bfloat16 and input.numel() != input.shape[-1]


def _forward_row(module: nn.Linear, input: Tensor) -> Tensor:
    if (
        input.dtype == torch.bfloat16
        and not _are_rows(input)
        and _is_plain(input, module.weight, module.bias)
    ):
        row, weight, bias = input.reshape(-1), module.weight, module.bias
        output = torch.mv(weight, row) if bias is None else torch.addmv(bias, weight, row)
        return output.view(*input.shape[:-1], -1)
    return type(module).forward(module, input)


def _read(module: Any, input: Tensor, activation: str, approximate: str) -> Tensor:
    operator: Any = torch.ops.mkldnn._linear_pointwise
    output: Tensor = operator(input, module.weight, module.bias, activation, [], approximate)
    return output


def _is_plain(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a call is one on the CPU in which neither autograd nor anything else of PyTorch takes part."""
    return (
        not torch.is_grad_enabled()
        and untransformed(input, weight, bias)
        and not torch.is_autocast_enabled("cpu")
        and input.dtype == weight.dtype
        and input.dtype in _types()
        and input.device.type == weight.device.type == "cpu"
        and input.numel() > 0
    )


@functools.cache
def _types() -> tuple[torch.dtype, ...]:
    """Those that oneDNN has fast products for on this processor."""
    has_bfloat16 = "avx512_bf16" in _machine.cpu_features()
    return (torch.float32, torch.bfloat16) if has_bfloat16 else (torch.float32,)
