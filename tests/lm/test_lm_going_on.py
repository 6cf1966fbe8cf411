"""Runs that are extended, models that are trained on, validation while training."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

from contract import rows
from linbias.data.corpus import load_corpus
from linbias.data.tokenizers import Tokenizer
from linbias.lm.initial import with_tokenizer_of
from linbias.lm.settings import TrainSettings
from linbias.lm.training import train
from linbias.lm.watch import StopWatch
from linbias.models.loading import load
from lm_training import SETTINGS, TINY, assert_same_run, history, interrupt, metrics, train_into

LONGER = replace(SETTINGS, steps=20)


@pytest.fixture(scope="module")
def extended(unbroken, corpus, tmp_path_factory):
    """The finished run of 12 steps, extended to 20."""
    folder = tmp_path_factory.mktemp("extended") / "run"
    return train_into(LONGER, corpus, Path(shutil.copytree(unbroken, folder)))


@pytest.mark.thorough
def test_a_finished_run_is_extended_from_its_last_step_on_the_longer_schedule(
    extended, unbroken, corpus, tmp_path
):
    assert metrics(extended)["steps"] == 20
    assert [path.name for path in (extended / "checkpoints").iterdir()] == ["checkpoint-20"]
    steps = [line["step"] for line in history(extended)]
    assert steps == [5, 10, 12, 15, 20]
    assert history(extended)[:3] == history(unbroken)
    # From there on the learning rate is that of a run of 20 steps from the start, already in the
    # first step: 1,000 times the rate of step 12 of 20 moves the weights otherwise than 0 would.
    straight = history(train_into(LONGER, corpus, tmp_path))
    assert [line["learning_rate"] for line in history(extended)[3:]] == [
        line["learning_rate"] for line in straight if line["step"] > 12
    ]


@pytest.mark.thorough
def test_the_first_step_of_an_extension_has_the_learning_rate_of_its_schedule_which_is_said(
    unbroken, corpus, tmp_path, capfd
):
    run = Path(shutil.copytree(unbroken, tmp_path / "run"))
    train(replace(SETTINGS, steps=13), corpus, run)
    said = "extended to 13 steps after 12, the learning rate goes from 0 to 1.7e-05 and then down"
    assert said in capfd.readouterr().err
    assert history(run)[-1]["step"] == 13
    assert history(run)[-1]["learning_rate"] > 0
    before, after = (load_file(folder / "model.safetensors") for folder in (unbroken, run))
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.thorough
def test_an_extension_that_is_interrupted_ends_like_one_that_is_not(
    extended, unbroken, corpus, tmp_path
):
    run = Path(shutil.copytree(unbroken, tmp_path / "run"))
    for step in (12, 17):  # before the first checkpoint of the extension, and after it
        interrupt(corpus, run, step, LONGER)
        assert metrics(run)["steps"] == 12  # the folder's model is still that of 12 steps
    assert_same_run(train_into(LONGER, corpus, run), extended)
    assert [line["step"] for line in history(run)] == [5, 10, 12, 15, 20]


@pytest.mark.thorough
def test_an_unfinished_run_is_extended(corpus, tmp_path):
    interrupt(corpus, tmp_path, 7)
    train_into(LONGER, corpus, tmp_path)
    assert metrics(tmp_path)["steps"] == 20
    assert [line["step"] for line in history(tmp_path)] == [5, 10, 15, 20]
    with pytest.raises(ValueError, match=r"TrainSettings: steps must be at least .* got 12 steps"):
        train(SETTINGS, corpus, tmp_path, progress=False)


def test_a_finished_run_without_its_checkpoint_is_not_trained_from_the_start(
    unbroken, corpus, tmp_path
):
    run = Path(shutil.copytree(unbroken, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(
        ValueError, match="train: checkpoints must hold the last one of a finished"
    ):
        train(LONGER, corpus, run, progress=False)
    assert train(SETTINGS, corpus, run, progress=False).steps == 12  # it is as it was


@pytest.mark.thorough
def test_a_budget_in_seconds_is_extended_in_proportion(corpus, tmp_path):
    settings = replace(SETTINGS, steps=None, seconds=0.1)
    steps = train(settings, corpus, tmp_path, progress=False).steps
    more = replace(settings, seconds=0.2)
    assert train(more, corpus, tmp_path, progress=False).steps == 2 * steps


@pytest.mark.parametrize(("segments", "scored"), rows("15-12", (5, 5), (15, 12)))  # batches of 6
def test_validation_is_the_mean_over_its_segments_and_leaves_training_alone(
    segments, scored, unbroken, corpus, tmp_path
):
    settings = replace(SETTINGS, validate_steps=5)
    valid = replace(corpus, valid=corpus.train[: segments * 16 + 3])
    run = train_into(settings, valid, tmp_path)
    assert_same_run(run, unbroken)  # with dropout, so with the same random numbers
    losses = {line["step"]: line["validation_loss"] for line in history(run)}
    assert list(losses) == [5, 10, 12] and all(losses.values())
    ids = torch.from_numpy(valid.valid[: scored * 16 + 1].astype("int64"))
    with torch.inference_mode():
        logits = load(run, device="cpu")(ids[:-1].view(scored, 16)).logits
    expected = cross_entropy(logits.flatten(0, 1), ids[1:]).item()
    assert losses[12] == pytest.approx(expected, rel=1e-5)
    assert metrics(run)["validation_loss"] == losses[12]


@pytest.mark.thorough
def test_the_history_has_every_line_once_however_often_a_run_stops(unbroken, corpus, tmp_path):
    validated = replace(SETTINGS, validate_steps=4)
    valid = replace(corpus, valid=corpus.train)
    expected = history(train_into(validated, valid, tmp_path / "whole"))
    run = tmp_path / "run"
    for step in (7, 9, 11):
        interrupt(valid, run, step, validated)
    assert len(history(run)) == 4
    # As a crash leaves it, in the middle of a line from after the last checkpoint.
    with (run / "history.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    assert_same_run(train_into(validated, valid, run), unbroken)
    lines = history(run)
    for line in (*lines, *expected):
        assert line.pop("tokens_per_second") > 0
    assert lines == expected
    assert [line["step"] for line in lines] == [4, 5, 8, 10, 12]
    assert [line["validation_loss"] is not None for line in lines] == [1, 0, 1, 0, 1]


@pytest.mark.thorough
def test_a_model_is_trained_on_with_its_own_tokenizer(tmp_path):
    for name in ("first", "second"):
        lines = (f"{name} {i} times {i} is {i * i}\n" for i in range(60))
        (tmp_path / f"{name}.txt").write_text("".join(lines))
    corpus = load_corpus(str(tmp_path / "first.txt"), tokenizer="bpe", vocab_size=300)
    first = train_into(
        replace(SETTINGS, model=TINY, steps=60, learning_rate=1e-2, save_steps=60),
        corpus,
        tmp_path / "first",
    )
    other = with_tokenizer_of(str(first), load_corpus(str(tmp_path / "second.txt")))
    settings = replace(
        SETTINGS,
        model={"hidden_dropout": 0.25},
        init=str(first),
        length=20,
        steps=1,
        learning_rate=1e-9,
    )
    second = train_into(settings, other, tmp_path / "second")

    before, after = (load(folder, device="cpu") for folder in (first, second))
    for name, value in before.state_dict().items():  # a step of 1e-9 leaves them where they were
        torch.testing.assert_close(after.state_dict()[name], value, atol=1e-6, rtol=0)
    assert after.config.train_length == 20
    assert after.config.hidden_dropout == 0.25
    assert after.config.num_hidden_layers == TINY["num_hidden_layers"]
    text = "second 7 times 7"
    tokenizers = [Tokenizer.load(folder) for folder in (first, second)]
    assert tokenizers[0].encode(text).tolist() == tokenizers[1].encode(text).tolist()
    assert (tmp_path / "second.txt").read_text().endswith(other.tokenizer.decode(other.test))

    # A run knows the weights that it began with.
    shutil.copytree(second, tmp_path / "third")
    with pytest.raises(
        ValueError, match=r"init\.model\.safetensors is '\w+' there and '\w+' here"
    ):
        train(replace(settings, init=str(second)), other, tmp_path / "third", progress=False)


CONTRADICTIONS = [
    ({"model": {"hidden_size": 64}}, "hidden_size must be 32, as in the model of init, got 64"),
    ({"model": {"position": "rotary"}}, "position must be 'alibi', as in the .* got 'rotary'"),
    ({"init": "no/such"}, "init must be a folder that `linbias train` made, got 'no/such'"),
    ({"init": "{gpt2}"}, "TrainSettings: init must be a model of `linbias train`, got .* 'gpt2'"),
]


@pytest.mark.parametrize(("change", "message"), CONTRADICTIONS)
def test_what_contradicts_the_model_to_go_on_from_is_refused(
    change, message, unbroken, corpus, tmp_path
):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    change = {
        n: str(v).format(gpt2=tmp_path / "gpt2") if n == "init" else v for n, v in change.items()
    }
    settings = TrainSettings(**{"init": str(unbroken), "length": 16, "steps": 1, **change})
    with pytest.raises(ValueError, match=message):
        train(settings, corpus, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


@pytest.mark.thorough
def test_tokens_of_another_tokenizer_and_a_short_table_are_refused(
    unbroken, corpus, text, tmp_path
):
    settings = TrainSettings(init=str(unbroken), length=16, batch_size=2, steps=1)
    other = load_corpus(text, tokenizer="bpe", vocab_size=257)
    with pytest.raises(ValueError, match="train: corpus must be tokenised as the model of init"):
        train(settings, other, tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match=r"length \+ 1 = 33 tokens to validate on, got \d\d$"):
        long = replace(settings, length=32, validate_steps=1)
        train(long, corpus, tmp_path / "run", progress=False)
    model = replace(SETTINGS, model={**TINY, "position": "learned"}, steps=1)
    learned = str(train_into(model, corpus, tmp_path / "learned"))
    with pytest.raises(ValueError, match="TrainSettings: length must be at most 16, the rows"):
        train(replace(settings, init=learned, length=17), corpus, tmp_path / "run", progress=False)
    shorter = replace(settings, init=learned, length=8)
    run = train_into(shorter, corpus, tmp_path / "run")
    assert load(run, device="cpu").config.train_length == 16  # the table keeps its rows


@pytest.mark.parametrize(
    ("times", "after", "expected"),
    [
        ([], 1, None),
        ([10.0], 1, None),
        ([10.0, 11.0], 1, 1.0),
        ([10.0, 11.0, 14.0, 15.0], 1, 1.0),  # a validation of three seconds does not show
        ([10.0, 15.0, 16.0, 17.0], 2, 1.0),
    ],
)
def test_the_time_of_a_step_is_the_median_without_the_first(times, after, expected):
    watch = StopWatch()
    watch.times = times
    assert watch.step_seconds(after) == expected
