"""Decoders that run without the code of their folders, against plain restatements of them.

Baichuan's own code is held against in `test_transformers_fused.py`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import linbias
from linbias.models import load
from linbias.models.decoder.baichuan import BaichuanForCausalLM
from small_models import GREEDY

pytestmark = pytest.mark.usefixtures("same_start")

GOLDEN = Path(__file__).parents[1] / "golden"
VOCABULARY, SIZE, HEADS = 97, 48, 6
BAICHUAN = {
    **{"vocab_size": VOCABULARY, "hidden_size": SIZE, "intermediate_size": 64},
    **{"num_attention_heads": HEADS, "num_hidden_layers": 2, "initializer_range": 0.3},
}


def build(**changes: Any) -> Any:
    config = BaichuanForCausalLM.config_class(**{**BAICHUAN, **changes})
    model = BaichuanForCausalLM(config).double().eval()
    for name, p in model.named_parameters():
        if p.dim() == 1:
            torch.nn.init.normal_(p, mean=float(name.endswith("weight")), std=0.3)
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


@pytest.mark.parametrize("normalize_head", [False, True])
@torch.no_grad()
def test_logits_of_padded_rows_and_generation(normalize_head: bool) -> None:
    model = build(normalize_head=normalize_head)
    ids, mask = torch.randint(VOCABULARY, (3, 25)), torch.ones(3, 25, dtype=torch.int64)
    mask[0, :6] = mask[1, 9:] = 0
    for given in (mask, None):
        logits = model(ids, attention_mask=given).logits
        for row in range(3):
            real = mask[row].bool() if given is not None else torch.ones(25, dtype=torch.bool)
            expected = plain_baichuan(model, ids[row, real])
            assert (logits[row, real] - expected).abs().max() < 1e-9 * expected.abs().max()
    options = {**GREEDY, "attention_mask": torch.ones_like(ids)}
    with_cache = model.generate(ids, **options)
    assert torch.equal(with_cache, model.generate(ids, **options, use_cache=False))


@torch.no_grad()
def test_original_folders_load_by_their_model_type(tmp_path: Path) -> None:
    model = build().float()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path, device="cpu")
    assert type(loaded) is BaichuanForCausalLM
    ids = torch.randint(VOCABULARY, (1, 7))
    assert torch.equal(loaded(ids).logits, model(ids).logits)
