"""Checkpoints of the original: every form is read, and becomes a folder of the same model."""

import argparse
import math
from collections import OrderedDict, defaultdict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import paper_original as original
from linbias.models import install
from linbias.paper.checkpoint import convert, load, load_original
from linbias.paper.config import POSITIONS, PaperConfig
from linbias.paper.dictionary import Dictionary
from linbias.paper.model import PaperForCausalLM, PaperModel
from small_models import build_paper, paper_tokens, tokens

pytestmark = pytest.mark.usefixtures("same_start")


def test_a_checkpoint_becomes_a_folder_of_the_same_model_bit_for_bit(golden_file, tmp_path):
    words = Dictionary.from_counts({f"w{n}": 9 for n in range(1020)})
    words.write(tmp_path / "dict.txt")
    convert(golden_file, tmp_path / "model", dictionary=tmp_path / "dict.txt")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == 59_088  # each tied weight once
    assert (tmp_path / "model" / "dict.txt").read_bytes() == (tmp_path / "dict.txt").read_bytes()
    assert not list((tmp_path / "model").glob(".*"))

    ids, targets = tokens(3, 70, vocab_size=1024), tokens(3, 70, vocab_size=1024)
    expected = load(golden_file).log_probs(ids, targets)
    install()
    auto = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for again in (load(tmp_path / "model"), auto.eval()):
        assert isinstance(again, PaperForCausalLM)
        assert torch.equal(again.log_probs(ids, targets), expected)
    assert isinstance(AutoConfig.from_pretrained(tmp_path / "model"), PaperConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path / "model"), PaperModel)


@pytest.mark.parametrize("position", POSITIONS)
def test_saving_and_loading_keeps_every_position_method(position, tmp_path):
    model = build_paper(position=position, final_norm=True, cutoffs=(9,)).float()
    ids = paper_tokens(2, 9)
    model.save_pretrained(tmp_path, max_shard_size="4KB")  # in several files
    again = load(tmp_path)
    assert again.config.to_dict() | {"_name_or_path": ""} == model.config.to_dict()
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_the_config_of_a_checkpoint_is_what_its_settings_say(golden_file):
    config, weights = load_original(golden_file)
    sizes = {"vocab_size": 1024, "hidden_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 12, "intermediate_size": 96, "train_length": 64}
    rates = {"dropout": 0.3, "attention_dropout": 0.1, "activation_dropout": 0.1}
    rates |= {"softmax_dropout": 0.2, "adaptive_factor": 4.0}
    others = {"position": "alibi", "cutoffs": (256, 640), "final_norm": False}
    for name, value in {**sizes, **rates, **others}.items():
        assert getattr(config, name) == value, name
    assert set(weights) == set(PaperForCausalLM(config).state_dict())


def with_namespaces_inside(record):
    parts = {name: argparse.Namespace(**part) for name, part in record["cfg"].items()}
    return {**record, "cfg": parts}


def with_one_namespace(record):
    return {**record, "cfg": argparse.Namespace(**record["cfg"])}


def with_args_beside(cfg):
    return lambda record: {**original.as_namespace(record), "cfg": cfg}


def with_settings(**changes):
    def changed(record):
        record["cfg"]["model"] |= changes
        return record

    return changed


def with_sinusoids_among_the_tensors(record):
    record["model"]["decoder.embed_positions.weights"] = torch.ones(66, 48)
    return record


def with_numbers_of_numpy(record):
    settings = record["cfg"]["model"]
    for name, number in settings.items():
        if type(number) in (int, float):
            settings[name] = np.array(number)[()]
    return record


def with_all_that_training_leaves(record):
    state = {0: {"momentum_buffer": torch.ones(3).half()}}
    counts = defaultdict(list, {"a": [1]}) | {"b": defaultdict(int, x=2)}
    objects = [np.array(["a"]), np.array([{}], dtype=object)]
    extra = {"best": np.float64(5.3), "metrics": OrderedDict(val_loss=np.float32(5.3))}
    extra |= {"numbers": [np.dtype(code).type(3) for code in "?bBhHiIlLqQefd"], "counts": counts}
    schedule = {"num_updates": np.int64(300), "lr_scheduler_state": {"best": None}}
    empty = {"decoder.embed_positions._float_tensor": torch.tensor([math.nan])}
    return {
        **record,
        "model": OrderedDict(record["model"] | empty),
        "optimizer_history": [schedule],
        "extra_state": {**extra, "arrays": [np.arange(6.0).reshape(2, 3), *objects]},
        "last_optimizer_state": {"state": state, "param_groups": [{"lr": 1.0}], "loss_scale": 128},
    }


FORMS = [
    *(original.as_namespace, with_namespaces_inside, with_one_namespace, with_args_beside({})),
    with_args_beside({"model": {"decoder_layers": 5, "adaptive_input": False}}),
    with_settings(tokens_per_sample=None),  # another group has it
    with_settings(share_decoder_input_output_embed=True),  # an adaptive softmax ignores it
    with_settings(adaptive_input_cutoff=[256, 640], adaptive_softmax_cutoff="256, 640"),
    *(with_sinusoids_among_the_tensors, with_numbers_of_numpy, with_all_that_training_leaves),
]


def assert_same_model(path, golden_file):
    expected, weights = load_original(golden_file)
    config, others = load_original(path)
    assert config.to_dict() == expected.to_dict()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("change", FORMS)
def test_other_forms_of_a_checkpoint_are_read(change, golden_file, tmp_path):
    assert_same_model(original.write(change(original.golden_record()), tmp_path), golden_file)


def test_the_format_before_zip_files_and_the_names_in_numpy_before_version_2_are_read(
    golden_file, tmp_path
):
    record, path = with_all_that_training_leaves(original.golden_record()), tmp_path / "old.pt"
    torch.save(record, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    assert_same_model(path, golden_file)


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "adaptive_softmax_dropout"])
@pytest.mark.parametrize("rate", ["absent", None, 1.0])
def test_a_dropout_that_nothing_is_trained_with_is_none(name, rate, golden_file, tmp_path):
    record = original.golden_record()
    expected, _ = load_original(golden_file)
    record["cfg"]["model"][name] = rate
    if rate == "absent":
        del record["cfg"]["model"][name]
    config, _ = load_original(original.write(record, tmp_path))
    changed = {name.removeprefix("adaptive_"): 0.0}
    assert config.to_dict() == expected.to_dict() | changed


@pytest.mark.parametrize(("old", "expected"), [(0.2, 0.2), (None, 0.0), (1.0, 0.0)])
def test_the_old_name_of_a_dropout_counts_where_the_new_one_says_nothing(old, expected, tmp_path):
    changed = with_settings(activation_dropout=None, relu_dropout=old)(original.golden_record())
    config, _ = load_original(original.write(changed, tmp_path))
    assert config.activation_dropout == expected


def test_half_precision_weights_become_float32(golden_file, tmp_path):
    record = original.golden_record()
    for name, tensor in record["model"].items():
        record["model"][name] = tensor.half() if tensor.is_floating_point() else tensor
    _, weights = load_original(golden_file)
    _, halves = load_original(original.write(record, tmp_path))
    for name, tensor in weights.items():
        assert halves[name].dtype == torch.float32
        assert torch.equal(halves[name], tensor.half().float())
