"""Checkpoints of training: what is damaged is seen, said and passed over."""

import hashlib
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from linbias.lm.checkpoints import Checkpoints, readable_model
from linbias.lm.generation import generate
from linbias.lm.text import read_text
from linbias.lm.training import train
from lm_training import SETTINGS, assert_same_run, interrupt


def test_damaged_checkpoint_is_passed_over_for_the_one_before(unbroken, corpus, tmp_path):
    newest = interrupt(corpus, tmp_path, 11) / "checkpoint-10"
    (newest / "rng_state.pth").unlink()
    message = r"got checkpoint-10 \(rng_state.pth is missing\) in .*; going on from checkpoint-5"
    steps = CountSteps()
    with pytest.warns(UserWarning, match=message):
        train(SETTINGS, corpus, tmp_path, progress=False, callbacks=[steps])
    assert_same_run(tmp_path, unbroken)
    assert steps.count == 12 - 5  # it did go on from there


class CountSteps(TrainerCallback):
    count = 0

    def on_step_end(self, *_: object, **__: object) -> None:
        self.count += 1


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


@pytest.fixture(scope="module")
def interrupted(corpus, tmp_path_factory):
    """A run that stopped after its second checkpoint; to be copied."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    interrupt(corpus, folder, 11)
    return folder


def add_a_second(mark: Path) -> None:
    kept = json.loads(mark.read_text())
    mark.write_text(json.dumps(kept | {"seconds": kept["seconds"] + 1}))


FILES = [
    *("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"),
    *("config.json", "generation_config.json", "training_args.bin", "complete.json"),
    *("tokenizer.json", "tokenizer_config.json"),
]
NO_MARKS = ["{}", "[]", "3", '{"sec', '{"seconds": 1}', '{"sha256": 3, "mark": null}', "\0"]
DAMAGES = [
    *((name, flip_a_bit, "damaged") for name in FILES),
    ("scaler.pt", lambda path: path.write_bytes(b""), "not of it"),
    ("complete.json", add_a_second, "damaged"),
    *(("complete.json", partial(Path.write_text, data=mark), "damaged") for mark in NO_MARKS),
]


def test_any_damage_to_any_file_of_a_checkpoint_is_seen(interrupted, tmp_path):
    names = {path.name for path in (interrupted / "checkpoints" / "checkpoint-10").iterdir()}
    assert names == set(FILES)
    for number, (name, damage, state) in enumerate(DAMAGES):
        folder = shutil.copytree(interrupted / "checkpoints", tmp_path / str(number))
        damage(folder / "checkpoint-10" / name)
        with pytest.warns(UserWarning, match=rf"got checkpoint-10 \({name} is {state}\)"):
            assert Checkpoints(folder).latest() == folder / "checkpoint-5"
        assert not (folder / "checkpoint-10").exists()


def test_a_run_that_continues_counts_the_time_before(tmp_path):
    (tmp_path / "checkpoint-7").mkdir()
    arguments = TrainingArguments(str(tmp_path), report_to="none"), TrainerState(global_step=7)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.seconds = 1000.0
    checkpoints.on_train_begin(*arguments, TrainerControl())
    checkpoints.on_save(*arguments, TrainerControl())
    again = Checkpoints(tmp_path)
    assert again.latest() == tmp_path / "checkpoint-7"
    assert 1000 <= again.seconds < 1100


def test_no_undamaged_checkpoint_is_an_error_and_none_is_deleted(interrupted, corpus, tmp_path):
    run = shutil.copytree(interrupted, tmp_path / "run")
    for step in (5, 10):
        flip_a_bit(run / "checkpoints" / f"checkpoint-{step}" / "model.safetensors")
    message = (
        r"train: checkpoints must have an undamaged one to go on from, got checkpoint-10 "
        r"\(model\.safetensors is damaged\), checkpoint-5 \(model\.safetensors is damaged\)"
    )
    with pytest.raises(ValueError, match=message):
        train(SETTINGS, corpus, run, progress=False)
    assert len(list((run / "checkpoints").iterdir())) == 2


def test_what_is_no_checkpoint_is_left_alone(interrupted, tmp_path):
    folder = shutil.copytree(interrupted / "checkpoints", tmp_path / "checkpoints")
    (folder / "checkpoint-abc").mkdir()
    (folder / "checkpoint-99").write_text("x")
    (folder / "checkpoint-98").symlink_to(tmp_path)
    (folder / "checkpoint-\u0667").mkdir()
    assert Checkpoints(folder).latest() == folder / "checkpoint-10"
    assert len(list(folder.iterdir())) == 6


def test_the_newest_undamaged_checkpoint_of_an_unfinished_run_is_a_model(
    interrupted, unbroken, text, tmp_path
):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    (folder / "checkpoints" / "checkpoint-11").mkdir()  # as a kill leaves it
    said = r"generate: training has not finished in .*; reading checkpoint-10$"
    with pytest.warns(UserWarning, match=said):
        written = generate(folder, "ab", max_new_tokens=3, seed=1)
    newest = folder / "checkpoints" / "checkpoint-10"
    assert written == generate(newest, "ab", max_new_tokens=3, seed=1)
    with pytest.warns(UserWarning, match="text must be one that the model was not trained on"):
        read_text(newest, text)
    flip_a_bit(newest / "model.safetensors")
    with pytest.warns(UserWarning, match=r"reading checkpoint-5$"):
        assert readable_model("evaluate", folder) == newest.with_name("checkpoint-5")
    assert newest.exists()  # reading deletes nothing
    for other in (unbroken, newest, "gpt2", tmp_path / "absent"):
        assert readable_model("evaluate", other) == other


@pytest.mark.parametrize(
    ("there", "words"),
    [
        ("none", "with none"),
        ("damaged", r"with damaged ones: checkpoint-5 \(config.json is damaged\)"),
        ("older", "with checkpoint-5 without a whole model and its tokenizer"),
    ],
)
def test_an_unfinished_run_without_a_readable_checkpoint_says_what_to_do(
    there, words, interrupted, tmp_path
):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    newest = folder / "checkpoints" / "checkpoint-5"
    shutil.rmtree(newest.with_name("checkpoint-10"))
    if there == "none":
        shutil.rmtree(folder / "checkpoints")
    elif there == "damaged":
        flip_a_bit(newest / "config.json")
    else:
        (newest / "tokenizer.json").unlink()
        mark = json.loads((newest / "complete.json").read_text())
        del mark["mark"], mark["sha256"]["tokenizer.json"]
        digest = hashlib.sha256(json.dumps(mark, sort_keys=True).encode()).hexdigest()
        (newest / "complete.json").write_text(json.dumps({**mark, "mark": digest}))
    said = (
        rf"generate: path must .* training has not finished, {words} \(the command that began it"
    )
    with pytest.raises(ValueError, match=said):
        generate(folder, "ab")


@pytest.mark.thorough
def test_measured_steps_that_are_damaged_are_one_error(corpus, tmp_path):
    by_seconds = replace(
        SETTINGS, steps=None, seconds=1.0
    )  # several steps, however busy the machine
    interrupt(corpus, tmp_path, 1, by_seconds)
    path = tmp_path / "settings.json"
    record = json.loads(path.read_text())
    for steps in (None, "7", 0):
        path.write_text(json.dumps({**record, "steps": steps}))
        said = rf"settings\.json is damaged \(steps is {steps!r}\)"
        with pytest.raises(ValueError, match=said):
            train(by_seconds, corpus, tmp_path, progress=False)
    del record["steps"]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"settings\.json is damaged \(it lacks steps\)"):
        train(by_seconds, corpus, tmp_path, progress=False)
