"""`linbias.compat.flash_attn` gives what flash-attn's documentation says, in plain code."""

import inspect
import itertools
from pathlib import Path

import pytest
import torch

from linbias.compat import flash_attn

pytestmark = pytest.mark.usefixtures("same_start")


def plain(q, k, v, slopes=None, causal=False, scale=None, first=0, end=None, window=(-1, -1)):
    """Out and lse over the keys first .. end - 1, with a bias of -slope * |i + S - T - j|."""
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
    for limit, beyond in zip(window, (distance, -distance), strict=True):
        if limit >= 0:
            scores = scores.masked_fill(beyond > limit, -torch.inf)
    weights = scores.softmax(-1).nan_to_num()
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


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


def same_with_gradients(got, want, leaves):
    """Outputs are equal, and so are their gradients, for all results that have some."""
    douts = [torch.randn_like(x) for x in want]
    for found, expected in zip(got, want, strict=True):
        torch.testing.assert_close(found, expected)
    gradients = []
    for results in (got, want):
        finite = [x.masked_fill(x.isinf(), 0) for x in results]
        gradients.append(torch.autograd.grad(finite, leaves, douts, allow_unused=True))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("slopes", SLOPES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(7, 11), (11, 7), (9, 9)], ids=str)
def test_flash_attn_func(slopes, causal, lengths):
    q, k, v = inputs(*lengths)
    given = None if SLOPES[slopes] is None else SLOPES[slopes].double().requires_grad_()
    out, lse, s_dmask = flash_attn.flash_attn_func(
        q, k, v, causal=causal, alibi_slopes=given, return_attn_probs=True
    )
    assert s_dmask is None and out.is_contiguous()
    leaves = (q, k, v) if given is None else (q, k, v, given)
    same_with_gradients((out, lse), plain(q, k, v, given, causal), leaves)


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
    options = {"causal": True, "alibi_slopes": slopes}
    got = flash_attn.flash_attn_varlen_qkvpacked_func(qkv, lengths, 5, **options)
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
    options = {"causal": causal, "alibi_slopes": slopes, "return_softmax_lse": True}
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=filled, **options
    )
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
    where = {
        "cache_seqlens": torch.tensor([9, 4]),
        "cache_batch_idx": rows,
        "cache_leftpad": first,
    }
    out = flash_attn.flash_attn_with_kvcache(
        q, *caches, k, v, **where, causal=True, alibi_slopes=slopes
    )
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
    """Caches are made with `torch.empty`, and rows hold what was there before."""
    filled, first, slopes = torch.tensor([0, 13, 6]), torch.tensor([0, 5, 6]), torch.rand(H)
    q = torch.randn(3, max(1, num_new), H, D)
    new = torch.randn(2, 3, num_new, G, D).unbind() if num_new else ()
    is_garbage = torch.ones(3, 16, dtype=torch.bool)
    for b, row in enumerate(range(3) if rows is None else rows.tolist()):
        is_garbage[row, first[b] : filled[b]] = False

    def attend(value):
        own = [cache.masked_fill(is_garbage[..., None, None], value) for cache in caches]
        where = {"cache_seqlens": filled, "cache_batch_idx": rows, "cache_leftpad": first}
        options = {"causal": True, "alibi_slopes": slopes, "return_softmax_lse": True}
        return flash_attn.flash_attn_with_kvcache(q, *own, *new, **where, **options)

    for found, expected in zip(attend(garbage), attend(0.0), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"window_size": 4}, TypeError),
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


