"""Scoring as the original does it: golden perplexities, and a loop over blocks one at a time."""

import json
import math
from typing import Any

import numpy as np
import pytest
import torch

import paper_original as original
from linbias.paper.checkpoint import load
from linbias.paper.config import PaperConfig
from linbias.paper.model import PaperForCausalLM
from linbias.paper.score import Scores, score

pytestmark = pytest.mark.usefixtures("same_start")
VOCAB = 41
RUNS = original.SHARED / "eval" / "perplexities.json"
GOLDEN_RUNS = json.loads(RUNS.read_text()) if RUNS.exists() else []
PRINTED = "Loss (base 2): {repo_loss_base2:.4f}, Perplexity: {repo_perplexity:.2f}"
# One pass an id, for 20,106 ids: its first ids are compared below, like its sum.
LONGEST = "scores_A_slice20k_l128_cw127.npy"
needs_shared = pytest.mark.skipif(
    not GOLDEN_RUNS, reason="the golden data lies outside the repository"
)


def build(**changes: Any) -> PaperForCausalLM:
    """A model in training mode, with dropout: `score` has to see to that."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 3}
    bands = {"cutoffs": (9, 20), "adaptive_factor": 2.0}
    return PaperForCausalLM(PaperConfig(**sizes | bands | changes))


@pytest.fixture(scope="module")
def model():
    return build()


def text(num_ids: int) -> np.ndarray:
    return np.random.default_rng(num_ids).integers(0, VOCAB, num_ids).astype(np.uint16)


@torch.inference_mode()
def one_block_at_a_time(
    model: PaperForCausalLM, ids: np.ndarray, length: int, context_window: int
) -> np.ndarray:
    """Walk the blocks as the original's data set does, keeping the last inputs."""
    model.eval()
    inputs = [2, *ids[:-1].tolist()]
    kept: list[int] = []
    scores: list[float] = []
    block = length - context_window
    for start in range(0, len(ids), block):
        read = kept + inputs[start : start + block]
        own = range(len(kept), len(read))
        logits = model(torch.tensor([read])).logits[0]
        scores += [logits[i, ids[start + i - len(kept)]].item() for i in own]
        kept = read[-context_window:] if context_window else []
    return np.array(scores)


LENGTHS = [
    (8, 0, 30),  # blocks, and a shorter last one
    (8, 0, 32),  # whole blocks
    (8, 7, 30),  # every id has a window of its own
    (8, 4, 30),
    (8, 3, 33),  # context that is no multiple of the block, and a shorter last block
    (8, 6, 31),
    (1, 0, 5),
    (40, 10, 30),  # all in the first block
    (40, 35, 30),  # all windows reach the start
    (3, 2, 1),
]


@pytest.mark.parametrize(("length", "context_window", "num_ids"), LENGTHS)
def test_every_id_is_scored_as_one_block_at_a_time_would(model, length, context_window, num_ids):
    ids = text(num_ids)
    expected = one_block_at_a_time(model, ids, length, context_window)
    model.train()
    sizes = {"length": length, "context_window": context_window}
    for batch_tokens in (1, 20, 10**6):
        scores = score(model, ids, **sizes, batch_tokens=batch_tokens)
        assert scores.log_probs.dtype == np.float32
        np.testing.assert_allclose(scores.log_probs, expected, atol=2e-5)
    assert model.training


@pytest.mark.parametrize("position", ["sinusoidal", "rotary", "t5", "none"])
def test_other_positions_count_from_the_start_of_their_window(position):
    model, ids = build(position=position, cutoffs=(9,)), text(30)
    for context_window in (0, 3, 7):
        expected = one_block_at_a_time(model, ids, 8, context_window)
        scores = score(model, ids, length=8, context_window=context_window)
        np.testing.assert_allclose(scores.log_probs, expected, atol=2e-5)


def golden_run(run):
    name = run["scores_file"]
    is_long = "valid" in run["text"] or name.endswith("cw127.npy")  # a split, or a pass an id
    return pytest.param(run, marks=[pytest.mark.thorough] * is_long, id=name[7:-4])


