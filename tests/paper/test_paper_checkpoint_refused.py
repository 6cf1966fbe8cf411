"""Checkpoints and folders that are refused: hostile, damaged, of another model, or in the way."""

import argparse
import errno
import math
import os
import pickle
import re
import resource
import zipfile
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import paper_original as original
from linbias.paper.checkpoint import convert, load, load_original
from linbias.paper.dictionary import Dictionary


class Hostile:
    """Unpickled in the ordinary way, this would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("where", ["args", "cfg", "model", "extra_state"])
def test_a_checkpoint_with_code_in_it_is_refused_and_not_run(where, zipped, tmp_path):
    hostile = Hostile(tmp_path / "run")
    inside = {"cfg": {"model": hostile}, "args": argparse.Namespace(x=hostile)}
    record = {**original.golden_record(), where: inside.get(where, {"x": hostile})}
    path = tmp_path / "checkpoint.pt"
    torch.save(record, path, _use_new_zipfile_serialization=zipped)
    message = r"plain values, .*it asks for \w+\.system, which was not run"
    for read in (load, load_original, partial(convert, output=tmp_path / "model")):
        with pytest.raises(ValueError, match=message):
            read(path)
    assert not (tmp_path / "run").exists() and not (tmp_path / "model").exists()


def test_harmless_kinds_do_not_hide_code(tmp_path):
    hostile = Hostile(tmp_path / "run")
    array = np.array([hostile], dtype=object)
    for hiding in (array, defaultdict(os.system), defaultdict(list, {"x": hostile})):
        path = original.write({**original.golden_record(), "extra_state": {"x": hiding}}, tmp_path)
        with pytest.raises(ValueError, match=r"it asks for \w+\.system, which was not run"):
            load_original(path)
    assert not (tmp_path / "run").exists()


def test_what_is_no_whole_checkpoint_is_refused(golden_file, tmp_path):
    whole, path = golden_file.read_bytes(), tmp_path / "checkpoint.pt"
    pickled = pickle.dumps(Hostile(tmp_path / "run"), protocol=4)
    half, other_start = whole[: len(whole) // 2], b"x" * 400 + whole[400:]
    for content in (b"", b"no checkpoint", half, other_start, pickled):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="load_original: path must be a checkpoint of"):
            load_original(path)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"load_original: path must be a file, got .*no\.pt"):
        load(tmp_path / "no.pt")


def test_a_flipped_bit_is_refused(golden_file, tmp_path):
    with zipfile.ZipFile(golden_file) as whole:
        entry = max(whole.infolist(), key=lambda entry: entry.file_size)
        middle = whole.read(entry)[1000:1064]
    content = bytearray(golden_file.read_bytes())
    content[content.index(middle) + 3] ^= 0x40
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(content)
    message = rf"path must be a checkpoint .*'{path}' \(its entry {entry.filename} is damaged\)"
    with pytest.raises(ValueError, match=message):
        load_original(path)


TABLE = "decoder.embed_tokens.embeddings"
BIAS, WIDE = "decoder.layers.0.fc1.bias", "decoder.layers.1.fc2.weight"
OTHER_BIAS = "decoder.layers.2.fc1.bias"
HEAD, TAIL = "decoder.adaptive_softmax.tail.0.2.weight", "decoder.adaptive_softmax.tail.1.0.weight"
NARROW = f"{TABLE}.2.0.weight"
BAD_TENSORS = [
    (
        {BIAS: None, HEAD: None, OTHER_BIAS: torch.zeros(3), WIDE: torch.zeros(96, 48)},
        f"{HEAD} is missing; {BIAS} is missing; {OTHER_BIAS} is unexpected; "
        rf"{WIDE} has shape \[96, 48\] instead of \[48, 96\]$",
    ),
    ({NARROW: torch.tensor(1.0)}, rf"{NARROW} has shape \[\] instead of \[384, 3\]$"),
    *(({f"{TABLE}.{b}.0.weight": None}, f"{TABLE}.{b}.0.weight is missing$") for b in range(3)),
    ({TAIL: torch.ones(48, 3)}, f"{TAIL} differs from {TABLE}.2.1.weight, to which it is tied"),
    (
        {BIAS: torch.zeros(96, dtype=torch.int32), "x": 3},
        f"{BIAS} is no tensor of floating-point numbers; x is no tensor",
    ),
    *(
        ({BIAS: torch.full((96,), value)}, f"{BIAS} has values that are not finite$")
        for value in (math.nan, math.inf, -math.inf)
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD_TENSORS)
def test_wrong_tensors_are_named(changes, message, tmp_path):
    record = original.golden_record()
    tensors = {**record["model"], **changes}
    record["model"] = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=rf"'.*checkpoint\.pt': {message}"):
        load(original.write(record, tmp_path))


CUTOFFS = ("adaptive_input_cutoff", "adaptive_softmax_cutoff")
BAD_SETTINGS = [
    ({"activation_fn": "gelu"}, "activation_fn must be 'relu', got 'gelu'"),
    ({"adaptive_input": False}, "adaptive_input must be True, got False"),
    ({"tie_adaptive_proj": False}, "tie_adaptive_proj must be True, got False"),
    ({"tie_adaptive_weights": False}, "tie_adaptive_weights must be True, got False"),
    ({"decoder_normalize_before": False}, "decoder_normalize_before must be True, got False"),
    ({"decoder_learned_pos": True}, "decoder_learned_pos must be False, got True"),
    ({"decoder_layers_to_keep": "0,2"}, "decoder_layers_to_keep must be None, got '0,2'"),
    ({"no_scale_embedding": True}, "no_scale_embedding must be False, got True"),
    ({"decoder_input_dim": 32}, "decoder_input_dim must be decoder_embed_dim, 48, got 32"),
    (
        {"adaptive_softmax_cutoff": "100,640", "layernorm_embedding": True},
        "layernorm_embedding must be False, got True; adaptive_softmax_cutoff must be "
        "adaptive_input_cutoff, [256, 640], got [100, 640]",
    ),
    ({"decoder_attention_heads": 7}, "hidden_size must be a multiple of 7 heads, got 48"),
    ({"decoder_layers": "two"}, "num_hidden_layers must be an integer of at least 1, got 'two'"),
    (dict.fromkeys(CUTOFFS, "a,b"), "adaptive_input_cutoff must be ids with commas between, got"),
    ({"adaptive_softmax_cutoff": 9}, "adaptive_softmax_cutoff must be ids with commas"),
    (
        {"adaptive_input": False, **dict.fromkeys(CUTOFFS)},
        "pt': adaptive_input must be True, got False; adaptive_input_cutoff must be",
    ),
    ({"dropout": 2.0}, "pt': PaperConfig: dropout must be a number in [0, 1)"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_SETTINGS, ids=str)
def test_a_model_that_this_is_not_is_refused_by_its_settings(changes, message, tmp_path):
    record = original.golden_record()
    record["cfg"]["model"] |= changes
    with pytest.raises(ValueError, match=re.escape(message)):
        load_original(original.write(record, tmp_path))


def without_settings(record):
    for name in ("decoder_layers", "adaptive_input_cutoff"):
        del record["cfg"]["model"][name]
    return record


def with_a_wrong_setting_and_without_others(record):
    record = original.as_namespace(record)
    del record["args"].adaptive_input_cutoff, record["args"].decoder_embed_dim
    record["args"].adaptive_input = False
    return record


NO_MODEL = "must be a checkpoint with an entry 'model', got"
NO_SETTINGS = "': cfg has no decoder_embed_dim, decoder_layers"
OTHER_RECORDS = ([1, 2], {"cfg": {}}, {"model": 3})
OTHER_SETTINGS = (None, "text", {"model": "text"}, {"task": [1]})
BAD_RECORDS = [
    *((lambda _, record=record: record, NO_MODEL) for record in OTHER_RECORDS),
    *((lambda record, cfg=cfg: {**record, "cfg": cfg}, NO_SETTINGS) for cfg in OTHER_SETTINGS),
    (without_settings, "cfg has no decoder_layers, adaptive_input_cutoff$"),
    (
        with_a_wrong_setting_and_without_others,
        "checkpoint.pt': adaptive_input must be True, got False; "
        "args has no decoder_embed_dim, adaptive_input_cutoff$",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_RECORDS)
def test_a_record_of_another_kind_is_refused(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_original(original.write(change(original.golden_record()), tmp_path))


def test_positions_that_a_checkpoint_cannot_have_are_refused(golden_file, tmp_path):
    with pytest.raises(ValueError, match=r"position must be 'alibi', .* got 't5'"):
        load_original(golden_file, position="t5")
    record = original.golden_record()
    record["cfg"]["model"]["no_token_positional_embeddings"] = True
    path = original.write(record, tmp_path)
    message = "no_token_positional_embeddings must be False for position 'sinusoidal', got True"
    with pytest.raises(ValueError, match=message):
        load(path, position="sinusoidal")
    for position in ("alibi", "none"):
        assert load(path, position=position).config.position == position


def test_a_dictionary_of_another_size_is_refused(golden_file, tmp_path):
    Dictionary.from_counts({"a": 2, "b": 1}).write(tmp_path / "dict.txt")
    with pytest.raises(ValueError, match="dictionary must have the model's 1024 types, got 8"):
        convert(golden_file, tmp_path / "model", dictionary=tmp_path / "dict.txt")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors"])
def test_foreign_weights_are_not_overwritten(name, golden_file, tmp_path):
    (tmp_path / name).write_bytes(b"precious")
    message = rf"convert: output must not hold a model already, got {tmp_path} \(it has {name}\)"
    with pytest.raises(ValueError, match=message):
        convert(golden_file, tmp_path)
    assert (tmp_path / name).read_bytes() == b"precious"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(golden_file, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    out = tmp_path / "new" / "model"
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"^convert: could not write to {out} \(.*too large"):
            convert(golden_file, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not out.parent.exists()
    convert(golden_file, out)
    assert load(out)


def test_a_full_disk_at_the_dictionary_leaves_nothing(golden_file, tmp_path, monkeypatch):
    def fail(self: Dictionary, path: Path) -> None:
        Path(path).write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    Dictionary.from_counts({f"w{n}": 9 for n in range(1020)}).write(tmp_path / "dict.txt")
    monkeypatch.setattr(Dictionary, "write", fail)
    with pytest.raises(OSError, match=r"^convert: could not write to .*model \(.*No space left"):
        convert(golden_file, tmp_path / "model", dictionary=tmp_path / "dict.txt")
    assert not (tmp_path / "model").exists()


def test_a_folder_is_not_read_with_another_position(golden_file, tmp_path):
    convert(golden_file, tmp_path)
    assert load(tmp_path, position="alibi").config.position == "alibi"
    with pytest.raises(ValueError, match=r"load: position must be that of .* 'alibi', got 'none'"):
        load(tmp_path, position="none")


def test_a_damaged_folder_is_refused(golden_file, tmp_path):
    with pytest.raises(ValueError, match=r"load: path must be a folder with a config\.json"):
        load(tmp_path)
    convert(golden_file, tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(ValueError, match="load: cannot read a model at"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match="model_type is 'linbias-paper', got 'gpt2'"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "linbias-paper"}')
    message = f"load: '{tmp_path}' must fit its config.json, but lacks"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)
