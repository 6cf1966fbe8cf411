"""The ledger of dropped keys, against hostile keys: it never says less than what is missing."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from linbias.models.window_cache.ledger import GRID, Ledger


def doubles(x: object) -> Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


class OneHead:
    """The ledger of one head and one text."""

    def __init__(self, slope: float, center: object, scale: float) -> None:
        self.ledger = Ledger(doubles([slope]), scale, doubles(center)[None, None])

    def add(self, keys: Tensor, first: int) -> None:
        self.ledger.add(keys[None], [len(keys)], [first], None)

    def bound(self, q: Tensor, lse: object, positions: object) -> Tensor:
        rows = torch.as_tensor(positions)
        return self.ledger.bound(q[None, None], doubles(lse)[None, None], rows)[0, 0]


def hostile(kind: str, N: int = 700, D: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, N, D))
    if kind == "offset":
        k += 5 * rng.normal(size=D)
    if kind == "one huge key":
        k[N // 3] = 40 * q[-1] / np.linalg.norm(q[-1])
    if kind == "alike, along the last query":
        k = q[-1] + 0.01 * k
    if kind == "growing queries":
        q *= np.geomspace(1e-3, 1e4, N)[:, None]
    if kind == "growing keys":
        k *= np.geomspace(1e-2, 20, N)[:, None]
    return doubles(q), doubles(k)


HOSTILE = ["random", "offset", "one huge key", "alike, along the last query"]
HOSTILE += ["growing queries", "growing keys"]


@pytest.mark.parametrize("scale", [0.35, -0.35])
@pytest.mark.parametrize("kind", HOSTILE)
def test_it_never_says_less_than_what_is_missing(kind, scale):
    """Of three texts, in four heads that share keys."""
    window = 12  # far too short a window: nearly all of the weight is missing
    q, k = (torch.stack(x) for x in zip(*(hostile(kind, seed=i) for i in range(3)), strict=True))
    places, slopes = torch.arange(700), doubles([0.0, 2**-7, 2**-3, 1.0])
    ledger = Ledger(slopes, scale, k[:, None, :50].mean(2))
    for first in range(0, 600, 7):
        end = first + 7
        ledger.add(k[:, first:end], [7], [first], None)
        rows = torch.arange(end + window, min(end + 7 + window, 700))
        own = q[:, None, rows].expand(-1, 4, -1, -1)
        fall = slopes[:, None, None] * (rows[:, None] - places)
        scores = (scale * own @ k[:, None].mT - fall).masked_fill(
            rows[:, None] < places, -math.inf
        )
        lse = scores[..., end:].logsumexp(-1)
        missing = scores[..., :end].logsumexp(-1) - lse
        assert (missing <= ledger.bound(own, lse, rows) + 1e-9).all()


def test_heads_are_as_each_alone_whenever_their_keys_leave():
    rng = np.random.default_rng(0)
    slopes, center = [0.5, 0.1, 0.03, 0.004], doubles(rng.normal(size=(2, 2, 8)))
    ledger = Ledger(doubles(slopes), 0.3, center)
    keys, q = doubles(rng.normal(size=(2, 2, 50, 8))), doubles(rng.normal(size=(2, 4, 3, 8)))
    q[0, 0, 0] *= 1e4  # beyond the grid
    lse, rows = doubles(rng.normal(size=(2, 4, 3))), torch.tensor([2060, 2061, 4000])
    for counts, later in (([20, 0], 0), ([10, 30], 0), ([20, 20], 2000)):
        at = list(ledger.count)
        new = [keys[:, g, at[g] : at[g] + n] for g, n in enumerate(counts)]
        ledger.add(torch.cat(new, 1), counts, [start + later for start in at], None)
    found = ledger.bound(q, lse, rows)
    for b, h in np.ndindex(2, 4):
        gone = OneHead(slopes[h], center[b, h // 2], scale=0.3)
        gone.add(keys[b, h // 2, :30], 0)
        gone.add(keys[b, h // 2, 30:], 2030)
        expected = gone.bound(q[b, h], lse[b, h], rows)
        torch.testing.assert_close(found[b, h], expected, rtol=1e-9, atol=0)


def test_keys_that_left_long_ago_have_decayed_by_all_of_their_distance():
    """A query of length 0 sees the biases alone: the ledger is right to the last digit."""
    slope, rows = 2**-7, torch.tensor([1099, 4000])
    gone = OneHead(slope, np.zeros(8), scale=1.0)
    gone.add(torch.ones(50, 8), first=0)
    gone.add(torch.ones(10, 8), first=1050)
    left = torch.cat([torch.arange(50), torch.arange(1050, 1060)])
    truth = (-slope * (rows[:, None] - left).double()).logsumexp(1)
    found = gone.bound(torch.zeros(2, 8), [0.0, 0.0], rows)
    torch.testing.assert_close(found, truth, rtol=1e-12, atol=0)


def test_an_outlier_is_forgotten():
    q, k = hostile("random")
    usual, struck = (OneHead(0.25, np.zeros(8), scale=0.35) for _ in range(2))
    usual.add(k[:300], first=0)
    k[10] *= 30
    struck.add(k[:300], first=0)
    bounds = [gone.bound(q[300:301], [0.0], [300])[0] for gone in (usual, struck)]
    assert abs(bounds[1] - bounds[0]) < 1e-6
    struck.add(k[10:11], first=300)
    assert struck.bound(q[300:301], [0.0], [301])[0] > bounds[0] + 5


def test_what_is_not_finite_never_passes():
    q, k = hostile("random")
    gone = OneHead(0.25, np.zeros(8), scale=0.35)
    nothing_missing = gone.bound(q[:2] * math.nan, [math.nan, 0.0], [5, 6])
    assert (nothing_missing == -math.inf).all()
    gone.add(k[:100], first=0)
    assert not (gone.bound(q[:1] * math.nan, [0.0], [200]) <= 0).any()
    assert not (gone.bound(q[:1], [math.nan], [200]) <= 0).any()
    assert gone.bound(q[:1], [-math.inf], [200]) == math.inf  # a row that sees no key that is left
    for value in (math.nan, math.inf):
        struck = OneHead(0.25, np.zeros(8), scale=0.35)
        bad = k[:100].clone()
        bad[3, 2] = value
        struck.add(bad, first=0)
        struck.add(k[100:400], first=100)
        assert struck.bound(q[:1], [0.0], [10_000]) == math.inf


def test_lengths_beyond_the_grid_are_bounded():
    _, k = hostile("random")
    gone = OneHead(0.01, np.zeros(8), scale=1.0)
    gone.add(k[:100], first=0)
    longest = k[k[:100].norm(dim=-1).argmax()]
    q = longest / longest.norm() * GRID[-1] * doubles([[1.0], [3.0], [100.0]])
    truth = (q @ k[:100].T - 0.01 * (100 - torch.arange(100))).logsumexp(1)
    bound = gone.bound(q, [0.0] * 3, [100] * 3)
    assert (truth <= bound).all()
    torch.testing.assert_close(bound, truth, rtol=1e-3, atol=0)


def test_padding_weighs_nothing():
    keys = torch.ones(2, 6, 4)
    keys[1, :3] = math.nan
    ledger = Ledger(torch.tensor([0.25]), 0.3, torch.zeros(2, 1, 4))
    ledger.add(keys, [6], [0], torch.tensor([0, 3]))
    bound = ledger.bound(torch.ones(2, 1, 1, 4), torch.zeros(2, 1, 1), torch.tensor([9]))
    assert bound[1] < bound[0] < math.inf
    without = OneHead(0.25, [0.0] * 4, scale=0.3)
    without.add(keys[1, 3:], first=3)
    torch.testing.assert_close(without.bound(torch.ones(1, 4), [0.0], [9]), bound[1, 0])
