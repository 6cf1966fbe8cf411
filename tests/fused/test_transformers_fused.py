"""Existing models, fused, against Transformers' own code for them, its defects mended."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    CompileConfig,
    FalconForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)
from transformers.models.falcon import modeling_falcon

import linbias
from linbias.models import LinbiasConfig, LinbiasForCausalLM, fuse, install, load, unfuse
from linbias.models.decoder.cache import key_bound
from linbias.models.fused import FAMILIES
from small_models import GREEDY, RELEASED, existing, needs_released, start_checkpointing

VOCABULARY = 97
SIZES = {"vocab_size": VOCABULARY, "initializer_range": 0.3}
# Heads that are no power of two; keys and values of their own, shared by all, shared by three.
bloom, falcon = (partial(existing, x, 6, vocab_size=VOCABULARY) for x in ("bloom", "falcon"))


def mpt(max_bias: int = 8, **options: Any) -> Any:
    attention = {"alibi": True, "alibi_bias_max": max_bias, **options}
    return existing("mpt", 6, vocab_size=VOCABULARY, attn_config=attention)


MODELS = {
    "bloom": bloom,
    "mpt": mpt,
    "mpt, alibi_bias_max 16": lambda: mpt(16, clip_qkv=1.0),
    "falcon, keys of each head": lambda: falcon(multi_query=False, bias=True, parallel_attn=False),
    "falcon, one key head": lambda: falcon(multi_query=True),
    "falcon, two key heads": lambda: falcon(new_decoder_architecture=True, num_kv_heads=2),
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
FALCON_OF_TWO = MODELS["falcon, two key heads"]
each_family = pytest.mark.parametrize("make", [bloom, mpt, FALCON_OF_TWO])


@pytest.fixture
def exact_reference(monkeypatch):
    """Transformers without rounding in Falcon, and with alibi_bias_max in MPT."""

    def unrounded(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        positions = (attention_mask.cumsum(-1) - 1) * attention_mask
        slopes = torch.tensor(linbias.slopes(num_heads))
        bias = slopes[:, None] * positions[:, None]
        return bias.flatten(0, 1)[:, None].to(dtype)

    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", unrounded)
    own = FAMILIES["mpt"].body.build_mpt_alibi_tensor

    def read_config(self: Any, num_heads: int, length: int, device: Any = None) -> Tensor:
        return own(self, num_heads, length, self.config.attn_config.alibi_bias_max, device)

    monkeypatch.setattr(FAMILIES["mpt"].body, "build_mpt_alibi_tensor", read_config)


def pair(make: Any, **options: Any) -> tuple[Any, Any]:
    """A model as Transformers runs it, and a fused copy."""
    torch.manual_seed(0)
    model = make().eval()
    return model, fuse(copy.deepcopy(model), **options)


def batch(T: int = 20, padded: str = "left") -> tuple[Tensor, Tensor]:
    """Token ids and mask [2, T], the first row padded."""
    ids = torch.randint(VOCABULARY, (2, T), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, T, dtype=torch.int64)
    if padded == "left":
        mask[0, : T // 3] = 0
    if padded == "right":
        mask[0, -T // 3 :] = 0
    return ids, mask


def difference(ours: Tensor, theirs: Tensor, mask: Tensor | None = None) -> float:
    """The largest at real tokens, relative to the largest value."""
    if mask is not None:
        ours, theirs = ours[mask.bool()], theirs[mask.bool()]
    return float(((ours - theirs).abs().max() / theirs.abs().max()).detach())


def by_row(weights: Tensor, mask: Tensor) -> Tensor:
    """Attention weights [B, H, T, S] of the real queries."""
    return weights.transpose(1, 2)[mask.bool()]


@each_model
@pytest.mark.parametrize("padded", ["left", "right", "nowhere"])
@torch.no_grad()
def test_logits(make, padded, exact_reference):
    reference, fused = pair(make)
    ids, mask = batch(padded=padded)
    given = None if padded == "nowhere" else mask
    theirs = reference(ids, attention_mask=given).logits
    assert difference(fused(ids, attention_mask=given).logits, theirs, mask) < 3e-6


@torch.no_grad()
def test_bfloat16_bloom_is_nearer_to_float32_than_the_reference():
    reference, fused = pair(bloom)
    ids, mask = batch(300)
    truth = reference(ids, attention_mask=mask).logits
    theirs = reference.bfloat16()(ids, attention_mask=mask).logits.float()
    ours = fused.bfloat16()(ids, attention_mask=mask).logits.float()
    assert difference(ours, truth, mask) < difference(theirs, truth, mask) / 3


@pytest.mark.parametrize(
    ("make", "most"),
    [(bloom, 1.0), (mpt, 1.0), (MODELS["falcon, keys of each head"], 1.03)],
    ids=["bloom", "mpt", "falcon"],
)
@torch.no_grad()
def test_bfloat16_of_short_texts(make, most):
    """Median of 64 texts of 17 tokens: in a single one what other layers round drowns it.

    Falcon's reference adds its scores up in float32, as ours does, and so is as near.
    """
    reference, fused = pair(make)
    ids = torch.randint(VOCABULARY, (64, 17), generator=torch.Generator().manual_seed(2))
    truth = fused(ids).logits
    theirs = reference.bfloat16()(ids).logits.float() - truth
    ours = fused.bfloat16()(ids).logits.float() - truth
    ratio = ours.flatten(1).norm(dim=1) / theirs.flatten(1).norm(dim=1)
    assert ratio.median() < most


@each_model
def test_gradients_with_and_without_checkpointing(make, exact_reference):
    reference, fused = pair(make)
    ids, mask = batch(padded="right")
    labels = ids.masked_fill(mask == 0, -100)
    reference.train()(ids, attention_mask=mask, labels=labels).loss.backward()
    for checkpointing in (False, True):
        fused.zero_grad()
        if checkpointing:
            start_checkpointing(fused)
        fused.train()(ids, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
        for ours, theirs in zip(fused.parameters(), reference.parameters(), strict=True):
            assert difference(ours.grad, theirs.grad) < 2e-5


@pytest.mark.parametrize("place", ["attention_dropout", "hidden_dropout"])
def test_dropout(place):
    _, fused = pair(lambda: bloom(**{place: 0.4}))
    ids, _ = batch()
    calm = fused(ids).logits
    assert torch.equal(calm, fused(ids).logits)
    fused.train()
    torch.manual_seed(3)
    first = fused(ids).logits
    torch.manual_seed(3)
    assert torch.equal(first, fused(ids).logits)
    assert difference(first, calm) > 0.01


GENERATION: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 5},
    "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
}


@each_family
@pytest.mark.parametrize("options", GENERATION.values(), ids=GENERATION)
def test_generation(make, options, exact_reference):
    reference, fused = pair(make)
    ids, mask = batch()
    options = {**GREEDY, "attention_mask": mask, **options}
    torch.manual_seed(4)
    ours = fused.generate(ids, **options)
    if isinstance(reference, FalconForCausalLM):
        options.pop("cache_implementation", None)  # Transformers' own Falcon stops with an error
    torch.manual_seed(4)
    assert torch.equal(ours, reference.generate(ids, **options))


@torch.no_grad()
def test_a_static_cache_without_a_mask():
    """Its keys beyond the tokens are no tokens."""
    _, fused = pair(mpt)
    ids, _ = batch()
    cache = StaticCache(fused.config, max_cache_len=30)
    first = fused(ids[:, :12], past_key_values=cache).logits
    then = fused(ids[:, 12:], past_key_values=cache).logits
    assert difference(torch.cat([first, then], dim=1), fused(ids).logits) < 3e-6


@each_family
def test_assisted_generation(make, exact_reference):
    """By a smaller model, and by looking the next tokens up in the prompt."""
    reference, fused = pair(make)
    torch.manual_seed(7)
    assistant = fuse(make().eval())
    ids = batch()[0][1:]
    expected = reference.generate(ids, **GREEDY)
    assert torch.equal(fused.generate(ids, assistant_model=assistant, **GREEDY), expected)
    assert torch.equal(fused.generate(ids, prompt_lookup_num_tokens=3, **GREEDY), expected)


@pytest.mark.parametrize("make", [bloom, MODELS["mpt, alibi_bias_max 16"], FALCON_OF_TWO])
@torch.no_grad()
def test_attention_weights(make, exact_reference):
    reference, fused = pair(make)
    ids, mask = batch()
    plain = fused(ids, attention_mask=mask).logits
    ours = fused(ids, attention_mask=mask, output_attentions=True)
    assert difference(ours.logits, plain, mask) < 3e-6
    for weights in ours.attentions:
        assert torch.allclose(by_row(weights, mask).sum(-1), torch.tensor(1.0))
        assert not weights[1].triu(1).any()
    if make is FALCON_OF_TWO:
        return  # Transformers adds its bias twice where weights are asked for
    theirs = reference(ids, attention_mask=mask, output_attentions=True)
    for a, b in zip(ours.attentions, theirs.attentions, strict=True):
        assert difference(by_row(a, mask), by_row(b, mask)) < 1e-5


@torch.no_grad()
def test_mpt_reads_beyond_its_declared_length(exact_reference):
    reference, fused = pair(mpt)
    ids, _ = batch(60)
    with pytest.raises(RuntimeError):
        reference(ids)
    reference.config.max_seq_len = 60
    assert difference(fused(ids).logits, reference(ids).logits) < 3e-6


@torch.no_grad()
def test_falcon_caches_shared_keys_once():
    _, fused = pair(FALCON_OF_TWO)
    cache = fused(batch()[0], use_cache=True).past_key_values
    assert cache.layers[0].keys.shape == (2, 2, 20, 8)
    assert key_bound(cache.layers[0]) is not None  # far keys can be left unread


@torch.no_grad()
def test_no_mask_or_bias_of_query_times_key_is_made():
    """32,768 tokens would need 24 GiB for one such tensor."""
    torch.manual_seed(0)
    model = fuse(BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=24, n_head=6, n_layer=1)))
    ids = torch.randint(50, (1, 32_768))
    assert model(ids, logits_to_keep=1).logits.isfinite().all()


@torch.no_grad()
def test_slope_scale(exact_reference):
    """Half the slopes of a text twice as long as trained on."""
    _, fused = pair(mpt, slope_scale="interpolate", train_length=30)
    _, halved = pair(mpt, slope_scale=0.5)
    _, plain = pair(mpt)
    ids, _ = batch(60)
    scaled = fused(ids).logits
    assert torch.equal(scaled, halved(ids).logits)
    assert difference(scaled, plain(ids).logits) > 0.01
    assert torch.equal(fused(ids[:, :30]).logits, plain(ids[:, :30]).logits)


HELD = {
    "bloom": (bloom, {"num_heads": 2}, slice(48, 96), slice(16, 32)),
    # Three heads of six, and the one head of keys that they share.
    "falcon": (FALCON_OF_TWO, {"num_heads": 3, "num_kv_heads": 1}, slice(40, 80), slice(24, 48)),
}


@pytest.mark.parametrize(("make", "held", "rows", "columns"), HELD.values(), ids=HELD)
@torch.no_grad()
def test_heads_of_one_process_have_their_slopes(make, held, rows, columns):
    """The heads that a process holds of a model split by heads run as they do in the whole."""
    _, whole = pair(make)
    ids, _ = batch(40)
    part = copy.deepcopy(unfuse(whole))
    part.transformer.h = part.transformer.h[:1]
    layer = part.transformer.h[0].self_attention
    vars(layer).update(held)
    product = layer.query_key_value
    product.weight.data = product.weight[rows]
    if product.bias is not None:
        product.bias.data = product.bias[rows]
    layer.dense.weight.data = layer.dense.weight[:, columns]
    with pytest.raises(ValueError, match=rf"heads must be .* holds {held['num_heads']} of the"):
        fuse(part)
    seen: list[Tensor] = []
    for model, heads in ((whole, None), (part, range(columns.start // 8, columns.stop // 8))):
        dense = model.transformer.h[0].self_attention.dense
        dense.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        fuse(model, heads=heads)(ids)
    assert torch.allclose(seen[1], seen[0][..., columns], atol=1e-6)


@each_model
@torch.no_grad()
def test_a_saved_model_is_fused_by_load_and_where_it_is_asked_for(make, tmp_path):
    reference, fused = pair(make)
    assert list(fused.state_dict()) == list(reference.state_dict())
    fused.save_pretrained(tmp_path)
    assert "linbias" not in (tmp_path / "config.json").read_text()
    install()
    assert not is_fused(AutoModelForCausalLM.from_pretrained(tmp_path))
    ids, mask = batch()
    expected = fused(ids, attention_mask=mask).logits
    asked = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="linbias")
    for loaded in (load(tmp_path), asked):
        assert is_fused(loaded)
        assert torch.equal(loaded(ids, attention_mask=mask).logits, expected)
    packed = {"position_ids": torch.arange(20)[None] % 10}
    assert torch.equal(asked(ids, **packed).logits, fused(ids, **packed).logits)
    assert not torch.equal(asked(ids, **packed).logits, asked(ids).logits)
    assert torch.equal(fuse(asked)(ids, attention_mask=mask).logits, expected)
    assert unfuse(asked).config._attn_implementation == reference.config._attn_implementation


def is_fused(model: Any) -> bool:
    """By its configuration and by its layers, which agree."""
    by_layer = {hasattr(module, "fused_bias") for module in model.modules()}
    assert (True in by_layer) == (model.config._attn_implementation == "linbias")
    return True in by_layer


@pytest.mark.parametrize(("make", "layers"), [(bloom, "h"), (mpt, "blocks"), (FALCON_OF_TWO, "h")])
@torch.no_grad()
def test_split_over_devices(make, layers, tmp_path):
    """Layers that lie on disk, and a model without numbers."""
    _, fused = pair(make)
    fused.save_pretrained(tmp_path / "a")
    ids, mask = batch()
    where = {f"transformer.{name}": "cpu" for name, _ in fused.transformer.named_children()}
    del where[f"transformer.{layers}"]
    where |= {f"transformer.{layers}.0": "cpu", f"transformer.{layers}.1": "disk"}
    loaded = type(fused).from_pretrained(
        tmp_path / "a", device_map=where | {"lm_head": "cpu"}, offload_folder=tmp_path / "b"
    )
    expected = fused(ids, attention_mask=mask).logits
    assert torch.equal(fuse(loaded)(ids, attention_mask=mask).logits, expected)
    with torch.device("meta"):
        empty = make()
    assert fuse(empty)(ids.to("meta")).logits.shape == expected.shape


@each_model
@torch.no_grad()
def test_unfuse(make):
    reference, fused = pair(make)
    ids, mask = batch()
    unfuse(fused)
    assert fused.config._attn_implementation == reference.config._attn_implementation
    for ours, theirs in zip(fused.modules(), reference.modules(), strict=True):
        assert type(ours) is type(theirs) and vars(ours).keys() == vars(theirs).keys()
    expected = reference(ids, attention_mask=mask).logits
    assert torch.equal(fused(ids, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("make", [bloom, falcon, mpt])
@torch.no_grad()
def test_fusing_a_model_changes_no_other_of_its_configuration(make):
    student = make().eval()
    teacher = type(student)(student.config).eval()
    ids, mask = batch()
    before = teacher(ids, attention_mask=mask).logits
    kind = student.config._attn_implementation
    fuse(student)
    configs = (m.config for m in student.modules() if hasattr(m, "config"))
    assert {config._attn_implementation for config in configs} == {"linbias"}
    assert teacher.config._attn_implementation == kind
    assert torch.equal(teacher(ids, attention_mask=mask).logits, before)
    assert type(student)(teacher.config).config._attn_implementation == kind


def ours() -> LinbiasForCausalLM:
    config = LinbiasConfig(hidden_size=48, num_attention_heads=6, num_hidden_layers=1, **SIZES)
    return LinbiasForCausalLM(config).eval()


@pytest.mark.thorough
@pytest.mark.parametrize("make", [bloom, falcon, mpt, ours])
@torch.no_grad()
def test_padded_prompts_go_on_compiled_with_a_static_cache(make):
    """Steps by `generate` itself, once, and by Transformers' recipe, `forward` in one graph."""
    torch._dynamo.reset()
    counters.clear()
    model = make() if make is ours else fuse(make())
    ids, mask = batch()
    how = CompileConfig(backend="eager", fullgraph=True, dynamic=False)
    how._compile_all_devices = True
    expected = model.generate(ids, **GREEDY, attention_mask=mask)
    options = {**GREEDY, "attention_mask": mask, "cache_implementation": "static"}
    assert torch.equal(model.generate(ids, **options, compile_config=how), expected)
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    assert torch.equal(model.generate(ids, **options), expected)


