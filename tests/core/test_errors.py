"""One row per message: the call, the kind of error, and the words that name argument, rule and value."""

import functools
import re
from inspect import signature
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import linbias
import linbias.jax
import linbias.plots
import linbias.torch
from linbias import _dispatch, _request

INT = torch.int64


def call(q=(2, 4, 5, 8), k=(2, 2, 7, 8), v=(2, 2, 7, 3), slopes=None, **options):
    """Call with tensors of these shapes, or with what stands in a shape's place."""
    q, k, v = (torch.ones(x) if isinstance(x, tuple) else x for x in (q, k, v))
    return linbias.torch.attention(q, k, v, slopes, **options)


MESSAGES = [
    (dict(q=(4, 5, 8)), ValueError, r"attention: q must have 4 axes, \[B, H, T, D\]: batch, heads, length, size, got \[4, 5, 8\]; q\[None\] is a batch of one$"),
    (dict(k=(5, 8)), ValueError, r"k must have 4 axes, .*, got \[5, 8\]; k\[None, None\] is a batch of one with one head$"),
    (dict(v=(8,)), ValueError, r"v must have 4 axes, .*, got \[8\]$"),
    (dict(q=[[1.0]]), TypeError, "attention: q must be a torch.Tensor, got list"),
    (dict(v=torch.ones(2, 2, 7, 3, dtype=INT)), TypeError, "v must be one of .*, got int64"),
    (dict(k=torch.ones(2, 2, 7, 8, dtype=torch.half)), TypeError, "k is float16 but q is float32"),
    (dict(k=torch.ones(2, 2, 7, 8, device="meta")), ValueError, "k is on meta but q is on cpu"),
    (dict(k=(8, 2, 7, 8)), ValueError, r"k has batch 8 but q has 2 \(k \[8, 2, 7, 8\], q \[2, 4, 5, 8\]\)"),
    (dict(v=(3, 2, 7, 3)), ValueError, "v has batch 3 but q has 2"),
    (dict(k=(2, 4, 7, 8)), ValueError, "k has 4 heads but v has 2"),
    (dict(v=(2, 2, 6, 3)), ValueError, "k has 7 keys but v has 6"),
    (dict(k=(2, 2, 7, 9)), ValueError, "k has head size 9 but q has 8"),
    (dict(q=(2, 4, 5, 0), k=(2, 2, 7, 0)), ValueError, "head size must be at least 1, got 0"),
    (dict(k=(2, 3, 7, 8), v=(2, 3, 7, 3)), ValueError, "q has 4 heads, which is no multiple of the 3"),
    (dict(k=(2, 0, 7, 8), v=(2, 0, 7, 3)), ValueError, "q has 4 heads, which is no multiple of the 0"),
    (dict(right_slopes=[1.0] * 4), ValueError, "right_slopes contradicts causal=True"),
    (dict(slopes=[1.0] * 3), ValueError, r"slopes must have shape \[H\] = \[4\] or \[B, H\] = \[2, 4\], got \[3\]"),
    (dict(slopes=torch.ones(2, 5)), ValueError, r"slopes must have shape .*, got \[2, 5\]"),
    (dict(slopes=0.5), ValueError, r"slopes must have shape .*, got \[\]"),
    (dict(right_slopes=[1.0], causal=False), ValueError, "right_slopes must have shape"),
    (dict(slopes=[1.0, -0.5, 1, 1]), ValueError, r"slopes must be at least 0 \(or inf\), got -0.5"),
    (dict(slopes=[1.0, 1, 1, float("nan")]), ValueError, r"slopes must be at least 0 \(or inf\), got nan"),
    (dict(slopes=[1j] * 4), TypeError, "attention: slopes must hold real numbers, got complex128"),
    (dict(slopes=torch.ones(4) * 1j), TypeError, "attention: slopes must hold real numbers, got complex64"),
    (dict(slopes=["steep"] * 4), TypeError, "slopes must hold real numbers, got <U5"),
    (dict(right_slopes=[None] * 4, causal=False), TypeError, "right_slopes must hold real numbers, got object"),
    (dict(slopes=[[1.0], [1.0, 2.0]]), ValueError, r"attention: slopes must be an array, got \[\[1.0\], \[1.0, 2.0\]\]"),
    (dict(right_slopes=[-1.0] * 4, causal=False), ValueError, r"right_slopes must be at least 0 \(or inf\), got -1.0"),
    (dict(key_range=torch.ones(2, 2)), TypeError, "key_range must hold integers, got float32"),
    (dict(key_range=[[0, 1]]), TypeError, "key_range must be a torch.Tensor, got list"),
    (dict(key_range=torch.ones(3, 2, dtype=INT)), ValueError, r"key_range must have shape \[B, 2\] = \[2, 2\] or \[B, G, 2\] = \[2, 2, 2\], got \[3, 2\]"),
    (dict(key_range=torch.tensor([[0, 7], [5, 8]])), ValueError, r"0 <= first <= end <= S = 7, got \[5, 8\] in batch row 1"),
    (dict(key_range=torch.tensor([[4, 3], [0, 7]])), ValueError, r"got \[4, 3\] in batch row 0"),
    (dict(key_range=torch.tensor([[[0, 7], [2, 3]], [[0, 7], [5, 8]]])), ValueError, r"got \[5, 8\] in batch row 1, key/value head 1"),
    (dict(query_start=torch.ones(2)), TypeError, "query_start must hold integers, got float32"),
    (dict(query_start=3), TypeError, "query_start must be a torch.Tensor, got int"),
    (dict(query_start=torch.ones(3, dtype=INT)), ValueError, r"query_start must have shape \[B\] = \[2\], got \[3\]"),
    (dict(query_start=torch.tensor([0, -(2**31)])), ValueError, r"query_start must be within 2\^30 of key 0, got -2147483648 in batch row 1"),
    (dict(key_range=torch.tensor([[-1, 3], [0, 7]])), ValueError, r"got \[-1, 3\] in batch row 0"),
    (dict(key_bound=torch.ones(2, 3)), ValueError, r"key_bound must be floating point \[B, G\] = \[2, 2\], got float32 \[2, 3\]"),
    (dict(mask=torch.ones(5, 7, dtype=INT)), TypeError, "attention: mask must hold bool, True for what takes part, or .* added to the scores, got int64"),
    (dict(mask=[[True]]), TypeError, "mask must be a torch.Tensor, got list"),
    (dict(mask=torch.ones(2, 5, 7) > 0), ValueError, r"mask must broadcast to \[B, H, T, S\] = \[2, 4, 5, 7\], got \[2, 5, 7\]"),
    (dict(mask=torch.ones(1, 2, 4, 5, 7) > 0), ValueError, r"mask must broadcast to .*, got \[1, 2, 4, 5, 7\]"),
    (dict(mask=torch.ones(5, 7, device="meta", dtype=torch.bool)), ValueError, "mask is on meta but q is on cpu"),
    (dict(positions=[[1.0]]), TypeError, "positions must be a torch.Tensor, got list"),
    (dict(positions=torch.ones(2, 7, dtype=torch.bfloat16)), TypeError, "attention: positions must be float32, .*, got bfloat16"),
    (dict(positions=torch.ones(2, 2, 7)), ValueError, r"positions must have shape \[S\] = \[7\], \[B, S\] = \[2, 7\] or \[B, H, S\] = \[2, 4, 7\], got \[2, 2, 7\]"),
    (dict(positions=torch.ones(2, 7, device="meta")), ValueError, "positions is on meta but q is on cpu"),
    (dict(positions=-torch.arange(7.0).expand(2, 7)), ValueError, r"attention: positions must not fall, got -1.0 after -0.0 at \[0, 1\]"),
    (dict(positions=torch.ones(2, 7), query_positions=torch.zeros(2, 4, 5)), ValueError, r"query_positions must be at least .*, got 0.0 at \[0, 0, 0\] where key 2 stands at 1.0"),
    (dict(positions=torch.ones(2, 7), query_start=torch.tensor([0, 3])), ValueError, "query 4 of batch row 1 would stand at key 7 of 7"),
    (dict(scale=float("inf")), ValueError, "scale must be finite, got inf"),
    (dict(scale="1"), TypeError, "scale must be a number, got '1'"),
    (dict(dropout=1.0), ValueError, r"dropout must be in \[0, 1 - 2\^-32\], got 1.0"),
    (dict(dropout=1 - 2**-33), ValueError, r"dropout must be in \[0, 1 - 2\^-32\], got 0.99999999988"),
    (dict(dropout=-0.1), ValueError, r"dropout must be in \[0, 1 - 2\^-32\], got -0.1"),
    (dict(dropout=True), TypeError, "dropout must be a number, got True"),
    (dict(tolerance=1.0), ValueError, r"tolerance must be in \[0, 1\), got 1.0"),
    (dict(tolerance=float("nan")), ValueError, r"tolerance must be in \[0, 1\), got nan"),
    (dict(causal=1), TypeError, "attention: causal must be True or False, got 1"),
    (dict(causal="no"), TypeError, "attention: causal must be True or False, got 'no'"),
    (dict(q=(2, 1, 4, 8), k=(2, 7, 4, 8), v=(2, 7, 4, 3)), ValueError, "1 heads, which is no multiple of the 7 .* read as batch, heads, length, size"),
    (dict(is_causal=True), TypeError, "attention: there is no argument is_causal; say causal"),
    (dict(dropout_p=0.1), TypeError, "attention: there is no argument dropout_p; say dropout"),
    (dict(attn_mask=None), TypeError, "attention: there is no argument attn_mask; say .*key_range"),
    (dict(alibi_slopes=None), TypeError, "attention: there is no argument alibi_slopes; say slopes"),
    (dict(softmax_scale=1.0), TypeError, "attention: there is no argument softmax_scale; say scale"),
    (dict(tolerence=1.0), TypeError, r"attention: there is no argument tolerence; did you mean tolerance\?"),
    (dict(moon=1.0), TypeError, "attention: there is no argument moon; there are q, k, v, slopes, .*, return_lse"),
    (dict(implementation="fast"), ValueError, r"implementation must be one of \('auto', 'cpu', 'blocked', 'sdpa', 'dense', 'triton'\), got 'fast'"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "kind", "words"), MESSAGES)
