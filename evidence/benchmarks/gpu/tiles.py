"""The stages that look for better tile sizes, and whether shorter floats pay for far blocks."""

import argparse
from functools import partial
from itertools import product
from typing import Any

import torch

from gpu.stages import by_definition, ours, random, slopes_of
from gpu.timing import Case, left_out_if_it_fails, write_times
from linbias.kernels.triton.sizes import Sizes, Tile, forced
from linbias.torch.impl import triton
from record import BACKWARD, FORWARD


def coarse(options: argparse.Namespace) -> None:
    """Far blocks in shorter floats or not: what would put a device into `sizes.COARSE`."""
    dtypes = [torch.float32]
    if options.dry_run or torch.cuda.get_device_capability() >= (8, 9):
        dtypes.append(options.dtype)
    for dtype, (H, D) in product(dtypes, options.shapes):
        compare_coarse(sorted(options.lengths)[len(options.lengths) // 2], H, D, dtype, options)


def compare_coarse(
    T: int, H: int, D: int, dtype: torch.dtype, options: argparse.Namespace
) -> None:
    q, k, v = random(1, H, T, D, options).to(dtype)
    if dtype != torch.float32:  # 8 bits take no larger scores
        q /= 16
    slopes, chosen = slopes_of(H, options), triton._sizes(q, v)
    case = Case(f"coarse-{T}", q, k, v, by_definition(slopes))

    def run(on: bool, call: Any) -> Any:
        with forced(chosen._replace(coarse=on)):  # backward as well
            return call(ours(*case.leaves, slopes))

    for mode in case.modes:
        fields, functions, more = case.enter(mode), {}, {}
        for name, on in {"triton": False, "triton, coarse": True}.items():
            with left_out_if_it_fails(fields, name, set(), options):
                more[name] = {"error": run(on, partial(case.error, mode=mode))}
                functions[name] = partial(run, on, partial(case.call, mode=mode))
        write_times(fields, functions, more, options)


def tiles(options: argparse.Namespace) -> None:
    """Each kernel's tile exchanged for others; the first line is the choice of sizes.py."""
    for H, D in options.shapes:
        compare_tiles(sorted(options.lengths)[len(options.lengths) // 2], H, D, options)


def compare_tiles(T: int, H: int, D: int, options: argparse.Namespace) -> None:
    q, k, v = random(1, H, T, D, options)
    slopes = slopes_of(H, options)
    chosen = triton._sizes(q, v)
    for kernel, choices in tile_choices(chosen, options).items():
        mode = BACKWARD if kernel != "forward" else FORWARD
        case = Case(f"tiles-{kernel}-{T}", q, k, v, by_definition(slopes), modes=(mode,))
        fields, gone = case.enter(mode), set[str]()

        def run(sizes: Sizes, case: Case = case, mode: str = mode) -> Any:
            with forced(sizes):  # backward as well
                return case.call(ours(*case.leaves, slopes), mode)

        functions = {"triton, as chosen": partial(run, chosen)}
        for tile in choices:
            name = f"tile {tuple(tile)}"
            with left_out_if_it_fails(fields, name, gone, options):  # too large, most likely
                function = partial(run, chosen._replace(**{kernel: tile}))
                function()
                functions[name] = function
        write_times(fields, functions, {}, options)


def tile_choices(chosen: Sizes, options: argparse.Namespace) -> dict[str, list[Tile]]:
    """Other tiles for each kernel, such that those of backward still divide forward's."""
    if options.dry_run:
        return {"forward": [], "dkv": []}
    found = {}
    for kernel, rows in {"forward": (128,), "dq": (64, 128), "dkv": (32, 64)}.items():
        least = chosen.dq.keys if kernel == "forward" else 32
        most = chosen.forward.keys if kernel == "dq" else 128
        sizes = product(rows, (32, 64, 128), (4, 8), (2, 3))
        tiles = [Tile(*size) for size in sizes if least <= size[1] <= most]
        found[kernel] = [tile for tile in tiles if tile != getattr(chosen, kernel)]
    return found