def llama() -> LlamaForCausalLM:
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes))


def remote(body: str) -> torch.nn.Module:
    """A model whose code lay in its folder."""
    model = torch.nn.Module()
    model.body = type(body, (torch.nn.Module,), {"__module__": "transformers_modules.x"})()
    return model


INSTEAD = r"fuse: model must contain .*got Module: linbias.models.load\(folder\) loads"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (llama, r"must contain one of BloomModel, FalconModel, MptModel .*got LlamaFor"),
        (lambda: falcon(alibi=False), r"must have alibi = True, got False: it has rotary"),
        (lambda: mpt(alibi=False), r"must have attn_config.alibi = True, got False"),
        (lambda: mpt(qk_ln=True), r"attn_config.qk_ln of an MPT model must be False"),
        (lambda: fuse(bloom()), r"fuse: model must not be fused, got a BloomModel that is"),
        (ours, r"got LinbiasForCausalLM: it runs on linbias' attention"),
        (lambda: remote("MPTModel"), INSTEAD),
        (lambda: remote("BaichuanModel"), INSTEAD),
        (lambda: remote("RWModel"), INSTEAD),
        (lambda: remote("JinaBertModel"), INSTEAD),
    ],
)
def test_refused_models(make, message):
    with pytest.raises(ValueError, match=message):
        fuse(make())


