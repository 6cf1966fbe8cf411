"""`load`: what it says where nothing can be loaded; and what imports leave alone."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from linbias import models
from linbias.models import (
    LinbiasBertConfig,
    LinbiasBertModel,
    LinbiasForCausalLM,
    families,
    files,
    fuse,
    load,
)
from linbias.models.loading import Files
from small_models import assert_same, build, tokens, write_folder

pytestmark = pytest.mark.usefixtures("same_start")

SIZES = {"vocab_size": 61, "num_hidden_layers": 1, "num_attention_heads": 2}


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(**SIZES, n_embd=16, n_positions=32))


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
    for kind in (modeling_utils.AttentionInterface, masking_utils.AttentionMaskInterface):
        found[str(kind)] = repr(kind._global_mapping)
    return found

before = snapshot()
import linbias
for module in pkgutil.walk_packages(linbias.__path__, "linbias."):
    apart = "triton" in module.name or ".vllm." in module.name  # a compiler, and an engine
    if module.name != "linbias.__main__" and not apart:
        importlib.import_module(module.name)
after = snapshot()
caches = ("_abc_impl", "__abstractmethods__", "__annotations_cache__", "__signature__", "__doc__")
changed = [key for key in before if before[key] != after.get(key) and key[-1] not in caches]
loaded = [name in sys.modules for name in ("linbias.models.loading", "linbias.lm.training")]
print(len(before) > 10_000, *loaded, changed)
"""


@pytest.mark.processes
def test_imports_leave_transformers_as_it_was() -> None:
    command = [sys.executable, "-c", SNAPSHOT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout[-2000:] + done.stderr
    assert done.stdout.splitlines()[-1:] == ["True True True []"], said


def test_a_room_that_is_gone_takes_its_family_along(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [family.name for family in families.families()]
    assert "linbias-paper" in names
    monkeypatch.setattr(families, "_ROOMS", ())
    left = families.families.__wrapped__()
    assert [family.name for family in left] == [x for x in names if x != "linbias-paper"]


@pytest.mark.parametrize("kind", ["mystery", "btlm", "t5", ["a"], "bert"])
def test_an_unknown_family_names_those_that_there_are(kind: Any, tmp_path: Path) -> None:
    write_folder(tmp_path, {"model_type": kind}, {"a": torch.ones(1)})
    known = r"load: .* family that is known \(linbias, .*bloom, .*MosaicBERT"
    with pytest.raises(ValueError, match=known):
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
    monkeypatch.setattr(files, "load_file", None)
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
    first, *_, last = sorted((tmp_path / "parts").glob("*.safetensors"))
    name = min(load_file(first))
    save_file(load_file(last) | {name: load_file(first)[name] + 1}, last, {"format": "pt"})
    twice = rf"{name} must lie in one file, got another in {last.name}"
    with pytest.raises(ValueError, match=twice):
        load(tmp_path / "parts")
    last.unlink()
    with pytest.raises(ValueError, match="it has not all parts that model"):
        load(tmp_path / "parts")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.to(torch.complex64), "floating numbers, got torch.complex64"),
        (lambda x: x.to(torch.int32), "floating numbers, got torch.int32"),
        (lambda x: x > 0, "floating numbers, got torch.bool"),
        (lambda x: x.where(x < x.max(), torch.nan), "finite numbers, got NaN"),
        (lambda x: x.where(x < x.max(), -torch.inf), "finite numbers, got infinity"),
        (lambda x: x.where(x < x.max(), torch.inf), "finite numbers, got infinity"),
    ],
    ids=["complex", "integer", "boolean", "NaN", "-infinity", "infinity"],
)
def test_weights_that_are_no_numbers_are_refused_by_name(
    change: Any, message: str, tmp_path: Path
) -> None:
    for name, model in (("ln_f.weight", gpt2()), ("model.norm.weight", build().float())):
        model.save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        (whole,) = (key for key in weights if key.endswith(name))
        weights[whole][0] += 1
        weights[whole] = change(weights[whole])
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=rf"load: .*{name} must hold {message}"):
            load(tmp_path)


