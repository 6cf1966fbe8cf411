"""The Triton kernels as PyTorch operators. What they compute, and how: linbias/kernels/triton."""

import contextlib
import functools
import importlib.metadata
import math
import os
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from linbias._dispatch import Abilities
from linbias._request import Problem
from linbias.kernels.triton import sizes
from linbias.kernels.triton.sizes import Sizes
from linbias.torch.operators import operator
from linbias.torch.operators.operator import Gradients, Inputs, Results

if TYPE_CHECKING:
    from linbias.kernels.triton.launch import Call

NAME = "triton"

OLDEST = (3, 6)
OLDEST_CAPABILITY = (8, 0)
ABILITIES = Abilities(
    runs_on="CUDA GPUs",
    how="near to far in Triton kernels",
    memory="linear in length",
    devices=("cuda",),
    dtypes=("float16", "bfloat16", "float32"),
    largest_head=sizes.LARGEST_HEAD,
)
INTERPRETED = ("float16", "float32")
# The interpreter has no such limits, but the same tiles.
_INTERPRETED_PROPERTIES = (0, 0), 227 * 1024, 4


def why_not(problem: Problem) -> str | None:
    """Say why the kernels cannot run a call, or None if they can."""
    version = _VERSION
    if version is None:
        return "Triton is not installed (pip install 'linbias[triton]')"
    if version < OLDEST:
        return (
            f"it needs Triton {OLDEST[0]}.{OLDEST[1]} or newer,"
            f" and {version[0]}.{version[1]} is installed"
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    on_cpu = interpreted and problem.device == "cpu"
    lacking = ABILITIES.lacks(replace(problem, device="cuda") if on_cpu else problem)
    if lacking is not None:
        return lacking
    if on_cpu and problem.dtype not in INTERPRETED:
        return f"Triton's interpreter cannot multiply {problem.dtype}"
    if on_cpu:
        return None
    if torch.version.hip is not None:
        return "it is written for NVIDIA GPUs, and this is one of AMD's"
    device = torch.cuda.current_device()
    capability, shared_memory, _ = _properties(device)
    if capability < OLDEST_CAPABILITY:
        return (
            "it needs compute capability 8.0 or newer,"
            f" and {torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}"
        )
    itemsize = 4 if problem.dtype == "float32" else 2
    if sizes.choose(problem.D, problem.E, itemsize, shared_memory) is None:
        return (
            f"no tile of head size {max(problem.D, problem.E)} fits {shared_memory} bytes of"
            " shared memory"
        )
    return None


def _installed() -> tuple[int, int] | None:
    try:
        numbers = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        return None
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


_VERSION = _installed()


def _properties(device: int) -> tuple[tuple[int, int], int, int]:
    """Compute capability, shared memory of a block in bytes, number of multiprocessors."""
    return _read_properties(device)


# What torch.compiler.assume_constant_result does, without loading the compiler.
setattr(_properties, "_dynamo_marked_constant", True)  # noqa: B010


@functools.cache
def _read_properties(device: int) -> tuple[tuple[int, int], int, int]:
    from triton.runtime import driver  # what a launch is held against, whatever torch calls it

    shared_memory: int = driver.active.utils.get_device_properties(device)["max_shared_mem"]
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), shared_memory, properties.multi_processor_count


def _properties_for(q: Tensor) -> tuple[tuple[int, int], int, int]:
    return _properties(q.device.index) if q.is_cuda else _INTERPRETED_PROPERTIES


def sizes_for(q: Tensor, v: Tensor) -> Sizes:
    _, shared_memory, _ = _properties_for(q)
    chosen = sizes.choose(q.shape[3], v.shape[3], q.element_size(), shared_memory)
    assert chosen is not None, "why_not refuses what does not fit"
    return chosen


