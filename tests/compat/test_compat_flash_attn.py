"""`linbias.compat.flash_attn` gives what flash-attn's documentation says, restated here in plain code."""

import inspect
from pathlib import Path

import pytest
import torch

from linbias.compat import flash_attn

pytestmark = pytest.mark.usefixtures("same_start")


def plain(q, k, v, slopes=None, causal=False, scale=None, first=0, end=None):
    """Attention over the keys first .. end - 1 with a bias of -slope * |i + S - T - j|, scores in memory: out and lse."""
    k, v = (x[:, first:end].repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    T, S = q.shape[1], k.shape[1]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    distance = torch.arange(T)[:, None] + S - T - torch.arange(S)
    if slopes is not None:
        slopes = slopes.expand(len(q), -1)[:, :, None, None].to(scores.dtype)
        scores = scores - slopes * distance.abs()
    if causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    lse = scores.logsumexp(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse.masked_fill(
        lse == -torch.inf, torch.inf
    )


B, T, S, H, G, D = 2, 7, 11, 6, 3, 8
SLOPES = {
    "none": None,
    "one row": torch.tensor([0.5, 0.25, 0.125, 0.0, 1.0, 2.0]),
    "of each batch row": torch.rand(B, H),
}


def inputs(T=T, S=S, G=G, dtype=torch.float64):
    q = torch.randn(B, T, H, D, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(B, S, G, D, dtype=dtype, requires_grad=True) for _ in range(2))
    return q, k, v


def same_with_gradients(got, want, leaves, **tolerance):
    """Outputs are equal, and so are their gradients, for all results that have some."""
    douts = [torch.randn_like(x) for x in want]
    for found, expected in zip(got, want, strict=True):
        torch.testing.assert_close(found, expected, **tolerance)
    gradients = (
        torch.autograd.grad(
            [x.masked_fill(x.isinf(), 0) for x in results], leaves, douts, allow_unused=True
        )
        for results in (got, want)
    )
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, **tolerance)


@pytest.mark.parametrize("slopes", SLOPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(7, 11), (11, 7), (9, 9)], ids=str)
def test_flash_attn_func(slopes, causal, lengths):
    q, k, v = inputs(*lengths)
    out, lse, s_dmask = flash_attn.flash_attn_func(
        q, k, v, causal=causal, alibi_slopes=SLOPES[slopes], return_attn_probs=True
    )
    assert s_dmask is None and out.is_contiguous()
    same_with_gradients((out, lse), plain(q, k, v, SLOPES[slopes], causal), (q, k, v))


