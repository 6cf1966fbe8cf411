"""JAIS and BTLM against a plain restatement of what is public about them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from linbias.models import load
from linbias.models.jais import BtlmConfig, BtlmForCausalLM, JaisConfig, JaisForCausalLM

pytestmark = pytest.mark.usefixtures("same_start")

VOCABULARY, SIZE, HEADS = 97, 48, 6
MUP = {"mup_embeddings_scale": 14.6, "mup_output_alpha": 2.2, "mup_width_scale": 0.11}


def build(make: Any = JaisForCausalLM, config: Any = JaisConfig, **changes: Any) -> Any:
    sizes = {
        "vocab_size": VOCABULARY,
        "n_embd": SIZE,
        "n_inner": 64,
        "n_head": HEADS,
        "n_layer": 2,
    }
    model = make(config(**{**sizes, "initializer_range": 0.2, **MUP, **changes})).double().eval()
    for name, p in model.named_parameters():
        if "slopes" in name:
            p.data.mul_(torch.rand_like(p) + 0.5)  # stored slopes count, not the schedule
        elif p.dim() == 1:
            torch.nn.init.normal_(p, mean=float("ln_" in name), std=0.3)
    return model


def plain(model: Any, ids: Tensor) -> Tensor:
    """Logits [T, V] of one text [T] in the plainest words."""
    w, config = model.state_dict(), model.config
    hidden = w["transformer.wte.weight"][ids] * config.mup_embeddings_scale
    distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
    slopes = w["transformer.relative_pe.slopes"]
    scaling = config.alibi_scaling or {}
    if "factor" in scaling:
        slopes = slopes / scaling["factor"]
    elif len(ids) > scaling.get("train_seq_len", len(ids)):
        slopes = slopes * scaling["train_seq_len"] / len(ids)
    bias = (-slopes[:, :, None] * distance).masked_fill(distance < 0, -torch.inf)
    D = SIZE // HEADS
    scale = 1 / D if config.mup_scale_qk_dot_by_d else D**-0.5

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (SIZE,), w[name + ".weight"], w[name + ".bias"], 1e-5)

    def product(name: str, x: Tensor) -> Tensor:
        return x @ w[name + ".weight"] + w[name + ".bias"]

    for layer in range(2):
        at = f"transformer.h.{layer}."
        parts = product(at + "attn.c_attn", norm(at + "ln_1", hidden)).chunk(3, -1)
        q, k, v = (x.unflatten(-1, (HEADS, D)).transpose(0, 1) for x in parts)
        gathered = ((q @ k.mT * scale + bias).softmax(-1) @ v).transpose(0, 1).flatten(1)
        hidden = hidden + product(at + "attn.c_proj", gathered)
        normed = norm(at + "ln_2", hidden)
        inner = product(at + "mlp.c_fc", normed)
        if config.activation_function == "swiglu":
            inner = inner * F.silu(product(at + "mlp.c_fc2", normed))
        else:
            inner = F.gelu(inner)
        hidden = hidden + product(at + "mlp.c_proj", inner)
    logits = norm("transformer.ln_f", hidden) @ w["lm_head.weight"].T
    return logits * config.mup_output_alpha * config.mup_width_scale


@pytest.mark.parametrize(
    "changes",
    [
        {"mup_scale_qk_dot_by_d": True},
        {"activation_function": "gelu"},
        {"alibi_scaling": {"type": "linear", "factor": 4.0}},
        {"alibi_scaling": {"type": "linear", "train_seq_len": 12}},
    ],
)
@torch.no_grad()
def test_logits_of_padded_rows(changes: dict[str, Any]) -> None:
    model = build(**changes)
    ids, mask = torch.randint(VOCABULARY, (3, 25)), torch.ones(3, 25, dtype=torch.int64)
    mask[0, :6] = mask[1, 9:] = 0
    for given in (mask, None):
        logits = model(ids, attention_mask=given).logits
        for row in range(3):
            real = mask[row].bool() if given is not None else torch.ones(25, dtype=torch.bool)
            expected = plain(model, ids[row, real])
            assert (logits[row, real] - expected).abs().max() < 1e-9 * expected.abs().max()


def test_generation_with_and_without_cache() -> None:
    model = build()
    ids = torch.randint(VOCABULARY, (2, 9))
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with_cache = model.generate(ids, **options)
    assert torch.equal(with_cache, model.generate(ids, **options, use_cache=False))


@torch.no_grad()
def test_original_folders_load_by_their_model_type(tmp_path: Path) -> None:
    """Names of the original, buffers of the causal mask among them, and no copy of the tied output weights."""
    for make, config in ((JaisForCausalLM, JaisConfig), (BtlmForCausalLM, BtlmConfig)):
        model = build(make, config).float()
        folder = tmp_path / config.model_type
        model.save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        assert "transformer.relative_pe.slopes" in weights and "lm_head.weight" not in weights
        weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        loaded = load(folder, device="cpu")
        assert type(loaded) is make
        ids = torch.randint(VOCABULARY, (1, 7))
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_slopes_stay_wide_in_a_narrow_model(tmp_path: Path) -> None:
    """`.to(bfloat16)` and loading in bfloat16 would round them."""
    model = build().float()
    slopes = model.transformer.relative_pe.slopes.clone()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, device="cpu", dtype=torch.bfloat16)
    for narrow in (loaded, model.to(torch.bfloat16), model.half()):
        assert narrow.lm_head.weight.itemsize == 2
        assert torch.equal(narrow.transformer.relative_pe.slopes, slopes)
    assert model.double().transformer.relative_pe.slopes.dtype == torch.float64


def test_the_first_models_name_their_scales_otherwise() -> None:
    older = {"embeddings_scale": 14.6, "width_scale": 0.22, "scale_qk_dot_by_d": True}
    config = JaisConfig.from_dict(older)
    assert config.mup_embeddings_scale == 14.6 and config.mup_width_scale == 0.22
    assert config.mup_scale_qk_dot_by_d


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "learned"}, r"must be one of \('alibi',\), got 'learned'"),
        ({"n_embd": 50}, r"n_embd must be a multiple of 6 heads, got 50"),
        ({"alibi_scaling": {"factor": 0}}, r"alibi_scaling must be None or a mapping"),
        (
            {"alibi_scaling": {"type": "cubic", "factor": 2}},
            r"alibi_scaling must be None or a mapp",
        ),
        ({"reorder_and_upcast_attn": True}, r"reorder_and_upcast_attn must be False, got True"),
        ({"activation_function": "exec"}, r"activation_function must be 'swiglu' or the name"),
    ],
)
def test_refused_configurations(changes: dict[str, Any], message: str) -> None:
    sizes = {"vocab_size": VOCABULARY, "n_embd": SIZE, "n_head": HEADS, "n_layer": 1}
    with pytest.raises(ValueError, match=message):
        JaisConfig.from_dict({**sizes, **changes})
