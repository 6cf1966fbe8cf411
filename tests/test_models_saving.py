"""Saving and loading of both families: folders, tokenizers, damage and hostile files."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from linbias.models import LinbiasConfig, LinbiasForCausalLM, LinbiasModel
from small_models import assert_same, build, every_block, every_position, tokens

pytestmark = pytest.mark.usefixtures("same_start")


@every_block
@every_position
@torch.no_grad()
def test_model_survives_saving_and_loading(position: str, block: str, tmp_path: Path) -> None:
    model = build(position=position, block=block)
    model.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is LinbiasForCausalLM and loaded.dtype == torch.float64
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    ids = tokens(2, 9)
    assert_same(loaded(ids).logits, model(ids).logits)
    assert type(AutoModel.from_pretrained(tmp_path)) is LinbiasModel
    assert type(AutoConfig.from_pretrained(tmp_path)) is LinbiasConfig


@pytest.mark.parametrize("tied", [True, False])
def test_weights_are_tied_as_configured(tied: bool, tmp_path: Path) -> None:
    build(tie_word_embeddings=tied).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied


@pytest.mark.parametrize(
    "spoil",
    [
        lambda weights: weights[: len(weights) // 2],
        lambda weights: b"",
        lambda weights: b"\xff" * 64 + weights[64:],
        lambda weights: pickle.dumps({"lm_head.weight": 1}),
    ],
    ids=["truncated", "empty", "corrupt header", "pickle in disguise"],
)
def test_spoilt_weights_are_refused(spoil: Any, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(spoil(weights.read_bytes()))
    with pytest.raises(SafetensorError):
        AutoModelForCausalLM.from_pretrained(tmp_path)


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_loading_never_runs_code(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"lm_head.weight": _Bomb(tmp_path / "exploded")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(pickle.UnpicklingError):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_a_bad_saved_configuration_is_refused(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "position": "absolute"}))
    with pytest.raises(ValueError, match=r"position must be one of .* got 'absolute'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_importing_the_package_does_not_load_data_sets_or_trainer() -> None:
    code = """
import sys, linbias.lm
heavy = ("datasets", "transformers.trainer", "linbias.lm.train")
print([name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