def test_rows_without_keys_have_zeros_and_an_infinite_lse():
    q, k, v = inputs(5, 2)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert not out[:, :3].any() and (lse[..., :3] == torch.inf).all()
    assert out[:, 3:].all() and lse[..., 3:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_types(dtype):
    q, k, v = (x.detach().to(dtype) for x in inputs())
    slopes = SLOPES["one row"]
    out, lse, _ = flash_attn.flash_attn_func(
        q, k, v, softmax_scale=0.5, causal=True, alibi_slopes=slopes, return_attn_probs=True
    )
    want, want_lse = plain(q.float(), k.float(), v.float(), slopes, True, 0.5)
    assert out.dtype == dtype and lse.dtype == torch.float32
    torch.testing.assert_close(out.float(), want, rtol=0, atol=2 * torch.finfo(dtype).eps + 1e-6)
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_forms(causal):
    slopes = SLOPES["one row"]
    options = {"causal": causal, "alibi_slopes": slopes, "softmax_scale": 0.3}
    qkv = torch.randn(B, T, 3, H, D, dtype=torch.float64, requires_grad=True)
    got = flash_attn.flash_attn_qkvpacked_func(qkv, **options)
    want = plain(*qkv.unbind(2), slopes, causal, 0.3)
    same_with_gradients([got], want[:1], (qkv,))
    q = inputs()[0]
    kv = torch.randn(B, S, 2, G, D, dtype=torch.float64, requires_grad=True)
    got = flash_attn.flash_attn_kvpacked_func(q, kv, **options, return_attn_probs=True)
    same_with_gradients(got[:2], plain(q, *kv.unbind(2), slopes, causal, 0.3), (q, kv))


LENGTHS = [(3, 5), (8, 2), (0, 4), (6, 6)]  # queries and keys of each sequence


def offsets(column):
    lengths = torch.tensor([0, *(pair[column] for pair in LENGTHS)])
    return lengths.cumsum(0).to(torch.int32)


def plain_varlen(q, k, v, slopes, causal):
    starts_q, starts_k = offsets(0), offsets(1)
    found = []
    for b in range(len(LENGTHS)):
        rows, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        own = slopes[b] if slopes.dim() == 2 else slopes
        found.append(plain(q[None, rows], k[None, keys], v[None, keys], own, causal))
    outs, lses = zip(*found, strict=True)
    return torch.cat(outs, dim=1)[0], torch.cat(lses, dim=2)[0]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("per_batch", [False, True])
def test_varlen_forms(causal, per_batch):
    slopes = torch.rand(len(LENGTHS), H) if per_batch else torch.rand(H)
    q = torch.randn(17, H, D, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(17, 2, G, D, dtype=torch.float64, requires_grad=True)
    options = {"causal": causal, "alibi_slopes": slopes, "return_attn_probs": True}
    both = offsets(0), offsets(1), 8, 6
    for got in (
        flash_attn.flash_attn_varlen_func(q, *kv.unbind(1), *both, **options),
        flash_attn.flash_attn_varlen_kvpacked_func(q, kv, *both, **options),
    ):
        assert got[2] is None and got[1].shape == (H, 17)
        same_with_gradients(got[:2], plain_varlen(q, *kv.unbind(1), slopes, causal), (q, kv))


def test_varlen_qkvpacked():
    slopes = torch.rand(H)
    qkv = torch.randn(9, 3, H, D, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
    got = flash_attn.flash_attn_varlen_qkvpacked_func(
        qkv, lengths, 5, causal=True, alibi_slopes=slopes
    )
    want = [plain(*part[None].unbind(2), slopes, True)[0][0] for part in (qkv[:4], qkv[4:])]
    same_with_gradients([got], [torch.cat(want)], (qkv,))


# ---- caches


@pytest.fixture
def caches():
    """Caches of 3 rows and 16 positions, which hold numbers everywhere."""
    return torch.randn(2, 3, 16, G, D).unbind()


def plain_rows(q, caches, slopes, causal, firsts, ends, rows=(0, 1, 2)):
    """Row by row, since each has its own part of the cache."""
    found = [
        plain(q[b : b + 1], *(c[row : row + 1] for c in caches), slopes, causal, None, first, end)
        for b, (row, first, end) in enumerate(zip(rows, firsts, ends, strict=True))
    ]
    return (torch.cat(parts) for parts in zip(*found, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("num_new", [1, 3])
def test_new_keys_are_written_where_each_row_ends(caches, causal, num_new):
    slopes, filled = torch.rand(H), torch.tensor([0, 13, 6], dtype=torch.int32)
    before = [cache.clone() for cache in caches]
    q = torch.randn(3, num_new, H, D)
    k, v = torch.randn(2, 3, num_new, G, D)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=filled, causal=causal, alibi_slopes=slopes,
        return_softmax_lse=True,
    )  # fmt: skip
    for cache, old, new in zip(caches, before, (k, v), strict=True):
        for b, start in enumerate(filled.tolist()):
            old[b, start : start + num_new] = new[b]
        assert torch.equal(cache, old)
    want, want_lse = plain_rows(q, caches, slopes, causal, [0] * 3, (filled + num_new).tolist())
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def test_one_number_for_all_rows_and_caches_that_are_full(caches):
    q, slopes = torch.randn(3, 2, H, D), torch.rand(H)
    out = flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=5, alibi_slopes=slopes)
    torch.testing.assert_close(out, next(plain_rows(q, caches, slopes, False, [0] * 3, [5] * 3)))
    out = flash_attn.flash_attn_with_kvcache(q, *caches, alibi_slopes=slopes)
    torch.testing.assert_close(out, plain(q, *caches, slopes)[0])


def test_padding_on_the_left_and_rows_of_the_cache_in_another_order(caches):
    q, slopes = torch.randn(2, 1, H, D), torch.rand(2, H)
    k, v = torch.randn(2, 2, 1, G, D)
    rows, first = torch.tensor([2, 0]), torch.tensor([3, 0])
    out = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=torch.tensor([9, 4]), cache_batch_idx=rows, cache_leftpad=first,
        causal=True, alibi_slopes=slopes,
    )  # fmt: skip
    assert torch.equal(caches[0][2, 9], k[0, 0]) and torch.equal(caches[1][0, 4], v[1, 0])
    want = [
        plain(q[b : b + 1], *(c[r : r + 1] for c in caches), slopes[b], True, None, a, e)[0]
        for b, (r, a, e) in enumerate([(2, 3, 10), (0, 0, 5)])
    ]
    torch.testing.assert_close(out, torch.cat(want))


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 3e38], ids=str)
@pytest.mark.parametrize("rows", [None, torch.tensor([1, 2, 0])], ids=["in order", "chosen"])
@pytest.mark.parametrize("num_new", [0, 1, 3])
def test_what_lies_outside_of_the_filled_positions_changes_nothing(caches, garbage, rows, num_new):
    """Caches are made with `torch.empty`, and rows that are used anew hold what was there before."""
    filled, first = torch.tensor([0, 13, 6]), torch.tensor([0, 5, 6])
    q = torch.randn(3, max(1, num_new), H, D)
    new = torch.randn(2, 3, num_new, G, D).unbind() if num_new else ()
    is_garbage = torch.ones(3, 16, dtype=torch.bool)
    for b, row in enumerate(range(3) if rows is None else rows.tolist()):
        is_garbage[row, first[b] : filled[b]] = False

    def attend(value):
        own = [cache.masked_fill(is_garbage[..., None, None], value) for cache in caches]
        return flash_attn.flash_attn_with_kvcache(
            q, *own, *new, cache_seqlens=filled, cache_batch_idx=rows, cache_leftpad=first,
            causal=True, alibi_slopes=torch.rand(H, generator=torch.Generator().manual_seed(0)),
            return_softmax_lse=True,
        )  # fmt: skip

    for found, expected in zip(attend(garbage), attend(0.0), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"window_size": (4, 0)}, NotImplementedError),
        ({"alibi_slopes": torch.ones(H + 1)}, ValueError),
    ],
)
def test_a_call_that_is_refused_writes_nothing_into_the_caches(caches, option, error):
    before = [cache.clone() for cache in caches]
    q, new = torch.randn(3, 1, H, D), torch.randn(3, 1, G, D)
    with pytest.raises(error):
        flash_attn.flash_attn_with_kvcache(q, *caches, new, new, cache_seqlens=2, **option)
    assert all(map(torch.equal, caches, before))


