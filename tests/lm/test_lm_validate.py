"""Validations at several lengths, the schedule's floor, budgets in epochs, runs resumed."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from linbias.data.corpus import load_corpus
from linbias.lm.generation import generate
from linbias.lm.training import LanguageModelTrainer, train
from linbias.models.loading import load
from lm_training import SETTINGS, assert_same_run, history, interrupt, metrics, train_into

VALIDATED = replace(
    SETTINGS, validate_steps=4, validate_lengths=(20,), prompt="7 times", accumulation=1
)


@pytest.fixture(scope="module")
def by_characters(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    lines = "".join(f"{i} times {i} is {i * i}\n" for i in range(240))
    path.write_text(lines, encoding="utf-8")
    return load_corpus(str(path), tokenizer="characters")


@pytest.fixture(scope="module")
def validated(by_characters, tmp_path_factory):
    return train_into(VALIDATED, by_characters, tmp_path_factory.mktemp("validated") / "run")


def scores_of(folder: Path, ids: torch.Tensor, length: int) -> dict[str, float]:
    """Segment by segment, as anyone would."""
    model = load(folder, device="cpu")
    losses: list[list[float]] = [[] for _ in range(length)]
    hits = 0
    for start in range(0, len(ids) - 1, length):
        inputs, targets = ids[start : start + length], ids[start + 1 : start + length + 1]
        inputs = inputs[: len(targets)]
        with torch.inference_mode():
            logits = model(inputs[None]).logits[0]
        hits += int((logits.argmax(1) == targets).sum())
        for position, loss in enumerate(cross_entropy(logits, targets, reduction="none")):
            losses[position].append(float(loss))
    mean = [sum(each) / len(each) for each in losses]
    return {
        "loss": sum(map(sum, losses)) / (len(ids) - 1),
        "accuracy": hits / (len(ids) - 1),
        "first": mean[0],
        "trained": mean[15],
        "last": mean[-1],
    }


def test_a_validation_keeps_what_a_plain_computation_gives(validated, by_characters):
    ids = torch.from_numpy(by_characters.valid.astype("int64"))
    last = history(validated)[-1]
    assert list(last["validation"]["lengths"]) == ["16", "20"]
    for length, found in last["validation"]["lengths"].items():
        assert found == pytest.approx(scores_of(validated, ids, int(length)), rel=1e-5)
    assert last["validation_loss"] == last["validation"]["lengths"]["16"]["loss"]
    assert metrics(validated)["validation"] == last["validation"]
    greedy = generate(validated, "7 times", max_new_tokens=25, temperature=0.0)
    assert last["validation"]["continuation"] == greedy


@pytest.mark.thorough
def test_validations_leave_the_training_alone(validated, by_characters, tmp_path):
    plain = replace(SETTINGS, accumulation=1)
    assert_same_run(train_into(plain, by_characters, tmp_path / "plain"), validated)


@pytest.mark.thorough
def test_the_history_has_every_line_once_however_often_a_run_stops(
    validated, by_characters, tmp_path
):
    for step in (7, 9, 11):
        interrupt(by_characters, tmp_path, step, VALIDATED)
    assert len(history(tmp_path)) == 4
    # As a crash leaves it, in the middle of a line from after the last checkpoint.
    with (tmp_path / "history.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    resumed = train_into(VALIDATED, by_characters, tmp_path)
    assert_same_run(resumed, validated)
    lines, expected = history(resumed), history(validated)
    for line in (*lines, *expected):
        assert line.pop("tokens_per_second") > 0
    assert lines == expected
    assert [line["step"] for line in lines] == [4, 5, 8, 10, 12]
    assert [line["validation_loss"] is not None for line in lines] == [1, 0, 1, 0, 1]
    assert metrics(resumed)["validation"] == metrics(validated)["validation"]


def test_lengths_beyond_a_table_of_positions_are_left_out(by_characters, tmp_path):
    model = {**SETTINGS.model, "position": "learned"}
    settings = replace(VALIDATED, model=model, validate_lengths=(20, 12), steps=1)
    found = metrics(train_into(settings, by_characters, tmp_path))["validation"]
    assert list(found["lengths"]) == ["16", "12"]  # and the prompt is continued beyond 16 tokens
    assert found["lengths"]["12"]["trained"] is None
    assert len(found["continuation"]) == len("7 times") + 25


def test_a_prompt_of_unknown_characters_is_refused_before_training(by_characters, tmp_path):
    settings = replace(VALIDATED, prompt="7 \xd7 7")
    with pytest.raises(ValueError, match=r"TrainSettings: prompt must be made .* got '\\xd7'"):
        train(settings, by_characters, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_learning_rate_does_not_go_below_its_floor(by_characters, tmp_path):
    settings = replace(SETTINGS, learning_rate_floor=0.25, warmup_steps=3, save_steps=1)
    run = train_into(settings, by_characters, tmp_path)
    expected = []
    for step in range(12):  # a line's rate is that of its step
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 3) / 9))
        expected.append(1e-3 * (step / 3 if step < 3 else max(0.25, cosine)))
    assert [line["learning_rate"] for line in history(run)] == pytest.approx(expected)


@pytest.mark.thorough
def test_untied_token_embeddings_do_not_decay(by_characters, tmp_path, monkeypatch):
    decayed = []
    names_of = LanguageModelTrainer.get_decay_parameter_names
    monkeypatch.setattr(
        LanguageModelTrainer,
        "get_decay_parameter_names",
        lambda *a: decayed.append(names_of(*a)) or decayed[-1],
    )
    for tied in (True, False):
        model = {**SETTINGS.model, "tie_word_embeddings": tied}
        settings = replace(SETTINGS, model=model, steps=1)
        train_into(settings, by_characters, tmp_path / str(tied))
    assert "model.embed_tokens.weight" in decayed[0]
    assert not {"model.embed_tokens.weight", "model.norm.weight"} & set(decayed[-1])
    assert "lm_head.weight" in decayed[-1]


@pytest.mark.thorough
def test_epochs_are_passes_over_the_text(by_characters, tmp_path):
    per_pass = (len(by_characters.train) - 1) // 16
    settings = replace(SETTINGS, steps=None, epochs=0.5, validate_steps=0.125)
    run = train_into(settings, by_characters, tmp_path)
    assert metrics(run)["steps"] == math.ceil(0.5 * per_pass / 6)
    steps = [line["step"] for line in history(run) if line["validation_loss"] is not None]
    assert steps == [6, 12, 18, 24, 25]  # an eighth of a pass is 6.02 steps
    more = train(replace(settings, epochs=0.75), by_characters, tmp_path, progress=False)
    assert more.steps == math.ceil(0.75 * per_pass / 6)
