"""Linear layers in the faster of the ways that PyTorch has, on the kinds of processors where that was measured (`MEASURED`).

PyTorch multiplies float32 matrices by MKL, which is made for Intel's processors; its oneDNN, which multiplies its
bfloat16 ones after a pass that fills in the bias, is at home on AMD's with AVX-512 too, in one step with bias and GELU. On Intel's with a
matrix unit only bfloat16 goes other ways: one row, a generated token, as the product of a matrix and a vector, which reads weights
as they lie faster than oneDNN's, which wants them packed; and of several rows those with a GELU after them, in one step. Elsewhere
PyTorch's own layers run. Models that `prepack` has seen read all through oneDNN, on any processor.
Only reading without gradients changes, and training and `torch.compile` meet PyTorch's own layers. docs/kernels.md has the figures.
Whichever way, what a layer returns is memory that the layer before gave back (`keep_freed_memory`).
"""

import functools
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.nn.modules.module import _has_any_global_hook
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.utils import logging

from linbias import _machine
from linbias.models.linear.prepacked import Prepacked, use_large_pages
from linbias.torch.operators.direct import untransformed

logger = logging.get_logger(__name__)

_SMALLEST = 2**18  # weights; a call of oneDNN takes 15 us longer to set out
_KINDS = (nn.Linear, FalconLinear)  # these very classes, and none that is derived from them


def read_faster(model: nn.Module) -> None:
    """Let a model's large linear layers read in another way where that is faster."""
    keep_freed_memory()
    way = _faster_way()
    if way is not None:
        for _, module in _large_layers(model):
            vars(module)[forward_name(module)] = partial(way, module)


def prepack_layers(model: nn.Module) -> None:
    """Keep the weights of a model's large linear layers in oneDNN's order, and read them so."""
    keep_freed_memory()
    layers = list(_large_layers(model))
    made = []
    others: dict[str, list[str]] = {}
    for name, module in layers:
        reason = _why_not_packable(module.weight)
        if reason is None:
            made.append(Prepacked(module.weight))
            vars(module)[forward_name(module)] = partial(_forward_prepacked, module, made[-1])
        else:
            others.setdefault(reason, []).append(repr(name))
    use_large_pages(made)
    words = [f"; not {', '.join(names)}: {reason}" for reason, names in others.items()]
    logger.info("prepack: packed %d of %d large linear layers%s", len(made), len(layers), "".join(words))  # fmt: skip


def prepacked_of(module: nn.Module) -> Prepacked | None:
    """What a layer reads in the place of its weight, if it is prepacked."""
    forward = vars(module).get("forward")
    if isinstance(forward, partial) and forward.func is _forward_prepacked:
        prepacked: Prepacked = forward.args[1]
        return prepacked
    return None


def _why_not_packable(weight: Tensor) -> str | None:
    """None if oneDNN multiplies it fast, and its changes are seen: it lasts (that of `torch.nn.utils.weight_norm` does not), and is no
    tensor of a kind of its own, such as a quantised one."""
    if not _has_onednn():
        return "PyTorch was built without oneDNN"
    if type(weight) is not nn.Parameter:
        return f"the weight is no plain parameter but a {type(weight).__name__}"
    if weight.device.type != "cpu":
        return f"the weight is on {weight.device.type}"
    if weight.dtype not in _types():
        return f"this processor has no fast products of {str(weight.dtype).removeprefix('torch.')}"
    return "the weight was made in inference mode" if weight.is_inference() else None


def read_as_before(model: nn.Module) -> None:
    """Undo `read_faster` and `prepack_layers`."""
    for module in model.modules():
        name = forward_name(module)
        forward = vars(module).get(name)
        if isinstance(forward, partial) and forward.func in (_forward, _forward_row, _forward_prepacked):  # fmt: skip
            del vars(module)[name]
            if name == "_old_forward":
                vars(module)[name] = MethodType(type(module).forward, module)


def _large_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Linear)
            and type(module) in _KINDS
            and module.weight.numel() >= _SMALLEST
        ):
            yield name, module


def forward_name(module: nn.Module) -> str:
    """Where a module keeps a forward of its own: the hooks of accelerate stand before it and call another."""
    return "_old_forward" if "_old_forward" in vars(module) else "forward"


def _faster_way() -> Any:
    if _is_faster():
        return _forward
    return _forward_row if _rows_are_faster() else None


class Ways(NamedTuple):
    """What one kind of processor gains by; each was measured on it (docs/kernels.md).

    Attributes:
        layers: All large layers go through oneDNN.
        rows: One row by bfloat16 weights goes as a matrix and a vector.
        copies: One row by a prepacked weight goes as four.
    """

    layers: bool = False
    rows: bool = False
    copies: bool = False


