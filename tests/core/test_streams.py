"""What a cache may drop: windows from weights, and the ledger against hostile keys."""

import math

import numpy as np
import pytest

from linbias.near_to_far import reach
from linbias.streams import GRID, Dropped, largest_lead

TOLERANCE = 2.0**-24


def projections(kind, D=8, n=24, seed=0):
    rng = np.random.default_rng(seed)
    F, G = rng.normal(size=(2, D, n)) / math.sqrt(n)
    f = rng.normal(size=D)
    return {
        "random": (F, G, 0 * f),
        "biased": (F, G, 3 * f),
        "bias alone": (0 * F, G, f),
        "alike": (2 * F, F, 0 * f),
        "opposed": (F, -2 * F, f),
        "one direction": (np.outer(f, F[0]), np.outer(f[::-1], F[1]), f),
    }[kind]


KINDS = ("random", "biased", "bias alone", "alike", "opposed", "one direction")


def worst_input(F, G, f, radius, scale, seed=0):
    """By gradient steps: the lead that was reached, and the two normed inputs that reach it."""
    rng = np.random.default_rng(seed)
    C, b = scale * F.T @ G, scale * G.T @ f

    def best_key(y):
        v = C.T @ y + b
        return v * radius / max(np.linalg.norm(v), 1e-300)

    def lead(y):
        return (y @ C + b) @ (best_key(y) - y)

    found = (-math.inf, None, None)
    for _ in range(12):
        y = rng.normal(size=F.shape[1])
        y *= radius / np.linalg.norm(y)
        step = 0.1 * radius
        for _ in range(300):
            slope = C @ best_key(y) - (C + C.T) @ y - b
            while step > 1e-9 * radius:
                other = y + step * slope / max(np.linalg.norm(slope), 1e-300)
                other *= radius / max(np.linalg.norm(other), radius)
                if lead(other) > lead(y):
                    y, step = other, 1.5 * step
                    break
                step /= 2
        found = max(found, (lead(y), y, best_key(y)), key=lambda item: item[0])
    return found


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_input_leads_by_more_and_one_leads_by_as_much(kind, centred):
    F, G, f = projections(kind)
    radius, scale = math.sqrt(F.shape[1]), 0.3
    bound = largest_lead(F, G, f, radius=radius, scale=scale, centred=centred)
    if centred:  # normed inputs that sum to 0 do not see the means of the rows
        F, G = F - F.mean(1, keepdims=True), G - G.mean(1, keepdims=True)
    reached, _, _ = worst_input(F, G, f, radius, scale)
    assert reached <= bound <= 1.01 * reached + 1e-9


def test_the_lead_holds_for_what_a_layer_norm_makes():
    import torch

    rng = np.random.default_rng(1)
    F, G, f = projections("biased", seed=3)
    norm = torch.nn.LayerNorm(24).double()
    hidden = torch.from_numpy(rng.normal(size=(400, 24)) * rng.choice([0.01, 1, 100], (400, 1)))
    y = norm(hidden).detach().numpy()
    q, k = y @ F.T + f, y @ G.T + rng.normal(size=8)
    lead = (0.5 * (q @ k.T - (q * k).sum(-1, keepdims=True))).max()
    bound = largest_lead(F, G, f, radius=math.sqrt(24), scale=0.5, centred=True)
    assert 0 < lead <= bound


def hostile(kind, N=700, D=8, seed=0):
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
    return q, k


HOSTILE = ["random", "offset", "one huge key", "alike, along the last query"]
HOSTILE += ["growing queries", "growing keys"]


@pytest.mark.parametrize("scale", [0.35, -0.35])
@pytest.mark.parametrize("slope", [0.0, 2**-7, 2**-3, 1.0])
@pytest.mark.parametrize("kind", HOSTILE)
def test_the_ledger_never_says_less_than_what_is_missing(kind, slope, scale):
    window = 12  # far too short a window: nearly all of the weight is missing
    for seed in range(3):
        q, k = hostile(kind, seed=seed)
        gone = Dropped(slope, k[:50].mean(0), scale=scale)
        for first in range(0, 600, 7):
            gone.add(k[first : first + 7], first)
            rows = np.arange(first + 7 + window, min(first + 14 + window, len(q)))
            scores = scale * q[rows] @ k.T - slope * (rows[:, None] - np.arange(len(k)))
            scores[rows[:, None] < np.arange(len(k))] = -math.inf
            lse = np.logaddexp.reduce(scores[:, gone.at :], axis=1)
            missing = np.logaddexp.reduce(scores[:, : gone.at], axis=1) - lse
            bound = gone.bound(q[rows], lse, rows)
            assert (missing <= bound + 1e-9).all()


