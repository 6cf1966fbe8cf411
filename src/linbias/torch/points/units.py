"""A warning about points in units that leave no head anything to see, such as pixels."""

import math
import sys
import warnings
from types import FrameType

import torch
from torch import Tensor

from linbias.torch.points.geometry import PointInputs, distances, parts

# What the flattest head must leave of the weight of a nearest neighbour.
_LEAST_WEIGHT = 1e-3
_MOST_SAMPLES = 32  # points whose nearest neighbour is looked for
_warned: set[tuple[str, int]] = set()  # lines that called


def warn_of_units(function: str, inputs: PointInputs) -> None:
    """Warn once for each line that calls, where even the flattest head sees the nearest alone.

    A batch has one unit, which its first row with neighbours tells.
    """
    frame = _caller()
    line = frame.f_code.co_filename, frame.f_lineno
    first = inputs.global_tokens
    row, num_points = next(((r.start, n) for r, n in parts(inputs) if n >= first + 2), (0, 0))
    if not num_points or line in _warned:
        return
    points = inputs.points[row if len(inputs.points) > 1 else 0, : num_points - first]
    flattest, most = inputs.slopes[row].detach().amin().item(), -math.log(_LEAST_WEIGHT)
    if flattest * (points.amax(0) - points.amin(0)).sum().item() <= most:
        return
    apart = _typical_gap(points, inputs.manhattan)
    if flattest * apart > most:
        _warned.add(line)
        text = (
            f"{function}: no head sees beyond the nearest point: neighbours are {apart:.4g} apart,"
            f" which takes {flattest * apart:.4g} from scores even by the flattest slope,"
            f" {flattest:.3g}; divide the points by {apart:.4g} (if they are pixels, that is the"
            " size of a patch), or give smaller slopes"
        )
        warnings.warn_explicit(text, UserWarning, *line, module=frame.f_globals.get("__name__"))


def _typical_gap(points: Tensor, manhattan: bool) -> float:
    """The median distance of some points [n, A] to the nearest of the others."""
    some = torch.arange(0, len(points), -(-len(points) // _MOST_SAMPLES))
    apart = distances(points[some], points, manhattan)
    apart[torch.arange(len(some)), some] = torch.inf
    return apart.amin(1).median().item()


def _caller() -> FrameType:
    """The frame that called linbias, be it through a layer of PyTorch's."""
    frame = sys._getframe()
    while frame.f_back is not None and _package(frame) in ("linbias", "torch"):
        frame = frame.f_back
    return frame


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