def test_attention_says_what_is_wrong(arguments, kind, words):
    call()  # a call that is right, whose check is kept, hides no other
    with pytest.raises(kind, match=words):
        call(**arguments)


def varlen(q=(5, 4, 8), k=(7, 2, 8), offsets_q=(0, 2, 5), offsets_k=(0, 3, 7), **sides):
    tensors = [
        o if isinstance(o, torch.Tensor) else torch.tensor(o) for o in (offsets_q, offsets_k)
    ]
    arrays = torch.ones(q), torch.ones(k), torch.ones(k)
    return linbias.torch.attention_varlen(*arrays, *tensors, **sides)


VARLEN_MESSAGES = [
    (dict(q=(1, 5, 4, 8)), r"attention_varlen: q must have 3 axes, total, heads, size, got \[1, 5, 4, 8\]"),
    (dict(offsets_q=(0.0, 5.0)), "cu_seqlens_q must be a row of integers, got float32"),
    (dict(offsets_q=((0, 5),)), r"cu_seqlens_q must be a row of integers, got int64 \[1, 2\]"),
    (dict(offsets_q=(0, 2, 4)), r"cu_seqlens_q must start at 0, never fall and end at 5, got \[0, 2, 4\]"),
    (dict(offsets_k=(0, 8, 7)), "cu_seqlens_k must start at 0, never fall and end at 7"),
    (dict(offsets_k=(1, 3, 7)), "cu_seqlens_k must start at 0"),
    (dict(offsets_k=(0, 7)), "cu_seqlens_q counts 2 sequences but cu_seqlens_k 1"),
    (dict(key_range=torch.ones(2, 2)), "attention_varlen: key_range must hold integers, got float32"),
    (dict(key_range=torch.ones(3, 2, dtype=INT)), r"key_range must have shape \[B, 2\] = \[2, 2\] or \[B, G, 2\] = \[2, 2, 2\], got \[3, 2\]"),
    (dict(key_range=torch.tensor([[0, 3], [0, 5]])), r"0 <= first <= end <= 4, the keys of sequence 1, got \[0, 5\]"),
    (dict(query_start=torch.ones(2)), "attention_varlen: query_start must hold integers, got float32"),
    (dict(query_start=torch.ones(1, dtype=INT)), r"attention_varlen: query_start must have shape \[B\] = \[2\], got \[1\]"),
    (dict(slopes=[1j] * 4), "attention_varlen: slopes must hold real numbers, got complex128"),
    (dict(slopes=np.ones((1, 4))), "attention_varlen: slopes has 1 rows for 2 sequences"),
    (dict(causal=False, right_slopes=np.ones((3, 4))), "attention_varlen: right_slopes has 3 rows for 2 sequences"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), VARLEN_MESSAGES)