def _on(x: Tensor) -> contextlib.AbstractContextManager[object]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def run_forward(call: "Call", results: Results, may_decode: bool) -> None:
    """Fill the results; but for `visited`, and in parts, where queries are few and that may be."""
    from linbias.kernels.triton.decode import decode, serves
    from linbias.kernels.triton.forward import forward

    _, H, G, T, *_ = call.lengths
    if call.sequences is not None:
        T = call.sequences.longest[0]
    with _on(call.q):
        if may_decode and serves(T, H // max(1, G), call.q.element_size()):
            processors = _properties_for(call.q)[2]
            decode(call, processors, results.out, results.row_max, results.log_sum)
        else:
            forward(call, **results._asdict())


def run_backward(
    call: "Call", dout: Tensor, dlse: Tensor, saved: Results, gradients: Gradients
) -> None:
    """Fill the gradients that are not None."""
    from linbias.kernels.triton.backward import backward

    with _on(call.q):
        backward(call, small_strides(dout), dlse, **saved._asdict(), **gradients._asdict())


def _fill(inputs: Inputs, results: Results) -> None:
    run_forward(_call(inputs), results, not inputs.precise and inputs.seed is None)


def _fill_gradients(
    inputs: Inputs, dout: Tensor, dlse: Tensor | None, saved: Results, gradients: Gradients
) -> None:
    if not inputs.slope_gradients:
        for side in (gradients.dleft, gradients.dright):
            if side is not None:
                side.zero_()
        gradients = gradients._replace(dleft=None, dright=None)
    if inputs.positions is None:
        gradients = gradients._replace(dpositions=None, dquery_positions=None)
    dlse = torch.zeros_like(saved.row_max) if dlse is None else dlse.contiguous()
    run_backward(_call(inputs), dout, dlse, saved, gradients)


operators = operator.Operators(
    NAME,
    _fill,
    _fill_gradients,
    lambda _: sizes.FEWEST_ROWS,
    unit=math.log(2),
    out_is_wide=False,
    visited_on_device=True,
)
attention = operators.attention


def visited_keys(inputs: Inputs, visited: Tensor) -> tuple[Tensor, Tensor, int]:
    """The first and one past the last key of each tile, [B, H, tiles] each, and its rows.

    Of a forward pass with `precise`: decoding does not count its blocks.
    """
    (H, T), (G, S) = inputs.q.shape[1:3], inputs.k.shape[1:3]
    tile = sizes_for(inputs.q, inputs.v).forward
    key_range, query_start = inputs.key_range, inputs.query_start
    if key_range is None:
        key_range = visited.new_tensor([0, S]).expand(len(visited), G, 2)
    if query_start is None:
        query_start = visited.new_tensor([S - T]).expand(len(visited))
    ranges = key_range.clamp(0, S).repeat_interleave(H // max(1, G), 1)
    first, end = ranges[..., :1].minimum(ranges[..., 1:]), ranges[..., 1:]
    tiles = torch.arange(-(-T // tile.rows), device=visited.device)
    position = query_start[:, None, None] + tiles * tile.rows
    counts = visited[:, :, : len(tiles)].long() * tile.keys
    low = position.clamp(first, end) // tile.keys * tile.keys
    high = -(-(position + tile.rows).clamp(first, end) // tile.keys) * tile.keys
    lowest = (low - counts[..., 0]).clamp(first, end)
    highest = (high.maximum(low) + counts[..., 1]).clamp(first, end)
    return lowest, highest, tile.rows


def _call(inputs: Inputs) -> "Call":
    """The call as the kernels take it."""
    from linbias.kernels.triton.launch import Call

    def there(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.to(inputs.q.device)

    def placed(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.double().expand(*inputs.q.shape[:2], -1)

    bound = there(inputs.key_bound)
    return Call(
        q=small_strides(inputs.q),
        k=small_strides(inputs.k),
        v=small_strides(inputs.v),
        left=inputs.left,
        right=inputs.right,
        key_range=there(inputs.key_range),
        query_start=there(inputs.query_start),
        query_range=there(inputs.query_range),
        key_bound=None if bound is None else bound.float().contiguous(),
        seed=inputs.seed,
        positions=placed(inputs.positions),
        query_positions=placed(inputs.query_positions),
        sequences=None,
        scale=inputs.scale,
        dropout=inputs.dropout,
        tolerance=inputs.tolerance,
        sizes=sizes_for(inputs.q, inputs.v),
    )


def small_strides(x: Tensor) -> Tensor:
    """x, copied if offsets within a tile might not fit 32 bits."""
    farthest = 128 * x.stride(2) + x.shape[3] * x.stride(3)
    return x if farthest < 2**31 else x.contiguous()