@pytest.mark.parametrize("causal", (True, False))
def test_caches_in_pages_are_as_those_in_rows(causal):
    """New keys go into the pages, whose order says nothing; packed calls read them, too."""
    q, (k, v) = torch.randn(3, 4, H, D), torch.randn(2, 3, 4, G, D)
    rows, size = torch.randn(2, 3, 24, G, D), 8
    table = torch.tensor([[7, 2, 5], [1, 8, 0], [3, 6, 4]], dtype=torch.int32)
    pages = rows.new_empty(2, 9, size, G, D)
    pages[:, table.long()] = rows.unflatten(2, (3, size))
    given = {
        "cache_seqlens": torch.tensor([20, 9, 0]),
        "causal": causal,
        "return_softmax_lse": True,
    }
    given["alibi_slopes"] = SLOPES["one row"]
    wanted = flash_attn.flash_attn_with_kvcache(q, *rows, k, v, **given)
    found = flash_attn.flash_attn_with_kvcache(q, *pages, k, v, block_table=table, **given)
    torch.testing.assert_close(found, wanted)
    assert torch.equal(pages[:, table.long()], rows.unflatten(2, (3, size)))
    offsets = torch.arange(4) * 4, torch.tensor([0, 24, 37, 41])
    sizes = {"max_seqlen_q": 4, "max_seqlen_k": 24, "causal": causal, "return_attn_probs": True}
    sizes["alibi_slopes"] = SLOPES["one row"]
    packed = [torch.cat([x[b, :n] for b, n in enumerate((24, 13, 4))]) for x in rows]
    wanted = flash_attn.flash_attn_varlen_func(q.flatten(0, 1), *packed, *offsets, **sizes)
    found = flash_attn.flash_attn_varlen_func(
        q.flatten(0, 1), *pages, *offsets, block_table=table, **sizes
    )
    torch.testing.assert_close(found[:2], wanted[:2])
    with pytest.raises(ValueError, match="flash_attn_varlen_func: cu_seqlens_k must start at 0"):
        flash_attn.flash_attn_varlen_func(
            q.flatten(0, 1),
            *pages,
            offsets[0],
            torch.tensor([0, 5, 3, 9]),
            4,
            24,
            block_table=table,
        )
    with pytest.raises(ValueError, match="dropout_p must be 0 with a block_table"):
        flash_attn.flash_attn_varlen_func(
            q.flatten(0, 1), *pages, *offsets, 4, 24, 0.5, block_table=table
        )


# ---- signatures and programs

OPTIONS = """dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic
    return_attn_probs"""
BOTH = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q k v {OPTIONS}",
    "flash_attn_kvpacked_func": f"q kv {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv {OPTIONS}",
    "flash_attn_varlen_func": f"q k v {BOTH} {OPTIONS} block_table",
    "flash_attn_varlen_kvpacked_func": f"q kv {BOTH} {OPTIONS}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {OPTIONS}",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens"
    " cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap"
    " rotary_interleaved alibi_slopes num_splits return_softmax_lse",
}
NOT_NONE = {
    **{"dropout_p": 0.0, "causal": False, "window_size": (-1, -1), "softcap": 0.0},
    **{"deterministic": False, "return_attn_probs": False, "rotary_interleaved": True},
    **{"num_splits": 0, "return_softmax_lse": False},
}


@pytest.mark.parametrize("name", flash_attn.__all__)
def test_arguments_are_those_of_flash_attn_in_their_order(name):
    """As flash_attn_interface.py of flash-attn 2.8 has them."""
    parameters = inspect.signature(getattr(flash_attn, name)).parameters
    assert list(parameters) == SIGNATURES[name].split()
    for argument, parameter in parameters.items():
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if parameter.default is not parameter.empty:
            assert parameter.default == NOT_NONE.get(argument), argument


def test_a_window_may_say_causal():
    q, k, v = inputs()
    causal, whole = (flash_attn.flash_attn_func(q, k, v, causal=c) for c in (True, False))
    said = {causal: ((-1, 0), (S, 0)), whole: ((S - 1, T - 1), (S - 1, -1), (-1, S), (S, S))}
    for expected, windows in said.items():
        for window in windows:
            assert torch.equal(flash_attn.flash_attn_func(q, k, v, window_size=window), expected)
    for window in ((S - 1, 0), (S + 3, -1), (S - 1, 2), (-1, 2)):
        taken = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=window)
        assert torch.equal(taken, causal)


@pytest.mark.parametrize("lengths", [(7, 11), (11, 4), (9, 9)], ids=str)
@pytest.mark.parametrize("window", [(2, 3), (0, 1), (3, -1), (-1, 2), (2, 0), (40, 6), (5, 40)])
@pytest.mark.parametrize("causal", [False, True])
def test_a_window_hides_what_lies_beyond(lengths, window, causal):
    q, k, v = inputs(*lengths)
    options = {"causal": causal, "alibi_slopes": SLOPES["one row"]}
    out, lse, _ = flash_attn.flash_attn_func(
        q, k, v, window_size=window, return_attn_probs=True, **options
    )
    want = plain(q, k, v, SLOPES["one row"], causal, window=window)
    same_with_gradients((out, lse), want, (q, k, v))


