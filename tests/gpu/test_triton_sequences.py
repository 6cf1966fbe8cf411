"""Sequences by offsets and in pages in the Triton kernels, in Triton's interpreter."""

from dataclasses import replace
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch

from cases import short
from contract import check_case, check_results, expected, rows
from linbias.torch import attention, attention_paged, attention_varlen
from linbias.torch.packed import by_triton
from test_torch import DECODING, _to_numpy
from test_torch_paged import EndToEnd, in_pages, run_paged
from test_triton import LONG, RANGED, TWO_TYPES, little, little_tiles  # noqa: F401

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("little_tiles"),
]

CASES = [case for case in short() if case.S < 100 and not case.places and not case.dropout]
PACKED = [(case, TWO_TYPES[i // 2 % 2]) for i, case in enumerate(CASES[::2])]


@pytest.mark.parametrize(("case", "dtype"), rows(lambda case, _: case == PACKED[0][0], *PACKED))
def test_contract_of_packed_sequences(case, dtype, poisoned_memory):
    with mock.patch.object(by_triton, "forward", wraps=by_triton.forward) as kernels:
        check_case(EndToEnd("triton"), little(case), dtype, again=False)
    assert kernels.called or case.B == 0


FAR = [*LONG, *(c for c in RANGED.values() if c.S > 60 and not c.places)]


@pytest.mark.thorough
@pytest.mark.parametrize("case", LONG[::3], ids=lambda case: case.name)
def test_contract_of_packed_sequences_where_keys_are_left_out(case):
    heads = 2 if case.G == 2 else 1
    case = replace(case, dropout=0.0, left="steep", H=heads, G=heads)
    check_case(EndToEnd("triton"), case, "float32", again=False)


def is_its_turn(index):
    return () if index % 6 == 0 else pytest.mark.thorough


PAGED = [
    pytest.param(case, TWO_TYPES[i % 2], i % 3 > 0, id=case.name, marks=is_its_turn(i))
    for i, case in enumerate((*DECODING, *FAR[::2]))
]


@pytest.mark.parametrize(("case", "dtype", "bounded"), PAGED)
def test_contract_of_pages(case, dtype, bounded):
    if case.H != 4:
        case = little(case)
    case, page_size = replace(case, dropout=0.0), (1, 16, 37, 128)[case.S % 4]
    results = run_paged(expected(case, dtype)[0], case, dtype, page_size, bounded, "triton")
    check_results(_to_numpy(results), case, dtype)


SEVERAL = (3, 0, 40, 2, 70, 1), (3, 4, 57, 0, 130, 100)


@pytest.mark.parametrize("causal", (True, False))
@pytest.mark.parametrize("window", (None, (30, 0)))
def test_sequences_of_several_lengths_are_as_each_alone(causal, window, poisoned_memory):
    """With the gradients of slopes of their own; some have no queries, or no keys."""
    q, k, v = (
        torch.randn(sum(lengths), heads, 8, requires_grad=True)
        for lengths, heads in zip((SEVERAL[0], SEVERAL[1], SEVERAL[1]), (4, 2, 2), strict=True)
    )
    offsets = [torch.tensor([0, *np.cumsum(lengths)]) for lengths in SEVERAL]
    left = torch.rand(6, 4).requires_grad_()
    options = {"causal": causal, "return_lse": True, "window": window}
    weights, found = torch.randn(sum(SEVERAL[0]), 4, 8), []
    for implementation in ("triton", "dense"):
        out, lse = attention_varlen(
            q, k, v, *offsets, left, **options, implementation=implementation
        )
        seen = lse.masked_fill(lse == -torch.inf, 0.0)
        loss = (out * weights).sum() + seen.sum()
        found.append((out, seen, *torch.autograd.grad(loss, (q, k, v, left))))
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_more_sequences_than_are_looked_at_together():
    lengths = torch.arange(140) % 3
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    q, k, v = (torch.randn(int(offsets[-1]), 2, 8, requires_grad=True) for _ in range(3))
    found = []
    for implementation in ("triton", "dense"):
        out = attention_varlen(q, k, v, offsets, offsets, implementation=implementation)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        assert out.is_contiguous()
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_no_pages_and_no_columns_of_a_table():
    q, pages = torch.randn(2, 2, 8), torch.zeros(0, 16, 2, 8)
    for table in (torch.zeros(1, 0, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)):
        out = attention_paged(
            q,
            pages,
            pages,
            table,
            torch.tensor([0]),
            cu_seqlens_q=torch.tensor([0, 2]),
            page_norms=torch.zeros(0, 2),
            implementation="triton",
        )
        assert torch.equal(out, torch.zeros_like(q))


def test_dropout_of_sequences_is_drawn_again_in_backward():
    offsets = torch.tensor([0, 40, 45])
    q, k, v = (torch.randn(45, 2, 8, requires_grad=True) for _ in range(3))
    options = {"dropout": 0.5, "implementation": "triton"}

    def run(values):
        torch.manual_seed(5)
        return attention_varlen(q, k, values, offsets, offsets, **options)

    weights = torch.randn(45, 2, 8)
    (dv,) = torch.autograd.grad((run(v) * weights).sum(), v)
    # The output is linear in the values: with ones in a row, and zeros elsewhere, it is weights.
    for row in (3, 42):
        unit = torch.zeros_like(v)
        unit[row] = 1
        assert torch.allclose((run(unit) * weights).sum((0, 2)), dv[row].sum(-1), atol=1e-5)


@pytest.mark.parametrize(
    ("new", "page_size"),
    rows("few-16", *product(("few", "many"), (1, 16, 128))),
)
def test_pages_beyond_reach_are_not_read(new, page_size):
    """By single tokens and drafts, or beside a part of a prompt."""
    lengths = 40, 700, 700
    counts = (1, 3, 0) if new == "few" else (40, 50, 1)
    slopes = torch.tensor([1.0, 0.5])
    q, (k, v) = torch.randn(sum(counts), 2, 16), torch.randn(2, 3, 1, 700, 16)
    k_pages, v_pages, table, norms = in_pages(k, v, lengths, page_size, torch.randperm)
    for b in (1, 2):
        unread = table[b, : 512 // page_size].long()
        k_pages[unread], v_pages[unread] = torch.nan, torch.nan
    starts = torch.tensor([0, *np.cumsum(counts)])
    out = attention_paged(
        q,
        k_pages,
        v_pages,
        table,
        torch.tensor(lengths),
        slopes,
        cu_seqlens_q=starts,
        page_norms=norms,
        implementation="triton",
    )
    for b, length in enumerate(lengths):
        mine = slice(starts[b], starts[b + 1])
        alone = attention(
            q[mine].transpose(0, 1)[None],
            *(x[b : b + 1, :, :length] for x in (k, v)),
            slopes,
        )
        torch.testing.assert_close(out[mine], alone[0].transpose(0, 1), atol=1e-5, rtol=1e-5)