def test_a_model_has_the_type_of_most_numbers_and_no_old_buffers(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name: x.bfloat16() if x.ndim > 1 else x.float() for name, x in weights.items()}
    weights["embeddings.position_ids"] = torch.arange(9)  # of older versions of Transformers
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert load(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("../model-evil/a.safetensors", "weight_map of .* must name files of the folder, got '"),
        ("../outside.safetensors", "weight_map of .* must name files of the folder, got '"),
        ("{}/outside.safetensors", "weight_map of .* must name files of the folder, got '/"),
        (5, "index.json is damaged"),
        (None, "index.json is damaged"),
    ],
)
def test_an_index_names_files_of_its_folder_alone(
    entry: Any, message: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    entry = entry.format(tmp_path) if isinstance(entry, str) else entry
    for model in (gpt2(), build()):
        model.save_pretrained(folder)
        names = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").replace(tmp_path / "outside.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, entry)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=message):
            load(folder)


def test_a_hub_that_does_not_answer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "answers", lambda: False)
    with pytest.raises(ValueError, match="Hub: it does not answer, and no such model was down"):
        load("nobody/has-this-model")


def test_links_stay_in_the_folder_or_the_cache_of_the_hub(tmp_path: Path) -> None:
    cache = tmp_path / "models--a--b"
    snapshot, blobs = cache / "snapshots" / "c0ffee", cache / "blobs"
    build().save_pretrained(blobs)
    snapshot.mkdir(parents=True)
    for blob in list(blobs.iterdir()):
        (snapshot / blob.name).symlink_to(Path("../../blobs", blob.name))
    load(snapshot)
    (tmp_path / "linked").symlink_to(snapshot)
    load(tmp_path / "linked")
    (tmp_path / "vocab.txt").touch()  # beside the cache
    (snapshot / "vocab.txt").symlink_to(tmp_path / "vocab.txt")
    with pytest.raises(ValueError, match=r"vocab.txt must lie in the folder, got a link"):
        load(snapshot)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        folder = tmp_path / name / "model"
        for other in (blobs, tmp_path / name / "model-evil"):
            build().save_pretrained(folder)
            (folder / name).unlink(missing_ok=True)
            other.mkdir(exist_ok=True)
            (other / name).touch()
            (folder / name).symlink_to(other / name)
            with pytest.raises(ValueError, match=f"{name} must lie in the folder, got a link"):
                load(folder)
            (folder / name).unlink()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_and_a_loop_of_links_answer(name: str, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    path = tmp_path / name
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to(name)):
        path.unlink()
        make()
        with pytest.raises(ValueError, match=r"load: .*config.json"):
            load(tmp_path)


def test_a_table_of_absurd_size_is_refused_before_memory_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"type_vocab_size must be at most 65536, got 10{12}$"):
        LinbiasBertConfig(type_vocab_size=10**12)
    gpt2().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "n_positions": 10**9}))
    with pytest.raises(ValueError, match=r"wpe.weight of shape .* asks for \[1000000000, 16\]"):
        load(tmp_path)


@torch.no_grad()
def test_models_without_alibi_stay_as_they_are(tmp_path: Path) -> None:
    llama = LlamaForCausalLM(LlamaConfig(**SIZES, hidden_size=16, intermediate_size=16))
    for model in (gpt2(), llama):
        folder = tmp_path / model.config.model_type
        model.eval().save_pretrained(folder)
        ids = tokens(1, 7)
        assert_same(load(folder)(ids).logits, model(ids).logits)
        with pytest.raises(ValueError, match=r"must be 'causal' for .*no ALiBi, got 'base'"):
            load(folder, task="base")