MEASURED = {
    "AMD Zen 4": Ways(layers=True, copies=True),
    "AMD Zen 5": Ways(layers=True),
    "Intel with AMX": Ways(rows=True),
}


def _ways() -> Ways:
    """Those of this processor: none on a kind that nobody measured."""
    return MEASURED.get(_machine.kind(), Ways())


def ways_in_words() -> str:
    """The row of `MEASURED` that holds here, for `linbias doctor`."""
    ways = MEASURED.get(_machine.kind())
    if ways is None:
        return "as PyTorch reads them: no other way was measured faster on this kind of processor"
    words = ("through oneDNN", "a bfloat16 row as a vector", "a prepacked row as four")
    return ", ".join(said for said, holds in zip(words, ways, strict=True) if holds)


@functools.cache
def _is_faster() -> bool:
    return _ways().layers and torch.backends.mkl.is_available() and _has_onednn()


@functools.cache
def _rows_are_faster() -> bool:
    return _ways().rows and _has_onednn()


@functools.cache
def _has_onednn() -> bool:
    return hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")  # fmt: skip


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
    way = vars(module).get("forward")
    if isinstance(way, partial) and not (
        module._forward_hooks or module._forward_pre_hooks or _has_any_global_hook()
    ):
        own, bias = _parameters(module)
        if is_plain(input, own, bias):
            weight = _weight_for_onednn(way, own, input)
            if weight is not None:
                reading = read_prepacked if way.func is _forward_prepacked else read
                return reading(input, weight, bias, "gelu", approximate)
    return gelu(module(input), approximate=approximate)


def _weight_for_onednn(way: Any, own: Tensor, input: Tensor) -> Tensor | None:
    """What oneDNN multiplies an input by in this way of reading; None if the way is another."""
    if way.func is _forward or (way.func is _forward_row and _are_rows(input)):
        return own
    if way.func is _forward_prepacked:
        prepacked: Prepacked = way.args[1]
        return prepacked.of(own)
    return None


def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    own, bias = _parameters(module)
    if is_plain(input, own, bias):
        return read(input, own, bias)
    return type(module).forward(module, input)


def _forward_prepacked(module: nn.Linear, prepacked: Prepacked, input: Tensor) -> Tensor:
    own, bias = _parameters(module)
    if is_plain(input, own, bias):
        weight = prepacked.of(own)
        if weight is not None:
            return read_prepacked(input, weight, bias)
    way: Any = _faster_way() or type(module).forward
    output: Tensor = way(module, input)
    return output


def _parameters(module: nn.Module) -> tuple[Any, Tensor | None]:
    """The weight and the bias, looked up faster than as attributes; None in place of a weight that is no parameter."""
    return module._parameters.get("weight"), module._parameters.get("bias")


def _are_rows(input: Tensor) -> bool:
    return input.dtype == torch.bfloat16 and input.numel() != input.shape[-1]


def _forward_row(module: nn.Linear, input: Tensor) -> Tensor:
    own, bias = _parameters(module)
    if input.dtype == torch.bfloat16 and not _are_rows(input) and is_plain(input, own, bias):
        row = input.reshape(-1)
        output = torch.mv(own, row) if bias is None else torch.addmv(bias, own, row)
        return output.view(*input.shape[:-1], -1)
    return type(module).forward(module, input)


def read(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "none",
    approximate: str = "",
) -> Tensor:
    operator: Any = torch.ops.mkldnn._linear_pointwise
    output: Tensor = operator(input, weight, bias, activation, [], approximate)
    return output


def read_prepacked(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "none",
    approximate: str = "",
) -> Tensor:
    """As `read`, of a weight in oneDNN's order; one row, or two, are multiplied as four in which they repeat.

    oneDNN computes 64 outputs at a time. The weights of these for one number of the input (a pair in bfloat16) fill four cache
    lines, and with each row of the input it asks memory for one of the four lines that come next. With one row three lines
    are left to the processor, which fetches them late; multiplying four rows takes less time than that wait.

    Source:
        oneDNN, src/cpu/x64/brgemm/jit_brgemm_kernel.cpp, gemm_microkernel.
    """
    copies = 4 * input.shape[-1] // input.numel()
    if copies > 1 and _copies_are_faster():
        return read(input.expand(copies, *input.shape), weight, bias, activation, approximate)[0]
    return read(input, weight, bias, activation, approximate)


@functools.cache
def _copies_are_faster() -> bool:
    return _ways().copies


def is_plain(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether a call is one on the CPU in which neither autograd nor anything else of PyTorch takes part."""
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
    if has_bfloat16 and _has_onednn() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return (torch.float32, torch.bfloat16)
    return (torch.float32,)
