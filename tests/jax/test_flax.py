"""`linbias.jax.flax`: both Flax attentions, every variant, decoding, masks, dropout, messages."""

import importlib.util
from functools import partial
from itertools import product
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import linbias
from contract import rows
from linbias.jax.call import prepare
from linbias.schedules import VARIANTS, is_causal, variant_slopes
from linbias.torch import MultiheadAttention

pytest.importorskip("flax", reason="Flax has no release for every Python")

import flax.linen
from flax import nnx
from flax.linen.attention import dot_product_attention, make_attention_mask, make_causal_mask

import linbias.jax.flax as flax_module
from linbias.jax.flax import attention_fn, mha_alibi

B, T, H, WIDTH = 2, 7, 4, 8
X = np.random.default_rng(0).normal(size=(B, T, WIDTH)).astype(np.float32)
QKV = np.random.default_rng(1).normal(size=(3, B, T, H, 2)).astype(np.float32)


def bias_of(variant, heads=H, length=T):
    left, right = variant_slopes("test", variant, heads)
    return linbias.bias(
        left, length, length, np.full(heads, np.inf) if is_causal(variant) else right
    )


def flax_attention(variant, mask=None):
    """What Flax computes when it is given the whole bias."""
    bias = np.maximum(bias_of(variant), -1e30).astype(np.float32)
    return dot_product_attention(*map(jnp.asarray, QKV), bias=bias, mask=mask)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_flax_with_the_whole_bias(variant):
    np.testing.assert_allclose(
        attention_fn(variant)(*map(jnp.asarray, QKV)), flax_attention(variant), atol=1e-6
    )


