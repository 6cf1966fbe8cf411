"""Checkpoints of training: what is damaged is seen, said and passed over."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from linbias.data.corpus import Corpus
from linbias.lm.checkpoints import Checkpoints
from linbias.lm.training import train
from lm_training import SETTINGS, assert_same_run, interrupt, train_into


@pytest.mark.parametrize("damage", ["flipped", "missing", "unmarked"])
def test_damaged_checkpoint_is_passed_over_for_the_one_before(
    damage: str, unbroken: Path, corpus: Corpus, tmp_path: Path
) -> None:
    newest = interrupt(corpus, tmp_path, 11) / "checkpoint-10"
    if damage == "unmarked":  # as a kill leaves it, and nothing to speak of
        (newest / "complete.json").unlink()
        assert_same_run(train_into(SETTINGS, corpus, tmp_path), unbroken)
        return
    if damage == "flipped":
        flip_a_bit(newest / "optimizer.pt")
        message = (
            r"got checkpoint-10 \(optimizer\.pt is damaged\) in .*; going on from checkpoint-5"
        )
    else:
        (newest / "rng_state.pth").unlink()
        message = (
            r"got checkpoint-10 \(rng_state\.pth is missing\) in .*; going on from checkpoint-5"
        )
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
def interrupted(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stopped after its second checkpoint; to be copied."""
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    interrupt(corpus, folder, 11)
    return folder


FILES = [
    *("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"),
    *("config.json", "generation_config.json", "training_args.bin", "complete.json"),
]


def test_one_flipped_bit_in_any_file_of_a_checkpoint_is_seen(
    interrupted: Path, tmp_path: Path
) -> None:
    names = {path.name for path in (interrupted / "checkpoints" / "checkpoint-10").iterdir()}
    assert names == set(FILES)
    for name in FILES:
        folder = tmp_path / name
        shutil.copytree(interrupted / "checkpoints", folder)
        flip_a_bit(folder / "checkpoint-10" / name)
        with pytest.warns(UserWarning, match=rf"got checkpoint-10 \({name} is damaged\)"):
            assert Checkpoints(folder).latest() == folder / "checkpoint-5"
        assert not (folder / "checkpoint-10").exists()
    folder = tmp_path / "one more"
    shutil.copytree(interrupted / "checkpoints", folder)
    (folder / "checkpoint-10" / "scaler.pt").write_bytes(b"")
    with pytest.warns(UserWarning, match=r"got checkpoint-10 \(scaler\.pt is not of it\)"):
        assert Checkpoints(folder).latest() == folder / "checkpoint-5"


def test_a_run_that_continues_counts_the_time_before(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").mkdir()
    arguments = TrainingArguments(str(tmp_path), report_to="none"), TrainerState(global_step=7)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.seconds = 1000.0
    checkpoints.on_train_begin(*arguments, TrainerControl())
    checkpoints.on_save(*arguments, TrainerControl())
    again = Checkpoints(tmp_path)
    assert again.latest() == tmp_path / "checkpoint-7"
    assert 1000 <= again.seconds < 1100


@pytest.mark.parametrize(
    "mark", ["{}", "[]", "3", '{"sec', '{"seconds": 1}', '{"sha256": 3, "mark": null}', "\0"]
)
def test_a_mark_that_is_none_counts_as_damage(
    mark: str, interrupted: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(interrupted / "checkpoints", tmp_path / "checkpoints")
    (folder / "checkpoint-10" / "complete.json").write_text(mark)
    with pytest.warns(UserWarning, match=r"got checkpoint-10 \(complete\.json is damaged\)"):
        assert Checkpoints(folder).latest() == folder / "checkpoint-5"


def test_no_undamaged_checkpoint_is_an_error_and_none_is_deleted(
    interrupted: Path, corpus: Corpus, tmp_path: Path
) -> None:
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


def test_what_is_no_checkpoint_is_left_alone(interrupted: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(interrupted / "checkpoints", tmp_path / "checkpoints")
    (folder / "checkpoint-abc").mkdir()
    (folder / "checkpoint-99").write_text("x")
    (folder / "checkpoint-98").symlink_to(tmp_path)
    (folder / "checkpoint-\u0667").mkdir()
    assert Checkpoints(folder).latest() == folder / "checkpoint-10"
    assert len(list(folder.iterdir())) == 6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "output must not be another run's"),
        ("[]", r"settings\.json is damaged \(it holds no JSON object\)"),
        ('{"sett', r"settings\.json is damaged"),
    ],
)
def test_settings_that_are_damaged_are_one_error(
    content: str, message: str, interrupted: Path, corpus: Corpus, tmp_path: Path
) -> None:
    run = shutil.copytree(interrupted, tmp_path / "run")
    (run / "settings.json").write_text(content)
    with pytest.raises(ValueError, match=f"train: .*{message}"):
        train(SETTINGS, corpus, run, progress=False)


@pytest.mark.parametrize("steps", [None, "7", 0])
def test_measured_steps_that_are_damaged_are_one_error(
    steps: object, corpus: Corpus, tmp_path: Path
) -> None:
    by_seconds = replace(
        SETTINGS, steps=None, seconds=1.0
    )  # several steps, however busy the machine
    interrupt(corpus, tmp_path, 1, by_seconds)
    path = tmp_path / "settings.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "steps": steps}))
    with pytest.raises(ValueError, match=rf"settings\.json is damaged \(steps is {steps!r}\)"):
        train(by_seconds, corpus, tmp_path, progress=False)
    del record["steps"]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"settings\.json is damaged \(it lacks steps\)"):
        train(by_seconds, corpus, tmp_path, progress=False)