def test_a_window_in_packed_sequences_and_in_a_cache(caches):
    q, k, v = (torch.randn(n, h, D) for n, h in ((17, H), (17, G), (17, G)))
    starts = offsets(0)
    out = flash_attn.flash_attn_varlen_func(
        q, k, v, starts, starts, 8, 8, causal=True, window_size=(2, 0)
    )
    for a, b in itertools.pairwise(starts.tolist()):
        want, _ = plain(q[None, a:b], k[None, a:b], v[None, a:b], None, True, window=(2, 0))
        torch.testing.assert_close(out[a:b], want[0])
    q, filled = torch.randn(3, 2, H, D), torch.tensor([4, 9, 6], dtype=torch.int32)
    out = flash_attn.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=filled, causal=True, window_size=(3, 0)
    )
    for b, end in enumerate(filled.tolist()):
        own = (x[b : b + 1] for x in (q, *caches))
        want, _ = plain(*own, None, True, end=end, window=(3, 0))
        torch.testing.assert_close(out[b : b + 1], want)


def test_a_call_compiles_whole():
    def call(qkv, caches, slopes):
        options = {"causal": True, "alibi_slopes": slopes}
        whole = flash_attn.flash_attn_qkvpacked_func(qkv, **options, return_attn_probs=True)
        cached = flash_attn.flash_attn_with_kvcache(
            qkv[:, :, 0], *caches, cache_seqlens=5, **options
        )
        return *whole[:2], cached

    given = torch.randn(3, 2, 3, H, D), torch.randn(2, 3, 16, G, D).unbind(), torch.rand(H)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), call(*given))


def test_dropout_keeps_the_mean():
    q, k = torch.zeros(1, 1, 1, 8), torch.randn(1, 4096, 1, 8)
    v = torch.ones(1, 4096, 1, 8)
    out = flash_attn.flash_attn_func(q, k, v, dropout_p=0.5)
    assert out[0, 0, 0, 0] != 1 and abs(out[0, 0, 0, 0] - 1) < 0.1


@pytest.fixture(scope="module")
def gpt():
    """The small GPT's classes, after one line of its program was changed."""
    text = (Path(__file__).parent / "flash_gpt.py").read_text()
    assert text.count("from flash_attn import") == 1
    names = {}
    changed = text.replace("from flash_attn import", "from linbias.compat.flash_attn import")
    exec(compile(changed, "flash_gpt.py", "exec"), names)
    return names["GPT"]


def test_a_gpt_written_for_flash_attn_generates_with_its_cache(gpt):
    model = gpt()
    written = model.generate(torch.randint(16, (2, 5)), 20)
    assert written.shape == (2, 20)
    expected = model(written[:, :-1]).argmax(-1)
    assert torch.equal(written[:, 5:], expected[:, 4:])


# ---- bad input

Q, K, V = torch.zeros(B, T, H, D), torch.zeros(B, S, G, D), torch.zeros(B, S, G, D)
OF_2 = torch.tensor([0, 4, 9], dtype=torch.int32)
OF_Q, OF_K = torch.tensor([0, 3, 7]), torch.tensor([0, 4, 11])
NEW, FEW = torch.zeros(B, 2, G, D), torch.zeros(B, 2, 1, D)
t, PROBS = torch.tensor, dict(dropout_p=0.1, return_attn_probs=True)
FULL = dict(k=NEW, v=NEW, cache_seqlens=10)


def call(q=Q, k=K, v=V, **options):
    return flash_attn.flash_attn_func(q, k, v, **options)


def varlen(q=Q[0], of_q=OF_Q, of_k=OF_K, longest=(4, 7), **options):
    return flash_attn.flash_attn_varlen_func(q, K[0], V[0], of_q, of_k, *longest, **options)


def cached(q=Q[:, :1], cache=K, k=None, v=None, **options):
    return flash_attn.flash_attn_with_kvcache(q, cache.clone(), V.clone(), k, v, **options)


def qkvpacked():
    return flash_attn.flash_attn_qkvpacked_func(Q)


def kvpacked():
    return flash_attn.flash_attn_kvpacked_func(Q, Q[:, :, None])


def varlen_qkvpacked():
    return flash_attn.flash_attn_varlen_qkvpacked_func(Q, OF_2, 5)


