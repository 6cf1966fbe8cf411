"""The paper's model, against golden data of the original and an oracle in NumPy."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paper_original as original
from linbias.paper import adaptive
from linbias.paper.checkpoint import load
from linbias.paper.config import POSITIONS, PaperConfig
from linbias.paper.model import PaperForCausalLM
from small_models import assert_same, build_paper, paper_tokens

pytestmark = pytest.mark.usefixtures("same_start")
every_position = pytest.mark.parametrize("position", POSITIONS)
needs_shared = pytest.mark.skipif(
    not original.SHARED.exists(), reason="the golden data lies outside the repository"
)
CHECKPOINTS = {"A": "ckpt_A_8heads.pt", "C": "ckpt_C_12heads_vocab1024.pt"}


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


def assert_all_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal beside the largest of all: gradients of the key biases are 0 but for rounding."""
    assert_same(*(torch.cat([x.flatten() for x in tensors]) for tensors in (actual, expected)))


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
    model, inputs = load(original.write(record, tmp_path)).double(), paper_tokens(37)
    features, log_probs = original.forward(record, inputs.numpy())
    with torch.inference_mode():
        assert_same(model.model(inputs[None]).last_hidden_state[0], torch.from_numpy(features))
        assert_same(model(inputs[None]).logits[0], torch.from_numpy(log_probs))


@pytest.mark.parametrize("position", ["sinusoidal", "none"])
def test_models_of_unchanged_fairseq_compute_what_the_oracle_says(position, tmp_path):
    record = original.random_record()
    path, inputs = original.write(record, tmp_path), paper_tokens(37)
    _, log_probs = original.forward(record, inputs.numpy(), position)
    with torch.inference_mode():
        actual = load(path, position=position).double()(inputs[None]).logits[0].numpy()
    np.testing.assert_allclose(actual, log_probs, atol=1e-4)  # the sinusoids are float32


@every_position
def test_the_last_positions_alone_are_those_of_all(position):
    model, ids = build_paper(position=position), paper_tokens(2, 10)
    whole = model(ids).logits
    for keep in (1, 4, 10):
        assert_same(model(ids, logits_to_keep=keep).logits, whole[:, -keep:])
        targets = paper_tokens(2, keep)
        picked = whole[:, -keep:].gather(-1, targets[..., None])[..., 0]
        assert_same(model.log_probs(ids, targets), picked)


@pytest.mark.parametrize("cutoffs", [(), (11,), (11, 30)])
def test_log_probs_of_many_rows_are_those_of_the_whole_vocabulary(cutoffs, monkeypatch):
    monkeypatch.setattr(adaptive, "_LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(adaptive, "_FEWEST_ROWS", 7)
    model, ids = build_paper(cutoffs=cutoffs), paper_tokens(2, 83)
    targets = torch.stack([torch.arange(83), paper_tokens(83)])  # every id, then any
    whole = model(ids).logits
    assert_same(whole.exp().sum(-1), torch.ones(2, 83, dtype=torch.float64))
    assert_same(model.log_probs(ids, targets), whole.gather(-1, targets[..., None])[..., 0])


def test_logits_of_narrow_models_are_wide():
    model, ids = build_paper().bfloat16(), paper_tokens(2, 9)
    assert model(ids).logits.dtype == model.log_probs(ids, ids).dtype == torch.float32


def test_the_loss_drops_what_the_original_drops_and_no_more():
    """Ids 12 and 31 are second in their bands, as <pad>, 1, is in the first."""
    ids, targets = paper_tokens(1, 8), torch.tensor([[3, 12, 31, 13, 1, -100, 82, 30]])
    faithful, plain = build_paper(), build_paper(ignore_tail_pad=False)
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
    model, ids = build_paper(), paper_tokens(2, 9)
    targets = torch.cat([ids[:, 1:], torch.full((2, 1), -100)], dim=1)
    assert_same(model(ids, labels=ids).loss, model(ids, targets=targets).loss)


def test_gradients_of_the_loss_are_those_of_the_log_probabilities():
    model = build_paper(ignore_tail_pad=False)
    ids, targets = paper_tokens(2, 2, 9)
    targets[targets == 1] = 3
    gradients = torch.autograd.grad(model(ids, targets=targets).loss, list(model.parameters()))
    nll = -model(ids).logits.gather(-1, targets[..., None]).mean()
    expected = torch.autograd.grad(nll, list(model.parameters()))
    assert_all_same(gradients, expected)


def test_the_second_id_of_every_band_learns_nothing_from_being_read():
    model = build_paper()
    embed = model.model.embed_tokens
    embed(torch.arange(83)).sum().backward()
    for table, _ in embed.bands:
        moved = table.weight.grad.abs().sum(1) > 0
        assert not moved[1] and moved[[0, *range(2, len(moved))]].all()


def test_fresh_weights_are_drawn_as_the_original_draws_them():
    sizes = {"vocab_size": 3000, "hidden_size": 256, "num_hidden_layers": 1}
    model = PaperForCausalLM(PaperConfig(**sizes, cutoffs=(800, 1600), final_norm=True))
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
    model = build_paper(**rates, attention_dropout=0.15).train()
    seen: list[Any] = []
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda m, x, _: seen.append((m.p, x[0].shape)))
    attend = model.model.position.attend

    def watched(*given: Any) -> Tensor:
        seen.append(("attention", given[-1].dropout))
        return attend(*given)

    monkeypatch.setattr(model.model.position, "attend", watched)
    # Scored: two ids of the first tail and one of the last.
    model(paper_tokens(2, 5), targets=torch.tensor([[3, 12, 15, 82, 1], [4, 5, 6, 7, -100]]))
    layer = [("attention", 0.15), (0.3, (2, 5, 24)), (0.25, (2, 5, 50)), (0.3, (2, 5, 24))]
    tails = [(0.2, (1, 12)), (0.2, (1, 6))]  # id 12 is left out
    assert seen == [(0.3, (2, 5, 24)), *layer, *layer, (0.2, (8, 24)), *tails]


def test_the_defaults_are_the_papers_model():
    with torch.device("meta"):
        model = PaperForCausalLM(PaperConfig())
    assert model.num_parameters() == 246_933_504


def test_bad_calls_are_refused():
    model, ids = build_paper(), paper_tokens(1, 5)
    for wrong in (-1, 83):
        bad = ids.clone()
        bad[0, 2] = wrong
        for call in (lambda: model(bad), lambda: model.log_probs(ids, bad)):  # noqa: B023
            with pytest.raises(IndexError):
                call()
    with pytest.raises(ValueError, match="give either labels or targets, and not both"):
        model(ids, labels=ids, targets=ids)
