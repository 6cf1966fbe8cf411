"""`window=` and `query_range=`: the keys that each query may see."""

from itertools import product

import numpy as np
import pytest
import torch

import linbias
import linbias.torch
from cases import RANGED_CASES, by_name, long, short
from contract import check_case, check_certificate_holds, rows
from linbias.torch import attention, attention_varlen
from test_torch import DTYPES, TorchSubject, check_decoding

NEAR_TO_FAR = ("blocked", "cpu")
IMPLEMENTATIONS = (*NEAR_TO_FAR, "dense", "sdpa")


def is_quick(implementation, case, dtype):
    """All short cases, and the long ones of what skips blocks, in one dtype after the other."""
    turn = RANGED_CASES.index(case)
    quick = implementation in NEAR_TO_FAR or (case in short(RANGED_CASES) and turn % 3 == 0)
    return quick and dtype in ("float32", DTYPES[turn % 4])


@pytest.mark.parametrize(
    ("implementation", "case", "dtype"),
    rows(
        is_quick,
        *(
            row
            for row in product(IMPLEMENTATIONS, RANGED_CASES, DTYPES)
            if row[0] != "sdpa" or not row[1].dropout
        ),
    ),
)
def test_contract(implementation, case, dtype, poisoned_memory):
    check_case(TorchSubject(implementation), case, dtype)


@pytest.mark.parametrize("bounded", (False, True))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
@pytest.mark.parametrize(
    "name", ("long-cache-window", "long-cache-scattered", "scattered-few-queries")
)
@pytest.mark.parametrize("implementation", NEAR_TO_FAR)
def test_decoding(implementation, name, dtype, bounded):
    check_decoding(implementation, by_name(name), dtype, bounded)


LONG = [case for case in long(RANGED_CASES) if not (case.dropout or case.places)]


@pytest.mark.parametrize("case", LONG, ids=str)
@pytest.mark.parametrize("implementation", NEAR_TO_FAR)
def test_dropped_mass_is_at_most_the_tolerance(implementation, case):
    check_certificate_holds(TorchSubject(implementation), case, 1e-2)


WINDOWS = ((0, 0), (3, 5), (-1, 2), (4, -1), (70, 130), (10**9, 3), (2**40, 2**40))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize(
    "where",
    (
        {},
        {"query_start": torch.tensor([-5, 180])},
        {"key_range": torch.tensor([[20, 190], [0, 60]])},
    ),
    ids=str,
)
def test_a_window_is_the_keys_beside_each_query(implementation, causal, where):
    T, S = 130, 200
    q, k, v = (torch.randn(2, 2, n, 8) for n in (T, S, S))
    ends = where.get("key_range", torch.tensor([[0, S]] * 2))[:, 1]
    p = (where.get("query_start", ends - T)[:, None] + torch.arange(T))[..., None]
    key = torch.arange(S)
    for left, right in WINDOWS:
        sees = torch.ones(2, T, S, dtype=torch.bool)
        if left >= 0:
            sees &= key >= p - left
        if right >= 0:
            sees &= key <= p + right
        options = {"causal": causal, **where}
        got = attention(q, k, v, window=(left, right), implementation=implementation, **options)
        want = attention(q, k, v, mask=sees[:, None], implementation="dense", **options)
        torch.testing.assert_close(got, want)
        both = attention(q, k, v, window=[left, right], query_range=hull(sees), **options)
        torch.testing.assert_close(both, want)


def hull(sees):
    """[B, T, 2] of [B, T, S], whose rows are runs."""
    first, num = sees.int().argmax(-1), sees.sum(-1)
    return torch.stack((first, first + num), -1)


def test_a_window_that_hides_nothing_is_none():
    q = torch.randn(1, 2, 9, 8)
    plain = attention(q, q, q)
    for window in ((-1, -1), (8, 0), (-1, 3), (20, 20), None):
        assert torch.equal(attention(q, q, q, window=window), plain), window