def test_keys_in_parts_are_as_keys_at_once_and_the_center_is_kept():
    k, center = hostile("random")[1], np.ones(8)
    whole, parts = (Dropped(0.1, x, scale=0.3) for x in (np.ones(8), center))
    center[:] = 0.0
    whole.add(k[:300], first=0)
    for first in range(0, 300, 50):
        parts.add(k[first : first + 50], first)
    np.testing.assert_allclose(parts.sums, whole.sums, rtol=1e-12)
    assert (parts.at, parts.count, parts.largest) == (whole.at, whole.count, whole.largest)


def test_keys_that_left_long_ago_have_decayed_by_all_of_their_distance():
    """A query of length 0 sees the biases alone: the ledger is right to the last digit."""
    slope, rows = 2**-7, np.array([1099, 4000])
    gone = Dropped(slope, np.zeros(8), scale=1.0)
    gone.add(np.ones((50, 8)), first=0)
    gone.add(np.ones((10, 8)), first=1050)
    left = np.concatenate([np.arange(50), np.arange(1050, 1060)])
    truth = np.logaddexp.reduce(-slope * (rows[:, None] - left), axis=1)
    np.testing.assert_allclose(gone.bound(np.zeros((2, 8)), np.zeros(2), rows), truth, rtol=1e-12)


def test_an_outlier_is_forgotten():
    q, k = hostile("random")
    usual, struck = (Dropped(0.25, np.zeros(8), scale=0.35) for _ in range(2))
    usual.add(k[:300], first=0)
    k[10] *= 30
    struck.add(k[:300], first=0)
    bounds = [gone.bound(q[300:301], [0.0], [300])[0] for gone in (usual, struck)]
    assert abs(bounds[1] - bounds[0]) < 1e-6
    struck.add(k[10:11], first=300)
    assert struck.bound(q[300:301], [0.0], [301])[0] > bounds[0] + 5


def test_what_is_not_finite_never_passes():
    q, k = hostile("random")
    lead = lead_of(np.full((2, 3), math.nan))
    assert reach(0.5, lead, tolerance=0.1) == math.inf
    gone = Dropped(0.25, np.zeros(8), scale=0.35)
    nothing_missing = gone.bound(q[:2] * math.nan, [math.nan, 0.0], [5, 6])
    assert (nothing_missing == -math.inf).all()
    gone.add(k[:100], first=0)
    assert not (gone.bound(q[:1] * math.nan, [0.0], [200]) <= 0).any()
    assert not (gone.bound(q[:1], [math.nan], [200]) <= 0).any()
    assert gone.bound(q[:1], [-math.inf], [200]) == math.inf  # a row that sees no key that is left
    for value in (math.nan, math.inf):
        struck = Dropped(0.25, np.zeros(8), scale=0.35)
        bad = k[:100].copy()
        bad[3, 2] = value
        struck.add(bad, first=0)
        struck.add(k[100:400], first=100)
        assert struck.bound(q[:1], [0.0], [10_000]) == math.inf


def test_lengths_beyond_the_grid_are_bounded():
    _, k = hostile("random")
    gone = Dropped(0.01, np.zeros(8), scale=1.0)
    gone.add(k[:100], first=0)
    longest = k[np.linalg.norm(k[:100], axis=-1).argmax()]
    q = longest / np.linalg.norm(longest) * GRID[-1] * np.array([[1.0], [3.0], [100.0]])
    truth = np.logaddexp.reduce(q @ k[:100].T - 0.01 * (100 - np.arange(100)), axis=1)
    bound = gone.bound(q, np.zeros(3), np.full(3, 100))
    assert (truth <= bound).all()
    np.testing.assert_allclose(bound, truth, rtol=1e-3)


def lead_of(G, radius=1.0):
    F = np.full((2, 3), math.nan)
    return largest_lead(F, G, radius=radius, scale=1.0, centred=False)


def out_of_order():
    gone = Dropped(0.5, np.zeros(2), scale=1.0)
    gone.add(np.ones((3, 2)), first=4)
    gone.add(np.ones((1, 2)), first=6)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lead_of(np.ones((2, 4)), radius=1), r"one shape \[D, n\].* \(2, 3\), \(2, 4\)"),
        (lambda: lead_of(np.ones((2, 3)), radius=-1), "radius must be at least 0, got -1"),
        (lambda: Dropped(math.inf, np.zeros(2), scale=1.0), "slope must be at least 0 and finite"),
        (out_of_order, "first must be at least 7, got 6"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
