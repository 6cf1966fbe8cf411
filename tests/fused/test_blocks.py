"""Blocks of prepacked models in one piece: the answers of their modules, to the bit, and the modules themselves wherever anything looks on."""

import copy
import io
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    MptConfig,
    MptForCausalLM,
)

from linbias.models import fuse, prepack, unfuse
from linbias.models.fused.mpt_model import LinbiasMptConfig, LinbiasMptForCausalLM
from linbias.models.linear import layers as linear
from small_models import every_type, fast_types, needs_bfloat16, needs_onednn, start_checkpointing

pytestmark = needs_onednn
SIZES = {"vocab_size": 97, "initializer_range": 0.3}


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(linear, "_SMALLEST", 1)
    monkeypatch.setattr(linear, "_types", lambda: fast_types)
    yield


def bloom(**changes: Any) -> Any:
    return BloomForCausalLM(BloomConfig(hidden_size=48, n_head=6, n_layer=2, **SIZES, **changes))


def falcon(**changes: Any) -> Any:
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "alibi": True}
    kind = {"parallel_attn": False, "multi_query": False, "bias": True} | changes  # of falcon-rw
    return FalconForCausalLM(FalconConfig(**sizes, **SIZES, **kind))


def mpt() -> Any:
    return MptForCausalLM(MptConfig(d_model=48, n_heads=6, n_layers=2, **SIZES))


def grouped_mpt() -> Any:
    attention = {"alibi": True, "attn_type": "grouped_query_attention", "kv_n_heads": 2}
    config = LinbiasMptConfig(
        d_model=48, n_heads=6, n_layers=2, attn_config=attention | {"qk_ln": True}, **SIZES
    )
    return LinbiasMptForCausalLM(config)


MODELS = [bloom, falcon, mpt, grouped_mpt]


def pair(make: Callable[[], Any], dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A prepacked model whose blocks run in one piece, and one with the same weights whose modules run."""
    torch.manual_seed(0)
    whole = make().to(dtype).eval()
    if not isinstance(whole, LinbiasMptForCausalLM):
        fuse(whole)
    by_module = copy.deepcopy(whole)
    linear.prepack_layers(by_module)
    return prepack(whole), by_module


def blocks(model: Any) -> Any:
    body = model.transformer
    return body.blocks if hasattr(body, "blocks") else body.h


def attention(model: Any) -> Any:
    return next(m for m in blocks(model)[0].children() if type(m).__name__.endswith("Attention"))


def feed_forward(model: Any) -> Any:
    return next(m for m in blocks(model)[0].children() if type(m).__name__.endswith("MLP"))


def norms(model: Any, run: Callable[[], object]) -> int:
    """How many norms of the blocks are called as modules: two for each block that does not run in one piece."""
    of_blocks = {n for block in blocks(model) for n in block.modules() if type(n) is nn.LayerNorm}
    wide = {norm for norm in of_blocks if norm in {n for b in blocks(model) for n in b.children()}}
    called, forward = [], nn.LayerNorm.forward

    def count(norm: nn.LayerNorm, x: Tensor) -> Tensor:
        called.append(norm in wide)
        return forward(norm, x)

    nn.LayerNorm.forward = count  # type: ignore[method-assign]
    try:
        run()
    finally:
        nn.LayerNorm.forward = forward  # type: ignore[method-assign]
    return sum(called)


def tokens(*shape: int) -> Tensor:
    return torch.randint(0, 97, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("make", MODELS)
@every_type
@torch.no_grad()
def test_its_answers_are_those_of_its_modules(make: Callable[[], Any], dtype: torch.dtype) -> None:
    (whole, by_module), x = pair(make, dtype), tokens(2, 9)
    assert norms(whole, lambda: whole(x)) == 0
    assert norms(by_module, lambda: by_module(x)) == 4
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])
    for given in ({}, {"attention_mask": mask}):
        assert torch.equal(whole(x, **given).logits, by_module(x, **given).logits)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    for given in ({}, {"attention_mask": mask}, {"num_beams": 2}):
        written = [model.generate(x, **settings, **given) for model in (whole, by_module)]
        assert torch.equal(*written)
    assert norms(whole, lambda: whole.generate(x, **settings)) == 0


def test_a_step_with_a_cache_is_in_one_piece_too() -> None:
    models, row = pair(bloom), tokens(1, 1)
    with torch.inference_mode():
        caches = [model(tokens(1, 7)).past_key_values for model in models]
        for _ in range(3):
            whole, by_module = (
                partial(model, row, past_key_values=cache)
                for model, cache in zip(models, caches, strict=True)
            )
            assert torch.equal(whole().logits, by_module().logits)
            assert norms(models[0], whole) == 0
            by_module()


class Adapted(nn.Module):
    """A linear layer with something added, as adapters are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 1.5


def hook(model: Any) -> None:
    attention(model).register_forward_hook(lambda *a: (a[2][0] * 2, *a[2][1:]))


def hook_before(model: Any) -> None:
    feed_forward(model).register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))