def test_keys_that_no_query_sees_are_not_read():
    """Blocks in which no query has a key are left alone, in forward, backward and decoding."""
    S, inside = 4096, slice(2048, 2200)
    for T in (1, 200):
        q, k, v = (torch.randn(1, 2, n, 16) for n in (T, S, S))
        for x in (k, v):
            x[:, :, : inside.start - 512] = x[:, :, inside.stop + 512 :] = torch.nan
        seen = torch.tensor([[inside.start, inside.stop]] * T)
        for implementation in NEAR_TO_FAR:
            leaves = [x.clone().requires_grad_(T > 1) for x in (q, k, v)]
            options = {"causal": False, "query_range": seen, "implementation": implementation}
            out = attention(*leaves, [0.0, 0.01], **options)
            own = [q, k[:, :, inside], v[:, :, inside]]
            distance_of_row_0 = torch.tensor([S - T - inside.start])
            want = attention(*own, [0.0, 0.01], causal=False, query_start=distance_of_row_0)
            torch.testing.assert_close(out, want)
            if T > 1:
                out.sum().backward()
                for x in leaves[1:]:
                    assert not x.grad[:, :, : inside.start].any()
                    assert x.grad.isfinite().all()


def test_a_window_costs_what_it_shows():
    """Of a head whose slope never stops a tile no block outside the window is read."""
    q, k, v = torch.randn(3, 1, 1, 4096, 16)
    for implementation in NEAR_TO_FAR:
        visit = linbias.torch.visited(
            q, k, v, [0.0], window=(100, 0), implementation=implementation
        )
        rows_of_tile = visit.tile_rows
        assert (visit.end - visit.first).max() <= 100 + rows_of_tile + 2 * 256, implementation
        assert visit.work_kept.item() == 1.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_mapped_and_exported():
    q, k, v = torch.randn(3, 2, 2, 90, 8)
    ranges = torch.tensor(by_name("window").row_ranges)[:1].repeat(1, 9, 1)[:, :90]

    def run(q, k, v, ranges):
        both = attention(q, k, v, window=(9, 0)), attention(q, k, v, query_range=ranges)
        starts = torch.tensor([0, 40, 90])
        return *both, attention_varlen(
            *(x[0].transpose(0, 1) for x in (q, k, v)), starts, starts, window=(5, 0)
        )

    want = run(q, k, v, ranges)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(q, k, v, ranges), want, strict=True):
        torch.testing.assert_close(got, expected)

    class Module(torch.nn.Module):
        def forward(self, q):
            return attention(q, q, q, window=(q.shape[2] // 7, 0))

    length = torch.export.Dim("length", min=2)
    program = torch.export.export(Module(), (q,), dynamic_shapes={"q": {2: length}})
    longer = torch.randn(2, 2, 131, 8)
    torch.testing.assert_close(program.module()(longer), Module()(longer))

    def mapped(q, ranges):
        return attention(q, q, q, query_range=ranges, window=(30, 0))

    each = torch.stack([ranges, (ranges - 1).clamp(min=0)])
    both = torch.stack([q, q + 1])
    got = torch.func.vmap(mapped)(both, each)
    for i in range(2):
        torch.testing.assert_close(got[i], mapped(both[i], each[i]))


def test_keys_in_any_order_have_no_window():
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(NotImplementedError, match="attention: window and query_range count keys"):
        attention(q, q, q, causal=False, positions=torch.randperm(9), window=(3, 3))
    with pytest.raises(NotImplementedError, match="attention: window and query_range count keys"):
        linbias.attention(q, q, q, causal=False, positions=np.arange(9)[::-1], window=(3, 3))


@pytest.mark.parametrize("variant", ("causal", "symmetric"))
def test_a_layer_with_a_window(variant):
    layer = linbias.torch.MultiheadAttention(
        16, 2, variant=variant, batch_first=True, window=(3, 2)
    )
    x, keys = torch.randn(2, 21, 16), torch.arange(21)
    padding = keys >= torch.tensor([[21], [15]])
    back = keys[:, None] - keys
    hidden = (back > 3) | (back < (0 if variant == "causal" else -2))
    out, weights = layer(x, key_padding_mask=padding, need_weights=True)
    assert not weights[0][hidden].any()
    layer.window = None
    want, _ = layer(x, key_padding_mask=padding, attn_mask=hidden, need_weights=False)
    torch.testing.assert_close(out[~padding], want[~padding])
    layer.window = (3, 2)
    nested = layer(torch.nested.nested_tensor([x[0], x[1, :15]], layout=torch.jagged))[0]
    torch.testing.assert_close(nested.values(), out[~padding])


def test_a_layer_says_what_is_wrong_with_its_window():
    with pytest.raises(ValueError, match="MultiheadAttention: window must be at least -1"):
        linbias.torch.MultiheadAttention(16, 2, window=(-3, 0))
