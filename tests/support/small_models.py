"""Small models of both families, for tests: float64, so that two ways to the same number agree to
1e-12.

Their weights are large, or all predictions would be alike and mistakes would hardly show.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    MptConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from linbias.models import LinbiasConfig, LinbiasForCausalLM, fuse
from linbias.models.decoder.config import BLOCKS, POSITIONS
from linbias.paper.config import POSITIONS as PAPER_POSITIONS
from linbias.paper.config import PaperConfig
from linbias.paper.model import PaperForCausalLM

VOCAB, PAPER_VOCAB = 61, 83
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 3}
# What the released code of existing models computed, outside of the repository.
RELEASED = Path(__file__).resolve().parents[3] / "shared" / "golden" / "transformers"
needs_released = pytest.mark.skipif(
    not RELEASED.is_dir(), reason="the data of the original code is not here"
)
every_position = pytest.mark.parametrize("position", POSITIONS)
every_block = pytest.mark.parametrize("block", BLOCKS)


def settings(**changes: Any) -> LinbiasConfig:
    small = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 4}
    return LinbiasConfig(**{**small, "train_length": 48, "initializer_range": 0.3, **changes})


def start_checkpointing(model: PreTrainedModel, **options: Any) -> None:
    """Transformers 5.23 gave the switch another name."""
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)(options or None)


def build(**changes: Any) -> LinbiasForCausalLM:
    return LinbiasForCausalLM(settings(**changes)).double().eval()


def build_paper(**changes: Any) -> PaperForCausalLM:
    small = {"vocab_size": PAPER_VOCAB, "hidden_size": 24, "num_hidden_layers": 2}
    small |= {"num_attention_heads": 3}
    fit = {"intermediate_size": 50, "train_length": 16, "cutoffs": (11, 30), "adaptive_factor": 2}
    model = PaperForCausalLM(PaperConfig(**{**small, **fit, **changes})).double().eval()
    for p in model.parameters():
        if p.dim() == 1:
            nn.init.normal_(p, std=0.3)
    return model


# Existing models of Transformers, with 8 numbers a head.
EXISTING: dict[str, tuple[type[PreTrainedConfig], tuple[str, str, str], dict[str, Any]]] = {
    "bloom": (BloomConfig, ("hidden_size", "n_head", "n_layer"), {}),
    "falcon": (
        FalconConfig,
        ("hidden_size", "num_attention_heads", "num_hidden_layers"),
        {"alibi": True},
    ),
    "mpt": (
        MptConfig,
        ("d_model", "n_heads", "n_layers"),
        {"max_seq_len": 40, "use_cache": True},
    ),
}
each_existing = pytest.mark.parametrize("family", EXISTING)


def existing(family: str, heads: int = 4, **changes: Any) -> PreTrainedModel:
    """As Transformers runs it; Falcon rounds the slopes of four heads without loss."""
    kind, names, own = EXISTING[family]
    sizes = dict(zip(names, (8 * heads, heads, 2), strict=True))
    fit = {"vocab_size": VOCAB, "initializer_range": 0.3}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        kind(**{**sizes, **own, **fit, **changes})
    )
    return model.eval()


def fused(family: str, **options: Any) -> PreTrainedModel:
    """One in float64, of heads whose slopes are no powers of two, on our attention."""
    return fuse(existing(family, heads=6).double(), **options)


def tokens(*shape: int, vocab_size: int = VOCAB) -> Tensor:
    return torch.randint(vocab_size, shape)


def paper_tokens(*shape: int) -> Tensor:
    return tokens(*shape, vocab_size=PAPER_VOCAB)


# With every position method of each.
both_families = pytest.mark.parametrize(
    ("make", "position", "draw"),
    [
        *(pytest.param(build, position, tokens, id=position) for position in POSITIONS),
        *(pytest.param(build_paper, p, paper_tokens, id=f"paper-{p}") for p in PAPER_POSITIONS),
    ],
)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    size = float(expected.detach().abs().max())
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12 * size)


def assert_near(ours: Tensor, expected: Tensor, most: float = 1e-5) -> None:
    assert (ours.double() - expected).abs().max() < most * expected.abs().max()


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    """A folder of a model, from the contents of its two files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return ids and mask; padding holds a token that would be noticed if it were read."""
    length = max(len(row) for row in rows)
    ids, mask = torch.full((2, len(rows), length), VOCAB - 1).unbind()
    for line, row in enumerate(rows):
        ids[line, length - len(row) :] = row
        mask[line] = (torch.arange(length) >= length - len(row)).long()
    return ids, mask


def decode(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, chunks: list[int]) -> Tensor:
    """Return the logits of all tokens, fed to a cache in chunks."""
    cache, logits, done = None, [], 0
    for chunk in chunks:
        seen = None if mask is None else mask[:, : done + chunk]
        out = model(ids[:, done : done + chunk], seen, past_key_values=cache, use_cache=True)
        cache, done = out.past_key_values, done + chunk
        logits.append(out.logits)
    return torch.cat(logits, dim=1)