def test_nothing_of_a_cache_is_differentiated(caches):
    q = torch.randn(3, 1, H, D, requires_grad=True)
    k = torch.randn(3, 1, G, D, requires_grad=True)
    out = flash_attn.flash_attn_with_kvcache(q, *caches, k, k, cache_seqlens=2)
    assert not out.requires_grad and not caches[0].requires_grad


# ---- signatures and programs

SIGNATURES = {
    "flash_attn_func": "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
    "flash_attn_kvpacked_func": "q kv dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
    "flash_attn_qkvpacked_func": "qkv dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal window_size"
    " softcap alibi_slopes deterministic return_attn_probs block_table",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal"
    " window_size softcap alibi_slopes deterministic return_attn_probs",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen dropout_p softmax_scale causal window_size softcap alibi_slopes"
    " deterministic return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table"
    " softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse",
}
DEFAULTS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": (-1, -1), "softcap": 0.0, "alibi_slopes": None,
    "deterministic": False, "return_attn_probs": False, "block_table": None, "k": None, "v": None, "rotary_cos": None,
    "rotary_sin": None, "cache_seqlens": None, "cache_batch_idx": None, "cache_leftpad": None, "rotary_interleaved": True,
    "num_splits": 0, "return_softmax_lse": False,
}  # fmt: skip


@pytest.mark.parametrize("name", flash_attn.__all__)
def test_arguments_are_those_of_flash_attn_in_their_order(name):
    """As flash_attn_interface.py of flash-attn 2.8 has them."""
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == SIGNATURES[name].split()
    for argument, parameter in parameters.items():
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if parameter.default is not parameter.empty:
            assert parameter.default == DEFAULTS[argument], argument


def test_a_window_may_say_causal():
    q, k, v = inputs()
    causal = flash_attn.flash_attn_func(q, k, v, causal=True)
    for window in ((-1, 0), (S, 0)):
        assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=window), causal)
    for window in ((S - 1, T - 1), (S - 1, -1), (-1, S), (S, S)):
        wide = flash_attn.flash_attn_func(q, k, v, window_size=window)
        assert torch.equal(wide, flash_attn.flash_attn_func(q, k, v))
    for window in ((S - 1, 0), (S + 3, -1), (S - 1, 2)):
        taken = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=window)
        assert torch.equal(taken, causal)
    with pytest.raises(NotImplementedError, match="window_size must be"):
        flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(S - 2, -1))
    with pytest.raises(NotImplementedError, match="window_size must be"):
        flash_attn.flash_attn_func(q, k, v, window_size=(-1, T - 2))
    wide = flash_attn.flash_attn_func(q, k, v, window_size=(S, S))
    assert torch.equal(wide, flash_attn.flash_attn_func(q, k, v))
    assert torch.equal(
        flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(-1, 2)), causal
    )


