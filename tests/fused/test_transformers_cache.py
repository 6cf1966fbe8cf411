"""The growing cache: what it holds, what copies share, what bounds its keys."""

import copy
import pickle

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from linbias.models.decoder.cache import GrowingLayer, key_bound, use_growing_layers
from small_models import assert_same, build, settings, tokens

pytestmark = pytest.mark.usefixtures("same_start")


def grow(layer: DynamicLayer, length: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """Append random tokens to a cache of 2 rows and 3 key/value heads, and return them."""
    new = size * torch.randn(2, 3, length, 5), torch.randn(2, 3, length, 7)
    layer.update(*new)
    return new


def assert_bounded(layer: GrowingLayer) -> None:
    """The bound holds, and is one: far above the largest norm, no key could be left unread."""
    bound, largest = key_bound(layer), layer.keys.norm(dim=-1).amax(2)
    assert bound is not None and bound.shape == (len(layer.keys), 3)
    assert (bound >= largest).all() and (bound <= 1.001 * largest).all()


@torch.no_grad()
def test_it_holds_what_was_appended():
    layer = GrowingLayer()
    parts = [grow(layer, length) for length in (5, 1, 0, 1, 200, 3)]
    for held, appended in zip((layer.keys, layer.values), zip(*parts, strict=True), strict=True):
        assert torch.equal(held, torch.cat(appended, dim=2))
    assert layer.get_seq_length() == 210


def pickled(layer: GrowingLayer) -> GrowingLayer:
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickled])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_copies_of_a_layer_grow_apart(mode, make_copy):
    with mode():
        first = GrowingLayer()
        start = grow(first, 5)
        second = make_copy(first)
        parts: dict[GrowingLayer, list[Tensor]] = {first: [start[0]], second: [start[0]]}
        for layer, length in ((first, 1), (second, 1), (second, 2), (first, 1), (second, 90)):
            parts[layer].append(grow(layer, length)[0])
        third = make_copy(second)
        parts[third] = [*parts[second], grow(third, 1)[0]]
        for layer, appended in parts.items():
            assert torch.equal(layer.keys, torch.cat(appended, dim=2))
            assert_bounded(layer)


@pytest.mark.parametrize("writes", [1, 2, 3, 4])
@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickled])
@torch.no_grad()
def test_copies_that_are_written_to_are_bounded_anew(make_copy, writes):
    """PyTorch counts changes of a new tensor anew: they may meet the original's count."""
    first = GrowingLayer()
    for _ in range(4):
        grow(first, 2)
        assert_bounded(first)
    second = make_copy(first)
    for _ in range(writes):
        second.keys.mul_(10)
    assert_bounded(second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 1e-25])
def test_the_bound_is_rounded_up(dtype, size):
    """Where squares of keys vanish, too."""
    keys = (size * torch.randn(1, 300, 1, 100)).to(dtype)
    layer = GrowingLayer()
    layer.update(keys, keys)
    bound = key_bound(layer)
    assert bound is not None and bound.dtype == torch.float32
    assert (bound >= keys.double().norm(dim=-1)[..., 0]).all()


def crop_and_refill(layer: GrowingLayer) -> None:
    layer.crop(-3)
    grow(layer, 3, size=100)


def assign_an_earlier_view(layer: GrowingLayer) -> None:
    held = layer.keys, layer.values
    grow(layer, 2, size=100)
    layer.keys, layer.values = held


