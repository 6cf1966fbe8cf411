"""MPT with what Transformers' class leaves out: against llm-foundry's, and in float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, MptConfig, MptForCausalLM

import linbias
from linbias.models import fuse, load, unfuse
from linbias.models.fused.mpt_model import LinbiasMptConfig, LinbiasMptForCausalLM
from small_models import GREEDY, assert_near, write_folder

pytestmark = pytest.mark.usefixtures("same_start")

GOLDEN = Path(__file__).parents[1] / "golden" / "mpt_attention.safetensors"
GROUPED = {"attn_type": "grouped_query_attention", "kv_n_heads": 2}
VOCABULARY, SIZE, HEADS = 97, 48, 6

MULTIQUERY = {"attn_type": "multiquery_attention"}
# As in the file of the numbers, which the attention of llm-foundry 0.22 computed.
ATTENTION = {
    "grouped qk_ln": {**GROUPED, "qk_ln": True},
    "grouped qk_gn": {**GROUPED, "kv_n_heads": 3, "qk_gn": True, "alibi_bias_max": 16},
    "multiquery clip_qkv": {**MULTIQUERY, "clip_qkv": 1.5, "softmax_scale": 0.2},
    "multihead qk_ln": {"qk_ln": True},
}


def original(attention: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A config.json as MPT's own code writes it."""
    return {
        **{"model_type": "mpt", "architectures": ["MPTForCausalLM"], "d_model": SIZE},
        **{"n_heads": HEADS, "n_layers": 2, "vocab_size": VOCABULARY, "expansion_ratio": 4},
        **{"max_seq_len": 40, "no_bias": True, "logit_scale": None, "resid_pdrop": 0.0},
        **{"emb_pdrop": 0, "embedding_fraction": 1.0, "learned_pos_emb": True, "verbose": 0},
        **{"norm_type": "low_precision_layernorm", "init_device": "cpu", "use_cache": False},
        **{"auto_map": {"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"}},
        "attn_config": {
            **{"alibi": True, "alibi_bias_max": 8, "attn_impl": "triton", "attn_pdrop": 0.0},
            **{"attn_type": "multihead_attention", "attn_uses_sequence_id": False},
            **{"clip_qkv": None, "prefix_lm": False, "qk_ln": False, "softmax_scale": None},
            **(attention or {}),
        },
        **changes,
    }


def weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random weights under the original names."""
    attention = config["attn_config"]
    kind = attention["attn_type"]
    shared = {"multihead_attention": HEADS, "multiquery_attention": 1}.get(kind)
    shared = (attention["kv_n_heads"] if shared is None else shared) * SIZE // HEADS
    inner = int(SIZE * config["expansion_ratio"])
    shapes = {"wte": (VOCABULARY, SIZE), "norm_f": (SIZE,)}
    for layer in range(config["n_layers"]):
        inside = {
            **{"norm_1": (SIZE,), "norm_2": (SIZE,), "attn.Wqkv": (SIZE + 2 * shared, SIZE)},
            **{"attn.out_proj": (SIZE, SIZE), "ffn.up_proj": (inner, SIZE)},
            "ffn.down_proj": (SIZE, inner),
        }
        if attention["qk_ln"]:
            inside |= {"attn.q_ln": (SIZE,), "attn.k_ln": (shared,)}
        shapes |= {f"blocks.{layer}.{name}": shape for name, shape in inside.items()}
    tensors = {}
    for name, shape in shapes.items():
        tensors[f"transformer.{name}.weight"] = torch.randn(shape) * 0.3 + (len(shape) == 1)
        if not config["no_bias"] and name != "wte":
            tensors[f"transformer.{name}.bias"] = torch.randn(shape[:1]) * 0.3
    return tensors


def plain(w: dict[str, Tensor], config: dict[str, Any], ids: Tensor) -> Tensor:
    """The logits [T, vocabulary] of one text [T], in float64 and the plainest words."""
    w = {name.removeprefix("transformer."): tensor.double() for name, tensor in w.items()}
    attention, size = config["attn_config"], SIZE // HEADS

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[name + ".weight"], w.get(name + ".bias"))

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[name + ".weight"], w.get(name + ".bias"))

    hidden = w["wte.weight"][ids]
    place = torch.arange(len(ids))
    slopes = torch.tensor(linbias.slopes(HEADS, "mpt", attention["alibi_bias_max"]))
    bias = -slopes[:, None, None] * (place[:, None] - place)
    bias = bias.masked_fill(place[:, None] < place, -torch.inf)
    for layer in range(config["n_layers"]):
        at = f"blocks.{layer}."
        qkv = linear(at + "attn.Wqkv", norm(at + "norm_1", hidden))
        if attention["clip_qkv"]:
            qkv = qkv.clamp(-attention["clip_qkv"], attention["clip_qkv"])
        q, k, v = qkv.split([SIZE, *2 * [(qkv.shape[-1] - SIZE) // 2]], dim=-1)
        if attention["qk_ln"]:
            q, k = norm(at + "attn.q_ln", q), norm(at + "attn.k_ln", k)
        gathered = []
        for head in range(HEADS):
            of = [slice(h * size, (h + 1) * size) for h in (head, head * k.shape[-1] // SIZE)]
            scores = q[:, of[0]] @ k[:, of[1]].T * size**-0.5 + bias[head]
            gathered.append(scores.softmax(-1) @ v[:, of[1]])
        hidden = hidden + linear(at + "attn.out_proj", torch.cat(gathered, -1))
        inner = F.gelu(linear(at + "ffn.up_proj", norm(at + "norm_2", hidden)))
        hidden = hidden + linear(at + "ffn.down_proj", inner)
    scale = SIZE**-0.5 if config["logit_scale"] else 1.0
    return norm("norm_f", hidden) @ w["wte.weight"].T * scale


@pytest.mark.parametrize(("case", "attention"), ATTENTION.items(), ids=ATTENTION)
@torch.no_grad()
def test_attention_of_llm_foundry(case, attention):
    golden = load_file(GOLDEN)
    own = {n.removeprefix(f"{case}."): x for n, x in golden.items() if n.startswith(case)}
    expected = own.pop("out")
    config = LinbiasMptConfig(
        **{"vocab_size": 9, "d_model": 24, "n_heads": HEADS, "n_layers": 1},
        no_bias="Wqkv.bias" not in own,
        attn_config={"alibi": True, **attention},
    )
    model = LinbiasMptForCausalLM(config).eval()
    layer = model.transformer.blocks[0].attn
    layer.load_state_dict(own)
    seen = []
    layer.out_proj.register_forward_hook(lambda _, given, out: seen.append(out))
    model.transformer.blocks[0].norm_1 = torch.nn.Identity()
    model(inputs_embeds=golden["x"])
    assert_near(seen[0], expected)


FOLDERS = {
    "storywriter": original({"clip_qkv": 6, "alibi_bias_max": 16}),
    "grouped, norms, biases": original(
        {**GROUPED, "qk_ln": True},
        no_bias=False,
        expansion_ratio=2.5,
        logit_scale="inv_sqrt_d_model",
    ),
    "one key head": original(MULTIQUERY),
}


@pytest.mark.parametrize("config", FOLDERS.values(), ids=FOLDERS)
@torch.no_grad()
def test_original_folders(config, tmp_path):
    """Logits longer than trained, of a padded row, with a cache; and saved as it came."""
    tensors = weights(config)
    model = load(write_folder(tmp_path / "a", config, tensors))
    assert type(model) is LinbiasMptForCausalLM
    ids, mask = torch.randint(VOCABULARY, (2, 60)), torch.ones(2, 60, dtype=torch.int64)
    mask[0, :25] = 0
    logits = model(ids, attention_mask=mask).logits
    whole = plain(tensors, config, ids[1])
    assert_near(logits[1], whole)
    assert_near(logits[0, 25:], plain(tensors, config, ids[0, 25:]))
    first = model(ids[1:, :50], use_cache=True)
    assert first.past_key_values.layers[0].keys.shape[1] == model.config.num_key_value_heads
    then = model(ids[1:, 50:], past_key_values=first.past_key_values).logits
    assert_near(then[0], whole[50:])
    model.save_pretrained(tmp_path / "b")
    saved = load_file(tmp_path / "b" / "model.safetensors")
    assert saved.keys() == tensors.keys()
    again = load(tmp_path / "b")
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert not torch.equal(load(tmp_path / "b", slope_scale=0.5)(ids).logits, again(ids).logits)


@torch.no_grad()
def test_plain_models_go_to_transformers_and_come_from_it(tmp_path):
    sizes = {"vocab_size": VOCABULARY, "d_model": SIZE, "n_heads": HEADS, "n_layers": 2}
    config = LinbiasMptConfig(**sizes, no_bias=True, attn_config={"alibi": True})
    model = LinbiasMptForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "a")
    theirs = MptForCausalLM.from_pretrained(tmp_path / "a")
    ids = torch.randint(VOCABULARY, (1, 30))
    assert_near(theirs(ids).logits, model(ids).logits)
    released = write_folder(tmp_path / "b", original({"attn_pdrop": 0}), weights(original()))
    assert type(load(released)) is MptForCausalLM


def test_training_and_generation():
    config = LinbiasMptConfig.from_dict(FOLDERS["grouped, norms, biases"])
    model = LinbiasMptForCausalLM(config)
    ids = torch.randint(VOCABULARY, (2, 12))
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    options = {**GREEDY, "attention_mask": torch.ones_like(ids)}
    growing = model.eval().generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, cache_implementation="static"), growing)
    assert torch.equal(model.generate(ids, **options, use_cache=False), growing)


@pytest.mark.parametrize("ours", [False, True])
def test_a_change_within_attn_config_leaves_its_other_fields(ours, tmp_path):
    said = {"alibi": True, "clip_qkv": 0.5, "softmax_scale": 0.1}
    sizes = {"vocab_size": 61, "d_model": 48, "n_heads": 6, "n_layers": 1, "attn_config": said}
    model: Any = MptForCausalLM(MptConfig(**sizes))
    if ours:
        model = LinbiasMptForCausalLM(LinbiasMptConfig(**sizes, logit_scale=2.0))
    model.save_pretrained(tmp_path)
    found = load(tmp_path, attn_config={"alibi_bias_max": 16}).config.attn_config.to_dict()
    assert found.items() >= (said | {"alibi_bias_max": 16}).items()
    with pytest.raises(ValueError, match=r"MptAttentionConfig has no field 'clip_qvk'"):
        load(tmp_path, attn_config={"clip_qvk": 6.0})


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"alibi": False}, r"must have attn_config.alibi = True, got False"),
        ({"rope": True}, r"attn_config.rope of an MPT model must be False, got True; all else"),
        ({"sliding_window_size": 64}, r"sliding_window_size of an MPT model must be -1, got 64"),
        ({**GROUPED, "kv_n_heads": 4}, r"a divisor of 6 heads, got 4"),
        ({"attn_type": "flash"}, r"attn_type must be one of .*got 'flash'"),
        ({"alibi_bias_max": 0}, r"alibi_bias_max must be in \(0, 126\], .* got 0"),
        ({"clip_qkv": "6"}, r"clip_qkv must be None or a positive number of float32, got '6'"),
    ],
)
def test_refused_attention(attention, message, tmp_path):
    test_refused_configurations(original(attention), message, tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_config": 3}, r"attn_config must be a mapping, got 3"),
        ({"ffn_config": {"ffn_type": "mptglu"}}, r"ffn_config.ffn_type .*'mptmlp', got 'mptglu'"),
        ({"norm_type": "rmsnorm"}, r"norm_type of an MPT model must be 'low_precision_l"),
        ({"n_layers": 10**9}, r"n_layers must be at most 2048"),
        ({"d_model": 47}, r"d_model must be a multiple of 6 heads, got 47"),
        ({"expansion_ratio": 1e9}, r"expansion_ratio must be such that"),
        ({"logit_scale": "big"}, r"logit_scale must be None, 'inv_sqrt_d_model' or a positive"),
    ],
)
def test_refused_configurations(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(original() | changes))
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_weights_that_contradict_the_configuration(tmp_path):
    config = original({"qk_ln": True})
    tensors = weights(config)
    less = {name: x for name, x in tensors.items() if "1.ffn" not in name}
    grouped = original({**GROUPED, "qk_ln": True})
    untied = original(tie_word_embeddings=False)
    unknown = "has unknown weights: transformer.blocks.0.attn.k_ln.weight, .*4 in all"
    lacks = r"lacks transformer.blocks.1.ffn.down_proj.weight, .*2 in all"
    wide = (
        r"has transformer.blocks.0.attn.Wqkv.weight of shape \[144, 48\] where it asks for "
        r"\[80, 48\].*4 in all"
    )
    for message, asked, stored in (
        (unknown, original(), tensors),
        (lacks, config, less),
        (wide, grouped, tensors),
        (rf"lacks .*2 in all.*; {wide}", grouped, less),
        (r"lacks lm_head.weight \(1 in all\)", untied, weights(original())),
    ):
        with pytest.raises(
            ValueError, match=rf"load: .*x' must fit its config.json, but {message}"
        ):
            load(write_folder(tmp_path / "x", asked, stored))
    with pytest.raises(ValueError, match=r"cannot read a model at 'mosaicml/typo'"):
        load("mosaicml/typo")


@pytest.mark.parametrize("part", [{"logit_scale": 0.5}, {"no_bias": False}, {"norm_eps": 1e-3}])
def test_the_class_of_transformers_is_refused_where_it_leaves_something_out(part, tmp_path):
    config = original(**part, attn_config={"alibi": True})
    model = AutoModelForCausalLM.from_pretrained(
        write_folder(tmp_path, config, weights(original()))
    )
    reason = r"leaves it out, linbias.models.load\(folder\) does not"
    with pytest.raises(ValueError, match=reason):
        fuse(model)


@torch.no_grad()
def test_it_is_always_fused():
    """`unfuse` undoes the options of `fuse`, and no more."""
    model = LinbiasMptForCausalLM(LinbiasMptConfig.from_dict(original())).eval()
    ids = torch.arange(30)[None]
    always = r"unfuse: .*got a LinbiasMptForCausalLM, which is always"
    with pytest.raises(ValueError, match=always):
        unfuse(model)
    before = model(ids).logits
    scaled = fuse(model, slope_scale=2.0)(ids).logits
    assert not torch.equal(scaled, before)
    assert torch.equal(unfuse(model)(ids).logits, before)
    packed = model(ids, position_ids=ids % 15).logits
    torch.testing.assert_close(packed[:, 15:], model(ids[:, 15:]).logits)
    model.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match=r"attn_implementation must be 'linbias'"):
        model(ids)
