"""`load`, the one door to models: what it says where nothing can be loaded; and what imports leave alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from linbias.models import LinbiasForCausalLM, load, loading
from linbias.models.loading import Files
from small_models import assert_same, build, tokens

pytestmark = pytest.mark.usefixtures("same_start")

SNAPSHOT = """
import importlib, pkgutil, sys
import transformers
from transformers import masking_utils, modeling_utils
from transformers.models.auto import configuration_auto, modeling_auto
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

def snapshot():
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("transformers", "huggingface_hub"):
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = id(value)
            if isinstance(value, (dict, set, list)):
                found[name, key, "content"] = repr(sorted(map(str, value)))
            if isinstance(value, type) and value.__module__.startswith("transformers"):
                for attribute, held in list(vars(value).items()):
                    found[name, key, attribute] = id(held)
    for key, value in vars(modeling_auto).items():
        if hasattr(value, "_extra_content"):
            found["extra", key] = repr(value._extra_content)
    found["configurations"] = repr(configuration_auto.CONFIG_MAPPING._extra_content)
    for name, kind in (("attention", modeling_utils.AttentionInterface), ("mask", masking_utils.AttentionMaskInterface)):
        found[name] = repr(kind._global_mapping)
    return found

before = snapshot()
import linbias
for module in pkgutil.walk_packages(linbias.__path__, "linbias."):
    if module.name not in ("linbias.transformers", "linbias.__main__") and "triton" not in module.name:
        importlib.import_module(module.name)
after = snapshot()
caches = ("_abc_impl", "__abstractmethods__", "__annotations_cache__", "__signature__", "__doc__")
changed = [key for key in before if before[key] != after.get(key) and key[-1] not in caches]
print(len(before) > 10_000, "linbias.models.loading" in sys.modules, "linbias.lm.training" in sys.modules, changed)
"""


@pytest.mark.processes
def test_imports_leave_transformers_as_it_was() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SNAPSHOT], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["True True True []"], (
        done.stdout[-2000:] + done.stderr
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "mystery"},
        {"model_type": "t5"},
        {"model_type": ["a"]},
        {"model_type": "bert"},
    ],
)
def test_an_unknown_family_names_those_that_there_are(settings: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"load: .* family that is known \(linbias, .*bloom, .*MosaicBERT"
    ):
        load(tmp_path)


def test_weights_that_do_not_fit_are_said_at_once_and_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    weights["model.more.weight"] = torch.ones(1)
    weights["model.norm.bias"] = torch.ones(3)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(LinbiasForCausalLM, "from_pretrained", None)
    monkeypatch.setattr(loading, "load_file", None)
    message = (
        r"load: '.*' must fit its config.json, but lacks model.norm.weight \(1 in all\); "
        r"has unknown weights: model.more.weight \(1 in all\); "
        r"has model.norm.bias of shape \[3\] where it asks for \[32\] \(1 in all\)"
    )
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_sharded_folder_and_one_of_pickles_are_read(tmp_path: Path) -> None:
    model = build().float()
    ids = tokens(1, 7)
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    assert_same(load(tmp_path / "parts")(ids).logits, model(ids).logits)
    model.save_pretrained(tmp_path / "pickle")
    (tmp_path / "pickle" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    assert_same(load(tmp_path / "pickle")(ids).logits, model(ids).logits)
    last = sorted((tmp_path / "parts").glob("*.safetensors"))[-1]
    last.unlink()
    with pytest.raises(
        ValueError, match=r"it has not all parts that model.safetensors.index.json"
    ):
        load(tmp_path / "parts")


@torch.no_grad()
def test_models_without_alibi_stay_as_they_are(tmp_path: Path) -> None:
    sizes = {"vocab_size": 61, "num_hidden_layers": 1, "num_attention_heads": 2}
    for model in (
        GPT2LMHeadModel(GPT2Config(**sizes, n_embd=16, n_positions=32)),
        LlamaForCausalLM(LlamaConfig(**sizes, hidden_size=16, intermediate_size=16)),
    ):
        folder = tmp_path / model.config.model_type
        model.eval().save_pretrained(folder)
        ids = tokens(1, 7)
        assert_same(load(folder)(ids).logits, model(ids).logits)
        with pytest.raises(
            ValueError, match=r"load: task must be 'causal' for .*no ALiBi, got 'base'"
        ):
            load(folder, task="base")


def test_arguments(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    for arguments, message in (
        ({"task": "classification"}, r"task must be one of \('base', .*got 'classification'"),
        (
            {"task": "masked"},
            r"task must be one of \('causal', 'base'\) for .*linbias model, got 'masked'",
        ),
        ({"rope": 1}, r"LinbiasConfig has no field 'rope'"),
        ({"dtype": "int8"}, r"dtype must be a floating type of PyTorch, got 'int8'"),
        ({"slope_scale": -1}, r"slope_scale must be None, 'interpolate' or a positive number"),
    ):
        with pytest.raises(ValueError, match=rf"load: .*{message}"):
            load(tmp_path, **arguments)
    assert load(tmp_path, dtype="bfloat16").dtype == torch.bfloat16


def test_a_folder_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build().save_pretrained(tmp_path)
    files = Files.at("test", tmp_path)
    (tmp_path / "config.json").unlink()
    monkeypatch.setattr(loading, "answers", None)
    assert type(load(files)) is LinbiasForCausalLM


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("from linbias.models import from_pretrained", r"from_pretrained is linbias.models.load"),
        ("from linbias.models import Padding", r"Padding is linbias.models.places.Places now"),
    ],
)
def test_names_that_moved_answer_with_the_new_one(name: str, message: str) -> None:
    with pytest.raises(ImportError, match=message):
        exec(name)
