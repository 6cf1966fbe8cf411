"""Baichuan's decoder against a plain restatement and the golden data of the original code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import linbias
from linbias.models import load
from linbias.models.baichuan import BaichuanConfig, BaichuanForCausalLM

pytestmark = pytest.mark.usefixtures("same_start")

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "transformers" / "baichuan"
VOCABULARY, SIZE, HEADS = 97, 48, 6


def build(**changes: Any) -> BaichuanForCausalLM:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": SIZE, "intermediate_size": 64}
    sizes |= {"num_attention_heads": HEADS, "num_hidden_layers": 2, "initializer_range": 0.3}
    model = BaichuanForCausalLM(BaichuanConfig(**{**sizes, **changes})).double().eval()
    for name, p in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(p, mean=1.0, std=0.3)
    return model


def plain(model: BaichuanForCausalLM, ids: Tensor) -> Tensor:
    """Logits [T, V] of one text [T] in the plainest words."""
    w = model.state_dict()
    hidden = w["model.embed_tokens.weight"][ids]
    distance = torch.arange(len(ids))[:, None] - torch.arange(len(ids))
    bias = -torch.tensor(linbias.slopes(HEADS))[:, None, None] * distance
    bias = bias.masked_fill(distance < 0, -torch.inf)

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w[name + ".weight"]

    for layer in range(2):
        at = f"model.layers.{layer}."
        q, k, v = (
            norm(at + "input_layernorm", hidden) @ w[at + "self_attn.W_pack.weight"].T
        ).chunk(3, -1)
        q, k, v = (x.unflatten(-1, (HEADS, -1)).transpose(0, 1) for x in (q, k, v))
        gathered = (q @ k.mT / (SIZE // HEADS) ** 0.5 + bias).softmax(-1) @ v
        hidden = hidden + gathered.transpose(0, 1).flatten(1) @ w[at + "self_attn.o_proj.weight"].T
        normed = norm(at + "post_attention_layernorm", hidden)
        gate, up = (normed @ w[at + f"mlp.{x}_proj.weight"].T for x in ("gate", "up"))
        hidden = hidden + (F.silu(gate) * up) @ w[at + "mlp.down_proj.weight"].T
    head = w["lm_head.weight"]
    if model.config.normalize_head:
        head = head / head.norm(dim=-1, keepdim=True)
    return norm("model.norm", hidden) @ head.T


@pytest.mark.parametrize("normalize_head", [False, True])
@torch.no_grad()
def test_logits_of_padded_rows(normalize_head: bool) -> None:
    model = build(normalize_head=normalize_head)
    ids, mask = torch.randint(VOCABULARY, (3, 15)), torch.ones(3, 15, dtype=torch.int64)
    mask[0, :6] = mask[1, 9:] = 0
    logits = model(ids, attention_mask=mask).logits
    for row in range(3):
        real = mask[row].bool()
        expected = plain(model, ids[row, real])
        assert (logits[row, real] - expected).abs().max() < 1e-6 * expected.abs().max()


@torch.no_grad()
def test_the_norms_of_the_head_follow_its_weights() -> None:
    model = build(normalize_head=True)
    ids = torch.randint(VOCABULARY, (1, 7))
    model(ids)
    model.lm_head.weight.mul_(torch.rand(VOCABULARY, 1).double() + 1)
    assert torch.allclose(model(ids).logits[0], plain(model, ids[0]), atol=1e-5)


def test_generation_with_and_without_cache() -> None:
    model = build(normalize_head=True)
    ids = torch.randint(VOCABULARY, (2, 9))
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with_cache = model.generate(ids, **options)
    assert torch.equal(with_cache, model.generate(ids, **options, use_cache=False))


def test_an_original_folder_loads_by_its_model_type(tmp_path: Path) -> None:
    model = build().float()
    model.save_pretrained(tmp_path)
    assert '"model_type": "baichuan"' in (tmp_path / "config.json").read_text()
    loaded = load(tmp_path)
    ids = torch.randint(VOCABULARY, (1, 7))
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_which_models_normalize_their_head() -> None:
    assert BaichuanConfig(vocab_size=125_696).normalize_head
    assert not BaichuanConfig(vocab_size=64_000).normalize_head
    assert BaichuanConfig(vocab_size=64_000, normalize_head=True).normalize_head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_position_embeddings": 4096}, r"must be absent: the models of 7B, .* got 4096"),
        ({"hidden_size": 50}, r"hidden_size must be a multiple of 6 heads, got 50"),
        ({"hidden_act": "exec"}, r"hidden_act must be the name of an activation"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers must be at most 2048"),
        ({"normalize_head": 1}, r"normalize_head must be None, True or False, got 1"),
    ],
)
def test_refused_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"BaichuanConfig: .*{message}|{message}"):
        build(**changes)


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the data of the original code is not here")
@torch.no_grad()
def test_golden_data() -> None:
    for case in sorted(GOLDEN.iterdir()):
        expected = load_file(case / "expected.safetensors")
        settings = {"normalize_head": True} if case.name == "heads12" else {}
        model = load(case, **settings)
        for name in ("T17", "T129", "T700", "right"):
            ids, mask = expected[f"{name}.input_ids"], expected[f"{name}.attention_mask"]
            logits = model(ids, attention_mask=mask).logits * mask[..., None]
            if (positions := expected.get(f"{name}.positions")) is not None:
                logits = logits.gather(1, positions[..., None].expand(-1, -1, VOCABULARY))
            truth = expected[f"{name}.logits"]
            assert (logits - truth).abs().max() < 2e-5 * truth.abs().max(), (case, name)
        options = {
            "max_new_tokens": 24,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
        }
        mask = expected["T17.attention_mask"]
        tokens = model.generate(expected["T17.input_ids"], attention_mask=mask, **options)
        assert torch.equal(tokens[:, 17:], expected["generate.tokens"])
