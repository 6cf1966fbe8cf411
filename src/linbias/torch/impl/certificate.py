"""When may a tile stop? The bound of DESIGN section 2 on what it has not visited.

Its fixed vector c is the mean key. Where keys have positions, `log_sums` has what all unvisited
keys weigh, seen from the nearest of them.
"""

import math

import torch
from torch import Tensor

from linbias._request import log_share

LEFT, RIGHT = 0, 1


class Certificate:
    """What the bound needs of a group's keys and slopes, once for all its tiles.

    A key or value that is not finite gets an endless norm, and so is never left out.
    """

    def __init__(
        self,
        k: Tensor,
        v: Tensor,
        left: Tensor,
        right: Tensor | None,
        tolerance: float,
        x: Tensor | None = None,
        xq: Tensor | None = None,
    ) -> None:
        self.slopes = (left, right)
        # Relative rounding of norms, of dot products over D terms, and of the scores in the sums.
        self.slack = (k.shape[-1] + 8) * torch.finfo(k.dtype).eps  # eps is twice the unit roundoff
        self.center = k.mean(1)
        radius = norm(k - self.center[:, None]) * (1 + self.slack)
        radius = radius + 0.0 * v.sum(-1)
        self.reach = radius.cummax(1).values, radius.flip(1).cummax(1).values.flip(1)
        share = tolerance if right is None else tolerance / 2
        self.log_share = log_share(share)
        self.x, self.xq = x, xq
        if x is not None:
            to_left = log_sums(x, left[..., 0])
            to_right = None if right is None else log_sums(-x.flip(-1), right[..., 0]).flip(-1)
            self.log_sums = to_left, to_right

    def open_heads(self) -> list[Tensor]:
        """The heads, int64 [up to n], that see anything to the left and to the right."""
        none = torch.empty(0, dtype=torch.int64, device=self.center.device)
        return [
            none if slope is None else (~slope.isinf()).any(0).flatten().nonzero().squeeze(-1)
            for slope in self.slopes
        ]

    def about(self, q: Tensor, start: int, shift: int, ranges: Tensor | None = None) -> "Question":
        """Ask about the rows q [B, n, rows, D], times scale, from `start` on.

        ranges: [B, rows, 2], the keys that each row sees; None is all.
        """
        return Question(self, q, start, shift, ranges)


class Question:
    """The rows of one tile: may their heads stop here?"""

    def __init__(
        self,
        certificate: Certificate,
        q: Tensor,
        start: int,
        shift: int,
        ranges: Tensor | None,
    ) -> None:
        self.certificate, self.ranges = certificate, ranges
        self.positions = torch.arange(q.shape[2], device=q.device) + (start + shift)
        if certificate.xq is not None:
            self.positions = certificate.xq[..., start : start + q.shape[2]]
        center = certificate.center
        self.q_norm = norm(q) * (1 + certificate.slack)
        largest = norm(center)
        if certificate.reach[LEFT].shape[1]:
            largest = largest + certificate.reach[LEFT][:, -1]
        aligned = torch.einsum("bhtd,bd->bht", q, center)
        self.base = aligned + certificate.slack * (self.q_norm * largest[:, None, None])

    def covered(self, side: int, nearest: int, heads: Tensor, lse: Tensor) -> Tensor:
        """[m], bool: which of the heads [m] may leave out every key from `nearest` outwards.

        lse: [B, m, rows], of the keys visited. What cannot be bounded, NaN, is visited.
        """
        certificate = self.certificate
        slopes = certificate.slopes[side]
        assert slopes is not None, "a side without slopes is never open"
        slope = slopes[:, heads, :, 0]
        reach = certificate.reach[side]
        if certificate.x is None:
            num_unvisited = nearest + 1 if side == LEFT else reach.shape[1] - nearest
            log_count = (-torch.log(-torch.expm1(-slope))).clamp(max=math.log(num_unvisited))
            distance = (self.positions - nearest).abs().to(lse.dtype)
        else:
            log_sum = certificate.log_sums[side]
            assert log_sum is not None, "as slopes"
            log_count = log_sum[:, heads, nearest, None].to(lse.dtype) * (1 + certificate.slack)
            apart = (self.positions - certificate.x[..., nearest, None]).abs().to(lse.dtype)
            distance = apart[:, heads] if apart.shape[1] > 1 else apart
        best = self.base[:, heads] + self.q_norm[:, heads] * reach[:, nearest, None, None]
        tail = best - slope * distance * (1 - certificate.slack) + log_count
        allowed = certificate.log_share + lse
        covered = (tail <= allowed) & (slope > 0)
        if self.ranges is not None:  # a row without keys out there loses nothing
            first, end = self.ranges[:, None].unbind(-1)
            covered |= ~((first < end) & ((first <= nearest) if side == LEFT else (end > nearest)))
        return covered.all(-1).all(0)


def log_sums(x: Tensor, slope: Tensor) -> Tensor:
    """Log of the sum of exp(-slope * (x[j] - x[s])) over s <= j; x [..., S], slope [..., 1].

    Each step doubles the number of keys that are summed. An infinite slope counts as 0.
    """
    slope = slope.double().masked_fill(slope.isinf(), 0.0)
    found, reach = torch.zeros_like(slope * x), 1
    while reach < x.shape[-1]:
        further = found[..., :-reach] - slope * (x[..., reach:] - x[..., :-reach])
        found[..., reach:] = torch.logaddexp(found[..., reach:], further)
        reach *= 2
    return found


def norm(x: Tensor) -> Tensor:
    """The length of [..., D], also where squares vanish; NaN where one is not finite."""
    largest = x.abs().amax(-1, keepdim=True)
    unit = x / largest.masked_fill(largest == 0, 1.0)
    return torch.linalg.vector_norm(unit, dim=-1) * largest.squeeze(-1)