@needs_shared
@pytest.mark.parametrize(
    "run", [golden_run(run) for run in GOLDEN_RUNS if run["scores_file"] != LONGEST]
)
def test_every_evaluation_of_the_original_is_reproduced(run):
    model = load(original.SHARED / "ckpt" / run["checkpoint"])
    ids = np.load(original.SHARED / "eval" / f"targets_{run['text']}.npy")
    scores = score(model, ids, length=run["l"], context_window=run["context_window"])
    file = original.SHARED / "eval" / run["scores_file"]
    if file.exists():
        assert np.abs(scores.log_probs - np.load(file)).max() < 2e-5
    assert len(scores.log_probs) == run["tokens_scored"]
    assert scores.loss_base2 == pytest.approx(run["float64_loss_base2"], rel=1e-6)
    assert scores.perplexity == pytest.approx(run["float64_perplexity"], rel=1e-6)
    assert scores.line == PRINTED.format(**run)


@needs_shared
def test_a_long_sliding_window_begins_as_the_original_does():
    model = load(original.SHARED / "ckpt" / "ckpt_A_8heads.pt")
    ids = np.load(original.SHARED / "eval" / "targets_slice20k.npy")[:1000]
    scores = score(model, ids, length=128, context_window=127)
    expected = np.load(original.SHARED / "eval" / LONGEST)[:1000]
    assert np.abs(scores.log_probs - expected).max() < 2e-5


def test_the_printed_line_adds_up_in_float32_block_by_block():
    lost, kept = -(2.0**24), np.full(2**10, -1.0, np.float32)
    one_by_one = Scores(np.append(np.float32(lost), kept), 2, 1, 0.0, 0)  # 2^24 + 1 is 2^24
    assert one_by_one.line.startswith(f"Loss (base 2): {2**24 / 1025 / math.log(2):.0f}")
    assert one_by_one.loss_base2 == pytest.approx((2**24 + 2**10) / 1025 / math.log(2), rel=1e-12)
    assert one_by_one.perplexity == math.inf
    short_block_first = Scores(np.append(kept, np.float32(lost)), 2**10, 0, 0.0, 0)
    assert short_block_first.loss_base2 == one_by_one.loss_base2
    assert short_block_first.line != one_by_one.line
    # Four blocks of one id, of which the original puts the first last: 3 + 2^24 is 2^24 + 4.
    shuffled = Scores(np.array([lost, -1, -1, -1], np.float32), 1, 0, 0.0, 0)
    assert shuffled.line.startswith("Loss (base 2): 6051103")


def test_perplexity_is_two_to_the_mean_bits():
    scores = Scores(np.log(np.array([0.5, 0.125], np.float32)), 2, 0, 0.0, 0)
    assert scores.loss_base2 == pytest.approx(2.0, rel=1e-7)
    assert scores.perplexity == pytest.approx(4.0, rel=1e-7)
    assert scores.line == "Loss (base 2): 2.0000, Perplexity: 4.00"
    for bits, perplexity in ((np.nan, np.nan), (2000.0, np.inf)):
        scores = Scores(np.array([-bits * np.log(2.0)], np.float32), 1, 0, 0.0, 0)
        assert np.array_equal(scores.perplexity, perplexity, equal_nan=True)


# A run that is stopped.


# Bad input.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids": np.zeros(0, int)}, r"ids must be one row of at least 1 integer, got int64 \[0\]"),
        ({"ids": np.zeros((2, 3), int)}, r"ids must be one row of at least 1 integer, got int64"),
        ({"ids": np.array([-1, VOCAB])}, r"ids must lie in \[0, 41\), .* got -1 to 41"),
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"batch_tokens": 0}, "batch_tokens must be at least 1, got 0"),
        ({"context_window": 8}, r"context_window must lie in \[0, length = 8\), got 8"),
        ({"context_window": -1}, r"context_window must lie in \[0, length = 8\), got -1"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(model, changes, message):
    with pytest.raises(ValueError, match=f"score: {message}"):
        score(model, **{"ids": text(20), "length": 8} | changes)
