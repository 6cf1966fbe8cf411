"""The paper's model and checkpoints: against golden data of the original, and an oracle in NumPy."""

import argparse
import errno
import json
import math
import os
import pickle
import resource
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, StaticCache

import paper_original as original
from linbias.data.dictionary import Dictionary
from linbias.models import PaperConfig, PaperForCausalLM, PaperModel
from linbias.models.paper_config import POSITIONS
from linbias.paper.checkpoint import convert, load, load_original

every_position = pytest.mark.parametrize("position", POSITIONS)
needs_shared = pytest.mark.skipif(
    not original.SHARED.exists(), reason="the golden data lies outside the repository"
)
CHECKPOINTS = {"A": "ckpt_A_8heads.pt", "C": "ckpt_C_12heads_vocab1024.pt"}


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def write(record: dict[str, Any], folder: Path) -> Path:
    path = folder / "checkpoint.pt"
    torch.save(record, path)
    return path


@pytest.fixture(scope="module")
def golden_file(tmp_path_factory) -> Path:
    return write(original.golden_record(), tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def golden_log_probs() -> dict[str, np.ndarray]:
    with np.load(original.GOLDEN / "paper_log_probs.npz") as file:
        return dict(file)


def in_blocks(model: PaperForCausalLM, inputs: np.ndarray, targets: np.ndarray, length: int):
    """log p of each target, [N], in blocks as the golden data was made."""
    rows, asked = (torch.from_numpy(ids).long().split(length) for ids in (inputs, targets))
    with torch.inference_mode():
        parts = [model.log_probs(x[None], y[None])[0] for x, y in zip(rows, asked, strict=True)]
    return torch.cat(parts).numpy()


def build(**changes: Any) -> PaperForCausalLM:
    """A small float64 model whose weights all show in its output."""
    small = {"vocab_size": 83, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    fit = {"intermediate_size": 50, "train_length": 16, "cutoffs": (11, 30), "adaptive_factor": 2}
    model = PaperForCausalLM(PaperConfig(**{**small, **fit, **changes})).double().eval()
    for p in model.parameters():
        if p.dim() == 1:
            nn.init.normal_(p, std=0.3)
    return model


def tokens(*shape: int, vocab_size: int = 83) -> Tensor:
    return torch.randint(vocab_size, shape)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    size = float(expected.detach().abs().max())
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12 * size)


def assert_all_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal beside the largest of all: gradients of the key biases are 0 but for rounding."""
    assert_same(*(torch.cat([x.flatten() for x in tensors]) for tensors in (actual, expected)))


# The golden data.


@pytest.mark.parametrize("length", [64, 128, 300])
def test_log_probs_are_those_of_the_original(golden_file, golden_log_probs, length):
    inputs, targets = golden_log_probs["inputs"], golden_log_probs["targets"]
    actual = in_blocks(load(golden_file), inputs, targets, length)
    assert np.abs(actual - golden_log_probs[f"length_{length}"]).max() < 2e-5


def test_the_oracle_is_the_original(golden_log_probs):
    inputs, targets = golden_log_probs["inputs"], golden_log_probs["targets"]
    _, log_probs = original.forward(original.golden_record(), inputs)
    actual = log_probs[np.arange(300), targets]
    assert np.abs(actual - golden_log_probs["length_300"]).max() < 2e-5


@needs_shared
@pytest.mark.parametrize("length", [64, 128, 300])
@pytest.mark.parametrize("name", "AC")
def test_every_golden_array_is_reproduced(name, length):
    def golden(kind: str) -> np.ndarray | None:
        path = original.SHARED / "logits" / f"{kind}_{name}_l{length}.npy"
        return np.load(path) if path.exists() else None

    model = load(original.SHARED / "ckpt" / CHECKPOINTS[name])
    inputs, targets = (
        np.load(original.SHARED / "logits" / f"{kind}_{name}.npy") for kind in ("input", "target")
    )
    states, features, head, log_probs = [], [], [], []
    with torch.inference_mode():
        for block in torch.from_numpy(inputs).long()[None].split(length, dim=1):
            outputs = model.model(block, output_hidden_states=True)
            states.append(torch.cat(outputs.hidden_states))
            features.append(outputs.last_hidden_state[0])
            weight = model.adaptive_softmax.head_weight(model.model.embed_tokens)
            head.append(F.linear(features[-1], weight))
            log_probs.append(model(block).logits[0])
    rows = json.loads((original.SHARED / "logits" / "logits_meta.json").read_text())
    everything = torch.cat(log_probs)
    compared = {
        "target_logprobs": torch.from_numpy(in_blocks(model, inputs, targets, length)),
        "features": torch.cat(features),
        "inner_states": torch.cat(states, dim=1),
        "head_logits": torch.cat(head),
        "logprobs_full": everything,
        "logprobs_rows": everything[rows["rows_of_full_vocab_logprobs"]],
    }
    found = {kind: golden(kind) for kind in compared}
    assert found["target_logprobs"] is not None
    for kind, expected in found.items():
        if expected is not None:
            assert compared[kind].shape == expected.shape
            assert np.abs(compared[kind].numpy() - expected).max() < 2e-5, kind


# The model, against the oracle and itself.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads": 8, "final_norm": True},
        {"heads": 6, "cutoffs": (40,), "factor": 3.0},
        {"heads": 1, "cutoffs": (), "layers": 1},
        {"heads": 12, "cutoffs": (7, 20, 33), "factor": 1.5, "layers": 3},
    ],
    ids=str,
)
def test_any_checkpoint_computes_what_the_oracle_says(changes, tmp_path):
    record = original.random_record(**changes)
    model, inputs = load(write(record, tmp_path)).double(), tokens(37)
    features, log_probs = original.forward(record, inputs.numpy())
    with torch.inference_mode():
        assert_same(model.model(inputs[None]).last_hidden_state[0], torch.from_numpy(features))
        assert_same(model(inputs[None]).logits[0], torch.from_numpy(log_probs))


@pytest.mark.parametrize("position", ["sinusoidal", "none"])
def test_models_of_unchanged_fairseq_compute_what_the_oracle_says(position, tmp_path):
    record = original.random_record()
    path, inputs = write(record, tmp_path), tokens(37)
    _, log_probs = original.forward(record, inputs.numpy(), position)
    with torch.inference_mode():
        actual = load(path, position=position).double()(inputs[None]).logits[0].numpy()
    np.testing.assert_allclose(actual, log_probs, atol=1e-4)  # the sinusoids are float32


@every_position
def test_positions_make_the_order_matter(position):
    model, ids = build(position=position), tokens(1, 12)
    swapped = ids[:, [0, 2, 1, *range(3, 12)]]
    same = torch.allclose(model(ids).logits[:, -1], model(swapped).logits[:, -1])
    # Without positions, the causal mask alone tells the second layer.
    assert not same


@every_position
def test_decoding_with_a_cache_equals_one_forward_pass(position):
    model, ids = build(position=position), tokens(2, 11)
    cache, parts = None, []
    for part in ids.split([4, 1, 1, 5], dim=1):
        outputs = model(part, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
        parts.append(outputs.logits)
    assert_same(torch.cat(parts, dim=1), model(ids).logits)


@every_position
def test_left_padding_changes_nothing(position):
    model, ids = build(position=position), tokens(1, 9)
    padded = F.pad(ids, (3, 0), value=5)
    mask = torch.tensor([[0] * 3 + [1] * 9])
    assert_same(model(padded, attention_mask=mask).logits[:, 3:], model(ids).logits)


@every_position
def test_the_last_positions_alone_are_those_of_all(position):
    model, ids = build(position=position), tokens(2, 10)
    whole = model(ids).logits
    for keep in (1, 4, 10):
        assert_same(model(ids, logits_to_keep=keep).logits, whole[:, -keep:])
        targets = tokens(2, keep)
        picked = whole[:, -keep:].gather(-1, targets[..., None])[..., 0]
        assert_same(model.log_probs(ids, targets), picked)


@pytest.mark.parametrize("cutoffs", [(), (11,), (11, 30)])
def test_log_probs_of_many_rows_are_those_of_the_whole_vocabulary(cutoffs, monkeypatch):
    from linbias.models import adaptive

    monkeypatch.setattr(adaptive, "_LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(adaptive, "_FEWEST_ROWS", 7)
    model, ids = build(cutoffs=cutoffs), tokens(2, 83)
    targets = torch.stack([torch.arange(83), tokens(83)])  # every id, then any
    whole = model(ids).logits
    assert_same(whole.exp().sum(-1), torch.ones(2, 83, dtype=torch.float64))
    assert_same(model.log_probs(ids, targets), whole.gather(-1, targets[..., None])[..., 0])


def test_the_loss_drops_what_the_original_drops_and_no_more():
    """Ids 12 and 31 are second in their bands, as <pad>, 1, is in the first."""
    ids, targets = tokens(1, 8), torch.tensor([[3, 12, 31, 13, 1, -100, 82, 30]])
    faithful, plain = build(), build(ignore_tail_pad=False)
    plain.load_state_dict(faithful.state_dict())
    scored = [0, 1, 2, 3, 6, 7]
    log_probs = faithful(ids).logits[0][scored, targets[0, scored]]
    head = F.linear(
        faithful.model(ids).last_hidden_state[0],
        faithful.adaptive_softmax.head_weight(faithful.model.embed_tokens),
    ).log_softmax(-1)
    kept = log_probs.clone()
    kept[1], kept[2] = head[1, 11], head[2, 12]  # their class alone

    assert_same(plain(ids, targets=targets).loss, -log_probs.mean())
    assert_same(faithful(ids, targets=targets).loss, -kept.mean())
    assert_same(faithful(ids, targets=targets, num_items_in_batch=10).loss, -kept.sum() / 10)
    total = faithful(ids, targets=targets, num_items_in_batch=torch.tensor(10)).loss
    assert_same(total, -kept.sum() / 10)


def test_labels_are_targets_one_place_on():
    model, ids = build(), tokens(2, 9)
    targets = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
    assert_same(model(ids, labels=ids).loss, model(ids, targets=targets).loss)


def test_gradients_of_the_loss_are_those_of_the_log_probabilities():
    model, ids, targets = build(ignore_tail_pad=False), tokens(2, 9), tokens(2, 9)
    targets[targets == 1] = 3
    gradients = torch.autograd.grad(model(ids, targets=targets).loss, list(model.parameters()))
    nll = -model(ids).logits.gather(-1, targets[..., None]).mean()
    expected = torch.autograd.grad(nll, list(model.parameters()))
    assert_all_same(gradients, expected)


def test_the_second_id_of_every_band_learns_nothing_from_being_read():
    model = build()
    embed = model.model.embed_tokens
    embed(torch.arange(83)).sum().backward()
    for table, _ in embed.bands:
        moved = table.weight.grad.abs().sum(1) > 0
        assert not moved[1] and moved[[0, *range(2, len(moved))]].all()


def test_fresh_weights_are_drawn_as_the_original_draws_them():
    config = PaperConfig(
        vocab_size=3000, hidden_size=256, num_hidden_layers=1, cutoffs=(800, 1600), final_norm=True
    )
    model = PaperForCausalLM(config)
    for (table, project), width in zip(model.model.embed_tokens.bands, (256, 64, 16), strict=True):
        assert table.weight.std().item() == pytest.approx(width**-0.5, rel=0.02)
        assert not table.weight[1].any() and table.weight[0].all()
        assert_uniform(project.weight, (6 / (256 + width)) ** 0.5)
    block = model.model.layers[0]
    attention, bound = block.self_attn, (6 / 512) ** 0.5
    for project in (attention.q_proj, attention.k_proj, attention.v_proj):
        assert_uniform(project.weight, bound * 0.5**0.5)
        assert_uniform(project.bias, 1 / 16)
    assert_uniform(attention.out_proj.weight, bound)
    assert not attention.out_proj.bias.any()
    assert_uniform(block.fc1.weight, 1 / 16)
    assert_uniform(block.fc2.weight, 1 / 64)
    assert_uniform(model.adaptive_softmax.class_proj, (6 / (256 + 2)) ** 0.5)
    for norm in (block.self_attn_layer_norm, block.final_layer_norm, model.model.layer_norm):
        assert (norm.weight == 1).all() and not norm.bias.any()


def assert_uniform(weight: Tensor, bound: float) -> None:
    assert weight.abs().max().item() == pytest.approx(bound, rel=0.05)
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)


def test_dropout_falls_where_the_original_has_it(monkeypatch):
    rates = {"dropout": 0.3, "activation_dropout": 0.25, "softmax_dropout": 0.2}
    model = build(**rates, attention_dropout=0.15).train()
    seen: list[Any] = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda m, x, _: seen.append((m.p, x[0].shape)))
    attend = model.model.position.attend
    monkeypatch.setattr(
        model.model.position,
        "attend",
        lambda *given: (seen.append(("attention", given[-1])), attend(*given))[1],
    )
    # Scored: two ids of the first tail and one of the last.
    model(tokens(2, 5), targets=torch.tensor([[3, 12, 15, 82, 1], [4, 5, 6, 7, -100]]))
    layer = [("attention", 0.15), (0.3, (2, 5, 24)), (0.25, (2, 5, 50)), (0.3, (2, 5, 24))]
    tails = [(0.2, (1, 12)), (0.2, (1, 6))]  # id 12 is left out
    assert seen == [(0.3, (2, 5, 24)), *layer, *layer, (0.2, (8, 24)), *tails]


def test_gradient_checkpointing_changes_nothing():
    model, ids = build(dropout=0.0, attention_dropout=0.0, activation_dropout=0.0), tokens(2, 9)
    model.train()
    model.adaptive_softmax.dropout.p = 0.0
    loss = model(ids, targets=ids).loss
    expected = torch.autograd.grad(loss, list(model.parameters()))
    # Transformers 5.23 renamed it.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    actual = torch.autograd.grad(model(ids, targets=ids).loss, list(model.parameters()))
    assert_all_same(actual, expected)


def test_it_generates_greedily_what_it_finds_most_likely():
    model, ids = build(), torch.tensor([[2, 30, 7], [2, 14, 82]])
    made = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    for row in made:
        for end in range(3, 7):
            assert model(row[None, :end]).logits[0, -1].argmax() == row[end]


# Checkpoints.


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
    auto = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for again in (load(tmp_path / "model"), auto.eval()):
        assert isinstance(again, PaperForCausalLM)
        assert torch.equal(again.log_probs(ids, targets), expected)
    assert isinstance(AutoConfig.from_pretrained(tmp_path / "model"), PaperConfig)
    assert isinstance(AutoModel.from_pretrained(tmp_path / "model"), PaperModel)


@every_position
def test_saving_and_loading_keeps_every_position_method(position, tmp_path):
    model, ids = build(position=position, final_norm=True, cutoffs=(9,)).float(), tokens(2, 9)
    model.save_pretrained(tmp_path, max_shard_size="4KB")  # in several files
    again = load(tmp_path)
    assert again.config.to_dict() == model.config.to_dict()
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_the_config_of_a_checkpoint_is_what_its_settings_say(golden_file):
    config, weights = load_original(golden_file)
    told = {name: getattr(config, name) for name in PaperConfig.__annotations__}
    assert (
        told
        | {
            "vocab_size": 1024,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 12,
            "intermediate_size": 96,
            "position": "alibi",
            "train_length": 64,
            "cutoffs": (256, 640),
            "adaptive_factor": 4.0,
            "dropout": 0.3,
            "attention_dropout": 0.1,
            "activation_dropout": 0.1,
            "softmax_dropout": 0.2,
            "final_norm": False,
        }
        == told
    )
    assert set(weights) == set(PaperForCausalLM(config).state_dict())


def as_namespace(record: dict[str, Any]) -> dict[str, Any]:
    cfg = record["cfg"]
    args = argparse.Namespace(**(cfg["task"] | cfg["model"]), criterion="adaptive_loss")
    return {"args": args, "model": record["model"]}


def with_namespaces_inside(record: dict[str, Any]) -> dict[str, Any]:
    parts = {name: argparse.Namespace(**part) for name, part in record["cfg"].items()}
    return {**record, "cfg": parts}


def with_one_namespace(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "cfg": argparse.Namespace(**record["cfg"])}


def with_args_beside_an_empty_cfg(record: dict[str, Any]) -> dict[str, Any]:
    return {**as_namespace(record), "cfg": {}}


def with_args_beside_another_cfg(record: dict[str, Any]) -> dict[str, Any]:
    return {
        **as_namespace(record),
        "cfg": {"model": {"decoder_layers": 5, "adaptive_input": False}},
    }


def with_nothing_where_another_group_tells(record: dict[str, Any]) -> dict[str, Any]:
    record["cfg"]["model"]["tokens_per_sample"] = None
    return record


def with_sharing_that_an_adaptive_softmax_ignores(record: dict[str, Any]) -> dict[str, Any]:
    record["cfg"]["model"]["share_decoder_input_output_embed"] = True
    return record


def with_sinusoids_among_the_tensors(record: dict[str, Any]) -> dict[str, Any]:
    record["model"]["decoder.embed_positions.weights"] = torch.ones(66, 48)
    return record


def with_cutoffs_written_otherwise(record: dict[str, Any]) -> dict[str, Any]:
    record["cfg"]["model"] |= {
        "adaptive_input_cutoff": [256, 640],
        "adaptive_softmax_cutoff": "256, 640",
    }
    return record


def with_numbers_of_numpy(record: dict[str, Any]) -> dict[str, Any]:
    settings = record["cfg"]["model"]
    for name, number in settings.items():
        if type(number) in (int, float):
            settings[name] = np.array(number)[()]
    return record


def with_all_that_training_leaves(record: dict[str, Any]) -> dict[str, Any]:
    state = {0: {"momentum_buffer": torch.ones(3).half()}}
    empty = dict.fromkeys(("decoder.embed_positions._float_tensor",), torch.tensor([math.nan]))
    return {
        **record,
        "model": OrderedDict(record["model"] | empty),
        "optimizer_history": [
            {"num_updates": np.int64(300), "lr_scheduler_state": {"best": None}}
        ],
        "extra_state": {
            "best": np.float64(5.3),
            "metrics": OrderedDict(val_loss=np.float32(5.3)),
            "counts": defaultdict(list, {"a": [1]}) | {"b": defaultdict(int, x=2)},
            "numbers": [np.dtype(code).type(3) for code in "?bBhHiIlLqQefd"],
            "arrays": [
                np.arange(6.0).reshape(2, 3),
                np.array(["a"]),
                np.array([{}], dtype=object),
            ],
        },
        "last_optimizer_state": {"state": state, "param_groups": [{"lr": 1.0}], "loss_scale": 128},
    }


FORMS = [
    *(as_namespace, with_namespaces_inside, with_one_namespace),
    *(with_args_beside_an_empty_cfg, with_args_beside_another_cfg),
    *(with_nothing_where_another_group_tells, with_sharing_that_an_adaptive_softmax_ignores),
    with_sinusoids_among_the_tensors,
    *(with_cutoffs_written_otherwise, with_numbers_of_numpy, with_all_that_training_leaves),
]


@pytest.mark.parametrize("change", FORMS)
def test_other_forms_of_a_checkpoint_are_read(change, golden_file, tmp_path):
    expected, weights = load_original(golden_file)
    config, others = load_original(write(change(original.golden_record()), tmp_path))
    assert config.to_dict() == expected.to_dict()
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_numpy_is_read_by_its_names_before_version_2(golden_file, tmp_path):
    record, path = with_all_that_training_leaves(original.golden_record()), tmp_path / "old.pt"
    torch.save(record, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))
    assert load_original(path)[0].to_dict() == load_original(golden_file)[0].to_dict()


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "adaptive_softmax_dropout"])
@pytest.mark.parametrize("rate", ["absent", None, 1.0])
def test_a_dropout_that_nothing_is_trained_with_is_none(name, rate, golden_file, tmp_path):
    record = original.golden_record()
    expected, _ = load_original(golden_file)
    record["cfg"]["model"][name] = rate
    if rate == "absent":
        del record["cfg"]["model"][name]
    config, _ = load_original(write(record, tmp_path))
    changed = {name.removeprefix("adaptive_"): 0.0}
    assert config.to_dict() == expected.to_dict() | changed


def test_the_old_name_of_a_dropout_counts_where_the_new_one_says_nothing(tmp_path):
    record = original.golden_record()
    for old, expected in ((0.2, 0.2), (None, 0.0), (1.0, 0.0)):
        record["cfg"]["model"] |= {"activation_dropout": None, "relu_dropout": old}
        assert load_original(write(record, tmp_path))[0].activation_dropout == expected


def test_half_precision_weights_become_float32(golden_file, tmp_path):
    record = original.golden_record()
    record["model"] = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in record["model"].items()
    }
    _, weights = load_original(golden_file)
    _, halves = load_original(write(record, tmp_path))
    for name, tensor in weights.items():
        assert halves[name].dtype == torch.float32
        assert torch.equal(halves[name], tensor.half().float())


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
    for read in (load, load_original):
        with pytest.raises(
            ValueError, match=r"plain values, .*it asks for \w+\.system, which was not"
        ):
            read(path)
    with pytest.raises(ValueError, match="which was not run"):
        convert(path, tmp_path / "model")
    assert not (tmp_path / "run").exists() and not (tmp_path / "model").exists()


def test_harmless_kinds_do_not_hide_code(tmp_path):
    hostile = Hostile(tmp_path / "run")
    for hiding in (
        np.array([hostile], dtype=object),
        defaultdict(os.system),
        defaultdict(list, {"x": hostile}),
    ):
        path = write({**original.golden_record(), "extra_state": {"x": hiding}}, tmp_path)
        with pytest.raises(ValueError, match=r"it asks for \w+\.system, which was not run"):
            load_original(path)
    assert not (tmp_path / "run").exists()


def test_a_bare_hostile_pickle_is_refused_and_not_run(tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(pickle.dumps(Hostile(tmp_path / "run"), protocol=4))
    with pytest.raises(ValueError, match="load_original: path must be a checkpoint of tensors"):
        load(path)
    assert not (tmp_path / "run").exists()


def test_a_damaged_checkpoint_is_refused(golden_file, tmp_path):
    whole, path = golden_file.read_bytes(), tmp_path / "checkpoint.pt"
    for content in (b"", b"no checkpoint", whole[: len(whole) // 2], b"x" * 400 + whole[400:]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"load_original: path must be a checkpoint of"):
            load_original(path)


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


def test_the_format_before_zip_files_is_read(golden_file, tmp_path):
    torch.save(original.golden_record(), tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    _, weights = load_original(golden_file)
    _, others = load_original(tmp_path / "a.pt")
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("record", [[1, 2], {"cfg": {}}, {"model": 3}], ids=str)
def test_a_record_without_a_model_is_refused(record, tmp_path):
    with pytest.raises(ValueError, match="must be a checkpoint with an entry 'model', got"):
        load_original(write(record, tmp_path))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"load_original: path must be a file, got .*no\.pt"):
        load(tmp_path / "no.pt")


def test_every_wrong_tensor_is_named_at_once(tmp_path):
    record = original.golden_record()
    weights = record["model"]
    del weights["decoder.layers.0.fc1.bias"], weights["decoder.adaptive_softmax.tail.0.2.weight"]
    weights["decoder.layers.2.fc1.bias"] = torch.zeros(3)
    weights["decoder.layer_norm.weight"] = torch.zeros(48)
    weights["decoder.layers.1.fc2.weight"] = torch.zeros(96, 48)
    with pytest.raises(ValueError) as caught:
        load(write(record, tmp_path))
    for part in (
        "decoder.layers.0.fc1.bias is missing",
        "decoder.adaptive_softmax.tail.0.2.weight is missing",
        "decoder.layers.2.fc1.bias is unexpected",
        "decoder.layer_norm.weight is unexpected",
        "decoder.layers.1.fc2.weight has shape [96, 48] instead of [48, 96]",
    ):
        assert part in str(caught.value)
    assert str(caught.value).count("decoder.") == 5


def test_a_tensor_without_axes_is_named(tmp_path):
    record = original.golden_record()
    name = "decoder.embed_tokens.embeddings.2.0.weight"
    record["model"][name] = torch.tensor(1.0)
    message = rf"'.*checkpoint\.pt': {name} has shape \[\] instead of \[384, 3\]$"
    with pytest.raises(ValueError, match=message):
        load(write(record, tmp_path))


@pytest.mark.parametrize("band", [0, 1, 2])
def test_a_missing_embedding_is_named(band, tmp_path):
    record = original.golden_record()
    name = f"decoder.embed_tokens.embeddings.{band}.0.weight"
    del record["model"][name]
    with pytest.raises(ValueError, match=rf"'.*checkpoint\.pt': {name} is missing$"):
        load(write(record, tmp_path))


def test_tied_tensors_that_differ_are_named(tmp_path):
    record = original.golden_record()
    tail = "decoder.adaptive_softmax.tail.1.0.weight"
    record["model"][tail] = record["model"][tail] + 1
    message = (
        f"{tail} differs from decoder.embed_tokens.embeddings.2.1.weight, to which it is tied"
    )
    with pytest.raises(ValueError, match=message):
        load(write(record, tmp_path))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_named(value, tmp_path):
    record = original.golden_record()
    names = ["decoder.layers.0.fc1.bias", "decoder.embed_tokens.embeddings.1.0.weight"]
    for name in names:
        record["model"][name] = record["model"][name].clone()
        record["model"][name].flatten()[3] = value
    with pytest.raises(ValueError) as caught:
        load(write(record, tmp_path))
    problems = str(caught.value).split("checkpoint.pt': ")[1].split("; ")
    assert sorted(problems) == sorted(f"{name} has values that are not finite" for name in names)


def test_what_is_no_floating_point_tensor_is_named(tmp_path):
    record = original.golden_record()
    record["model"] |= {"decoder.layers.0.fc1.bias": torch.zeros(96, dtype=torch.int32), "x": 3}
    message = "fc1.bias is no tensor of floating-point numbers; x is no tensor"
    with pytest.raises(ValueError, match=message):
        load(write(record, tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
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
        (
            {"decoder_layers": "two"},
            "num_hidden_layers must be an integer of at least 1, got 'two'",
        ),
        (
            {"adaptive_input_cutoff": "a,b", "adaptive_softmax_cutoff": "a,b"},
            "adaptive_input_cutoff must be ids with commas between, got 'a,b'",
        ),
        ({"adaptive_softmax_cutoff": 9}, "adaptive_softmax_cutoff must be ids with commas"),
        (
            {
                "adaptive_input": False,
                "adaptive_input_cutoff": None,
                "adaptive_softmax_cutoff": None,
            },
            "checkpoint.pt': adaptive_input must be True, got False; adaptive_input_cutoff must be",
        ),
        ({"dropout": 2.0}, "checkpoint.pt': PaperConfig: dropout must be a number in [0, 1)"),
    ],
    ids=str,
)
def test_a_model_that_this_is_not_is_refused_by_its_settings(changes, message, tmp_path):
    record = original.golden_record()
    record["cfg"]["model"] |= changes
    with pytest.raises(ValueError) as caught:
        load_original(write(record, tmp_path))
    assert message in str(caught.value)


def test_a_wrong_setting_comes_before_those_that_are_lacking(tmp_path):
    record = as_namespace(original.golden_record())
    del record["args"].adaptive_input_cutoff, record["args"].decoder_embed_dim
    record["args"].adaptive_input = False
    wrong = "checkpoint.pt': adaptive_input must be True, got False; "
    lacking = "args has no decoder_embed_dim, adaptive_input_cutoff$"
    with pytest.raises(ValueError, match=wrong + lacking):
        load_original(write(record, tmp_path))


@pytest.mark.parametrize("cfg", [None, "text", {"model": "text"}, {"task": [1]}], ids=str)
def test_settings_of_another_kind_are_refused(cfg, tmp_path):
    record = {**original.golden_record(), "cfg": cfg}
    with pytest.raises(ValueError, match="': cfg has no decoder_embed_dim, decoder_layers"):
        load_original(write(record, tmp_path))


def test_lacking_settings_are_named(tmp_path):
    record = original.golden_record()
    for name in ("decoder_layers", "adaptive_input_cutoff"):
        del record["cfg"]["model"][name]
    with pytest.raises(ValueError, match=r"cfg has no decoder_layers, adaptive_input_cutoff$"):
        load_original(write(record, tmp_path))


def test_positions_with_weights_are_not_read_from_a_checkpoint_that_has_none(golden_file):
    with pytest.raises(ValueError, match=r"position must be 'alibi', .* got 't5'"):
        load_original(golden_file, position="t5")


def test_sinusoids_are_refused_where_the_settings_say_that_there_are_none(tmp_path):
    record = original.golden_record()
    record["cfg"]["model"]["no_token_positional_embeddings"] = True
    path = write(record, tmp_path)
    message = "no_token_positional_embeddings must be False for position 'sinusoidal', got True"
    for read in (load, load_original):
        with pytest.raises(ValueError, match=message):
            read(path, position="sinusoidal")
    for position in ("alibi", "none"):
        assert load(path, position=position).config.position == position


def test_a_dictionary_of_another_size_is_refused(golden_file, tmp_path):
    Dictionary.from_counts({"a": 2, "b": 1}).write(tmp_path / "dict.txt")
    message = "convert: dictionary must have the model's 1024 types, got 8"
    with pytest.raises(ValueError, match=message):
        convert(golden_file, tmp_path / "model", dictionary=tmp_path / "dict.txt")
    assert not (tmp_path / "model").exists()


def test_a_folder_that_holds_a_model_is_not_overwritten(golden_file, tmp_path):
    convert(golden_file, tmp_path)
    with pytest.raises(ValueError, match="convert: output must not hold a model already, got"):
        convert(golden_file, tmp_path)


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
    out = tmp_path / "model"
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(OSError, match=rf"^convert: could not write to {out} \(.*too large"):
            convert(golden_file, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(out.iterdir())
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
    assert not list((tmp_path / "model").iterdir())


def test_a_folder_is_not_read_with_another_position(golden_file, tmp_path):
    convert(golden_file, tmp_path)
    assert load(tmp_path, position="alibi").config.position == "alibi"
    with pytest.raises(ValueError, match=r"load: position must be that of .* 'alibi', got 'none'"):
        load(tmp_path, position="none")


def test_a_folder_with_wrong_tensors_is_refused(golden_file, tmp_path):
    convert(golden_file, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.fc1.bias"] = torch.zeros(3)
    weights["other"] = weights.pop("model.layers.1.fc1.bias")
    save_file(weights, tmp_path / "model.safetensors")
    message = (
        r"load: cannot use '.*': model.layers.1.fc1.bias is missing; other is unexpected; "
        r"model.layers.0.fc1.bias has shape \[3\] instead of \[96\]"
    )
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def test_a_damaged_folder_is_refused(golden_file, tmp_path):
    with pytest.raises(ValueError, match="load: cannot read a model at"):
        load(tmp_path)  # no config.json
    convert(golden_file, tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(ValueError, match="load: cannot read a model at"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match="model_type is 'linbias-paper', got 'gpt2'"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "linbias-paper", "dropout": 2}')
    with pytest.raises(ValueError, match=f"load: cannot use '{tmp_path}': PaperConfig: dropout"):
        load(tmp_path)


# The configuration, and other bad input.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 20}, "hidden_size must be a multiple of 8 heads, got 20"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
        ({"position": "learned"}, "position must be one of .*, got 'learned'"),
        ({"cutoffs": (60000, 20000)}, "bands of 2 or more, got .60000, 20000."),
        ({"cutoffs": (20000, 267743)}, "cutoffs must be ids that cut .0, 267744. into bands"),
        ({"cutoffs": "20000"}, "cutoffs must be ids that cut .* got '20000'"),
        ({"adaptive_factor": 0}, "adaptive_factor must be a positive number, got 0"),
        ({"adaptive_factor": 40.0}, "small enough to leave 3 bands of 1024 a width, got 40.0"),
        ({"dropout": 1.0}, r"dropout must be a number in \[0, 1\), got 1.0"),
        ({"softmax_dropout": "0"}, r"softmax_dropout must be a number in \[0, 1\), got '0'"),
        ({"final_norm": 1}, "final_norm must be True or False, got 1"),
        ({"slope_schedule": "steep"}, "slope_schedule must be one of .*, got 'steep'"),
        ({"slope_scale": -1}, "slope_scale must be None, 'interpolate' or a positive number"),
        ({"attention_implementation": None}, "must be the name of an implementation, got None"),
        ({"position": "rotary", "hidden_size": 24}, "even per head for position='rotary'"),
        ({"position": "sinusoidal", "hidden_size": 2, "num_attention_heads": 1}, "at least 4"),
        ({"t5_max_distance": 16}, "t5_max_distance must be above half of t5_num_buckets, 16"),
    ],
    ids=str,
)
def test_a_wrong_setting_is_named(changes, message):
    with pytest.raises(ValueError, match=f"PaperConfig: .*{message}"):
        PaperConfig(**changes)


def test_the_defaults_are_the_papers_model():
    with torch.device("meta"):
        model = PaperForCausalLM(PaperConfig())
    assert model.num_parameters() == 246_933_504


@pytest.mark.parametrize("wrong", [-1, 83])
def test_an_id_beyond_the_vocabulary_is_refused(wrong):
    model, ids = build(), tokens(1, 5)
    bad = ids.clone()
    bad[0, 2] = wrong
    with pytest.raises(IndexError):
        model(bad)
    with pytest.raises(IndexError):
        model.log_probs(ids, bad)


def test_labels_and_targets_together_are_refused():
    ids = tokens(1, 5)
    with pytest.raises(ValueError, match="give either labels or targets, and not both"):
        build()(ids, labels=ids, targets=ids)


def test_a_static_cache_is_refused():
    model = build()
    cache = StaticCache(config=model.config, max_cache_len=8)
    with pytest.raises(ValueError, match="must be a growing cache, got StaticCache"):
        model(tokens(1, 5), past_key_values=cache)