WRITE = "layer.keys.mul_(100)"
CHANGES = [
    "layer.keys, layer.values = 100 * layer.keys, layer.values.clone()",
    "layer.keys = 100 * layer.keys",
    "layer.values = 100 * layer.values",
    "crop_and_refill(layer)",
    "assign_an_earlier_view(layer)",
    WRITE,
    "layer.reorder_cache(torch.tensor([1, 1]))",
    "layer.batch_repeat_interleave(2)",
    "layer.batch_select_indices(torch.tensor([1]))",
    "layer.crop(-4)",
    "layer.reset()",
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_replaced_contents_are_kept_and_bounded_anew(mode, change):
    if mode is torch.inference_mode and change == WRITE:
        return  # PyTorch does not tell that such a tensor was written to
    with mode():
        layer = GrowingLayer()
        for _ in range(3):
            grow(layer, 4)
            assert_bounded(layer)
        exec(change, globals() | {"layer": layer})
        kept = torch.empty(2, 3, 0, 5), torch.empty(2, 3, 0, 7)
        if layer.is_initialized:
            assert_bounded(layer)
            kept = layer.keys.clone(), layer.values.clone()
        new = torch.randn(len(kept[0]), 3, 1, 5), torch.randn(len(kept[0]), 3, 1, 7)
        layer.update(*new)
        for held, old, added in zip((layer.keys, layer.values), kept, new, strict=True):
            assert torch.equal(held, torch.cat([old, added], dim=2))
        assert_bounded(layer)


def test_layers_go_from_one_mode_to_another():
    layer = GrowingLayer()
    held = []
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            grow(layer, 2)
            assert_bounded(layer)
            held.append((layer.keys, layer.keys.clone()))
    assert all(torch.equal(*pair) for pair in held)


@torch.no_grad()
def test_only_growing_layers_tell_a_bound():
    layer = DynamicLayer()
    grow(layer, 2)
    assert key_bound(layer) is None
    assert key_bound(GrowingLayer()) is None


@torch.no_grad()
def test_a_compiled_step_grows_the_cache_and_asks_for_no_bound():
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(layer: GrowingLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor | None]:
        return layer.update(keys, values)[0], key_bound(layer)

    layer = GrowingLayer()
    start, _ = grow(layer, 5)
    assert_bounded(layer)
    parts = [start]
    for _ in range(3):
        new = 100 * torch.randn(2, 3, 1, 5)
        keys, bound = step(layer, new, torch.randn(2, 3, 1, 7))
        parts.append(new)
        assert bound is None and torch.equal(keys, torch.cat(parts, dim=2))
    grow(layer, 1)
    assert_bounded(layer)


def test_gradients_reach_keys_in_the_cache():
    layer = GrowingLayer()
    old, new = torch.randn(2, 1, 1, 3, 5, requires_grad=True).unbind()
    layer.update(old, old)
    keys, _ = layer.update(new, new)
    half_square = keys.square().sum() / 2
    layer.update(new, new)  # which must not write to what autograd holds
    gradients = torch.autograd.grad(half_square, [old, new])
    assert all(torch.equal(*pair) for pair in zip(gradients, (old, new), strict=True))


@torch.no_grad()
def test_only_empty_layers_of_the_usual_kind_are_replaced():
    lazy, filled, offloaded = DynamicCache(), DynamicCache(config=settings()), DynamicCache()
    filled.update(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), 0)
    offloaded.offloading = True
    for cache in (lazy, filled, offloaded):
        use_growing_layers(cache)
    lazy.update(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2, 3), 0)
    assert type(lazy.layers[0]) is GrowingLayer
    assert [type(layer) for layer in filled.layers] == [DynamicLayer, GrowingLayer]
    assert offloaded.layer_class_to_replicate is DynamicLayer


@torch.no_grad()
def test_cache_grows_in_place_and_never_writes_over_what_somebody_may_hold():
    model = build(num_hidden_layers=1)
    ids = tokens(2, 40)
    cache = model(ids[:, :9], use_cache=True).past_key_values
    layer = cache.layers[0]
    start = layer.keys.data_ptr()
    model(ids[:, 9:12], past_key_values=cache)
    assert layer.keys.data_ptr() == start
    held = layer.keys
    before = held.clone()
    cache.crop(-5)
    model(ids[:, 20:25], past_key_values=cache)
    assert torch.equal(held, before) and torch.equal(layer.keys[:, :, :7], before[:, :, :7])
    cache.reorder_cache(torch.tensor([1, 1]))
    after = model(ids[:, 25:26], past_key_values=cache).logits
    rows = torch.cat([ids[:, :7], ids[:, 20:25]], dim=1)[[1, 1]]
    assert_same(after[:, -1], model(torch.cat([rows, ids[:, 25:26]], dim=1)).logits[:, -1])
    for _ in range(3):  # beyond the room of the first buffers
        model(tokens(2, 60), past_key_values=cache)
    assert layer.keys.shape[2] == layer.get_seq_length() == 13 + 180