def hook_a_layer(model: Any) -> None:
    next(feed_forward(model).children()).register_forward_hook(lambda *a: a[2] * 2)


def patch(model: Any) -> None:
    module = feed_forward(model)
    own = module.forward
    module.forward = lambda *args: own(*args) * 2


def adapt(model: Any) -> None:
    module = feed_forward(model)
    name = next(n for n, m in module.named_children() if isinstance(m, nn.Linear))
    setattr(module, name, Adapted(getattr(module, name)))


def replace_a_norm(model: Any) -> None:
    block = blocks(model)[0]
    name = next(n for n, m in block.named_children() if isinstance(m, nn.LayerNorm))
    setattr(block, name, nn.RMSNorm(48))


def rename_a_class(model: Any) -> None:
    module = feed_forward(model)
    doubled = {"forward": lambda self, *args: 2 * super(kind, self).forward(*args)}
    kind = type("Doubled", (type(module),), doubled)
    module.__class__ = kind


def change_a_weight(model: Any) -> None:
    next(m for m in feed_forward(model).children() if isinstance(m, nn.Linear)).weight.mul_(2)


def change_a_norm(model: Any) -> None:
    next(m for m in blocks(model)[0].children() if isinstance(m, nn.LayerNorm)).weight.mul_(2)


def set_a_bias(model: Any) -> None:
    layer = next(m for m in feed_forward(model).children() if isinstance(m, nn.Linear))
    layer.bias = nn.Parameter(torch.full((layer.out_features,), 0.5))


@pytest.mark.parametrize("make", [bloom, falcon, mpt])
@pytest.mark.parametrize(
    ("change", "by_modules"),
    [
        *((hook, True), (hook_before, True), (hook_a_layer, True), (patch, True), (adapt, True)),
        *((replace_a_norm, True), (rename_a_class, True), (change_a_weight, True)),
        *((change_a_norm, False), (set_a_bias, False)),
    ],
)
@torch.no_grad()
def test_what_changes_after_prepacking_counts(
    make: Callable[[], Any], change: Callable[[Any], None], by_modules: bool
) -> None:
    (whole, by_module), x = pair(make), tokens(2, 9)
    before = whole(x).logits
    for model in (whole, by_module):
        change(model)
    assert not torch.equal(by_module(x).logits, before)
    assert torch.equal(whole(x).logits, by_module(x).logits)
    assert (norms(whole, lambda: whole(x)) > 0) == by_modules  # of its first block