def test_attention_varlen_says_what_is_wrong(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        varlen(**arguments)


ONES = np.ones((2, 3, 4))


def at(positions, query_positions=None, **options):
    """Attention with keys at these positions."""
    return linbias.attention(
        ONES, ONES, ONES, positions=positions, query_positions=query_positions, **options
    )


NUMPY_MESSAGES = [
    (lambda: linbias.attention(ONES[0], ONES, ONES), ValueError, r"attention: q must have at least 3 axes, .*, got \[3, 4\]; num_heads= splits the last of 2"),
    (lambda: linbias.attention(ONES[0], ONES[0], ONES[0], num_heads=3), ValueError, r"attention: q must be \[..., length, heads \* size\] with a multiple of 3 columns, got \[3, 4\]"),
    (lambda: linbias.attention(ONES[0], ONES[0, :, :3], ONES[0], num_heads=2), ValueError, "attention: k has head size 3 but q has 2"),
    (lambda: linbias.attention(ONES[0], ONES[0], ONES[0, :, :3], num_heads=2), ValueError, r"attention: v must be .* with a multiple of 2 columns, got \[3, 3\]"),
    (lambda: linbias.attention(ONES[0], ONES[0], ONES[0], num_heads=0), ValueError, "attention: num_heads must be an integer of at least 1, got 0"),
    (lambda: linbias.attention(1.0, ONES[0], ONES[0], num_heads=2), ValueError, r"attention: q must be .*, got \[\]"),
    (lambda: linbias.attention(ONES > 0, ONES, ONES), TypeError, "attention: q must hold real numbers, got bool"),
    (lambda: linbias.attention(ONES * 1j, ONES, ONES), TypeError, "attention: q must hold real numbers, got complex128"),
    (lambda: linbias.explain(ONES, (ONES * 1j).tolist(), ONES), TypeError, "explain: k must hold real numbers, got complex128"),
    (lambda: linbias.attention(ONES, ONES, ONES.astype(object)), TypeError, "v must hold real numbers, got object"),
    (lambda: linbias.explain([["a"]], ONES, ONES), TypeError, "explain: q must hold real numbers, got <U1"),
    (lambda: linbias.explain([[1], [2, 3]], ONES, ONES), ValueError, r"explain: q must be an array, got \[\[1\], \[2, 3\]\]"),
    (lambda: linbias.attention(ONES, ONES, ONES, [1j, 1]), TypeError, "attention: slopes must hold real numbers, got complex128"),
    (lambda: linbias.attention(ONES, ONES, ONES, causal=False, right_slopes=["a", "b"]), TypeError, "right_slopes must hold real numbers, got <U1"),
    (lambda: linbias.attention(ONES, ONES, ONES, key_range=[[0], [1, 2]]), ValueError, r"key_range must be an array, got \[\[0\], \[1, 2\]\]"),
    (lambda: linbias.attention(ONES, ONES, ONES, query_start=1j), TypeError, "query_start must hold integers, got complex128"),
    (lambda: linbias.attention_backward(ONES * 1j, ONES, ONES, ONES), TypeError, "dout must hold real numbers, got complex128"),
    (lambda: linbias.merge([ONES * 1j], [ONES[..., 0]]), TypeError, "merge: outs must hold real numbers, got complex128"),
    (lambda: linbias.bias([1j], 2, 2), TypeError, "bias: slopes must hold real numbers, got complex128"),
    (lambda: linbias.attention(ONES, ONES[None], ONES), ValueError, r"k has batch axes \[1\] but q has \[\]"),
    (lambda: linbias.attention(ONES, ONES, ONES, [1, -1]), ValueError, "slopes must be at least 0"),
    (lambda: linbias.explain(ONES, ONES, ONES, [1.0]), ValueError, r"explain: slopes must have shape \[H\] = \[2\]"),
    (lambda: linbias.attention_backward(ONES[:1], ONES, ONES, ONES), ValueError, r"dout must have shape \[2, 3, 4\], got \[1, 3, 4\]"),
    (lambda: linbias.attention_backward(ONES, ONES, ONES, ONES, dlse=ONES), ValueError, r"dlse must have shape \[2, 3\], got \[2, 3, 4\]"),
    (lambda: linbias.attention(ONES, ONES, ONES, key_range=[0.0, 1.0]), TypeError, "attention: key_range must hold integers, got float64"),
    (lambda: linbias.attention(ONES[None], ONES[None], ONES[None], key_range=[0, 4]), ValueError, r"key_range must have shape \[B, 2\] = \[1, 2\] or"),
    (lambda: linbias.attention(ONES, ONES, ONES, key_range=[[0, 3], [2, 1]]), ValueError, r"got \[2, 1\] in batch row 0, key/value head 1"),
    (lambda: linbias.attention(ONES, ONES, ONES, query_start=0.5), TypeError, "query_start must hold integers, got float64"),
    (lambda: linbias.attention(ONES[None, None], ONES[None, None], ONES[None, None], mask=np.ones((1, 3, 2, 3, 3), bool)), ValueError, r"mask must broadcast to .* = \[1, 2, 3, 3\], got \[1, 3, 2, 3, 3\]"),
    (lambda: linbias.attention(ONES, ONES, ONES, query_start=2**31), ValueError, r"query_start must be within 2\^30 of key 0, got 2147483648"),
    (lambda: linbias.merge([], []), ValueError, "merge: outs and lses must be as many, at least 1, got 0 and 0"),
    (lambda: linbias.merge([ONES], [ONES]), ValueError, r"out \[2, 3, 4\] and lse \[2, 3\], got \[2, 3, 4\] and \[2, 3, 4\] in part 0"),
    (lambda: linbias.slopes(0), ValueError, "num_heads must be at least 1, got 0"),
    (lambda: linbias.slopes(2.0), TypeError, "num_heads must be an integer, got 2.0"),
    (lambda: linbias.slopes(True), TypeError, "num_heads must be an integer, got True"),
    (lambda: linbias.slopes(2, "linear"), ValueError, "schedule must be one of .*, got 'linear'"),
    (lambda: linbias.slopes(2, max_bias=0), ValueError, "max_bias must be positive and finite, got 0"),
    (lambda: linbias.slopes(2, "halving", 4.0), ValueError, "schedule 'halving' has no max_bias, got 4.0"),
    (lambda: linbias.bias([-1.0], 2, 2), ValueError, "bias: slopes must be at least 0"),
    (lambda: linbias.bias([1.0], 2, 2, [np.nan]), ValueError, "bias: right_slopes must be at least 0"),
    (lambda: linbias.bias(8, 2, 2), ValueError, r"bias: slopes must have shape \[H\] or \[B, H\], got \[\]; linbias.slopes\(8\) are"),
    (lambda: linbias.attention(ONES, ONES, ONES, causal=1), TypeError, "attention: causal must be True or False, got 1"),
    (lambda: linbias.attention(ONES, ONES, ONES, is_causal=True), TypeError, "attention: there is no argument is_causal; say causal"),
    (lambda: linbias.explain(ONES, ONES, ONES, key_rnge=None), TypeError, r"explain: there is no argument key_rnge; did you mean key_range\?"),
    (lambda: linbias.cpu.attention(ONES, ONES, ONES, window_size=3), TypeError, "attention: there is no argument window_size; far keys"),
    (lambda: linbias.cpu.attention(ONES, ONES, ONES, [1j, 1]), TypeError, "attention: slopes must hold real numbers, got complex128"),
    (lambda: linbias.cpu.attention(ONES, ONES, ONES, key_range=[[0], [1, 2]]), ValueError, "attention: key_range must be an array"),
    (lambda: linbias.jax.attention(ONES[None], ONES[None], ONES[None], enable_gqa=True), TypeError, "attention: there is no argument enable_gqa; k and v may"),
    (lambda: linbias.explain(ONES, ONES, ONES).table("cat"), ValueError, "explain: query must be a number or token, got 'cat'"),
    (lambda: linbias.explain(ONES, ONES, ONES).table(-4), ValueError, r"explain: query must be in \[-3, 3\), got -4"),
    (lambda: linbias.attention(ONES, ONES, ONES, mask=np.full((3, 3), np.nan)), ValueError, "attention: a mask of numbers must be below inf, got nan"),
    (lambda: linbias.attention(ONES, ONES, ONES, mask=np.ones((3, 3), int)), TypeError, "attention: mask must hold bool, .*numbers that are added to the scores, got int64"),
    (lambda: linbias.near_to_far.attention(ONES, ONES, ONES, mask=np.ones((3, 3), bool)), TypeError, "near_to_far: there is no argument mask; say key_range"),
    (lambda: linbias.cpu.attention(ONES, ONES, ONES, mask=np.ones((3, 3))), TypeError, "attention: there is no argument mask; say key_range"),
    (lambda: at([0, 1]), ValueError, r"attention: positions must have shape \[S\] = \[3\], \[B, S\] = \[1, 3\] or \[B, H, S\] = \[1, 2, 3\], got \[1, 2\]"),
    (lambda: at([0, 1, 2], [0, 1]), ValueError, r"query_positions must have shape \[T\] = \[3\], \[B, T\] = \[1, 3\] or \[B, H, T\] = \[1, 2, 3\], got \[1, 2\]"),
    (lambda: at(None, [0, 1, 2]), ValueError, "attention: query_positions lie among positions of keys; give positions too"),
    (lambda: at([1j, 2, 3]), TypeError, "attention: positions must be float32, float64 or integers, which tell far positions apart, got complex128"),
    (lambda: at(np.float16([0, 1, 2])), TypeError, "positions must be .*, got float16"),
    (lambda: at([0, 1, 2], [True] * 3), TypeError, "query_positions must be .*, got bool"),
    (lambda: at([0, np.nan, 2]), ValueError, r"positions must be numbers within 2\^53 of 0, got nan at \[0, 1\]"),
    (lambda: at([[0, 1, 2], [0, 1, np.inf]]), ValueError, r"positions must be numbers within 2\^53 of 0, got inf at \[0, 1, 2\]"),
    (lambda: at([0, 1, 2**53 + 1]), ValueError, r"positions must be .* of 0, got 9007199254740993 at \[0, 2\]"),
    (lambda: at([0, 1, 2], [0, -np.inf, 2]), ValueError, r"query_positions must be numbers within 2\^53 of 0, got -inf at \[0, 1\]"),
    (lambda: at([-np.inf, 0, 2]), ValueError, r"positions must be numbers within 2\^53 of 0, got -inf at \[0, 0\]"),
    (lambda: at([5.0, 3.0, 7.0]), ValueError, r"attention: positions must not fall, got 3.0 after 5.0 at \[0, 1\]"),
    (lambda: at([[0, 1, 2], [0, 2, 1]]), ValueError, r"positions must not fall, got 1.0 after 2.0 at \[0, 1, 2\]"),
    (lambda: at([0, 1, 2], query_start=-1), ValueError, "attention: query 0 of batch row 0 would stand at key -1 of 3; say where with query_positions"),
    (lambda: at([0, 1, 2], query_start=1), ValueError, "query 2 of batch row 0 would stand at key 3 of 3"),
    (lambda: at([0, 4, 9], [3, 3.5, 9]), ValueError, r"query_positions must be at least that of every key before the query, got 3.5 at \[0, 1\] where key 1 stands at 4.0"),
    (lambda: at([0, 4, 9], [[0, 5, 9], [4.5, 5, 9]]), ValueError, r"query_positions must be at most that of every key after the query, got 4.5 at \[0, 1, 0\] where key 1 stands at 4.0"),
    (lambda: linbias.distances(-1, 2), ValueError, "T and S must be at least 0, got T=-1, S=2"),
]  # fmt: skip


X = torch.ones(1, 2, 3, 4)
LENGTHS = torch.tensor([0, 3])


@pytest.mark.parametrize(
    "function",
    [
        functools.partial(linbias.bias, [0.5], 3, 3),
        functools.partial(linbias.attention, X, X, X),
        functools.partial(linbias.attention_backward, X, X, X, X),
        functools.partial(linbias.attention_weights, X, X),
        functools.partial(linbias.explain, X, X, X),
        functools.partial(linbias.near_to_far.attention, X, X, X),
        functools.partial(linbias.near_to_far.share_outside, X, X, 0, 3),
        functools.partial(linbias.cpu.attention, X, X, X),
        functools.partial(linbias.plots.bias, [0.5], 3),
        functools.partial(linbias.plots.reach, X[0], X[0]),
        functools.partial(linbias.torch.attention, X, X, X),
        functools.partial(linbias.torch.attention_weights, X, X),
        functools.partial(linbias.torch.attention_varlen, X[0, 0], X[0, 0], X[0, 0], LENGTHS, LENGTHS),
        functools.partial(linbias.torch.visited, X, X, X),
        functools.partial(linbias.jax.attention, *[X.numpy()] * 3),
        functools.partial(linbias.jax.attention_weights, *[X.numpy()] * 2),
    ],
    ids=lambda function: getattr(function, "func", function).__module__,
)  # fmt: skip
def test_the_former_names_of_the_slopes_are_answered_with_the_new_ones(function):
    for former, name in (("left", "slopes"), ("right", "right_slopes")):
        with pytest.raises(TypeError, match=f"there is no argument {former}; say {name}$"):
            function(**{former: [0.5]})


@pytest.mark.parametrize(("function", "kind", "words"), NUMPY_MESSAGES)
def test_numpy_functions_say_what_is_wrong(function, kind, words):
    with pytest.raises(kind, match=words):
        function()


def test_every_argument_of_jax_is_answered_with_ours():
    names = signature(jax.nn.dot_product_attention).parameters.keys()
    x = np.zeros((1, 2, 2, 4), np.float32)
    for name in names - signature(linbias.jax.attention).parameters.keys():
        advice = re.escape(_request.OTHER_NAMES[name]) if name != "mask" else "say mask"
        with pytest.raises(TypeError, match=f"there is no argument {name}; {advice}"):
            linbias.jax.attention(x, x, x, **{name: None})


SWAPPED = "attention: the axes are read as {0}, which makes {1} heads and 8 queries in q, 8 and {1} keys in k"


@pytest.mark.parametrize(
    ("function", "zeros", "words"),
    [
        (linbias.attention, np.zeros, "batch, heads, length, size"),
        (linbias.cpu.attention, np.zeros, "batch, heads, length, size"),
        (linbias.torch.attention, torch.zeros, "batch, heads, length, size"),
        (linbias.jax.attention, np.zeros, "batch, length, heads, size"),
    ],
    ids=["definition", "cpu", "torch", "jax"],
)
@pytest.mark.parametrize("length", [128, 200])
def test_length_in_the_place_of_the_heads_is_warned_of(function, zeros, words, length):
    q, k = zeros((1, length, 8, 1)), zeros((1, 8, length, 1))
    if function is linbias.jax.attention:
        q, k = (np.float32(x) for x in (k, q))
    with pytest.warns(UserWarning, match=SWAPPED.format(words, length)) as warned:
        function(q, k, k)
    assert warned[0].filename == __file__
    many = zeros((1, 1025, 2, 1)) if function is not linbias.jax.attention else None
    if many is not None:
        with pytest.warns(UserWarning, match="makes 1025 heads and 2 queries"):
            function(many, many, many)
        all_swapped = many[:, :128]
        with pytest.warns(UserWarning, match="makes 128 heads and 2 queries"):
            function(all_swapped, all_swapped, all_swapped)
        # No warning, which is an error here: few heads, one query, few key/value heads, as many queries as heads.
        heads = zeros((1, 128, 64, 1))
        for q, k in (
            (heads[:, :127, :2], heads[:, :127, :2]),
            (many[:, :1024, :1], many[:, :1024, :1]),
            (many[:, :1024], many[:, :8]),
            (heads, heads),
        ):
            function(q, k, k)


class Unable:
    NAME = "unable"

    @staticmethod
    def why_not(call):
        return "it is Sunday"


def test_an_implementation_that_cannot_is_refused_by_name_and_passed_over_by_auto():
    from linbias.torch.impl import blocked, dense

    one = _request.Described((1, 1, 1, 1), "float32")
    problem = _request.check("f", _request.Request(q=one, k=one, v=one))
    refused = "f: unable cannot run this call: it is Sunday"
    with pytest.raises(NotImplementedError, match=refused):
        _dispatch.choose("f", "unable", problem, (Unable, dense))
    assert _dispatch.choose("f", "auto", problem, (Unable, dense, blocked)) is dense
    with pytest.raises(
        NotImplementedError, match="no implementation can run this call: unable: it is Sunday"
    ):
        _dispatch.choose("f", "auto", problem, (Unable,))


class NotBuilt:
    NAME, WHY_MISSING = "fast", "no compiler"
    ABILITIES = _dispatch.Abilities(runs_on="the CPU", how="", memory="", devices=("cpu",))

    @staticmethod
    def why_not(call):
        return "no compiler"


def test_a_slow_fallback_warns_once(monkeypatch):
    from linbias.torch.impl import dense

    monkeypatch.setattr(_dispatch, "_warned", [])
    ones = (_request.Described((1, 1, 1, 1), "float32", device) for device in ("cuda", "cpu"))
    on_gpu, problem = (_request.check("f", _request.Request(q=x, k=x, v=x)) for x in ones)
    assert _dispatch.choose("f", "auto", on_gpu, (NotBuilt, dense)) is dense  # built or not
    with pytest.warns(
        UserWarning, match="f: dense runs in place of fast, .*linbias doctor"
    ) as warned:
        for _ in range(2):
            assert _dispatch.choose("f", "auto", problem, (NotBuilt, dense)) is dense
    assert len(warned) == 1


def test_every_message_of_the_checks_has_a_row():
    """Count raise sites, so that a new rule cannot come without its message here (of points: in test_points.py)."""
    source = Path(_request.__file__).read_text() + Path(_dispatch.__file__).read_text()
    assert len(re.findall(r"^\s+raise ", source, re.MULTILINE)) == 50
