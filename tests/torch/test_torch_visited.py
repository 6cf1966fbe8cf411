"""What implementations leave unread, against the definition; and parts merged into the whole."""

import functools
from itertools import product

import numpy as np
import pytest
import torch

import linbias
import linbias.torch
from cases import CASES, REPEATED, by_name, make_inputs
from contract import rows
from linbias import near_to_far
from linbias.torch import merge, visited
from linbias.torch.operators.operator import Inputs

IMPLEMENTATIONS = ("blocked", "cpu")
LONG = [case for case in CASES if case.T * case.S > 10_000 and not case.dropout]


def tensors(case, dtype=torch.float64):
    inputs = make_inputs(case, str(dtype).removeprefix("torch."))
    arrays = [torch.tensor(x, dtype=dtype) for x in (inputs.q, inputs.k, inputs.v)]
    placement = {name: torch.tensor(x) for name, x in case.placement.items()}
    right = None if inputs.right is None else torch.tensor(inputs.right)
    options = {"causal": case.causal, "right_slopes": right, "scale": case.scale, **placement}
    return arrays, torch.tensor(inputs.left), options


def rows_of(found, T):
    tile = np.arange(T) // found.tile_rows
    return found.first.numpy()[..., tile], found.end.numpy()[..., tile]


def is_quick(implementation, case, tolerance):
    """For `make test` each implementation has one of the two tolerances."""
    return case.name not in REPEATED and (implementation == "cpu") == (tolerance < 0.1)


@pytest.mark.parametrize(
    ("implementation", "case", "tolerance"),
    rows(is_quick, *product(IMPLEMENTATIONS, LONG, (0.1, 2.0**-24))),
)
def test_what_is_not_read_holds_at_most_the_tolerance(implementation, case, tolerance):
    (q, k, v), left, options = tensors(case)
    found = visited(q, k, v, left, tolerance=tolerance, implementation=implementation, **options)
    numpy_options = {n: x.numpy() if torch.is_tensor(x) else x for n, x in options.items()}
    left_out = near_to_far.share_outside(q, k, *rows_of(found, case.T), left, **numpy_options)
    assert left_out.max() <= tolerance
    assert (found.first <= found.end).all() and (found.work_kept <= 1).all()
    assert torch.equal(found.precise_first, found.first)  # of float64
    assert torch.equal(found.precise_end, found.end)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_most_of_a_long_sequence_is_left_out(implementation):
    """The point of it all: a steep head reads few keys, and a head without slope all of them."""
    q, k, v = torch.randn(3, 1, 2, 4096, 16, generator=torch.Generator().manual_seed(0))
    found = visited(q, k, v, [0.5, 0.0], implementation=implementation)
    steep, flat = (found.end - found.first)[0]
    assert steep.max() <= 640 and found.work_kept[0, 0] < 0.25
    assert flat.tolist() == found.end[0, 1].tolist() and found.work_kept[0, 1] == 1
    assert found.end[0, :, -1].tolist() == [4096, 4096]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_tolerance_zero_reads_every_visible_key(implementation):
    q, k, v = torch.randn(3, 2, 2, 700, 8)
    options = {"tolerance": 0.0, "implementation": implementation}
    assert (visited(q, k, v, [9.0, 9.0], **options).work_kept == 1).all()
    ranges, start = torch.tensor([[100, 640], [3, 77]]), torch.tensor([0, 650])
    options |= {"key_range": ranges, "query_start": start, "causal": False}
    found = visited(q, k, v, [9.0, 9.0], **options)
    assert (found.work_kept == 1).all()
    assert (found.first == ranges[:, :1, None]).all() and (found.end == ranges[:, 1:, None]).all()


