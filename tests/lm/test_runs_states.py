"""A training run in random orders of what may happen to it ends as if nothing had, bit for bit."""

import errno
import multiprocessing
import pkgutil
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transformers import TrainerCallback

from interrupting import die
from linbias.data.corpus import Corpus
from linbias.lm.checkpoints import readable_model
from linbias.lm.evaluation import evaluate
from linbias.lm.loop import is_finished
from linbias.lm.training import LanguageModelMetrics, train
from linbias.models.loading import load
from lm_training import SETTINGS, losses, train_into

# Four checkpoints, the last of them not where save_steps says.
SHORT = replace(
    SETTINGS,
    model={**SETTINGS.model, "hidden_size": 8, "num_hidden_layers": 1},
    length=8,
    batch_size=2,
    steps=7,
    save_steps=2,
)
PLACES = {  # functions of a run, by how often they are called in it at most
    "linbias.lm.loop.RunTrainer.training_step": 14,
    "linbias.lm.checkpoints.write_json": 4,  # a checkpoint without its mark
    "torch.save": 20,  # within a checkpoint
    "linbias._run.files.os.fsync": 12,  # within a file, or a line of a log
    "linbias._run.files.os.replace": 12,  # a file is written, not in place
    "linbias.lm.loop.move_into_place": 1,  # trained, not in place
    "linbias.lm.checkpoints.shutil.rmtree": 3,  # a checkpoint that is no longer needed
}
SAME = ("model.safetensors", "config.json", "tokenizer.json")
OF_CHECKPOINT = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")
NUMBER = st.integers(0, 2**16)


def press_ctrl_c() -> None:
    raise KeyboardInterrupt


def fill_the_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def run_until(
    strike: Callable[[], None], where: str, count: int, run: Callable[..., Any], *arguments: Any
) -> None:
    """Run, and strike before a call of one function, if there are as many."""
    module, _, name = where.rpartition(".")
    owner, left = pkgutil.resolve_name(module), count
    original = getattr(owner, name)

    def count_and_strike(*args: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            strike()
        return original(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, count_and_strike)
        run(*arguments)


class KeepAll(TrainerCallback):
    """Copies every checkpoint."""

    def __init__(self, run: Path, kept: Path) -> None:
        self.run, self.kept = run, kept

    def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        name = f"checkpoint-{state.global_step}"
        shutil.copytree(self.run / "checkpoints" / name, self.kept / name)


class CountSteps(TrainerCallback):
    count = 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.count += 1


class Undisturbed:
    """The run that nothing happened to, with its checkpoints, and what evaluations say of them."""

    def __init__(self, corpus: Corpus, folder: Path) -> None:
        self.corpus, self.run, self.kept = corpus, folder / "run", folder
        train(SHORT, corpus, self.run, progress=False, callbacks=[KeepAll(self.run, self.kept)])
        self.losses = {path.name: self.evaluate(path) for path in self.kept.glob("checkpoint-*")}

    def evaluate(self, folder: str | Path) -> float:
        return evaluate(
            load(folder, device="cpu"), self.corpus.valid, length=8, limit_tokens=24
        ).nll


def files(folder: Path) -> list[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    return sorted(path for path in found if path != ".lock")


class Runs(RuleBasedStateMachine):
    """Folders of one run, in different states."""

    undisturbed: Undisturbed
    strikes: tuple[Callable[[], None], ...]

    @initialize()
    def begin(self):
        self.parent = tempfile.TemporaryDirectory()
        self.made = 0
        self.folders = [self.new()]

    def new(self) -> Path:
        self.made += 1
        return Path(self.parent.name) / str(self.made)

    def one(self, number: int) -> Path:
        return self.folders[number % len(self.folders)]

    @rule(number=NUMBER, place=st.sampled_from(list(PLACES)), count=NUMBER, strike=NUMBER)
    def disturb(self, number, place, count, strike):
        folder = self.one(number)
        run = train_into, SHORT, self.undisturbed.corpus, folder
        arguments = place, 1 + count % PLACES[place], *run
        strike = self.strikes[strike % len(self.strikes)]
        if strike is not die:
            try:
                run_until(strike, *arguments)
            except (KeyboardInterrupt, OSError):
                pass
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["linbias.lm.extrapolation"])
        process = context.Process(target=run_until, args=(strike, *arguments))
        process.start()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)

    @precondition(lambda self: len(self.folders) < 3)
    @rule(number=NUMBER)
    def copy(self, number):
        if self.one(number).exists():
            self.folders.append(Path(shutil.copytree(self.one(number), self.new())))

    @precondition(lambda self: len(self.folders) > 1)
    @rule(number=NUMBER)
    def forget(self, number):
        shutil.rmtree(self.folders.pop(number % len(self.folders)))

    @rule(number=NUMBER)
    def evaluate(self, number):
        """Of an unfinished run its newest checkpoint; each is that of the undisturbed run."""
        folder = self.one(number)
        if (folder / "config.json").exists():
            assert (
                self.undisturbed.evaluate(readable_model("evaluate", folder))
                == self.undisturbed.losses["checkpoint-7"]
            )
        elif any(folder.glob("checkpoints/*/complete.json")):
            with pytest.warns(UserWarning, match="training has not finished"):
                newest = Path(readable_model("evaluate", folder))
            assert self.undisturbed.evaluate(newest) == self.undisturbed.losses[newest.name]
        elif (folder / "settings.json").exists():
            with pytest.raises(ValueError, match="must hold a model or an undamaged checkpoint"):
                readable_model("evaluate", folder)

    @rule(number=NUMBER)
    def finish(self, number):
        """Let it run to its end, from its newest checkpoint; what has finished stays as it is."""
        folder, whole = self.one(number), self.undisturbed.run
        was_finished = is_finished(folder)
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
        complete = folder.glob("checkpoints/*/complete.json")
        last, steps = (
            max((int(path.parent.name[11:]) for path in complete), default=0),
            CountSteps(),
        )
        asked = SHORT, self.undisturbed.corpus, folder
        found = train(*asked, progress=False, callbacks=[steps])
        assert found == LanguageModelMetrics.read(folder)
        assert steps.count == (0 if was_finished else SHORT.steps - last)
        if was_finished:
            after = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
            assert after.items() <= before.items()
        assert files(folder) == files(whole)
        names = [*SAME, *(f"checkpoints/checkpoint-7/{name}" for name in OF_CHECKPOINT)]
        for name in names:
            assert (folder / name).read_bytes() == (whole / name).read_bytes(), name
        assert losses(folder) == losses(whole)

    def teardown(self):
        if hasattr(self, "folders"):
            for number in range(len(self.folders)):
                self.finish(number)
            self.parent.cleanup()


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    return Undisturbed(corpus, tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize(
    ("examples", "steps", "strikes"),
    [
        pytest.param(2, 4, (press_ctrl_c, fill_the_disk), id="raised"),
        pytest.param(
            60, 6, (press_ctrl_c, fill_the_disk), id="raised often", marks=pytest.mark.thorough
        ),
        pytest.param(15, 6, (press_ctrl_c, die, die), id="killed", marks=pytest.mark.processes),
    ],
)
def test_a_run_ends_as_if_nothing_had_happened_to_it(undisturbed, examples, steps, strikes):
    machine = type("Runs", (Runs,), {"undisturbed": undisturbed, "strikes": strikes})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            phases=set(Phase) - {Phase.shrink},  # which would train for minutes
        ),
    )