def test_arguments(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    for arguments, message in (
        ({"task": "classification"}, r"task must be one of \('base', .*got 'classification'"),
        ({"task": "masked"}, r"one of \('causal', 'base'\) for .*linbias model, got 'masked'"),
        ({"rope": 1}, r"LinbiasConfig has no field 'rope'$"),
        ({"device_map": "auto"}, "has no field 'device_map'; device= names one device"),
        ({"low_cpu_mem_usage": True}, "no field 'low_cpu_mem_usage'; leave it out: weights are"),
        ({"revision": "main"}, "no field 'revision'; give the folder that .*snapshot_download"),
        ({"trust_remote_code": True}, "no field 'trust_remote_code'; leave it out: no code"),
        ({"torch_dtype": "half"}, "has no field 'torch_dtype'; say dtype$"),
        ({"dtype": "int8"}, "dtype must be a floating type of PyTorch, got 'int8'"),
        ({"slope_scale": -1}, "slope_scale must be None, 'interpolate' or a positive number"),
    ):
        with pytest.raises(ValueError, match=rf"load: .*{message}"):
            load(tmp_path, **arguments)
    assert load(tmp_path, num_labels=5).config.num_labels == 5


@pytest.mark.parametrize(
    "make",
    [
        build,
        lambda: BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=32, n_layer=1)),
        lambda: LinbiasBertModel(
            LinbiasBertConfig(
                vocab_size=61,
                hidden_size=32,
                num_attention_heads=4,
                num_hidden_layers=1,
                intermediate_size=48,
            )
        ),
    ],
    ids=["native", "fused", "encoder"],
)
def test_the_type_of_weights_is_obeyed(make: Any, tmp_path: Path) -> None:
    model = make()
    model.save_pretrained(tmp_path)
    for asked in ("bfloat16", torch.bfloat16):
        loaded = load(tmp_path, dtype=asked)
        assert {x.dtype for x in loaded.parameters()} == {torch.bfloat16}
        assert loaded.config.dtype == torch.bfloat16
    assert load(tmp_path, dtype="auto").dtype == model.dtype


def test_a_missing_head_names_the_argument_that_makes_one(tmp_path: Path) -> None:
    BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=32)).save_pretrained(tmp_path)
    message = r"lacks score.weight \(1 in all\) \(new_head=True starts them from fresh weights\)$"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, task="sequence")
    assert load(tmp_path, task="sequence", new_head=True, num_labels=3).score.out_features == 3
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.ln_f.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    message = r"lacks score.weight, transformer.ln_f.weight \(2 in all\)$"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, task="sequence")


def test_a_folder_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build().save_pretrained(tmp_path)
    held = Files.at("test", tmp_path)
    (tmp_path / "config.json").unlink()
    monkeypatch.setattr(files, "answers", None)
    assert type(load(held)) is LinbiasForCausalLM


def test_a_gguf_file_of_bloom_is_read_by_transformers_and_fused(tmp_path: Path) -> None:
    config = BloomConfig(vocab_size=64, hidden_size=32, n_head=4, n_layer=2, initializer_range=0.3)
    model, ids = BloomForCausalLM(config).eval(), torch.randint(64, (1, 20))
    file = gguf.GGUFWriter(tmp_path / "bloom.gguf", "bloom")
    file.add_block_count(2)
    file.add_embedding_length(32)
    file.add_head_count(4)
    file.add_layer_norm_eps(config.layer_norm_epsilon)
    file.add_vocab_size(64)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BLOOM, 2)
    for name, x in model.transformer.state_dict().items():
        if "query_key_value" in name:  # all queries, all keys, all values
            x = x.unflatten(0, (4, 3, 8)).transpose(0, 1).flatten(0, 2)
        stem, _, end = name.rpartition(".")
        stem = names.get_name(f"transformer.{stem}") or names.get_name(stem)
        file.add_tensor(f"{stem}.{end}", x.contiguous().numpy())
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="bloom.gguf")
    torch.testing.assert_close(fuse(read.eval())(ids).logits, model(ids).logits)
    with pytest.raises(ValueError, match=r"load: folder must be a folder, .* Transformers reads"):
        load(tmp_path / "bloom.gguf")


@pytest.mark.parametrize("name", ["prepack", "Document", "read_documents"])
def test_a_name_that_went_says_what_does_its_work(name: str) -> None:
    with pytest.raises(ImportError, match=rf"^linbias.models has no {name}: "):
        getattr(models, name)
