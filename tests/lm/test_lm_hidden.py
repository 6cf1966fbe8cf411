"""Masked models: what they train on, and what is scored."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from linbias.data.segments import MaskedSegments, MaskTokens
from linbias.lm.evaluation import evaluate
from linbias.lm.hidden import evaluate_hidden, masked_blocks, masked_positions
from linbias.lm.initial import with_tokenizer_of
from linbias.lm.settings import TrainSettings
from linbias.lm.training import train
from linbias.models import LinbiasConfig, LinbiasForMaskedLM
from linbias.models.loading import load
from lm_training import SETTINGS, TINY, assert_same_run, interrupt, metrics, train_into
from test_cli import run

MASK = MaskTokens(begin=2, mask=26)
ASYMMETRIC = {**SETTINGS.model, "encoder_position": "asymmetric"}
MASKED = replace(SETTINGS, task="masked", model=ASYMMETRIC)


def test_sequences_hold_every_token_once_a_pass_and_mask_others_each_time():
    ids = np.arange(100, 200, dtype=np.uint8)
    segments = MaskedSegments(ids, length=21, num_segments=8, seed=3, tokens=MASK)
    batch = segments.__getitems__(list(range(8)))  # two passes of four sequences
    read, labels = batch["input_ids"], batch["labels"]
    chosen = labels != -100
    assert (read[:, 0] == 2).all() and not chosen[:, 0].any()
    assert (chosen.sum(1) == 3).all()  # 15 % of 20
    assert (read[chosen] == 26).all() and (read != 26)[~chosen].all()
    text = torch.where(chosen, labels, read)[:, 1:]
    for one in (text[:4], text[4:]):
        assert sorted(one.flatten().tolist()) == list(range(100, 180))
    assert not torch.equal(chosen[:4], chosen[4:])
    again = segments.__getitems__([5, 2])
    assert torch.equal(again["labels"], labels[[5, 2]])


@pytest.mark.parametrize("stride", [None, 1, 4, 7])
@pytest.mark.parametrize("num_tokens", [1, 9, 10, 11, 40])
def test_every_token_is_scored_once_amid_others(num_tokens, stride):
    width = min(9, num_tokens)
    found = list(masked_blocks(num_tokens, width, stride and min(stride, width)))
    assert [t for b in found for t in range(b.first, b.end)] == list(range(num_tokens))
    assert all(b.stop - b.start == width and 0 <= b.start <= b.first for b in found)
    margin = (9 - (stride or 9)) // 2
    for block in found:
        assert block.first == 0 or block.first - block.start >= margin
        assert block.end == num_tokens or block.stop - block.end >= margin


@pytest.fixture(scope="module")
def masked_model():
    torch.manual_seed(0)
    config = LinbiasConfig(**TINY, encoder_position="directional", initializer_range=0.3)
    return LinbiasForMaskedLM(config).eval()


@pytest.mark.parametrize("stride", [None, 3])
def test_the_same_tokens_are_masked_and_scored_at_every_length(masked_model, stride):
    ids = np.random.default_rng(1).integers(97, 122, 50).astype(np.uint8)
    masked = masked_positions(50)  # results are compared: the draws stay
    assert np.flatnonzero(masked[:5]).tolist() == [2, 3]
    assert np.array_equal(masked_positions(30), masked[:30])
    losses = {}
    for length in (8, 21, 51, 200):
        result = evaluate_hidden(
            masked_model, ids, length=length, tokens=MASK, stride=stride, batch_tokens=30
        )
        assert (result.num_tokens, result.num_scored) == (50, masked.sum())
        losses[length] = result.nll
        total, right = 0.0, 0
        for block in masked_blocks(50, min(length - 1, 50), stride):
            read = np.where(masked, 26, ids)[block.start : block.stop]
            logits = masked_model(torch.tensor([[2, *read]])).logits[0, 1:].detach()
            for token in range(block.first, block.end):
                if masked[token]:
                    says = logits[token - block.start]
                    total += float(cross_entropy(says, torch.tensor(int(ids[token]))))
                    right += int(says.argmax()) == ids[token]
        assert result.nll == pytest.approx(total / masked.sum(), rel=1e-5)
        assert result.accuracy == pytest.approx(right / masked.sum())
    assert losses[51] == pytest.approx(losses[200], rel=1e-6) and losses[8] != losses[51]
    short = evaluate_hidden(masked_model, ids, length=8, tokens=MASK, limit_tokens=30)
    assert (short.num_tokens, short.num_scored) == (30, masked[:30].sum())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 1}, "length must be at least 2, got 1"),
        ({"stride": 20}, r"stride must lie in \[1, length - 1 = 19\], got 20"),
        ({"limit_tokens": 1}, "text must be long enough to mask a token, got 1 tokens"),
    ],
)
def test_what_cannot_be_scored_is_refused(masked_model, changes, message):
    ids = np.full(50, 97)
    with pytest.raises(ValueError, match=f"evaluate: {message}"):
        evaluate_hidden(masked_model, ids, **{"length": 20, "tokens": MASK, **changes})
    with pytest.raises(
        ValueError, match="evaluate: model must be causal, got one that sees later"
    ):
        evaluate(masked_model, ids, length=8)
    config = LinbiasConfig(**TINY, encoder_position="learned", train_length=16)
    with pytest.raises(ValueError, match="evaluate: length must be at most 16, the rows"):
        evaluate_hidden(LinbiasForMaskedLM(config), ids, length=17, tokens=MASK)


@pytest.mark.thorough
def test_a_run_that_was_stopped_ends_as_an_unbroken_one_and_another_goes_on_from_its_model(
    corpus, tmp_path
):
    unbroken = train_into(MASKED, corpus, tmp_path / "unbroken")
    interrupt(corpus, tmp_path / "run", 7, MASKED)
    assert_same_run(train_into(MASKED, corpus, tmp_path / "run"), unbroken)
    trained = load(unbroken, device="cpu")
    assert type(trained) is LinbiasForMaskedLM and trained.config.vocab_size == 256
    position = trained.model.position
    assert not torch.equal(position.log_left, position.log_right)

    going_on = {"init": str(unbroken), "steps": 1, "batch_size": 2, "length": 16}
    text = with_tokenizer_of(str(unbroken), corpus)
    assert np.array_equal(text.train, corpus.train)
    train(TrainSettings(task="masked", **going_on), text, tmp_path / "on", progress=False)
    with pytest.raises(ValueError, match="task must be that of the model of init, got 'causal'"):
        train(TrainSettings(**going_on), text, tmp_path / "other", progress=False)


@pytest.mark.thorough
def test_training_learns_and_leaves_slopes_undecayed(corpus, tmp_path):
    long = {"steps": 40, "validate_steps": 40, "save_steps": 40, "learning_rate": 1e-2}
    settings = replace(MASKED, model={**TINY, "encoder_position": "asymmetric"}, **long)
    measured = metrics(train_into(settings, corpus, tmp_path / "a"))
    assert measured["loss"] < 3.4 and measured["validation_loss"] < 4.5  # from 5.5
    frozen = replace(
        settings, learning_rate=1e-9, weight_decay=1e6, clip=0.0, steps=1, validate_steps=0
    )
    slopes = load(train_into(frozen, corpus, tmp_path / "b")).model.position.log_left.exp()
    torch.testing.assert_close(slopes.detach(), torch.tensor([2**-4, 2**-8]))


def test_the_command_line_trains_and_scores(text, tmp_path):
    folder = tmp_path / "run"
    sizes = [word for name, value in TINY.items() for word in ("--set", f"{name}={value}")]
    words = ["train", "--task", "masked", "--position", "window", "--set", "window=4"]
    words += ["--corpus", text, *sizes]
    words += ["--length", 16, "--steps", 2, "--batch-size", 4, "-o", folder]
    result = run(*words, "-q")
    assert result.exit_code == 0, result.stderr
    assert "bits per masked token" in result.stdout
    score = ("evaluate", folder, "--corpus", text, "--split", "train", "-q")
    short, long = json.loads(run(*score, "--length", "16,64", "--json").stdout)
    assert short["num_scored"] == long["num_scored"] > 30 and short["nll"] != long["nll"]
    shown = run(*score, "--length", "16").stdout
    assert "masked and scored" in shown and "masked token" in shown and "accuracy" in shown
    shared = run(*score, "--context-parallel", 2).stderr
    assert "--context-parallel: must be 1 but for causal models, got 2" in shared
    refused = run("generate", folder, "-p", "a")
    assert refused.exit_code == 2 and "MODEL: must hold a causal model" in refused.stderr
    failed = run(*words[:-1], tmp_path / "other", "--position", "alibi", "-q")
    said = "--position: must be None or one of ('symmetric',"
    assert failed.exit_code == 2 and said in failed.stderr