@torch.no_grad()
def test_modules_run_for_whoever_looks_on() -> None:
    (whole, by_module), x = pair(bloom), tokens(1, 9)
    asked = whole(x, output_attentions=True).attentions
    assert [weights.shape for weights in asked] == [(1, 6, 9, 9)] * 2
    for weights, expected in zip(
        asked, by_module(x, output_attentions=True).attentions, strict=True
    ):
        torch.testing.assert_close(weights, expected)
    seen: list[nn.Module] = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    whole(x)
    handle.remove()
    assert attention(whole) in seen
    with torch.autocast("cpu", torch.bfloat16):
        assert norms(whole, lambda: whole(x)) == 4
    with torch.enable_grad():
        whole(x).logits.sum().backward()
    assert attention(whole).dense.weight.grad.abs().sum() > 0


@torch.no_grad()
def test_dropout_of_one_module_is_applied() -> None:
    torch.manual_seed(0)
    model, x = prepack(fuse(bloom(hidden_dropout=0.5).eval())), tokens(1, 9)
    assert torch.equal(model(x).logits, model(x).logits)
    model.transformer.h[0].mlp.train()
    assert not torch.equal(model(x).logits, model(x).logits)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_it_learns_and_compiles_as_before() -> None:
    (whole, by_module), x = pair(bloom), tokens(2, 9)
    start_checkpointing(whole)
    for model in (whole.train(), by_module.train()):
        model(x, labels=x, use_cache=False).loss.backward()
    for own, other in zip(whole.parameters(), by_module.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)
    whole.eval()
    with torch.no_grad():
        expected = whole(x, use_cache=False).logits
        found = torch.compile(whole, backend="eager")(x, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: bloom(apply_residual_connection_post_layernorm=True),
        lambda: bloom(pretraining_tp=2, slow_but_exact=True),
        lambda: falcon(parallel_attn=True),
        lambda: falcon(activation="relu"),
    ],
    ids=["other residuals", "sliced", "parallel", "no GELU"],
)
@torch.no_grad()
def test_blocks_of_other_parts_run_their_modules(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model, x = make().eval(), tokens(2, 9)
    expected = fuse(model)(x).logits
    prepack(model)
    assert norms(model, lambda: model(x)) > 0
    torch.testing.assert_close(model(x).logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_copies_run_their_own_modules_until_they_are_prepacked() -> None:
    (whole, _), x = pair(bloom), tokens(1, 6)
    saved = io.BytesIO()
    torch.save(whole, saved)
    saved.seek(0)
    before = whole(x).logits
    for other in (copy.deepcopy(whole), torch.load(saved, weights_only=False)):
        other.transformer.h[0].mlp.dense_h_to_4h.weight.zero_()
        assert norms(other, lambda other=other: other(x)) == 4
        assert (other(x).logits - before).abs().max() > 1e-2
        assert norms(other, lambda other=other: prepack(other)(x)) == 0
        assert torch.equal(whole(x).logits, before)


@torch.no_grad()
def test_unfusing_ends_it() -> None:
    (whole, _), x = pair(bloom), tokens(1, 6)
    unfuse(whole)
    assert norms(whole, lambda: whole(x)) == 4
    assert not any("forward" in vars(module) for module in whole.modules())


@torch.no_grad()
def test_a_block_that_accelerate_hooks_keeps_its_hook() -> None:
    class Doubling(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output[0] * 2, *output[1:]

    torch.manual_seed(0)
    model, x = fuse(bloom().eval()), tokens(1, 6)
    before = model(x).logits
    add_hook_to_module(model.transformer.h[1], Doubling())
    expected = model(x).logits
    assert not torch.equal(expected, before)
    prepack(model)
    torch.testing.assert_close(model(x).logits, expected, rtol=1e-4, atol=1e-4)
    assert norms(model, lambda: model(x)) == 2  # of the block that is hooked


@needs_bfloat16
@torch.no_grad()
def test_layers_of_two_types_are_refused_as_before() -> None:
    model = fuse(bloom().eval())
    model.transformer.h[1].mlp.dense_h_to_4h.bfloat16()
    prepack(model)
    with pytest.raises(RuntimeError, match="dtype"):
        model(tokens(1, 6))