@pytest.mark.parametrize("variant", ("causal", "symmetric", "directional", "none"))
def test_the_layers_of_pytorch_linen_and_nnx_agree_on_the_same_weights(variant):
    torch.manual_seed(0)
    ours = MultiheadAttention(WIDTH, H, variant=variant, batch_first=True)
    expected = ours(torch.from_numpy(X))[0].detach().numpy()
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
    params = {}
    for name, theirs in names.items():
        weight, bias = (p.detach().numpy() for p in getattr(ours, theirs).parameters())
        inner, heads = weight.T, (H, WIDTH // H)
        params[name] = (
            {"kernel": inner.reshape(*heads, WIDTH), "bias": bias}
            if name == "out"
            else {"kernel": inner.reshape(WIDTH, *heads), "bias": bias.reshape(heads)}
        )
    linen = flax.linen.MultiHeadDotProductAttention(
        num_heads=H, attention_fn=attention_fn(variant)
    )
    np.testing.assert_allclose(linen.apply({"params": params}, X), expected, atol=1e-6)
    layer = nnx.MultiHeadAttention(
        H, WIDTH, attention_fn=attention_fn(variant), decode=False, rngs=nnx.Rngs(0)
    )
    for name, arrays in params.items():
        for kind, array in arrays.items():
            getattr(getattr(layer, name), kind)[...] = jnp.asarray(array)
    np.testing.assert_allclose(layer(jnp.asarray(X)), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("jitted", "window"),
    rows(lambda *row: any(row), (False, None), (True, None), (False, (2, 0))),
)
def test_nnx_decodes_with_a_cache_as_it_reads_at_once(jitted, window):
    """A window reaches back from the last key of the cache."""
    layer = nnx.MultiHeadAttention(
        H, WIDTH, attention_fn=attention_fn(window=window), decode=False, rngs=nnx.Rngs(0)
    )
    x = jnp.asarray(X)
    expected = layer(x)
    layer.init_cache((B, T + 3, WIDTH))
    step = (nnx.jit if jitted else lambda f: f)(lambda layer, token: layer(token, decode=True))
    steps = [step(layer, x[:, t : t + 1]) for t in range(T)]
    np.testing.assert_allclose(jnp.concatenate(steps, 1), expected, atol=1e-6)


def test_linen_decodes_with_a_cache_as_it_reads_at_once():
    x = jnp.asarray(X)
    plain, decoding = (
        flax.linen.MultiHeadDotProductAttention(
            num_heads=H, decode=decode, attention_fn=attention_fn()
        )
        for decode in (False, True)
    )
    variables = decoding.init(jax.random.key(0), jnp.zeros((B, T + 3, WIDTH)))
    expected = plain.apply({"params": variables["params"]}, x)
    step = jax.jit(lambda variables, token: decoding.apply(variables, token, mutable=["cache"]))
    for t in range(T):
        out, cache = step(variables, x[:, t : t + 1])
        variables = {**variables, **cache}
        np.testing.assert_allclose(out[:, 0], expected[:, t], atol=1e-6)


LENGTHS = np.array([[True] * T, [True] * 4 + [False] * 3])
MASKS = {
    "causal": make_causal_mask(jnp.ones((B, T))),
    "keys padded right": LENGTHS[:, None, None],
    "keys padded left": LENGTHS[:, None, None, ::-1],
    "both padded, causal": make_attention_mask(LENGTHS, LENGTHS) * make_causal_mask(LENGTHS),
    "holes": np.array([True, False, True, True, False, True, True]),
    "per head": np.random.default_rng(2).random((B, H, T, T)) < 0.7,
}


@pytest.mark.parametrize(
    ("name", "variant", "known"),
    rows(
        lambda name, variant, known: (
            variant == "causal" and known == (list(MASKS).index(name) % 2 == 0)
        ),
        *product(MASKS, ("causal",), (True, False)),
        *product([name for name in MASKS if "causal" not in name], ("symmetric",), (True, False)),
    ),
)
def test_masks_hide_keys_known_or_traced(name, variant, known):
    mask = MASKS[name]
    attend = attention_fn(variant)
    run = (lambda m: attend(*QKV, mask=m)) if known else jax.jit(lambda m: attend(*QKV, mask=m))
    out = np.asarray(run(mask))
    visible = np.tri(T, dtype=bool) if variant == "causal" else True
    seen = np.broadcast_to((mask != 0) & visible, (B, H, T, T)).any(-1).swapaxes(1, 2)
    expected = np.asarray(flax_attention(variant, mask != 0))
    np.testing.assert_allclose(out[seen], expected[seen], atol=1e-6)
    assert (out[~seen] == 0).all()


def options_of(monkeypatch, variant, mask, num_queries=T, **options):
    """The options that a mask of this call comes to."""
    found = {}

    def spy(*args, **options):
        found.update((n, options.get(n)) for n in ("key_range", "query_start", "mask"))
        return prepare(*args, **options)

    monkeypatch.setattr(flax_module, "prepare", spy)
    attention_fn(variant, **options)(QKV[0][:, :num_queries], *QKV[1:], mask=mask)
    return {n: np.asarray(x).tolist() for n, x in found.items() if x is not None}


RIGHT, LEFT = {"key_range": [[0, 7], [0, 4]]}, {"key_range": [[0, 7], [3, 7]]}
AT_THE_KEYS = {"query_start": [0, 0]}


@pytest.mark.parametrize(
    ("variant", "name", "options"),
    [
        ("causal", "causal", {}),
        ("causal", "keys padded right", RIGHT | AT_THE_KEYS),
        ("causal", "keys padded left", LEFT | AT_THE_KEYS),
        ("symmetric", "keys padded right", RIGHT | AT_THE_KEYS),
        ("symmetric", "keys padded left", LEFT | AT_THE_KEYS),
    ],
)
def test_a_known_mask_that_is_a_range_of_keys_becomes_one(monkeypatch, variant, name, options):
    assert options_of(monkeypatch, variant, MASKS[name]) == options


@pytest.mark.parametrize(
    ("variant", "known"), rows("symmetric-True", *product(("causal", "symmetric"), (True, False)))
)
def test_a_window_hides_what_the_mask_shows_and_a_mask_what_the_window_shows(variant, known):
    mask, p = MASKS["holes"], np.arange(T)
    within = (p[:, None] - p <= 2) & (p - p[:, None] <= 1)
    visible = (mask & within & np.tri(T, dtype=bool)) if variant == "causal" else mask & within
    run = partial(attention_fn(variant, window=(2, 1)), *QKV)
    out = np.asarray((run if known else jax.jit(lambda mask: run(mask=mask)))(mask=mask))
    seen = visible.any(-1)
    expected = np.asarray(flax_attention(variant, jnp.asarray(visible)[None, None]))
    np.testing.assert_allclose(out[:, seen], expected[:, seen], atol=1e-6)
    assert (out[:, ~seen] == 0).all()


@pytest.mark.thorough
def test_a_known_mask_that_shows_what_the_window_shows_is_no_mask(monkeypatch):
    within = np.tri(T, dtype=bool) & ~np.tri(T, k=-3, dtype=bool)
    assert options_of(monkeypatch, "causal", within, window=(2, 0)) == {}
    # Later keys are shown, though the window has none: the mask is not causal.
    both = options_of(monkeypatch, "symmetric", np.ones((T, T), bool), window=(2, 0))
    assert both == {}


def test_one_query_gets_the_position_of_the_last_key_shown(monkeypatch):
    """Farther right it would see the same, but large distances cost the scores digits."""
    mask = np.arange(T) < np.array([5, 6])[:, None]
    options = options_of(monkeypatch, "causal", mask[:, None, None], num_queries=1)
    assert options == {"key_range": [[0, 5], [0, 6]], "query_start": [4, 5]}


def test_other_masks_stay_masks_and_the_core_refuses_them(monkeypatch):
    for name in ("holes", "per head", "both padded, causal"):
        assert "mask" in options_of(monkeypatch, "causal", MASKS[name])
    attend = attention_fn("causal", implementation="cpu")
    attend(*QKV, mask=MASKS["causal"])
    with pytest.raises(NotImplementedError, match="cpu cannot run this call: it takes "):
        attend(*QKV, mask=MASKS["holes"])


@pytest.mark.parametrize(
    ("variant", "known"), rows("causal-True", *product(("causal", "symmetric"), (True, False)))
)
def test_one_query_sees_what_its_mask_shows(variant, known):
    """Each batch row at its own: a cache filled to another length, with padding or a hole."""
    q, k, v = QKV[0][:, :1], QKV[1], QKV[2]
    mask = np.array([[False, True, False, True, True, False, False], [True] * 6 + [False]])
    run = attention_fn(variant)
    run = run if known else jax.jit(run)
    out = run(q, k, v, mask=mask[:, None, None])
    for b, end in enumerate((5, 6)):
        here = (x[b : b + 1] for x in (q, k[:, :end], v[:, :end]))
        bias = np.where(mask[b, :end], bias_of("causal", length=end)[:, -1:], -1e30)
        expected = dot_product_attention(*here, bias=bias.astype(np.float32)[None])
        np.testing.assert_allclose(out[b : b + 1], expected, atol=1e-6)


def test_dropout_acts_in_training_only_and_obeys_its_key():
    layer = nnx.MultiHeadAttention(
        H, WIDTH, dropout_rate=0.5, attention_fn=attention_fn(), decode=False, rngs=nnx.Rngs(0)
    )
    x = jnp.asarray(X)
    run = lambda seed, **options: layer(x, rngs=nnx.Rngs(dropout=seed), **options)  # noqa: E731
    assert (run(1, deterministic=False) == run(1, deterministic=False)).all()
    assert not (run(1, deterministic=False) == run(2, deterministic=False)).all()
    assert (run(1, deterministic=True) == run(2, deterministic=True)).all()


def test_any_number_of_batch_axes_is_taken():
    attend, (q, k, v) = attention_fn(), QKV
    expected = attend(q, k, v)
    np.testing.assert_array_equal(attend(q[0], k[0], v[0]), expected[0])
    np.testing.assert_array_equal(attend(q[:, None], k[:, None], v[:, None])[:, 0], expected)


def test_mha_alibi_is_the_seed_documents_closure():
    def closure(seed, x, num_heads, qkv_features):
        slopes = 2.0 ** (-8 * (jnp.arange(num_heads) + 1) / num_heads)
        i = jnp.arange(len(x))
        bias = -slopes[:, None, None] * jnp.abs(i[:, None] - i)

        def attend(query, key, value, mask=None, **options):
            return dot_product_attention(query, key, value, bias=bias, mask=mask, **options)

        layer = flax.linen.MultiHeadDotProductAttention(
            num_heads, qkv_features=qkv_features, attention_fn=attend
        )
        return layer.apply(layer.init(jax.random.PRNGKey(seed), x), x).ravel()

    out = mha_alibi(3, X[0].tolist(), num_heads=6, qkv_features=12)
    np.testing.assert_allclose(out, closure(3, X[0], 6, 12), atol=1e-6)


Q = np.zeros((B, T, H, 2), np.float32)
EARLIER = np.tri(T, k=-1, dtype=bool).T


def attend(q=Q, k=Q, v=Q, variant="causal", **options):
    return lambda: attention_fn(variant)(q, k, v, **options)


MESSAGES = [
    (lambda: attention_fn(left=[0.5]), TypeError, "no argument left; say slopes$"),
    (lambda: attention_fn("both"), ValueError, "variant must be one of .*, got 'both'"),
    (lambda: attention_fn("causal", right_slopes=[1.0] * H), ValueError,
     "right_slopes contradicts variant 'causal'"),
    (lambda: attention_fn(window=(3,)), TypeError,
     r"attention_fn: window must be \(left, right\), two integers: .* got \(3,\)"),
    (lambda: attention_fn(local_window_size=3), TypeError,
     "attention_fn: there is no argument local_window_size; say window"),
    (attend(*[Q[:, :, :3]] * 3, "directional"), ValueError, "needs an even num_heads, got 3"),
    (attend(Q[0, 0]), ValueError, r"q must be \[..., length, heads, size\] .* got \[4, 2\]"),
    (attend(k=Q[:1]), ValueError, r"k must .* batch axes \[2\], got \[1, 7, 4, 2\]"),
    (attend(v=Q[:, :6]), ValueError, "k has 7 keys but v has 6"),
    (attend(module=object()), NotImplementedError, "sow_weights must be False"),
    (attend(variant="symmetric", is_causal=True), ValueError,
     "is_causal must be False for variant 'symmetric'"),
    (attend(dropout_rate=0.1), ValueError, "dropout_rate 0.1 needs a dropout_rng, got None"),
    (attend(mask=np.ones((3, 1, T, T))), ValueError,
     r"mask must fit to \[2, 4, 7, 7\], got \[3, 1, 7, 7\]"),
    (attend(variant="symmetric", mask=MASKS["causal"]), ValueError,
     "mask must not be causal for variant 'symmetric', .* use variant='causal'"),
    (attend(variant="none", mask=MASKS["causal"]), ValueError, "use variant='none_causal'"),
    (attend(mask=EARLIER), ValueError,
     "mask must show keys that variant 'causal' shows, got only later ones"),
    (lambda: mha_alibi(0, Q, 2, 4), ValueError,
     r"mha_alibi: x must have 2 axes, length, width, got \[2, 7, 4, 2\]"),
    (lambda: mha_alibi(0, X[0], 3, 4), ValueError,
     "mha_alibi: qkv_features must be a multiple of num_heads 3, got 4"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "kind", "words"), MESSAGES)
def test_messages(function, kind, words):
    with pytest.raises(kind, match=words):
        function()


@pytest.mark.thorough
def test_the_example_trains_and_tests_every_position(capsys):
    path = Path(__file__).parents[2] / "examples" / "flax_extrapolation.py"
    spec = importlib.util.spec_from_file_location("flax_extrapolation", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    sizes = "--steps 2 --length 8 --batch 2 --width 8 --heads 2 --layers 1"
    results = example.main([*sizes.split(), *"--test-lengths 8 16 --test-bytes 32".split()])
    assert set(results) == set(example.POSITIONS)
    assert all(4 < bits < 10 for row in results.values() for bits in row)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(results)