def test_dropout_keeps_the_mean():
    q, k = torch.zeros(1, 1, 1, 8), torch.randn(1, 4096, 1, 8)
    v = torch.ones(1, 4096, 1, 8)
    out = flash_attn.flash_attn_func(q, k, v, dropout_p=0.5)
    assert out[0, 0, 0, 0] != 1 and abs(out[0, 0, 0, 0] - 1) < 0.1


def test_slopes_are_differentiable():
    q, k, v = inputs()
    slopes = torch.rand(H, dtype=torch.float64, requires_grad=True)
    got = flash_attn.flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes)
    same_with_gradients([got], plain(q, k, v, slopes, True)[:1], (slopes, q))


@pytest.fixture(scope="module")
def gpt():
    """The small GPT's classes, after one line of its program was changed."""
    text = (Path(__file__).parent / "flash_gpt.py").read_text()
    assert text.count("from flash_attn import") == 1
    names = {}
    changed = text.replace("from flash_attn import", "from linbias.compat.flash_attn import")
    exec(compile(changed, "flash_gpt.py", "exec"), names)
    return names["GPT"]


def test_a_gpt_written_for_flash_attn_trains(gpt):
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Each token repeats the one three places before it.
    tokens = torch.randint(16, (8, 3)).repeat(1, 8)
    losses = []
    for _ in range(50):
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2.5 and losses[-1] < 1.0


def test_a_gpt_written_for_flash_attn_generates_with_its_cache(gpt):
    model = gpt()
    written = model.generate(torch.randint(16, (2, 5)), 20)
    assert written.shape == (2, 20)
    expected = model(written[:, :-1]).argmax(-1)
    assert torch.equal(written[:, 5:], expected[:, 4:])


# ---- bad input

Q, K, V = torch.zeros(B, T, H, D), torch.zeros(B, S, G, D), torch.zeros(B, S, G, D)
OF_2 = torch.tensor([0, 4, 9], dtype=torch.int32)


def call(q=Q, k=K, v=V, **options):
    return flash_attn.flash_attn_func(q, k, v, **options)


OF_Q, OF_K = torch.tensor([0, 3, 7]), torch.tensor([0, 4, 11])


def varlen(q=Q[0], of_q=OF_Q, of_k=OF_K, longest=(4, 7), **options):
    return flash_attn.flash_attn_varlen_func(q, K[0], V[0], of_q, of_k, *longest, **options)


def cached(q=Q[:, :1], cache=K, k=None, v=None, **options):
    return flash_attn.flash_attn_with_kvcache(q, cache.clone(), V.clone(), k, v, **options)