WRONG_VALUES = [
    (call, dict(k=K[0]), r"k must have shape \[B, S, G, D\] = \[2, S, G, 8\], got \[11, 3, 8\]"),
    (call, dict(v=V[:, 1:]), r"v must have shape .* = \[2, 11, 3, 8\], got \[2, 10, 3, 8\]"),
    (call, dict(k=K[:1]), r"k must have shape .* = \[2, 11, 3, 8\], got \[1, 11, 3, 8\]"),
    (call, dict(q=Q[:, :, :5]), "the heads of q must be a multiple of those of k, got 5 and 3"),
    (call, dict(dropout_p=1.0), r"dropout_p must be in \[0, 1 - 2\^-32\], got 1.0"),
    (
        call,
        dict(alibi_slopes=t([1.0])),
        r"alibi_slopes must have .*\[B, H\] = \[2, 6\], got \[1\]",
    ),
    (call, dict(alibi_slopes=-t([1.0] * H)), r"alibi_slopes must be at least 0 .*, got -1"),
    (qkvpacked, {}, r"qkv must have shape \[B, T, 3, H, D\] = .*, got \[2, 7, 6, 8\]"),
    (kvpacked, {}, r"kv must have shape \[B, S, 2, G, D\] = .*, got \[2, 7, 1, 6, 8\]"),
    (varlen_qkvpacked, {}, r"qkv must have shape \[total, 3, H, D\] = .*, got"),
    (varlen, dict(q=Q), r"q must have shape \[total_q, H, D\] = .*, got \[2, 7, 6, 8\]"),
    (cached, dict(cache=K[:1]), r"k_cache must have shape .* = \[2, 11, 3, 8\], got \[1, 11, 3"),
    (
        cached,
        dict(k=NEW),
        "k and v must be given both or neither, and with cache_seqlens, .* None",
    ),
    (cached, dict(k=NEW, v=NEW), "and with cache_seqlens, where they are written, got None"),
    (cached, FULL, r"cache_seqlens must be in \[0, 9\], so that 2 more fit .*, got \[10, 10\]"),
    (
        cached,
        dict(k=FEW, v=FEW, cache_seqlens=1),
        r"k must have .* = \[2, 2, 3, 8\], got \[2, 2, 1",
    ),
    (cached, dict(cache_seqlens=t([1])), r"cache_seqlens must have .* \[B\] = \[2\], got \[1\]"),
    (
        cached,
        dict(cache_batch_idx=t([0, 2])),
        r"cache_batch_idx must be in \[0, 1\], got \[0, 2\]",
    ),
    (cached, dict(cache_leftpad=t([0, -1])), r"cache_leftpad must be in \[0, 11\], got \[0, -1\]"),
    (cached, dict(block_table=t([[0], [1]]), cache_seqlens=None), "cache_seqlens must be given"),
    (cached, dict(block_table=t([[0], [1]]), cache_leftpad=t([0, 1])), "cache_leftpad be None"),
    (
        cached,
        dict(block_table=t([[0], [2]]), cache_seqlens=5),
        r"block_table must be in \[0, 2\), .* got 2 for page 0",
    ),
    (cached, dict(block_table=t([[0]]), cache_seqlens=5), "block_table must have shape"),
]
WRONG_KINDS = [
    (call, dict(q=None), "q must be a torch.Tensor, got NoneType"),
    (call, dict(v=V.half()), "v must hold floating point, .* of q, float32 on cpu, got float16"),
    (call, dict(alibi_slopes=[0.5] * H), "alibi_slopes must be a torch.Tensor, got list"),
    (varlen, dict(of_q=[0, 7]), "cu_seqlens_q must be a torch.Tensor, got list"),
    (cached, dict(cache_seqlens=2.0), "cache_seqlens must be a torch.Tensor, got float"),
    (cached, dict(cache_leftpad=t([0.0, 0.0])), "cache_leftpad must hold integers, got float32"),
    (call, dict(window_size=(4.0, 0)), r"window_size must be two integers, .*, got \(4.0, 0\)"),
]
NOT_BUILT = [
    (call, dict(softcap=30.0), r"softcap must be at most 0 \(none\), .*, got 30.0"),
    (call, PROBS, "return_attn_probs must be False with dropout, .*; got dropout_p=0.1"),
    (cached, dict(rotary_cos=Q), "rotary_cos must be None, .*: rotate q and k before .*Tensor"),
]
TABLES = {ValueError: WRONG_VALUES, TypeError: WRONG_KINDS, NotImplementedError: NOT_BUILT}
MESSAGES = [(error, *row) for error, rows in TABLES.items() for row in rows]
NAMES = {call: "func", cached: "with_kvcache", varlen: "varlen_func", qkvpacked: "qkvpacked_func"}
NAMES |= {kvpacked: "kvpacked_func", varlen_qkvpacked: "varlen_qkvpacked_func"}


@pytest.mark.parametrize(("error", "run", "given", "words"), MESSAGES)
def test_bad_input_is_refused_by_name(error, run, given, words):
    with pytest.raises(error, match=f"^flash_attn_{NAMES[run]}: .*{words}"):
        run(**given)
