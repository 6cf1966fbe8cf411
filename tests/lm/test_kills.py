"""`extrapolate` and the paper's path, killed at any point, end as if undisturbed."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interrupting import die, killed_processes
from linbias._run.files import JsonLog
from linbias.lm.extrapolation import extrapolate
from linbias.lm.settings import ExtrapolateSettings, TrainSettings
from linbias.paper.pipeline import run as run_path
from linbias.paper.recipe import Recipe
from paper_training import MODEL, assert_same_run
from test_runs_states import run_until

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_dropout": 0.1}
WORDS = ["train", "short", "test", "long", "slope", "bias"]


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    draw, folder = random.Random(0), tmp_path_factory.mktemp("texts")
    paths = {}
    for name, lines in {"train": 120, "valid": 12, "test": 12}.items():
        paths[name] = folder / name
        paths[name].write_text(
            "".join(" ".join(draw.choices(WORDS, k=9)) + "\n" for _ in range(lines))
        )
    return paths


def run_extrapolate(texts: dict[str, Path], output: Path) -> None:
    training = TrainSettings(TINY, length=16, batch_size=2, steps=4, save_steps=2, threads=1)
    settings = ExtrapolateSettings(
        methods=("alibi", "learned"),
        train_lengths=(16,),
        test_lengths=(16, 32),
        corpus=str(texts["train"]),
        limit_tokens=300,
        training=training,
    )
    extrapolate(settings, output, progress=False)


def run_paper(texts: dict[str, Path], output: Path) -> None:
    sizes = {"length": 16, "max_tokens": 64, "rows_multiple": 1, "batches_per_step": 2}
    recipe = Recipe(
        **sizes,
        model={**MODEL, "cutoffs": []},
        steps=4,
        warmup_steps=1,
        precision="fp32",
        validate_steps=2,
        save_steps=2,
        log_steps=1,
        device="cpu",
    )
    run_path(texts, output, recipe, progress=False)


def kill_in_turn(run: Callable[..., None], deaths: list[tuple[str, int]], *arguments: Any) -> None:
    """Start again after every death, and let the last run end."""
    killed_processes(run_until, [(die, *death) for death in deaths], run, *arguments)
    run(*arguments)


@pytest.mark.processes
def test_extrapolate_killed_anywhere_ends_like_an_undisturbed_run(texts, tmp_path):
    deaths = [
        ("linbias.lm.checkpoints.write_json", 1),  # the first checkpoint has no mark
        ("linbias._run.files.JsonLog.append", 1),  # trained, not recorded
        ("linbias._run.files.os.fsync", 2),  # within a line or a file
        ("linbias.lm.loop.move_into_place", 1),  # trained, not in place
        ("linbias.lm.extrapolation.write_json", 1),
        ("linbias.lm.extrapolation.write_report", 1),
    ]
    run_extrapolate(texts, tmp_path / "whole")
    kill_in_turn(run_extrapolate, deaths, texts, tmp_path / "killed")
    models = (f"models/{method}-L16-s0/model.safetensors" for method in ("alibi", "learned"))
    assert_same_files(tmp_path, *models)
    logs = [JsonLog(tmp_path / name / "results.jsonl").records for name in ("whole", "killed")]
    for record, other in zip(*logs, strict=True):
        for field in ("kind", "method", "test_length", "loss", "nll", "num_tokens", "steps"):
            assert record.get(field) == other.get(field)


@pytest.mark.processes
def test_the_papers_path_killed_anywhere_ends_like_an_undisturbed_run(texts, tmp_path):
    deaths = [
        ("linbias.paper.prepare.os.replace", 2),  # one split is written
        ("linbias.lm.checkpoints.write_json", 2),
        ("linbias.lm.evaluation._own_losses", 5),
    ]
    run_paper(texts, tmp_path / "whole")
    kill_in_turn(run_paper, deaths, texts, tmp_path / "killed")
    names = ("data/train.bin", "data/dict.txt", "model/model.safetensors")
    assert_same_files(tmp_path, *names)
    assert_same_run(tmp_path / "whole" / "model", tmp_path / "killed" / "model")


def assert_same_files(folder: Path, *names: str) -> None:
    """The folders whole and killed hold the same files, and those of these names bit for bit."""
    whole, killed = folder / "whole", folder / "killed"
    assert files(killed) == files(whole)
    for name in names:
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_the_papers_path_under_torchrun_is_refused(texts, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ValueError, match="run: must run as one process; use paper train for several"
    ):
        run_paper(texts, tmp_path / "run")
    assert not (tmp_path / "run").exists()
