"""The cache of constant size gives what the growing one gives, and drops nothing in silence."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from linbias.models.decoder.layout import TokenLayout
from linbias.models.fused import fuse
from linbias.models.window_cache.cache import WindowCache
from linbias.models.window_cache.certificate import Settings, Uncertified
from linbias.models.window_cache.layer import WindowLayer
from linbias.models.window_cache.reach import reach_of_weights
from small_models import VOCAB, assert_near, build, build_paper, left_padded, tokens
from test_models_windows import MODELS, made
from test_transformers_fused import bloom

pytestmark = pytest.mark.usefixtures("no_gradients")
TOLERANCE = 2.0**-24  # of float64 models: with their own, no key would leave


def quiet(**changes: Any) -> Any:
    """A model whose windows are much shorter than the texts below."""
    model = build(**{"initializer_range": 0.1, **changes})
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = VOCAB - 1
    return model


def words(*shape: int) -> Tensor:
    return tokens(*shape).clamp(max=VOCAB - 2)  # none is padding


def read(model: Any, ids: Tensor, cache: WindowCache, parts: list[int]) -> Tensor:
    found, at = [], 0
    for n in parts:
        found.append(model(ids[:, at : at + n], past_key_values=cache).logits)
        at += n
    return torch.cat(found, 1)


PARTS = [700, 1, 1, 3, 300, 5, 1, 512, 512, *[1] * 20]


@pytest.mark.parametrize("windows", ["adaptive", "weights"])
@pytest.mark.parametrize(("rows", "shared"), [(1, 4), (3, 2)])
def test_reading_in_parts_is_reading_at_once(windows, rows, shared):
    model = quiet(num_key_value_heads=shared)
    ids = words(rows, sum(PARTS))
    cache = WindowCache.for_model(model, TOLERANCE, windows)
    found = read(model, ids, cache, PARTS)
    assert_near(found, model(ids).logits, 1e-6)
    assert cache.uncertified == 0 and cache.largest_dropped <= TOLERANCE / 2
    assert cache.layers[0].counts[0] < sum(PARTS) / 2  # keys did leave
    assert cache.get_seq_length() == sum(PARTS)


def test_windows_by_the_weights_leave_half_of_the_tolerance_to_kept_keys():
    model = quiet()
    windows = WindowCache.for_model(model, TOLERANCE, "weights").windows
    needed = reach_of_weights(model).of_heads(TOLERANCE / 2)
    assert windows == needed.reshape(*np.shape(windows), -1).max(2).tolist()


@pytest.mark.parametrize("name", MODELS)
def test_every_family_reads_through_it(name):
    model = made(name)
    ids = torch.randint(model.config.vocab_size, (2, 900))
    cache = WindowCache.for_model(model, 1e-6)
    assert_near(read(model, ids, cache, [600, 200, 1, 99]), model(ids).logits, 1e-3)
    assert cache.uncertified == 0


def test_memory_does_not_grow():
    model = quiet()
    ids = words(1, 12_000)
    cache = WindowCache.for_model(model, TOLERANCE, 90)
    read(model, ids[:, :4000], cache, [1000] * 4)
    size = cache.num_bytes
    read(model, ids[:, 4000:], cache, [1000] * 8)
    assert cache.num_bytes == size


def test_windows_that_are_too_short_are_never_silent():
    """The rows that are counted are at least those that really miss more than the tolerance."""
    model = quiet(num_hidden_layers=1)
    ids = words(1, 1800)
    cache = WindowCache.for_model(model, 1e-3, 150)
    found = read(model, ids, cache, [100] * 18)
    weights = model(ids, output_attentions=True).attentions[0][0].double()  # [H, T, T]
    distance = torch.arange(1800)[:, None] - torch.arange(1800)
    missing = weights.masked_fill(distance < 1200, 0).sum(-1)  # what no head can still have
    assert cache.uncertified >= int((missing > 1e-3).sum()) > 0
    assert cache.largest_dropped >= float(missing.max())
    assert (found - model(ids).logits).abs().max() > 1e-6
    strict = WindowCache.for_model(model, 1e-3, 150, on_uncertified="raise")
    with pytest.raises(Uncertified, match=r"rows of heads may miss more than tolerance 0.001"):
        read(model, ids, strict, [100] * 18)


def pickled(cache: Any) -> Any:
    return pickle.loads(pickle.dumps(cache))


@pytest.mark.parametrize("made_copy", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_goes_its_own_way(made_copy):
    model, ids = quiet(), words(1, 1400)
    cache = WindowCache.for_model(model, TOLERANCE)
    with torch.inference_mode():
        read(model, ids[:, :1300], cache, [900, 398, 1, 1])
        cache.batch_select_indices(torch.tensor([0]))
    other, mine = made_copy(cache), words(1, 700)
    assert made_copy(cache.layers[0]).pool.keys is not cache.layers[0].pool.keys
    found = read(model, mine, other, [1, 1, 698]), read(model, ids[:, 1300:], cache, [1, 1, 98])
    for logits, end in zip(found, (mine, ids[:, 1300:]), strict=True):
        assert_near(logits, model(torch.cat([ids[:, :1300], end], 1)).logits[:, 1300:], 1e-6)


WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "beams": {"do_sample": False, "num_beams": 3},
    "two texts": {"do_sample": True, "num_return_sequences": 2},
    "in chunks": {"do_sample": False, "prefill_chunk_size": 256},
    "looked up": {"do_sample": False, "prompt_lookup_num_tokens": 5},
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_generate_writes_the_same(way, padded):
    if padded and way in ("looked up", "in chunks"):
        pytest.skip("Transformers does so for one text alone")
    model = quiet()
    ids, mask = left_padded([words(900), words(400), words(3)] if padded else [words(900)])
    given = {"attention_mask": mask, "max_new_tokens": 20, **WAYS[way]}
    torch.manual_seed(1)
    expected = model.generate(ids, **given)
    cache = WindowCache.for_model(model, TOLERANCE)
    torch.manual_seed(1)
    assert torch.equal(model.generate(ids, past_key_values=cache, **given), expected)
    assert cache.uncertified == 0


def test_nothing_is_dropped_that_may_be_taken_back():
    model, ids = quiet(), words(1, 3000)
    cache = WindowCache.for_model(model, TOLERANCE)
    read(model, ids, cache, [800])
    cache.activate_past_recording()
    read(model, ids[:, 800:], cache, [500, 500, 500])
    assert min(cache.layers[0].counts) >= 1500
    cache.crop(-1400)  # more than the windows: now keys may leave
    assert min(cache.layers[0].counts) < 600
    found = read(model, ids[:, 900:], cache, [100, 200, 50])
    assert_near(found, model(ids[:, :1250]).logits[:, 900:], 1e-6)


def test_rows_that_are_not_finite_are_counted():
    layer = WindowCache.for_model(quiet(num_hidden_layers=1), TOLERANCE, 64).layers[0]
    slopes, layout = torch.full((4,), 0.25), TokenLayout(torch.zeros(1, 1, dtype=torch.int64))
    q, k, v = torch.randn(3, 1, 4, 3000, 8).double() / 4
    layer.attend(q, k, v, slopes, None, layout)
    before = layer.uncertified
    layer.attend(q[:, :, :1] * math.nan, k[:, :, :1], v[:, :, :1], slopes, None, layout)
    assert layer.uncertified == before + 4
    assert layer.largest_dropped == math.inf


def step(layer: WindowLayer, tokens: int, keys: Tensor | None = None) -> None:
    q, k, v = torch.randn(3, 1, 1, tokens, 8)
    k = k if keys is None else keys
    layout = TokenLayout(torch.zeros(1, 1, dtype=torch.int64))
    layer.attend(q, k, v, torch.tensor([2.0**-12]), None, layout)


def test_a_window_that_grew_does_not_vouch_for_what_left_before():
    layer = WindowLayer(Settings([50.0], [20.0], 1e-3, "count"))
    step(layer, 512)
    layer.windows = [50.0]
    layer.drop_all_but([20])
    step(layer, 1)  # the nearest key that left is 21 tokens away
    assert layer.uncertified == 1
    step(layer, 40)
    assert layer.uncertified == 29  # and 50 from the 30th row on: beyond the window of the weights


def test_the_weights_do_not_vouch_for_keys_that_are_not_finite():
    layer = WindowLayer(Settings([20.0], [20.0], 1e-3, "count"))
    keys = torch.randn(1, 1, 512, 8)
    keys[0, 0, 3] = math.nan
    step(layer, 512, keys)
    step(layer, 1)
    assert layer.ledger is not None and layer.uncertified == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tolerance": 1e-30}, r"tolerance must be in \[1.11e-16, 1\) for .*float64, got 1e-30"),
        ({"tolerance": 1.5}, "tolerance must be in"),
        ({"windows": "all"}, "must be 'adaptive', 'weights' or an integer of at least 1, got 'al"),
        ({"windows": 0}, "windows must be .* an integer of at least 1, got 0"),
        ({"on_uncertified": "ignore"}, "on_uncertified must be one of .*got 'ignore'"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        WindowCache.for_model(quiet(), **options)


def test_models_that_cannot_have_one_are_refused():
    for position in ("rotary", "forget", "cable"):
        with pytest.raises(ValueError, match="linear biases that do not depend on the text"):
            WindowCache.for_model(build(position=position))
    with pytest.raises(ValueError, match="slope_scale"):
        WindowCache.for_model(build(slope_scale="interpolate"))
    other = WindowCache.for_model(quiet(num_key_value_heads=2), TOLERANCE)
    with pytest.raises(ValueError, match="2 key/value heads, got 4"):
        quiet()(words(1, 5), past_key_values=other)


def test_calls_that_it_cannot_serve_are_refused():
    model, ids = quiet(), words(2, 9)
    cache = WindowCache.for_model(model, TOLERANCE)
    with torch.enable_grad(), pytest.raises(ValueError, match="gradients must be off"):
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="output_attentions must be off"):
        model(ids, past_key_values=cache, output_attentions=True)
    with pytest.raises(ValueError, match="padding must come before"):
        model(ids, torch.tensor([[1] * 9, [1] * 5 + [0] * 4]), past_key_values=cache)
    model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="batch must have 2 rows"):
        model(ids[:1], past_key_values=cache)
    layer = cache.layers[0]
    for call, message in (
        (layer.offload, "must not be offloaded"),
        (lambda: layer.crop(-5000), "crop must take back at most 9 tokens, got 5000"),
        (lambda: layer.crop(5), "crop takes back -n tokens, got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for other in (build_paper(position="rotary"), build(position="forget")):
        with pytest.raises(ValueError, match="must be given to a model with linear biases"):
            other(torch.tensor([[5, 6]]), past_key_values=cache)


def test_plain_models_of_transformers_refuse_it():
    model = bloom().eval()
    cache = WindowCache.for_model(fuse(bloom()).eval())
    with pytest.raises(ValueError, match=r"linbias\.models\.load"):
        model(torch.tensor([[1, 2]]), past_key_values=cache)
