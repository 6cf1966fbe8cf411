"""Decoders that run without the code of their folders, against plain restatements of them.

Baichuan's own code is held against in `test_transformers_fused.py`. The data of JAIS are logits of
llama.cpp (llama-cpp-python 0.3.36, a GGUF file of the weights beside them, float32).
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import linbias
from linbias.models import load
from linbias.models.decoder.baichuan import BaichuanForCausalLM
from linbias.models.decoder.jais import JaisConfig, JaisForCausalLM
from small_models import GREEDY

pytestmark = pytest.mark.usefixtures("same_start")

GOLDEN = Path(__file__).parents[1] / "golden"
VOCABULARY, SIZE, HEADS = 97, 48, 6
BAICHUAN = {
    **{"vocab_size": VOCABULARY, "hidden_size": SIZE, "intermediate_size": 64},
    **{"num_attention_heads": HEADS, "num_hidden_layers": 2, "initializer_range": 0.3},
}
JAIS = {
    **{"vocab_size": VOCABULARY, "n_embd": SIZE, "n_inner": 64, "n_head": HEADS, "n_layer": 2},
    **{"mup_embeddings_scale": 14.6, "mup_output_alpha": 2.2, "mup_width_scale": 0.11},
    "initializer_range": 0.2,
}


def build(make: Any = JaisForCausalLM, **changes: Any) -> Any:
    sizes = BAICHUAN if make is BaichuanForCausalLM else JAIS
    model = make(make.config_class(**{**sizes, **changes})).double().eval()
    for name, p in model.named_parameters():
        if "slopes" in name:
            p.data.mul_(torch.rand_like(p) + 0.5)  # stored slopes count, not the schedule
        elif p.dim() == 1:
            is_scale = name.endswith("weight")
            torch.nn.init.normal_(p, mean=float(is_scale), std=0.3)
    return model


def attend(parts: tuple[Tensor, ...], slopes: Tensor, scale: float) -> Tensor:
    """What each token [T, SIZE] gathers: causal attention with slopes [H, 1]."""
    q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(0, 1) for x in parts)
    place = torch.arange(q.shape[1])
    distance = place[:, None] - place
    bias = (-slopes[:, :, None] * distance).masked_fill(distance < 0, -torch.inf)
    return ((q @ k.mT * scale + bias).softmax(-1) @ v).transpose(0, 1).flatten(1)


def plain_baichuan(model: Any, ids: Tensor) -> Tensor:
    """Logits [T, V] of one text [T] in the plainest words."""
    w = model.state_dict()
    hidden = w["model.embed_tokens.weight"][ids]
    slopes = torch.tensor(linbias.slopes(HEADS))[:, None]

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[name + ".weight"]

    for layer in range(2):
        at = f"model.layers.{layer}."
        product = norm(at + "input_layernorm", hidden) @ w[at + "self_attn.W_pack.weight"].T
        gathered = attend(product.chunk(3, -1), slopes, (SIZE // HEADS) ** -0.5)
        hidden = hidden + gathered @ w[at + "self_attn.o_proj.weight"].T
        normed = norm(at + "post_attention_layernorm", hidden)
        gate, up = (normed @ w[at + f"mlp.{x}_proj.weight"].T for x in ("gate", "up"))
        hidden = hidden + (F.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    head = w["lm_head.weight"]
    if model.config.normalize_head:
        head = head / head.norm(dim=-1, keepdim=True)
    return norm("model.norm", hidden) @ head.T


def plain_jais(model: Any, ids: Tensor) -> Tensor:
    """Likewise."""
    w, config = model.state_dict(), model.config
    hidden = w["transformer.wte.weight"][ids] * config.mup_embeddings_scale
    slopes = w["transformer.relative_pe.slopes"]
    scaling = config.alibi_scaling or {}
    if "factor" in scaling:
        slopes = slopes / scaling["factor"]
    elif len(ids) > scaling.get("train_seq_len", len(ids)):
        slopes = slopes * scaling["train_seq_len"] / len(ids)
    D = SIZE // HEADS
    scale = 1 / D if config.mup_scale_qk_dot_by_d else D**-0.5

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (SIZE,), w[name + ".weight"], w[name + ".bias"], 1e-5)

    def product(name: str, x: Tensor) -> Tensor:
        return x @ w[name + ".weight"] + w[name + ".bias"]

    for layer in range(2):
        at = f"transformer.h.{layer}."
        parts = product(at + "attn.c_attn", norm(at + "ln_1", hidden)).chunk(3, -1)
        hidden = hidden + product(at + "attn.c_proj", attend(parts, slopes, scale))
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
    ("make", "plain", "changes"),
    [
        (BaichuanForCausalLM, plain_baichuan, {"normalize_head": False}),
        (BaichuanForCausalLM, plain_baichuan, {"normalize_head": True}),
        (JaisForCausalLM, plain_jais, {"mup_scale_qk_dot_by_d": True}),
        (JaisForCausalLM, plain_jais, {"activation_function": "gelu"}),
        (JaisForCausalLM, plain_jais, {"alibi_scaling": {"type": "linear", "factor": 4.0}}),
        (JaisForCausalLM, plain_jais, {"alibi_scaling": {"type": "linear", "train_seq_len": 12}}),
    ],
)
@torch.no_grad()
def test_logits_of_padded_rows_and_generation(make: Any, plain: Any, changes: Any) -> None:
    model = build(make, **changes)
    ids, mask = torch.randint(VOCABULARY, (3, 25)), torch.ones(3, 25, dtype=torch.int64)
    mask[0, :6] = mask[1, 9:] = 0
    for given in (mask, None):
        logits = model(ids, attention_mask=given).logits
        for row in range(3):
            real = mask[row].bool() if given is not None else torch.ones(25, dtype=torch.bool)
            expected = plain(model, ids[row, real])
            assert (logits[row, real] - expected).abs().max() < 1e-9 * expected.abs().max()
    if "train_seq_len" not in changes.get("alibi_scaling", {}):  # whose slopes change by the step
        options = {**GREEDY, "attention_mask": torch.ones_like(ids)}
        with_cache = model.generate(ids, **options)
        assert torch.equal(with_cache, model.generate(ids, **options, use_cache=False))


@torch.no_grad()
def test_the_norms_of_the_head_follow_its_weights() -> None:
    model = build(BaichuanForCausalLM, normalize_head=True)
    ids = torch.randint(VOCABULARY, (1, 7))
    weight, factors = model.lm_head.weight, torch.rand(VOCABULARY, 1).double() + 1
    step = torch.optim.SGD([weight], lr=1.0, fused=True).step  # which PyTorch does not count

    def learn() -> None:
        weight.grad = torch.randn_like(weight)
        step()

    for change in (lambda: weight.mul_(factors), lambda: weight.data.mul_(factors), learn):
        model(ids)
        change()
        for found in (model, copy.deepcopy(model)):
            assert torch.allclose(found(ids).logits[0], plain_baichuan(model, ids[0]))


@torch.no_grad()
def test_jais_gives_the_logits_of_llama_cpp() -> None:
    """Six heads, whose slopes are no powers of one ratio; all factors of muP differ from 1."""
    golden = load_file(GOLDEN / "jais_llama_cpp.safetensors")
    ids, expected = golden.pop("ids").long(), golden.pop("logits")
    sizes = {"vocab_size": 24, "n_embd": 24, "n_inner": 24, "n_head": 6, "n_layer": 2}
    factors = {"mup_embeddings_scale": 3.0, "mup_output_alpha": 1.5, "mup_width_scale": 0.5}
    model = JaisForCausalLM(
        JaisConfig(**sizes, **factors, mup_scale_qk_dot_by_d=True, tie_word_embeddings=False)
    )
    model.load_state_dict(golden)
    torch.testing.assert_close(model.eval()(ids[None]).logits[0], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("make", [BaichuanForCausalLM, JaisForCausalLM])
@torch.no_grad()
def test_original_folders_load_by_their_model_type(make: Any, tmp_path: Path) -> None:
    """With names of the original, buffers of the causal mask, and no copy of tied weights."""
    model = build(make).float()
    model.save_pretrained(tmp_path)
    if make is not BaichuanForCausalLM:
        weights = load_file(tmp_path / "model.safetensors")
        assert "transformer.relative_pe.slopes" in weights and "lm_head.weight" not in weights
        weights["transformer.h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    loaded = load(tmp_path, device="cpu")
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
