"""Saving and loading of both families: folders, tokenizers, damage and hostile files."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from linbias.data.tokenizers import byte_tokenizer
from linbias.models import (
    LinbiasConfig,
    LinbiasForCausalLM,
    LinbiasModel,
    install,
    load,
    load_tokenizer,
)
from linbias.models.loading import encode
from linbias.paper.checkpoint import add_words
from linbias.paper.checkpoint import load as load_paper_model
from linbias.paper.dictionary import Dictionary
from small_models import assert_same, build, build_paper, every_block, every_position, tokens

pytestmark = pytest.mark.usefixtures("same_start")


@pytest.fixture(autouse=True)
def auto_classes() -> None:
    install()


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


class _Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def run(code: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: here, other tests have imported everything."""
    command = [sys.executable, "-c", code, *arguments]
    how = {"capture_output": True, "text": True, "env": {**os.environ, **environment}}
    done = subprocess.run(command, check=False, **how)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.processes
def test_importing_the_models_does_not_load_data_sets_or_trainer() -> None:
    heavy = ("datasets", "transformers.trainer", "linbias.lm.training")
    code = f"import sys, linbias.models; print([name for name in {heavy} if name in sys.modules])"
    assert run(code).stdout.strip() == "[]"


# Models, tokenizers and texts of a folder.

TEXT = " the cat = <unk>\n\n sat\x1c on\tthe mat </s>\r\n the end"


