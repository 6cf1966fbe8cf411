"""The Triton kernels as PyTorch operators. What they compute, and how: linbias/triton."""

import contextlib
import functools
import importlib.metadata
import math
import os
import re

import torch
from torch import Tensor

from linbias._checks import Call
from linbias.torch import operator
from linbias.torch.operator import Arguments, Gradients, Results
from linbias.triton import sizes
from linbias.triton.sizes import Sizes

NAME = "triton"

OLDEST = (3, 6)
OLDEST_CAPABILITY = (8, 0)
INTERPRETED = ("float16", "float32")
# The interpreter has no such limits, but the same tiles.
_INTERPRETED_BYTES, _INTERPRETED_PROCESSORS = 227 * 1024, 4


def why_not(call: Call) -> str | None:
    """Say why the kernels cannot run a call, or None if they can."""
    version = _VERSION
    if version is None:
        return "Triton is not installed (pip install 'linbias[triton]')"
    if version < OLDEST:
        return f"it needs Triton {OLDEST[0]}.{OLDEST[1]} or newer, and {version[0]}.{version[1]} is installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if call.device != "cuda" and not (interpreted and call.device == "cpu"):
        return f"it runs on CUDA GPUs, and the arrays are on {call.device}"
    if call.dtype == "float64":
        return "it takes float16, bfloat16 and float32, got float64"
    if max(call.D, call.E) > sizes.LARGEST_HEAD:
        return f"head sizes go up to {sizes.LARGEST_HEAD}, got {max(call.D, call.E)}"
    if call.device == "cpu":
        return (
            None
            if call.dtype in INTERPRETED
            else f"Triton's interpreter cannot multiply {call.dtype}"
        )
    if torch.version.hip is not None:
        return "it is written for NVIDIA GPUs, and this is one of AMD's"
    device = torch.cuda.current_device()
    capability, shared_memory, _ = _properties(device)
    if capability < OLDEST_CAPABILITY:
        return f"it needs compute capability 8.0 or newer, and {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
    if sizes.choose(call.D, call.E, 4 if call.dtype == "float32" else 2, shared_memory) is None:
        return f"no tile of head size {max(call.D, call.E)} fits {shared_memory} bytes of shared memory"
    return None


def _installed() -> tuple[int, int] | None:
    try:
        found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return None
    return (int(found[1]), int(found[2])) if found else (0, 0)


_VERSION = _installed()


def _properties(device: int) -> tuple[tuple[int, int], int, int]:
    """Compute capability, shared memory of a block in bytes, number of multiprocessors."""
    return _read_properties(device)


# What torch.compiler.assume_constant_result does, without loading the compiler; it is not seen on a cached function.
setattr(_properties, "_dynamo_marked_constant", True)  # noqa: B010


@functools.cache
def _read_properties(device: int) -> tuple[tuple[int, int], int, int]:
    from triton.runtime import driver  # what a launch is held against, whatever torch calls it

    shared_memory: int = driver.active.utils.get_device_properties(device)["max_shared_mem"]
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), shared_memory, properties.multi_processor_count


def _sizes(q: Tensor, v: Tensor) -> Sizes:
    shared_memory = _properties(q.device.index)[1] if q.is_cuda else _INTERPRETED_BYTES
    chosen = sizes.choose(q.shape[3], v.shape[3], q.element_size(), shared_memory)
    assert chosen is not None, "why_not refuses what does not fit"
    return chosen


def _on(x: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def _fill(call: Arguments, results: Results) -> None:
    from linbias.triton.decode import decode, serves
    from linbias.triton.forward import forward

    q, k, v, key_range = _arrays(call)
    chosen = _sizes(q, v)
    slopes, numbers = (call.left, call.right), (call.scale, call.dropout, call.tolerance)
    with _on(q):
        group_size = q.shape[1] // max(1, k.shape[1])
        if (
            not call.precise
            and call.seed is None
            and serves(q.shape[2], group_size, q.element_size())
        ):
            bound = call.key_bound
            if bound is not None:
                bound = bound.to(device=q.device, dtype=torch.float32).contiguous()
            processors = _properties(q.device.index)[2] if q.is_cuda else _INTERPRETED_PROCESSORS
            decode(
                q, k, v, *slopes, key_range, bound, call.scale, call.tolerance, chosen, processors, results[:3]
            )  # fmt: skip
        else:
            forward(q, k, v, *slopes, key_range, call.seed, *numbers, chosen, results)


def _fill_gradients(
    call: Arguments, dout: Tensor, dlse: Tensor, saved: Results, gradients: Gradients
) -> None:
    from linbias.triton.backward import backward

    q, k, v, key_range = _arrays(call)
    with _on(q):
        backward(
            q, k, v, call.left, call.right, key_range, call.seed, call.scale, call.dropout, _sizes(q, v),
            _small_strides(dout), dlse.contiguous(), saved, gradients[:3],
            (gradients.dleft, gradients.dright) if call.slopes else None,
        )  # fmt: skip


attention, forward = operator.define(
    NAME,
    _fill,
    _fill_gradients,
    lambda _: sizes.FEWEST_ROWS,
    unit=math.log(2),
    out_is_wide=False,
    visited_on_device=True,
)


def work_kept(visited: Tensor, q: Tensor, v: Tensor, S: int) -> Tensor:
    """Return the share of the causal query-key pairs that lie in visited blocks, float64 [B, H]."""
    tile = _sizes(q, v).forward
    return operator.work_kept(visited, q.shape[2], S, tile.rows, tile.keys)


def _arrays(call: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v = (_small_strides(x) for x in (call.q, call.k, call.v))
    key_range = call.key_range
    if key_range is not None:
        key_range = key_range.to(device=q.device, dtype=torch.int32).contiguous()
    return q, k, v, key_range


def _small_strides(x: Tensor) -> Tensor:
    """x, copied if offsets within a tile might not fit 32 bits."""
    farthest = 128 * x.stride(2) + x.shape[3] * x.stride(3)
    return x if farthest < 2**31 else x.contiguous()
