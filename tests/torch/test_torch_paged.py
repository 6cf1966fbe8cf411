"""Sequences by their offsets and in pages: the contract, what is not read, and what is refused."""

from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch

import linbias.torch
from cases import arguments, by_name, short
from contract import check_case, check_results, expected, rows
from linbias.torch import (
    attention,
    attention_paged,
    attention_varlen,
    visited,
    visited_paged,
    write_pages,
)
from linbias.torch.packed import offsets, varlen
from test_torch import DECODING, DTYPES, TorchSubject, _to_numpy

OURS = ("cpu", "blocked", "dense")
CASES = [case for case in short() if not case.places and not case.dropout]
LONG = [by_name(n) for n in ("long", "long-symmetric")]


class EndToEnd(TorchSubject):
    """Batch rows as sequences of one packed call."""

    def forward(self, inputs, case, dtype, tolerance=None, layout="plain"):
        def pack(q, k, v, slopes=None, **options):
            given = {n: x.flatten(0, 1) if n == "query_range" else x for n, x in options.items()}
            given.pop("dropout")
            counts = (torch.arange(case.B + 1) * n for n in (case.T, case.S))
            packed = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
            with mock.patch.object(offsets, "forward", wraps=offsets.forward) as core:
                results = attention_varlen(*packed, *counts, slopes, **given)
            assert core.called == (self.implementation != "dense" and case.B > 0)
            return [x.unflatten(0, (case.B, case.T)).transpose(1, 2) for x in results]

        with mock.patch.object(linbias.torch, "attention", pack):
            return super().forward(inputs, case, dtype, tolerance, layout)


def is_its_turn(case, dtype):
    return dtype == "float32" or DTYPES[CASES.index(case) % 4] == dtype


@pytest.mark.parametrize(
    ("case", "dtype"),
    rows(is_its_turn, *product(CASES, DTYPES)) + rows("long-float32", *product(LONG, DTYPES)),
)
@pytest.mark.parametrize("implementation", ("cpu", "dense"))
def test_contract_of_packed_sequences(implementation, case, dtype, poisoned_memory):
    if dtype == "float16" and case.logits > 100:
        pytest.skip("q overflows float16")
    check_case(EndToEnd(implementation), case, dtype, again=implementation == "cpu")