@pytest.fixture(scope="module")
def paper_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("paper")
    words = Dictionary.from_counts({"the": 3, "cat": 1, "=": 1, "sat": 1, "on": 1, "end": 1})
    add_words(words, folder)
    build_paper(vocab_size=len(words), cutoffs=(6,)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    byte_tokenizer().save(folder)
    build(vocab_size=256).save_pretrained(folder)
    return folder


@pytest.mark.processes
def test_one_call_is_enough_for_folders_of_both_families(
    byte_folder: Path, paper_folder: Path
) -> None:
    code = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer
from linbias.models import install, load
from linbias.models.loading import encode
install()
for folder in {[str(byte_folder), str(paper_folder)]!r}:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    print(type(AutoModelForCausalLM.from_pretrained(folder)).__name__, type(load(folder)).__name__)
    print(tokenizer("the").input_ids, tokenizer.decode(tokenizer("the\\nthe").input_ids).split())
    print(encode(folder, b"the").tolist())
"""
    done = run(code)
    assert done.stdout.splitlines() == [
        "LinbiasForCausalLM LinbiasForCausalLM",
        "[116, 104, 101] ['the', 'the']",
        "[116, 104, 101]",
        "PaperForCausalLM PaperForCausalLM",
        "[4] ['the', 'the']",
        "[4, 2]",
    ]
    assert "of type" not in done.stderr  # Transformers knows the family of each tokenizer's folder


SAVE_FOR_THE_HUB = """
import sys
from linbias.paper.dictionary import Dictionary
from linbias.data.tokenizers import byte_tokenizer
from linbias.paper.words import save_word_tokenizer
from linbias.models import LinbiasConfig, LinbiasForCausalLM
from linbias.paper.config import PaperConfig
from linbias.paper.model import PaperForCausalLM
small = dict(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
for config, model, own in (
    (LinbiasConfig, LinbiasForCausalLM, {}),
    (PaperConfig, PaperForCausalLM, dict(vocab_size=16, cutoffs=(6,))),
):
    config.register_for_auto_class()
    model.register_for_auto_class("AutoModelForCausalLM")
    model(config(**small, **own)).save_pretrained(f"{sys.argv[1]}/{config.model_type}")
byte_tokenizer().save(f"{sys.argv[1]}/linbias")
save_word_tokenizer(Dictionary.from_counts({"the": 1}), f"{sys.argv[1]}/linbias-paper")
"""
LOAD_FROM_THE_HUB = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
folders = [f"{sys.argv[1]}/{family}" for family in ("linbias", "linbias-paper")]
model = AutoModelForCausalLM.from_pretrained(folders[0], trust_remote_code=True)
print(type(model).__name__, "transformers_modules" in type(model).__module__)
import linbias.models
linbias.models.install()
for folder in folders:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    print(type(model).__module__, model(**tokenizer("the", return_tensors="pt")).logits.shape[-1])
"""


def test_a_folder_answers_what_trl_asks_of_its_configuration(tmp_path: Path) -> None:
    install()
    build().save_pretrained(tmp_path / "a")
    for here, there in (("a", "b"), ("b", "c")):
        config = AutoConfig.from_pretrained(tmp_path / here)
        assert config.architectures == ["LinbiasForCausalLM"] and config.auto_map == {}
        AutoModelForCausalLM.from_pretrained(tmp_path / here).save_pretrained(tmp_path / there)
    assert "auto_map" not in (tmp_path / "c" / "config.json").read_text()


@pytest.mark.processes
def test_a_folder_for_the_hub_loads_with_and_without_its_code(tmp_path: Path) -> None:
    """Registered for the Auto classes, it carries its code; after `install` that is not run."""
    cache = {"HF_MODULES_CACHE": str(tmp_path / "modules")}
    run(SAVE_FOR_THE_HUB, str(tmp_path), **cache)
    assert run(LOAD_FROM_THE_HUB, str(tmp_path), **cache).stdout.splitlines() == [
        "LinbiasForCausalLM True",
        "linbias.models.decoder.linbias 256",
        "linbias.paper.model 16",
    ]


def test_texts_of_paper_models_become_the_ids_of_their_words(paper_folder: Path) -> None:
    words = Dictionary.read(paper_folder / "dict.txt")
    lines = TEXT.replace("\r\n", "\n").split("\n")
    expected = [word for line in lines for word in words.encode_line(line)]
    assert encode(paper_folder, TEXT.encode()).tolist() == expected
    tokenizer = load_tokenizer(paper_folder)
    # A prompt goes on where it stops: only the end of a line is </s>.
    assert tokenizer(TEXT).input_ids == expected[:-1]
    assert tokenizer(TEXT + "\n").input_ids == expected
    assert encode(paper_folder, b"").tolist() == []


def test_words_become_text_again(paper_folder: Path) -> None:
    tokenizer = load_tokenizer(paper_folder)
    ids = tokenizer(" the cat = zzz\n sat<pad> </s>").input_ids
    assert tokenizer.decode(ids) == "the cat = <unk>\n <unk>\n"  # white space alone parts words
    assert tokenizer.decode([1, *ids], skip_special_tokens=True) == "the cat = <unk> <unk>"


def test_prompts_of_paper_models_are_padded_on_the_left(paper_folder: Path) -> None:
    model, tokenizer = load(paper_folder), load_tokenizer(paper_folder)
    batch = tokenizer(["the cat", "the"], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[4, 6], [1, 4]] and batch.attention_mask[1, 0] == 0
    together = model(batch.input_ids, batch.attention_mask).logits
    assert_same(together[1, 1:], model(batch.input_ids[1:, 1:]).logits[0])


def test_a_missing_dictionary_is_named(tmp_path: Path) -> None:
    build_paper().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"path must be a dict.txt, got '{tmp_path}"):
        encode(tmp_path, b"a")
    with pytest.raises(ValueError, match=r"load_tokenizer: path must hold the tokenizer.json"):
        load_tokenizer(tmp_path)


CONTENTS = ("", "[1]", "3", "null", '"a"', "[" * 10**5, '{"model_type": ["a"]}', "{}", "\x00")


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: content[:20])
def test_a_damaged_configuration_is_one_clear_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    for reader in (load, load_paper_model):
        with pytest.raises(ValueError, match=r"^load: "):
            reader(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position": "absolute"}, "LinbiasConfig: position must be one of .*, got 'absolute'"),
        ({"id2label": "x"}, "LinbiasConfig: id2label must be None or a mapping, got 'x'"),
        ({"model_type": "gpt2", "num_hidden_layers": 10**6}, "GPT2Config: n_layer must"),
        ({"quantization_config": 3}, ""),
    ],
    ids=str,
)
def test_a_hostile_configuration_is_one_clear_error(
    fields: dict[str, object], message: str, byte_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(byte_folder, tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(ValueError, match=rf"^load: cannot read a model at '.*': {message}"):
        load(folder)


SAFETENSORS = {
    "half of them": lambda weights: weights[: len(weights) // 2],
    "none": lambda weights: b"",
    "a corrupt header": lambda weights: b"\xff" * 64 + weights[64:],
    "a pickle in disguise": lambda weights: pickle.dumps({"lm_head.weight": 1}),
}
PICKLES = {"zeros": bytes(99), "empty": b"", "cut": b"PK\3\4abc", "text": b"weights"}


@pytest.mark.parametrize("kind", [*SAFETENSORS, *PICKLES, "bomb"])
def test_hostile_or_damaged_weights_are_one_clear_error(
    kind: str, byte_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(byte_folder, tmp_path / "model")
    whole, pickled = folder / "model.safetensors", folder / "pytorch_model.bin"
    if kind in SAFETENSORS:
        whole.write_bytes(SAFETENSORS[kind](whole.read_bytes()))
    else:
        whole.unlink()
        pickled.write_bytes(PICKLES.get(kind, b""))
    if kind == "bomb":
        torch.save({"lm_head.weight": _Bomb(tmp_path / "exploded")}, pickled)
    message = "model.safetensors is damaged$"
    if kind not in SAFETENSORS:
        message = "pytorch_model.bin is damaged, or asks for code, which was not run"
    with pytest.raises(ValueError, match=rf"^load: cannot read a model at .*: {message}"):
        load(folder)
    assert not (tmp_path / "exploded").exists()