NEW = torch.zeros(B, 2, G, D)
MESSAGES = [
    (lambda: call(q=None), TypeError, "flash_attn_func: q must be a torch.Tensor, got NoneType"),
    (lambda: call(k=K[0]), ValueError, r"flash_attn_func: k must have axes \[B, T, H, D\], got \[11, 3, 8\]"),
    (lambda: call(v=V.half()), TypeError, "flash_attn_func: v must hold floating point, in the dtype and on the device of q, torch.float32 on cpu, got torch.float16 on cpu"),
    (lambda: call(v=V[:, 1:]), ValueError, r"flash_attn_func: v must have shape \[2, 11, 3, 8\], got \[2, 10, 3, 8\]"),
    (lambda: call(k=K[:1]), ValueError, r"flash_attn_func: k must have shape \[2, 11, 3, 8\], got \[1, 11, 3, 8\]"),
    (lambda: call(q=Q[:, :, :5]), ValueError, "flash_attn_func: the heads of q must be a multiple of those of k, got 5 and 3"),
    (lambda: call(softcap=30.0), NotImplementedError, r"flash_attn_func: softcap must be at most 0 \(none\), .*, got 30.0"),
    (lambda: call(window_size=(4, 0)), NotImplementedError, r"flash_attn_func: window_size must be \(-1, -1\), or \(-1, 0\) for causal: .*; got \(4, 0\)"),
    (lambda: call(window_size=(-1, 3)), NotImplementedError, r"window_size must be .*; got \(-1, 3\)"),
    (lambda: call(dropout_p=1.0), ValueError, r"flash_attn_func: dropout_p must be in \[0, 1 - 2\^-32\], got 1.0"),
    (lambda: call(dropout_p=0.1, return_attn_probs=True), NotImplementedError, "return_attn_probs must be False with dropout, .*; got dropout_p=0.1"),
    (lambda: call(alibi_slopes=torch.ones(G)), ValueError, r"alibi_slopes must have shape \[H\] = \[6\] or \[B, H\] = \[2, 6\], got \[3\]"),
    (lambda: call(alibi_slopes=[0.5] * H), TypeError, "alibi_slopes must be a tensor of floating point, got list"),
    (lambda: call(alibi_slopes=-torch.ones(H)), ValueError, r"flash_attn_func: alibi_slopes must be at least 0 \(or inf\), got -1.0"),
    (lambda: flash_attn.flash_attn_qkvpacked_func(Q), ValueError, r"flash_attn_qkvpacked_func: qkv must have shape \[B, T, 3, H, D\], got \[2, 7, 6, 8\]"),
    (lambda: flash_attn.flash_attn_kvpacked_func(Q, Q[:, :, None]), ValueError, r"flash_attn_kvpacked_func: kv must have shape \[B, T, 2, H, D\], got \[2, 7, 1, 6, 8\]"),
    (lambda: flash_attn.flash_attn_varlen_qkvpacked_func(Q, OF_2, 5), ValueError, r"qkv must have shape \[total, 3, H, D\], got"),
    (lambda: varlen(q=Q), ValueError, r"flash_attn_varlen_func: q must have axes \[total, H, D\], got \[2, 7, 6, 8\]"),
    (lambda: varlen(of_k=OF_2), ValueError, r"flash_attn_varlen_func: cu_seqlens_k must start at 0, never fall and end at 11, got \[0, 4, 9\]"),
    (lambda: varlen(of_q=torch.tensor([0.0, 7.0])), TypeError, r"cu_seqlens_q must be integers \[B \+ 1\], got float32"),
    (lambda: varlen(longest=(3, 7)), ValueError, "flash_attn_varlen_func: max_seqlen_q must be at least 4, the longest sequence, got 3"),
    (lambda: varlen(block_table=OF_2), NotImplementedError, "flash_attn_varlen_func: block_table must be None, since it is not built: gather the pages .*; got Tensor"),
    (lambda: cached(rotary_cos=Q), NotImplementedError, "flash_attn_with_kvcache: rotary_cos must be None, since it is not built: rotate q and k before the call; got Tensor"),
    (lambda: cached(block_table=OF_2), NotImplementedError, "flash_attn_with_kvcache: block_table must be None"),
    (lambda: cached(cache=K[:1]), ValueError, r"flash_attn_with_kvcache: k_cache must have shape \[2, 11, 3, 8\], got \[1, 11, 3, 8\]"),
    (lambda: cached(k=NEW), ValueError, "flash_attn_with_kvcache: k and v must be given both or neither, got v=None"),
    (lambda: cached(k=NEW, v=NEW), ValueError, "cache_seqlens must be given with k and v, which are written there, got None"),
    (lambda: cached(k=NEW, v=NEW, cache_seqlens=10), ValueError, r"cache_seqlens must be in \[0, 9\], so that 2 more fit into the cache, got \[10, 10\]"),
    (lambda: cached(k=NEW[:, :, :1], v=NEW[:, :, :1], cache_seqlens=1), ValueError, "k must have the 3 heads of k_cache, got 1"),
    (lambda: cached(cache_seqlens=torch.tensor([1])), ValueError, r"cache_seqlens must have shape \[B\] = \[2\], got \[1\]"),
    (lambda: cached(cache_seqlens=2.0), TypeError, "cache_seqlens must hold integers, got float"),
    (lambda: cached(cache_batch_idx=torch.tensor([0, 2])), ValueError, r"cache_batch_idx must be in \[0, 1\], got \[0, 2\]"),
    (lambda: cached(cache_leftpad=torch.tensor([0, -1])), ValueError, r"cache_leftpad must be in \[0, 11\], got \[0, -1\]"),
]  # fmt: skip


@pytest.mark.parametrize(("run", "error", "message"), MESSAGES, ids=[row[2] for row in MESSAGES])
def test_bad_input_is_refused_by_name(run, error, message):
    with pytest.raises(error, match=message):
        run()