def test_what_is_no_model_and_what_is_not_fused_are_refused():
    with pytest.raises(TypeError, match=r"fuse: model must be a Transformers model, got str"):
        fuse("bloom")
    with pytest.raises(ValueError, match=r"unfuse: model must be fused"):
        unfuse(bloom())
    fuse(bloom())
    other = llama()
    other.config._attn_implementation = "linbias"
    with pytest.raises(ValueError, match=r"fuses models of type bloom, falcon, mpt, got llama"):
        other(torch.ones(1, 3, dtype=torch.int64))
    _, fused = pair(mpt)
    whole = torch.ones(2, 1, 20, 20, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"must have shape \[B, S\], got \[2, 1, 20, 20\]"):
        fused(batch()[0], attention_mask=whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slope_scale": 0.0}, r"slope_scale must be positive, 'interpolate' or None, got 0.0"),
        (
            {"slope_scale": 1e39},
            r"slope_scale must be positive, 'interpolate' or None, got 1e\+39",
        ),
        (
            {"slope_scale": "ntk"},
            r"slope_scale must be positive, 'interpolate' or None, got 'ntk'",
        ),
        ({"slope_scale": "interpolate"}, r"train_length must be given for slope_scale"),
        ({"train_length": 0}, r"train_length must be at least 1, got 0"),
        ({"heads": [0, 1]}, r"heads must name the 6 heads of each layer, got 2"),
        ({"heads": [0, 1, 2, 3, 4, 9]}, r"heads must be in \[0, 6\), got 9"),
        ({"implementation": "fastest"}, r"implementation must be one of .*got 'fastest'"),
    ],
)
def test_refused_options(options, message):
    model = bloom()
    with pytest.raises(ValueError, match=f"fuse: {message}"):
        fuse(model, **options)
    assert not hasattr(model.transformer, "unfused_implementation")