@pytest.mark.parametrize("name", ("long-range-per-head", "long-range"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_work_kept_counts_pairs(implementation, name):
    case = by_name(name)
    (q, k, v), left, options = tensors(case)
    found = visited(q, k, v, left, implementation=implementation, **options)
    first, end = rows_of(found, case.T)
    keys, group = np.arange(case.S), case.H // case.G
    for b, h in np.ndindex(case.B, case.H):
        low, high = case.ranges[b, h // group]
        visible = np.broadcast_to((keys >= low) & (keys < high), (case.T, case.S))
        if case.causal:
            visible = visible & (keys <= case.starts[b] + np.arange(case.T)[:, None])
        read = visible & (keys >= first[b, h][:, None]) & (keys < end[b, h][:, None])
        assert found.work_kept[b, h] == pytest.approx(read.sum() / visible.sum())


def test_dense_leaves_nothing_out():
    q = torch.ones(1, 1, 2, 2)
    with pytest.raises(ValueError, match="visited: implementation must be one of"):
        visited(q, q, q, implementation="dense")


@pytest.mark.parametrize("implementation", ("dense", *IMPLEMENTATIONS))
def test_parts_of_a_cache_merge_to_the_whole(implementation):
    """Decode one token from three parts of the cache, as parallel machines would."""
    q, k, v = (torch.randn(1, 4, n, 8, dtype=torch.float64) for n in (1, 50, 50))
    options = {"implementation": implementation, "return_lse": True}
    run = functools.partial(linbias.torch.attention, **options)
    parts = [
        run(q, k[:, :, a:b], v[:, :, a:b], query_start=torch.tensor([49 - a]))
        for a, b in ((0, 20), (20, 35), (35, 50))
    ]
    for merged, whole in zip(merge(*zip(*parts, strict=True)), run(q, k, v), strict=True):
        torch.testing.assert_close(merged, whole)


def test_merged_parts_have_the_gradients_of_the_whole():
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64, requires_grad=True) for n in (5, 9, 9))
    run = functools.partial(linbias.torch.attention, implementation="dense", return_lse=True)
    # The first queries see nothing of the second part, and no query sees anything of the last.
    starts = [torch.tensor([start] * 2) for start in (2, -2, -90)]
    spans = [slice(0, 4), slice(4, 9), slice(0, 4)]
    parts = [
        run(q, k[:, :, span], v[:, :, span], query_start=start)
        for span, start in zip(spans, starts, strict=True)
    ]
    whole = run(q, k, v, query_start=torch.tensor([2, 2]))
    gradients = []
    for out, lse in (merge(*zip(*parts, strict=True)), whole):
        loss = (out * torch.arange(4.0)).sum() + lse.square().sum()
        gradients.append(torch.autograd.grad(loss, (q, k, v)))
    for merged, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(merged, expected)


def test_merging_rows_that_see_nothing():
    lses = [torch.full((2,), -torch.inf), torch.tensor([-torch.inf, 0.5])]
    out, lse = merge([torch.zeros(2, 3), torch.ones(2, 3)], lses)
    assert out.tolist() == [[0, 0, 0], [1, 1, 1]] and lse.tolist() == [-torch.inf, 0.5]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ranges_that_nobody_checked_are_clamped(implementation):
    """As traced or mapped values come: the operators are called without the checks."""
    q, k, v = torch.randn(3, 3, 2, 70, 8)
    forward = getattr(linbias.torch.impl, implementation).operators.forward
    results = []
    for ranges in ([[-300000, 70], [-5, 40], [60, 20]], [[0, 70], [0, 40], [60, 60]]):
        per_head = torch.tensor(ranges)[:, None].expand(3, 2, 2)
        inputs = Inputs(
            q, k, v, torch.tensor([0.5, 0.1]), None, per_head, torch.zeros(3, dtype=torch.int64),
            None, None, scale=0.3, dropout=0.0, tolerance=1e-7, precise=True,
        )  # fmt: skip
        results.append(forward(*inputs))
    for hostile, clamped in zip(*results, strict=True):
        assert torch.equal(hostile[..., :70], clamped[..., :70])
