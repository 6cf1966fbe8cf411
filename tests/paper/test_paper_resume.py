"""Runs with the paper's recipe that are interrupted end like an unbroken one, also in two processes."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from interrupting import SignalAt, callbacks_that_kill, fill_the_disk, killed_processes, torchrun
from linbias.models import load
from linbias.paper.train import train
from paper_training import RECIPE, SMOOTH, KeepMomentum, assert_same_run, log, train_into


def train_until_killed(event: str, step: int, paper_data: Path, output: Path) -> None:
    callbacks = callbacks_that_kill(event, step)
    train(paper_data, output, RECIPE, progress=False, callbacks=callbacks)


@pytest.mark.processes
@pytest.mark.parametrize(
    "deaths",
    [
        [("on_step_end", 1), ("while moving", 4), ("while saving", 5), ("while saving", 10)],
        [("on_step_begin", 5), ("on_evaluate", 8), ("on_step_end", 11), ("on_train_end", 14)],
    ],
    ids=lambda deaths: ", ".join(f"{event} {step}" for event, step in deaths),
)
def test_killed_run_ends_like_an_unbroken_one(
    deaths: list[tuple[str, int]], paper_run: Path, paper_data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    for death in deaths:
        killed_processes(train_until_killed, [death], paper_data, output)
        assert not (output / "metrics.json").exists()
    train(paper_data, output, RECIPE, progress=False, callbacks=[KeepMomentum(output)])
    assert_same_run(output, paper_run)
    ours, theirs = (
        torch.load(folder.parent / "momentum.pt", weights_only=True)
        for folder in (output, paper_run)
    )
    assert ours["param_groups"] == theirs["param_groups"]  # lr_old is there
    for index, state in theirs["state"].items():
        assert torch.equal(ours["state"][index]["momentum_buffer"], state["momentum_buffer"])


def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint(
    paper_run: Path, paper_data: Path, tmp_path: Path
) -> None:
    before, stop = (
        signal.signal(signal.SIGINT, signal.default_int_handler),
        SignalAt(2, signal.SIGINT),
    )
    try:
        with pytest.raises(KeyboardInterrupt, match="The same command continues from here"):
            train(paper_data, tmp_path, RECIPE, progress=False, callbacks=[stop])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "checkpoints" / "checkpoint-3" / "complete.json").exists()
    assert_same_run(train_into(paper_data, tmp_path), paper_run)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "full_at",
    [
        "checkpoint-10/model.safetensors",
        pytest.param("checkpoint-10/optimizer.pt", marks=pytest.mark.thorough),
        pytest.param(".partial", marks=pytest.mark.thorough),
    ],
)
def test_full_disk_leaves_the_checkpoint_before_and_the_run_goes_on_from_it(
    full_at: str,
    paper_run: Path,
    paper_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_full(path: str) -> bool:
        return full_at in path and (tmp_path / "checkpoints" / "checkpoint-5").exists()

    with monkeypatch.context() as patch:
        fill_the_disk(patch, is_full)
        with pytest.raises(OSError, match=r"train: could not write to .*No space left") as error:
            train(paper_data, tmp_path, RECIPE, progress=False)
        assert str(error.value).count("could not write") == 1
    assert load(tmp_path)  # the best of the first steps
    assert_same_run(train_into(paper_data, tmp_path), paper_run)


def test_a_result_that_was_deleted_is_made_again(paper_data: Path, tmp_path: Path) -> None:
    recipe = replace(RECIPE, steps=2, warmup_steps=1, validate_steps=0)
    weights = train_into(paper_data, tmp_path / "run", recipe) / "model.safetensors"
    made = weights.read_bytes()
    weights.unlink()
    train(paper_data, tmp_path / "run", recipe, progress=False)
    assert weights.read_bytes() == made


IN_EACH_PROCESS = """
import sys
from dataclasses import replace
from pathlib import Path
from torch import distributed
from interrupting import Stop, StopAt
from linbias.paper.train import train
from linbias.models import load
from paper_training import SMOOTH

data, folder = map(Path, sys.argv[1:])
train(data, folder / "ddp", SMOOTH, progress=False)
sharded = replace(SMOOTH, fsdp={})
train(data, folder / "fsdp", sharded, progress=False)
pieces = replace(SMOOTH, context_parallel=2)
train(data, folder / "pieces", pieces, progress=False)
for name, recipe in {"fsdp": sharded, "pieces": pieces}.items():
    broken = folder / f"resumed-{name}"
    try:
        train(data, broken, recipe, progress=False, callbacks=[StopAt(7)])
    except Stop:
        train(data, broken, recipe, progress=False)
distributed.destroy_process_group()
"""


@pytest.mark.processes
def test_two_processes_train_the_model_of_one(paper_data: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_EACH_PROCESS)
    done = torchrun(script, paper_data, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "missing keys" not in done.stderr
    alone = train_into(paper_data, tmp_path / "alone", SMOOTH)
    for kind in ("ddp", "fsdp", "pieces"):
        for line, theirs in zip(log(alone), log(tmp_path / kind), strict=True):
            assert theirs == pytest.approx(line, rel=1e-4)
        weights = load_file(tmp_path / kind / "model.safetensors")
        for name, value in load_file(alone / "model.safetensors").items():
            torch.testing.assert_close(weights[name], value, atol=1e-4, rtol=0)
    for kind in ("fsdp", "pieces"):
        assert_same_run(tmp_path / f"resumed-{kind}", tmp_path / kind)
    with pytest.raises(ValueError, match="num_processes is 2 there and 1 here"):
        train(paper_data, tmp_path / "ddp", SMOOTH, progress=False)
