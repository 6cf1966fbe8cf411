"""One row per message: the call, and the words that name argument, rule and value."""

import functools
import re
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch

import linbias
import linbias.jax
import linbias.torch
from linbias import _dispatch, _request
from linbias._request import checks, keywords, seen
from linbias.torch.impl import blocked, dense

INT = torch.int64


def by_kind(table):
    """Rows of a test from a table of messages by the kind of error."""
    return [(call, kind, words) for kind, rows in table.items() for call, words in rows]


def call(q=(2, 4, 5, 8), k=(2, 2, 7, 8), v=(2, 2, 7, 3), slopes=None, **options):
    """Call with tensors of these shapes, or with what stands in a shape's place."""
    q, k, v = (torch.ones(x) if isinstance(x, tuple) else x for x in (q, k, v))
    return linbias.torch.attention(q, k, v, slopes, **options)


def ints(*values):
    return torch.tensor(values)


ATTENTION = {
    TypeError: [
        (dict(q=[[1.0]]), "q must be a torch.Tensor, got list"),
        (dict(key_range=[[0, 1]]), "key_range must be a torch.Tensor, got list"),
        (dict(query_start=3), "query_start must be a torch.Tensor, got int"),
        (dict(mask=[[True]]), "mask must be a torch.Tensor, got list"),
        (dict(positions=[["noon"] * 7]), "positions must be float32, .*, got str"),
        (dict(v=torch.ones(2, 2, 7, 3, dtype=INT)), "v must be one of .*, got int64"),
        (dict(k=torch.ones(2, 2, 7, 8, dtype=torch.half)), "k is float16 but q is float32"),
        (dict(slopes=[1j] * 4), "slopes must hold real numbers, got complex128"),
        (dict(slopes=torch.ones(4) * 1j), "slopes must hold real numbers, got complex64"),
        (dict(slopes=["steep"] * 4), "slopes must hold real numbers, got <U5"),
        (dict(right_slopes=[None] * 4, causal=False), "right_slopes must .* numbers, got object"),
        (dict(key_range=torch.ones(2, 2)), "key_range must hold integers, got float32"),
        (dict(query_start=torch.ones(2)), "query_start must hold integers, got float32"),
        (dict(mask=torch.ones(5, 7, dtype=INT)),
         "mask must hold bool, True for what takes part, or .* added to the scores, got int64"),
        (dict(positions=torch.ones(2, 7, dtype=torch.bfloat16)),
         "positions must be float32, .*, got bfloat16"),
        (dict(window=3), r"window must be \(left, right\), two integers: .*; got 3"),
        (dict(window=(3, 0, 0)), r"window must be .*; got \(3, 0, 0\)"),
        (dict(window=(3.0, 0)), r"window must be .*; got \(3.0, 0\)"),
        (dict(window=(True, 0)), r"window must be .*; got \(True, 0\)"),
        (dict(query_range=[[0, 1]]), "query_range must be a torch.Tensor, got list"),
        (dict(query_range=torch.ones(5, 2)), "query_range must hold integers, got float32"),
        (dict(scale="1"), "scale must be a number, got '1'"),
        (dict(dropout=True), "dropout must be a number, got True"),
        (dict(causal=1), "causal must be True or False, got 1"),
        (dict(is_causal=True), "there is no argument is_causal; say causal"),
        (dict(attn_mask=None), "there is no argument attn_mask; say .*key_range"),
        (dict(tolerence=1.0), r"there is no argument tolerence; did you mean tolerance\?"),
        (dict(moon=1.0), "there is no argument moon; there are q, k, v, slopes, .*, return_lse"),
    ],
    ValueError: [
        (dict(q=(4, 5, 8)), r"q must have 4 axes, \[B, H, T, D\]: batch, heads, length, size,"
         r" got \[4, 5, 8\]; q\[None\] is a batch of one$"),
        (dict(k=(5, 8)), r"k .*, got \[5, 8\]; k\[None, None\] is a batch of one with one head$"),
        (dict(v=(8,)), r"v must have 4 axes, .*, got \[8\]$"),
        (dict(k=torch.ones(2, 2, 7, 8, device="meta")), "k is on meta but q is on cpu"),
        (dict(k=(8, 2, 7, 8)), r"k has batch 8 but q has 2 \(k \[8, 2, 7, 8\], q \[2"),
        (dict(k=(2, 4, 7, 8)), "k has 4 heads but v has 2"),
        (dict(v=(2, 2, 6, 3)), "k has 7 keys but v has 6"),
        (dict(k=(2, 2, 7, 9)), "k has head size 9 but q has 8"),
        (dict(q=(2, 4, 5, 0), k=(2, 2, 7, 0)), "the head size must be at least 1, got 0"),
        (dict(k=(2, 3, 7, 8), v=(2, 3, 7, 3)), "q has 4 heads, which is no multiple of the 3 .*"
         " read as batch, heads, length, size"),
        (dict(k=(2, 0, 7, 8), v=(2, 0, 7, 3)), "q has 4 heads, which is no multiple of the 0"),
        (dict(right_slopes=[1.0] * 4), "right_slopes contradicts causal=True"),
        (dict(slopes=[1.0] * 3), r"slopes must .* \[4\] or \[B, H\] = \[2, 4\], got \[3\]"),
        (dict(slopes=0.5), r"slopes must have shape .*, got \[\]"),
        (dict(right_slopes=[1.0], causal=False), "right_slopes must have shape"),
        (dict(slopes=[1.0, -0.5, 1, 1]), r"slopes must be at least 0 \(or inf\), got -0.5"),
        (dict(slopes=[1.0, 1, 1, float("nan")]), r"slopes must be at least 0 .*, got nan"),
        (dict(slopes=[[1.0], [1.0, 2.0]]), r"slopes must be an array, got \[\[1.0\], \[1.0, 2.0"),
        (dict(right_slopes=[-1.0] * 4, causal=False), "right_slopes must be .* 0 .*, got -1.0"),
        (dict(key_range=ints(*[[0, 7]] * 3)), r"key_range must have shape \[B, 2\] = \[2, 2\] or"
         r" \[B, G, 2\] = \[2, 2, 2\], got \[3, 2\]"),
        (dict(key_range=ints([0, 7], [5, 8])), r"key_range must be 0 <= first <= end <= S = 7,"
         r" got \[5, 8\] in batch row 1"),
        (dict(key_range=ints([4, 3], [0, 7])), r"key_range .* got \[4, 3\] in batch row 0"),
        (dict(key_range=ints([-1, 3], [0, 7])), r"key_range .* got \[-1, 3\] in batch row 0"),
        (dict(key_range=ints([[0, 7], [2, 3]], [[0, 7], [5, 8]])),
         r"key_range .* got \[5, 8\] in batch row 1, key/value head 1"),
        (dict(query_start=ints(1, 1, 1)), r"query_start must have shape \[B\] = \[2\], got \[3\]"),
        (dict(query_start=ints(0, -(2**31))),
         r"query_start must be within 2\^30 of key 0, got -2147483648 in batch row 1"),
        (dict(key_bound=torch.ones(2, 3)),
         r"key_bound must have shape \[B, G\] = \[2, 2\], got \[2, 3\]"),
        (dict(mask=torch.ones(2, 5, 7) > 0),
         r"mask must broadcast to \[B, H, T, S\] = \[2, 4, 5, 7\], got \[2, 5, 7\]"),
        (dict(mask=torch.ones(1, 2, 4, 5, 7) > 0), "mask must .*, got .1, 2, 4, 5, 7"),
        (dict(mask=torch.ones(5, 7, device="meta") > 0), "mask is on meta but q is on cpu"),
        (dict(positions=torch.ones(2, 2, 7)), r"positions must have shape \[S\] = \[7\], \[B, S\]"
         r" = \[2, 7\] or \[B, H, S\] = \[2, 4, 7\], got \[2, 2, 7\]"),
        (dict(positions=torch.ones(2, 7, device="meta")), "positions is on meta but q is on cpu"),
        (dict(positions=-torch.arange(7.0)[None]), "positions must not fall, got -1.0 after -0.0"),
        (dict(window=(-2, 0)), r"window must be at least -1 on each side, got \(-2, 0\)"),
        (dict(window=[4, -3]), r"window must be at least -1 on each side, got \[4, -3\]"),
        (dict(query_range=ints([0, 1])),
         r"query_range .* \[T, 2\] = \[5, 2\] or \[B, T, 2\] = \[2, 5, 2\], got \[1, 2\]"),
        (dict(query_range=ints(*[[0, 7]] * 4, [3, 8])),
         r"query_range must be 0 <= first <= end <= S = 7, got \[3, 8\] in query 4"),
        (dict(query_range=ints([[0, 7]] * 5, [*[[0, 7]] * 4, [5, 3]])),
         r"query_range must be .*, got \[5, 3\] in batch row 1, query 4"),
        (dict(query_range=torch.zeros(5, 2, dtype=INT, device="meta")),
         "query_range is on meta but q is on cpu"),
        (dict(scale=float("inf")), "scale must be finite, got inf"),
        (dict(dropout=1 - 2**-33), r"dropout must be in \[0, 1 - 2\^-32\], got 0.99999999988"),
        (dict(dropout=-0.1), r"dropout must be in \[0, 1 - 2\^-32\], got -0.1"),
        (dict(tolerance=1.0), r"tolerance must be in \[0, 1\), got 1.0"),
        (dict(tolerance=float("nan")), r"tolerance must be in \[0, 1\), got nan"),
        (dict(implementation="fast"), "implementation must be one of .'auto', 'cpu', 'blocked',"
         " 'sdpa', 'dense', 'triton'., got 'fast'"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "kind", "words"), by_kind(ATTENTION))
def test_attention_says_what_is_wrong(arguments, kind, words):
    call()  # a call that is right, whose check is kept, hides no other
    with pytest.raises(kind, match=f"^attention: {words}"):
        call(**arguments)


def varlen(q=(5, 4, 8), k=(7, 2, 8), offsets_q=(0, 2, 5), offsets_k=(0, 3, 7), **sides):
    arrays = torch.ones(q), torch.ones(k), torch.ones(k)
    offsets = torch.tensor(offsets_q), torch.tensor(offsets_k)
    return linbias.torch.attention_varlen(*arrays, *offsets, **sides)


VARLEN = {
    TypeError: [
        (dict(key_range=torch.ones(2, 2)), "key_range must hold integers, got float32"),
        (dict(query_start=torch.ones(2)), "query_start must hold integers, got float32"),
        (dict(slopes=[1j] * 4), "slopes must hold real numbers, got complex128"),
        (dict(window=3), "window must be .*; got 3"),
        (dict(query_range=torch.ones(5, 2)), "query_range must hold integers, got float32"),
    ],
    ValueError: [
        (dict(window=(0, -2), offsets_q=(0, 0), q=(0, 4, 8), offsets_k=(0, 7)),
         r"window must be at least -1 on each side, got \(0, -2\)"),
        (dict(query_range=ints([0, 1])), r"query_range .* \[total_q, 2\] = \[5, 2\], got .1, 2"),
        (dict(query_range=ints(*[[0, 3]] * 2, *[[0, 4]] * 2, [1, 5])),
         r"query_range .* <= 4, the keys of the sequence, got \[1, 5\] in row 4"),
        (dict(offsets_q=(0.0, 5.0)), "cu_seqlens_q must be a row of integers, got float32"),
        (dict(offsets_q=((0, 5),)), r"cu_seqlens_q must be a row of .*, got int64 \[1, 2\]"),
        (dict(q=(1, 5, 4, 8)), r"q must have 3 axes, total, heads, size, got \[1, 5, 4, 8\]"),
        (dict(offsets_q=(0, 2, 4)),
         r"cu_seqlens_q must start at 0, never fall and end at 5, got \[0, 2, 4\]"),
        (dict(offsets_k=(0, 8, 7)), "cu_seqlens_k must start at 0, never fall and end at 7"),
        (dict(offsets_k=(0, 7)), "cu_seqlens_q counts 2 sequences but cu_seqlens_k 1"),
        (dict(key_range=ints(*[[0, 1]] * 3)), r"key_range must have shape .*, got \[3, 2\]"),
        (dict(key_range=ints([0, 3], [0, 5])),
         r"key_range .* 0 <= first <= end <= 4, the keys of sequence 1, got \[0, 5\]"),
        (dict(query_start=ints(1)), r"query_start must have shape \[B\] = \[2\], got \[1\]"),
        (dict(slopes=np.ones((1, 4))), "slopes has 1 rows for 2 sequences"),
        (dict(causal=False, right_slopes=np.ones((3, 4))), "right_slopes has 3 rows for 2 seq"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "kind", "words"), by_kind(VARLEN))
def test_attention_varlen_says_what_is_wrong(arguments, kind, words):
    with pytest.raises(kind, match=f"^attention_varlen: {words}"):
        varlen(**arguments)


ONES = np.ones((2, 3, 4))
FLAT = ONES[0]
BATCH = ONES[None, None]


def on(q=ONES, k=ONES, v=ONES, *slopes, **options):
    return functools.partial(linbias.attention, q, k, v, *slopes, **options)


def at(positions, query_positions=None, **options):
    return on(positions=positions, query_positions=query_positions, **options)


def explain(*arrays, **options):
    return functools.partial(linbias.explain, *arrays or [ONES] * 3, **options)


# What has a row above has none here, where NumPy's functions ask the same of their arrays.
NUMPY = {
    TypeError: [
        (on(ONES > 0), "attention: q must hold real numbers, got bool"),
        (on(v=ONES.astype(object)), "v must hold real numbers, got object"),
        (explain(ONES, (ONES * 1j).tolist(), ONES), "explain: k must .* numbers, got complex128"),
        (lambda: linbias.attention_backward(ONES * 1j, *[ONES] * 3), "dout must hold real"),
        (lambda: linbias.merge([ONES * 1j], [ONES[..., 0]]), "merge: outs must hold real numbers"),
        (on(query_start=1j), "query_start must hold integers, got complex128"),
        (on(is_causal=True), "attention: there is no argument is_causal; say causal"),
        (explain(key_rnge=None), r"explain: there is no .* key_rnge; did you mean key_range\?"),
        (lambda: linbias.cpu.attention(ONES, ONES, ONES, window_size=3),
         "attention: there is no argument window_size; say window"),
        (lambda: linbias.cpu.attention(ONES, ONES, ONES, mask=FLAT > 0),
         "attention: there is no argument mask; say key_range"),
        (lambda: linbias.near_to_far.attention(ONES, ONES, ONES, mask=FLAT > 0),
         "near_to_far: there is no argument mask; say key_range"),
        (lambda: linbias.jax.attention(*[BATCH[0]] * 3, enable_gqa=True),
         "attention: there is no argument enable_gqa; k and v may"),
        (lambda: linbias.slopes(2.0), "num_heads must be an integer, got 2.0"),
        (at([1j, 2, 3]), "attention: positions must be float32, float64 or integers, which tell"
         " far positions apart, or NumPy's datetime64 or timedelta64, got complex128"),
        (at(np.zeros(3, "datetime64[M]")),
         r"positions must count weeks or a shorter unit, .*, got datetime64\[M\]"),
        (at(np.zeros(3, "datetime64[s]"), [0, 1, 2]),
         r"positions and query_positions must be of one kind, got datetime64\[s\] and int64"),
        (at([0, 1, 2], [True] * 3), "query_positions must be .*, got bool"),
    ],
    ValueError: [
        (on(FLAT), r"attention: q must have at least 3 axes, .*, got \[3, 4\]; num_heads= splits"),
        (on(FLAT, FLAT, FLAT, num_heads=3), r"attention: q must be \[..., length, heads \* size\]"
         r" with a multiple of 3 columns, got \[3, 4\]"),
        (on(FLAT, FLAT[:, :3], FLAT, num_heads=2), "attention: k has head size 3 but q has 2"),
        (on(FLAT, FLAT, FLAT[:, :3], num_heads=2), r"v .* of 2 columns, got \[3, 3\]"),
        (on(FLAT, FLAT, FLAT, num_heads=0), "num_heads must be .* at least 1, got 0"),
        (explain([[1], [2, 3]], ONES, ONES), r"explain: q must be an array, got \[\[1\], \[2, 3"),
        (on(key_range=[[0], [1, 2]]), r"key_range must be an array, got \[\[0\], \[1, 2\]\]"),
        (on(ONES, ONES[None]), r"k has batch axes \[1\] but q has \[\]"),
        (explain(slopes=[1.0]), r"explain: slopes must have shape \[H\] = \[2\]"),
        (lambda: linbias.attention_backward(ONES[:1], ONES, ONES, ONES),
         r"dout must have shape \[2, 3, 4\], got \[1, 3, 4\]"),
        (lambda: linbias.attention_backward(ONES, ONES, ONES, ONES, dlse=ONES),
         r"dlse must have shape \[2, 3\], got \[2, 3, 4\]"),
        (on(*[ONES[None]] * 3, key_range=[0, 4]), r"key_range must .* \[B, 2\] = \[1, 2\]"),
        (on(key_range=[[0, 3], [2, 1]]), r"got \[2, 1\] in batch row 0, key/value head 1"),
        (on(*[BATCH] * 3, mask=np.ones((1, 3, 2, 3, 3), bool)),
         r"mask must broadcast to .* = \[1, 2, 3, 3\], got \[1, 3, 2, 3, 3\]"),
        (on(mask=np.full((3, 3), np.nan)), "a mask of numbers must be below inf, got nan"),
        (lambda: linbias.merge([], []), "merge: outs and lses .*, at least 1, got 0 and 0"),
        (lambda: linbias.merge([ONES], [ONES]), r"merge: every part must have out \[2, 3, 4\] and"
         r" lse \[2, 3\], got \[2, 3, 4\] and \[2, 3, 4\] in part 0"),
        (lambda: linbias.slopes(0), "num_heads must be at least 1, got 0"),
        (lambda: linbias.slopes(2, "linear"), "schedule must be one of .*, got 'linear'"),
        (lambda: linbias.slopes(2, max_bias=0), "max_bias must be positive and finite, got 0"),
        (lambda: linbias.slopes(2, "halving", 4.0), "'halving' has no max_bias, got 4.0"),
        (lambda: linbias.bias([-1.0], 2, 2), "bias: slopes must be at least 0"),
        (lambda: linbias.bias(8, 2, 2),
         r"bias: slopes must have shape \[H\] or \[B, H\], got \[\]; linbias.slopes\(8\) are"),
        (lambda: linbias.distances(-1, 2), "T and S must be at least 0, got T=-1, S=2"),
        (lambda: explain()().table("cat"), "explain: query must be a number or token, got 'cat'"),
        (lambda: explain()().table(-4), r"explain: query must be in \[-3, 3\), got -4"),
        (at([0, 1]), r"attention: positions must have shape \[S\] = \[3\], \[B, S\] = \[1, 3\] or"
         r" \[B, H, S\] = \[1, 2, 3\], got \[1, 2\]"),
        (at([0, 1, 2], [0, 1]), r"query_positions must .* \[T\] = \[3\], .*, got \[1, 2\]"),
        (at(None, [0, 1, 2]), "query_positions lie among positions of keys; give positions too"),
        (at([0, np.nan, 2]), r"must be numbers within 2\^53 of 0 .*, got nan at \[0, 1\]"),
        (at([0, 1.7e18, 2]), r"numbers within 2\^53 of 0 \(or integers within 2\^53 of each"
         r" other\), got 1.7e\+18 at \[0, 1\]"),
        (at(np.array([0, "NaT", 2], "datetime64[s]")), r"must .*, got NaT, .* at \[0, 1\]"),
        (at([[0, 1, 2], [0, 1, np.inf]]), r"positions must .*, got inf at \[0, 1, 2\]"),
        (at([0, 1, 2**53 + 1]),
         r"positions must be integers within 2\^53 of each other, got 0 at \[0, 0\]"),
        (at([0, 1, 2], [0, 1, 2**60]), r"query_positions .* each other, got 1\d* at \[0, 2\]"),
        (at([0, 1, 2], [0, -np.inf, 2]), r"query_positions must be .*, got -inf at \[0, 1\]"),
        (at([5.0, 3.0, 7.0]), r"positions must not fall, got 3.0 after 5.0 at \[0, 1\]; sort keys,"
         " values and queries by their positions, or say causal=False, where any order will do"),
        (at([[0, 1, 2], [0, 2, 1]]), r"must not fall, got 1 after 2 at \[0, 1, 2\]"),
        (at([[0, 1, 2], [0, 2, 1]], causal=False, query_start=0), "must not fall, got 1 after 2"),
        (at([0, 1, 2], query_start=-1), "attention: query 0 of batch row 0 would stand at key -1"
         r" of 3; say where with query_start \(0: each at its own key\) or query_positions"),
        (at([0, 1, 2], key_range=[0, 2]), r"at key -1 of 3; say where with query_start \(0:"),
        (at([0, 1, 2], query_start=1), "query 2 of batch row 0 would stand at key 3 of 3"),
        (at([0, 4, 9], [3, 3.5, 9]), "query_positions must be at least that of every key before"
         r" the query, got 3.5 at \[0, 1\] where key 1 stands at 4; causal=False without"
         " query_start finds them by itself"),
        (at([0, 4, 9], [[0, 5, 9], [4.5, 5, 9]]), "query_positions must be at most that of every"
         r" key after the query, got 4.5 at \[0, 1, 0\] where key 1 stands at 4"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(("function", "kind", "words"), by_kind(NUMPY))
def test_numpy_functions_say_what_is_wrong(function, kind, words):
    with pytest.raises(kind, match=words):
        function()


X = torch.ones(1, 2, 3, 4)
EVERY_FUNCTION = [
    (linbias.bias, [0.5], 3, 3),
    (linbias.attention, X, X, X),
    (linbias.attention_backward, X, X, X, X),
    (linbias.attention_weights, X, X),
    (linbias.explain, X, X, X),
    (linbias.near_to_far.attention, X, X, X),
    (linbias.near_to_far.share_outside, X, X, 0, 3),
    (linbias.cpu.attention, X, X, X),
    (linbias.torch.attention, X, X, X),
    (linbias.torch.attention_weights, X, X),
    (linbias.torch.attention_varlen, *[X[0, 0]] * 3, ints(0, 3), ints(0, 3)),
    (linbias.torch.visited, X, X, X),
    (linbias.jax.attention, *[X.numpy()] * 3),
    (linbias.jax.attention_weights, *[X.numpy()] * 2),
]


@pytest.mark.parametrize("function", EVERY_FUNCTION, ids=lambda row: row[0].__module__)
def test_the_former_names_of_the_slopes_are_answered_with_the_new_ones(function):
    for former, name in (("left", "slopes"), ("right", "right_slopes")):
        with pytest.raises(TypeError, match=f"there is no argument {former}; say {name}$"):
            function[0](*function[1:], **{former: [0.5]})


def test_every_argument_of_jax_is_answered_with_ours():
    names = signature(jax.nn.dot_product_attention).parameters.keys()
    x = np.zeros((1, 2, 2, 4), np.float32)
    for name in names - signature(linbias.jax.attention).parameters.keys():
        advice = re.escape(keywords.ELSEWHERE[name]) if name != "mask" else "say mask"
        with pytest.raises(TypeError, match=f"there is no argument {name}; {advice}"):
            linbias.jax.attention(x, x, x, **{name: None})


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
    makes = f"which makes {length} heads and 8 queries in q, 8 and {length} keys in k"
    with pytest.warns(UserWarning, match=f"the axes are read as {words}, {makes}") as warned:
        function(q, k, k)
    assert warned[0].filename == __file__
    many = zeros((1, 1025, 2, 1)) if function is not linbias.jax.attention else None
    if many is not None:
        with pytest.warns(UserWarning, match="makes 1025 heads and 2 queries"):
            function(many, many, many)
        all_swapped = many[:, :128]
        with pytest.warns(UserWarning, match="makes 128 heads and 2 queries"):
            function(all_swapped, all_swapped, all_swapped)
        # No warning, which is an error here: few heads, one query, few key/value heads, as many
        # queries as heads.
        heads = zeros((1, 128, 64, 1))
        for q, k in (
            (heads[:, :127, :2], heads[:, :127, :2]),
            (many[:, :1024, :1], many[:, :1024, :1]),
            (many[:, :1024], many[:, :8]),
            (heads, heads),
        ):
            function(q, k, k)


Unable = SimpleNamespace(NAME="unable", why_not=lambda call: "it is Sunday")


def test_an_implementation_that_cannot_is_refused_by_name_and_passed_over_by_auto():
    one = _request.Described((1, 1, 1, 1), "float32")
    problem = _request.check("f", _request.Request(q=one, k=one, v=one))
    assert _dispatch.choose("f", "auto", problem, (Unable, dense, blocked)) is dense
    for asked, words in (
        ("unable", "f: unable cannot run this call: it is Sunday"),
        ("auto", "no implementation can run this call: unable: it is Sunday"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            _dispatch.choose("f", asked, problem, (Unable,))


def test_a_slow_fallback_warns_once(monkeypatch):
    not_built = SimpleNamespace(
        NAME="fast",
        WHY_MISSING="no compiler",
        ABILITIES=_dispatch.Abilities(runs_on="the CPU", how="", memory="", devices=("cpu",)),
        why_not=lambda call: "no compiler",
    )
    monkeypatch.setattr(_dispatch, "_warned", [])
    ones = (_request.Described((1, 1, 1, 1), "float32", device) for device in ("cuda", "cpu"))
    on_gpu, problem = (_request.check("f", _request.Request(q=x, k=x, v=x)) for x in ones)
    assert _dispatch.choose("f", "auto", on_gpu, (not_built, dense)) is dense  # built or not
    words = "f: dense runs in place of fast, .*linbias doctor"
    with pytest.warns(UserWarning, match=words) as warned:
        for _ in range(2):
            assert _dispatch.choose("f", "auto", problem, (not_built, dense)) is dense
    assert len(warned) == 1


def test_every_message_of_the_checks_has_a_row():
    """A new rule cannot come without its message here (of points: in test_points.py)."""
    rules = _request, seen, checks, keywords, _dispatch
    source = "".join(Path(module.__file__).read_text() for module in rules)
    assert len(re.findall(r"^\s+raise ", source, re.MULTILINE)) == 34