def test_a_layer_that_does_not_know_the_mask_says_so():
    _, fused = pair(bloom)
    alien = fused.transformer.h[0].self_attention
    forward = {"forward": lambda *_, attention_mask, **__: attention_mask + torch.ones(1)}
    alien.__class__ = type("Alien", (torch.nn.Module,), forward)
    said = r"given the mask of a fused .* as if it were a tensor: .*know attn_implementation='linb"
    with pytest.raises(ValueError, match=said):
        fused(batch()[0])


def test_an_unknown_version_is_refused(monkeypatch):
    monkeypatch.setattr(FAMILIES["bloom"].attention, "forward", lambda self, hidden, rope: None)
    said = r"BloomAttention of transformers .* takes self, hidden, rope"
    with pytest.raises(ValueError, match=said):
        fuse(bloom())


def released(family: str, texts: tuple[str, ...], **options: Any) -> Iterator[Any]:
    """Of each text: the model, what it says, what the released code says, and where more is."""
    for case in sorted((RELEASED / family).iterdir()):
        expected = load_file(case / "expected.safetensors")
        own = {"normalize_head": True} if (family, case.name) == ("baichuan", "heads12") else {}
        fused = load(case, device="cpu", **options, **own)
        exact = "exact." if "T17.exact.logits" in expected else ""
        for name in texts:
            ids, mask = expected[f"{name}.input_ids"], expected[f"{name}.attention_mask"]
            logits = fused(ids, attention_mask=mask).logits.float() * mask[..., None]
            if (positions := expected.get(f"{name}.positions")) is not None:
                logits = logits.gather(1, positions[..., None].expand(-1, -1, VOCABULARY))
            yield fused, logits, expected[f"{name}.{exact}logits"], expected, (name, exact)


@needs_released
@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon", "baichuan"])
@torch.no_grad()
def test_golden_data(family):
    """Every case of the released code: logits, a padded batch, a greedy continuation."""
    texts = ("T17", "T129", "T700", "right")
    for fused, logits, truth, expected, (name, exact) in released(family, texts):
        assert difference(logits, truth) < 2e-5, name
        if name == "T17":
            ids, mask = expected["T17.input_ids"], expected["T17.attention_mask"]
            tokens = fused.generate(ids, attention_mask=mask, **GREEDY | {"max_new_tokens": 24})
            assert torch.equal(tokens[:, 17:], expected[f"generate.{exact}tokens"])


@needs_released
@pytest.mark.parametrize("family", ["bloom", "mpt", "falcon"])
@torch.no_grad()
def test_golden_data_in_bfloat16(family):
    """Nearer to the float32 truth than the reference; for shorter texts see above."""
    cases = released(family, ("T129", "T700"), dtype=torch.bfloat16)
    for _, ours, truth, expected, (name, _) in cases:
        theirs = expected[f"{name}.bfloat16.logits"].float()
        assert (ours - truth).norm() < (theirs - truth).norm(), name