def in_pages(k, v, lengths, page_size, order=torch.arange):
    """Keys and values [B, G, S, size] in pages, of which others hold NaN, the table, and the norms
    that `write_pages` keeps.
    """
    B, G, S = k.shape[:3]
    each = -(-S // page_size)
    num_pages = B * each + 2
    table = order(num_pages)[: B * each].reshape(B, each)
    k_pages, v_pages = (
        x.new_full((num_pages, page_size, G, x.shape[3]), torch.nan) for x in (k, v)
    )
    wide = torch.float64 if k.dtype == torch.float64 else torch.float32
    norms = torch.full((num_pages, G), torch.nan, dtype=wide)
    s = torch.arange(S)
    for b, length in enumerate(lengths):
        slots = torch.where(s < length, table[b, s // page_size] * page_size + s % page_size, -1)
        new = (x[b].transpose(0, 1) for x in (k, v))
        write_pages(*new, k_pages, v_pages, slots, norms)
        table[b, -(-length // page_size) :] = -1
    return k_pages, v_pages, table.int(), norms


def run_paged(inputs, case, dtype, page_size, bounded, implementation):
    narrow = getattr(torch, dtype)
    given = arguments({n: getattr(inputs, n) for n in ("q", "k", "v", "left", "right")})
    q, k, v = (torch.tensor(given.pop(n), dtype=narrow) for n in "qkv")
    k_pages, v_pages, table, norms = in_pages(k, v, [case.S] * case.B, page_size, torch.randperm)
    for name, x in case.placement.items():
        given[name] = torch.tensor(x).flatten(0, 1) if name == "query_range" else torch.tensor(x)
    out, lse = attention_paged(
        q.transpose(1, 2).flatten(0, 1),
        k_pages,
        v_pages,
        table,
        torch.full((case.B,), case.S, dtype=torch.int32),
        cu_seqlens_q=torch.arange(case.B + 1) * case.T,
        page_norms=norms if bounded else None,
        causal=case.causal,
        scale=case.scale,
        implementation=implementation,
        return_lse=True,
        **given,
    )
    shape = (case.B, case.T)
    return {
        "out": out.unflatten(0, shape).mT.mT.transpose(1, 2),
        "lse": lse.unflatten(0, shape).mT,
    }


EACH = [*CASES, *LONG, *DECODING]
PAGED = list(product(DECODING, DTYPES)) + [(c, DTYPES[i % 4]) for i, c in enumerate(EACH)]


@pytest.mark.parametrize("bounded", (True, False))
@pytest.mark.parametrize("index", range(len(PAGED)))
def test_contract_of_pages(index, bounded):
    case, dtype = PAGED[index]
    if dtype == "float16" and case.logits > 100:
        pytest.skip("q overflows float16")
    page_size, implementation = (1, 16, 37, 128)[index % 4], OURS[index % 3 if bounded else 0]
    inputs = expected(case, dtype)[0]
    results = run_paged(inputs, case, dtype, page_size, bounded, implementation)
    check_results(_to_numpy(results), case, dtype)


def test_visited_says_which_keys_were_read():
    q, k, v = torch.randn(3, 1, 2, 700, 16)
    slopes, new, lengths = torch.tensor([0.5, 0.01]), (100, 1, 0), (700, 650, 20)
    k, v = (x.expand(3, -1, -1, -1) for x in (k, v))
    k_pages, v_pages, table, norms = in_pages(k, v, lengths, 16)
    rows_of_q = torch.cat([q[0, :, 700 - n :].transpose(0, 1) for n in new])
    given = {"cu_seqlens_q": torch.tensor([0, 100, 101, 101])}
    keys = k_pages, v_pages, table, torch.tensor(lengths)
    told = visited_paged(rows_of_q, *keys, slopes, **given)
    assert len(told) == 3
    for b, answer in enumerate(told):
        alone = [x[:1, :, : lengths[b]] for x in (k, v)]
        expected_answer = visited(q[:, :, 700 - new[b] :], *alone, slopes, implementation="cpu")
        for name in ("first", "end", "work_kept", "precise_first", "precise_end"):
            assert torch.equal(getattr(answer, name), getattr(expected_answer, name)), name
    assert told[0].work_kept[0, 0] < 0.5
    narrowed = visited_paged(rows_of_q, *keys, slopes, page_norms=norms, **given)[0]
    assert (narrowed.first >= told[0].first).all() and torch.equal(narrowed.end, told[0].end)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("page_size", (1, 16, 128))
def test_mixed_lengths_in_one_call_and_pages_beyond_reach(page_size, dtype):
    """A prompt, a part of one, one token, drafts and nothing, beside caches whose far pages nobody
    may read.
    """
    slopes, new, lengths = (
        torch.tensor([1.0, 0.5, 2.0, 1.0]),
        (300, 70, 1, 6, 0),
        (300, 2048, 2048, 2048, 9),
    )
    far = 1024  # no query of these slopes reaches so far back
    q = torch.randn(sum(new), 4, 16).to(dtype)
    k, v = torch.randn(2, 5, 2, 2048, 16).to(dtype)
    k_pages, v_pages, table, norms = in_pages(k, v, lengths, page_size, torch.randperm)
    starts = torch.tensor([0, *np.cumsum(new)], dtype=torch.int32)
    for b in (1, 2, 3):
        unread = table[b, : far // page_size].long()
        k_pages[unread], v_pages[unread] = torch.nan, torch.nan
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    # Any strides: as an engine has them, heads before rows and keys beside values.
    both = (
        torch.stack([k_pages, v_pages]).permute(1, 3, 0, 2, 4).contiguous().permute(2, 0, 3, 1, 4)
    )
    options = {"cu_seqlens_q": starts, "page_norms": norms}
    out = attention_paged(q, *both, table, seq_lens, slopes, **options)
    for b in range(4):
        mine = slice(starts[b], starts[b + 1])
        keys, values = (x[b : b + 1, :, : lengths[b]].double() for x in (k, v))
        alone = attention(q[mine].double().transpose(0, 1)[None], keys, values, slopes.double())
        tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(
            out[mine].double(), alone[0].transpose(0, 1), atol=tolerance, rtol=0
        )


@pytest.mark.parametrize("rows_first", (True, False))  # by the core, and by PyTorch
def test_norms_start_again_with_a_page_and_say_what_is_not_finite(rows_first):
    k_pages, v_pages = torch.zeros(2, 3, 4, 2, 3) if rows_first else torch.zeros(2, 3, 4, 3, 2).mT
    norms = torch.zeros(3, 2)
    k = torch.zeros(4, 2, 3)
    k[:, 0, 0] = torch.tensor([5.0, 1.0, 2.0, 1e-30])
    v = torch.zeros(4, 2, 3)
    write_pages(k, v, k_pages, v_pages, torch.tensor([4, 5, -1, 9]), norms)
    assert (norms[1, 0] >= 5) and norms[1, 0] < 5.0001 and norms[0].eq(0).all()
    assert norms[2, 0] >= 1e-30  # whose square vanishes
    assert k_pages[1, :2, 0, 0].tolist() == [5, 1] and k_pages.count_nonzero() == 3
    v[0, 1] = torch.inf
    write_pages(k[:1], v[:1], k_pages, v_pages, torch.tensor([6]), norms)
    assert norms[1].isnan().tolist() == [False, True]
    write_pages(k[1:2], v[1:2], k_pages, v_pages, torch.tensor([4]), norms)
    assert norms[1, 0] < 1.0001 and norms[1].isfinite().all()


def arrays(**changed):
    given = {
        "q": torch.randn(4, 2, 8),
        "k_pages": torch.randn(3, 16, 2, 8),
        "v_pages": torch.randn(3, 16, 2, 8),
        "block_table": torch.tensor([[1, 0], [2, -5]]),
        "seq_lens": torch.tensor([20, 3]),
        "cu_seqlens_q": torch.tensor([0, 1, 4]),
    }
    return {**given, **changed}


WRONG_VALUES = (
    ({"block_table": torch.tensor([[1, 3], [2, 0]])}, "0, 3.*got 3 for page 1 of sequence 0"),
    ({"seq_lens": torch.tensor([33, 3])}, "seq_lens must be in .0, 32.*got 33 of sequence 0"),
    ({"seq_lens": torch.tensor([20, -1])}, "got -1 of sequence 1"),
    ({"seq_lens": torch.tensor([20, 3, 4])}, "block_table must have shape"),
    ({"cu_seqlens_q": torch.tensor([0, 4])}, "counts 1 sequences but seq_lens 2"),
    ({"cu_seqlens_q": torch.tensor([0, 5, 4])}, "never fall"),
    ({"v_pages": torch.randn(3, 8, 2, 8)}, "v_pages must have shape"),
    ({"page_norms": torch.zeros(2, 2)}, "page_norms must have shape"),
    ({"slopes": torch.ones(3, 2)}, "slopes has 3 rows for 2 sequences"),
    ({"q": torch.randn(4, 3, 8)}, "3 heads, which is no multiple of the 2"),
    ({"slopes": torch.ones(1)}, "slopes must have shape"),
    ({"right_slopes": torch.ones(2)}, "right_slopes contradicts causal=True"),
    ({"query_start": torch.tensor([2**40, 0])}, "query_start must be within 2.30"),
    ({"implementation": "flex"}, "flex"),
)
WRONG_TYPES = (
    ({"seq_lens": [20, 3]}, "seq_lens must be a torch.Tensor, got list"),
    ({"k_pages": torch.randn(3, 16, 2, 8).double()}, "k_pages is float64 but q is float32"),
    ({"block_table": torch.ones(2, 2)}, "block_table must hold integers"),
    ({"positions": torch.arange(4.0)}, "positions"),
    ({"dropout": 0.5}, "dropout"),
    ({"scale": [1.0]}, "scale must be a number"),
)
REFUSED = [(ValueError, *row) for row in WRONG_VALUES] + [(TypeError, *row) for row in WRONG_TYPES]
TWO_SIDED = {"causal": False, "right_slopes": torch.ones(2).requires_grad_()}
for changed in ({"q": torch.randn(4, 2, 8).requires_grad_()}, TWO_SIDED):
    REFUSED.append((NotImplementedError, changed, "must not require a gradient"))


@pytest.mark.parametrize(("error", "changed", "words"), REFUSED)
def test_what_is_refused(error, changed, words):
    with pytest.raises(error, match=words):
        attention_paged(**arrays(**changed))


def test_tables_and_lengths_of_any_integers():
    wanted = attention_paged(**arrays())
    given = arrays()
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int64):
        table = given["block_table"].clamp(min=0).to(dtype)
        changed = {"block_table": table, "seq_lens": given["seq_lens"].to(dtype)}
        pages = {n: torch.cat([given[n]] * 20, 1) for n in ("k_pages", "v_pages")}
        changed["cu_seqlens_q"] = given["cu_seqlens_q"].to(dtype)
        out = attention_paged(**{**given, **changed, **pages})
        assert out.shape == wanted.shape


def test_no_sequences_and_no_queries():
    given = arrays(cu_seqlens_q=torch.tensor([0, 4, 4]), window=(4, 0))
    told = visited_paged(**given)
    assert [x.first.shape[2] for x in told] == [1, 0]
    none = {"seq_lens": torch.zeros(0).long(), "block_table": torch.zeros(0, 3).long()}
    none |= {"q": torch.randn(0, 2, 8), "cu_seqlens_q": torch.tensor([0])}
    assert (
        attention_paged(**arrays(**none)).shape == (0, 2, 8)
        and visited_paged(**arrays(**none)) == []
    )


def test_slots_outside_the_pages_are_refused():
    k_pages, v_pages = torch.zeros(2, 3, 4, 2, 8)
    k = v = torch.ones(1, 2, 8)
    with pytest.raises(ValueError, match=r"slots must be below 12, .* got 12"):
        write_pages(k, v, k_pages, v_pages, torch.tensor([12]))
    with pytest.raises(TypeError, match="k is float64 but k_pages is float32"):
        write_pages(k.double(), v, k_pages, v_pages, torch.tensor([1]))
    assert not k_pages.any()


@pytest.mark.parametrize("shared", (False, True))
def test_sequences_may_have_a_page_in_common(shared):
    given = arrays(block_table=torch.tensor([[1, 0], [1 if shared else 2, 0]]))
    given["k_pages"][2], given["v_pages"][2] = given["k_pages"][1], given["v_pages"][1]
    out = attention_paged(**given)
    given["block_table"][1, 0] = 2
    assert torch.equal(out, attention_paged(**given))


# ---- gradients of packed sequences


def packed(dtype=torch.float64):
    q, k, v = torch.randn(3, 10, 4, 8, dtype=dtype).requires_grad_().unbind()
    return q, k, v, torch.tensor([0, 4, 10])


def test_slopes_of_any_strides_have_their_gradients():
    q, k, v, ends = packed()
    slopes = torch.rand(4, 2, dtype=torch.float64)
    gradients = []
    for given in (slopes.T, slopes.T.contiguous()):
        leaf = given.detach().requires_grad_()
        out = attention_varlen(q, k, v, ends, ends, leaf)
        gradients += torch.autograd.grad(out.square().sum(), leaf)
    assert gradients[0].any() and torch.equal(*gradients)


def test_a_second_derivative_is_refused_by_name():
    q, k, v, ends = packed()
    out = attention_varlen(q, k, v, ends, ends)
    (once,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="cpu gives first derivatives only"):
        torch.autograd.grad(once.square().sum() + out.sum(), q)


def test_backward_finds_offsets_ranges_and_results_as_they_were():
    q, k, v, ends = packed()
    ranges, starts = torch.tensor([[0, 4], [1, 6]]), torch.tensor([0, 1])

    def apart(x):  # the same values with other strides
        return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else x

    def gradient(changes, unpack):
        given = [x.clone() for x in (ends, ranges, starts)]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
            placed = {"key_range": given[1], "query_start": given[2]}
            out = attention_varlen(q, k, v, given[0], given[0], **placed)
            for x in given if changes else ():
                x.zero_()
            return torch.autograd.grad(out.square().sum(), q)[0]

    wanted = gradient(False, lambda x: x)
    assert torch.equal(gradient(True, lambda x: x), wanted)
    assert torch.equal(gradient(False, apart), wanted)


def test_gradients_may_be_batched_and_lazily_negative():
    q, k, v, ends = packed()
    out = attention_varlen(q, k, v, ends, ends, return_lse=True)[0]
    weights = torch.randn(3, *out.shape, dtype=out.dtype)
    each = [torch.autograd.grad(out, (q, k, v), w, retain_graph=True) for w in weights]
    batched = torch.autograd.grad(
        out, (q, k, v), weights, retain_graph=True, is_grads_batched=True
    )
    for i in range(3):
        torch.testing.assert_close([x[i] for x in batched], list(each[i]))
    negative = torch.complex(weights[0], -weights[0]).conj().imag  # + weights, as a lazy negative
    assert negative.is_neg()
    torch.testing.assert_close(torch.autograd.grad(out, (q, k, v), negative), each[0])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dropout_draws_one_mask_whoever_looks_on():
    """The operator's forward under a profiler, and its backward without."""
    q, k, v, ends = packed(torch.float32)
    seed = torch.tensor(3)
    call = varlen.packed.Packed(q, k, v, None, None, None, None, ends, ends, seed, dropout=0.5)
    with torch.profiler.profile():
        out, _ = varlen._operator(*call)
    (dv,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close((dv * v).sum(), out.sum())  # linear in v
