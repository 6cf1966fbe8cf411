"""`linbias paper`: the whole path, its steps one by one, and errors."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from linbias import cli
from linbias._run.folders import hold_run_folder
from paper_training import ORIGINAL

SMALL = [
    *("--set", "hidden_size=32", "--set", "num_hidden_layers=1", "--set", "num_attention_heads=2"),
    *("--set", "intermediate_size=32", "--set", "cutoffs=[10,20]"),
]


def linbias(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["paper", *map(str, words)], env={"COLUMNS": "120"})


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("texts")
    words = np.random.default_rng(0).integers(40, size=900)
    paths = [folder / f"wiki.{split}.tokens" for split in ("train", "valid", "test")]
    for path, part in zip(paths, np.split(words, [500, 700]), strict=True):
        path.write_text(
            "\n".join(" ".join(f"w{n}" for n in line) for line in part.reshape(-1, 20))
        )
    return paths


@pytest.fixture(scope="session")
def whole_path(texts: list[Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("path") / "out"
    words = ["run", *texts, "-o", folder, "--steps", 3, "--workers", 1, *SMALL, "-q", "--json"]
    result = linbias(*words)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    measured = json.loads(result.stdout)
    again = json.loads(linbias(*words).stdout)  # from what is there, and so at once
    for one in (*measured["evaluations"], *again["evaluations"]):
        del one["tokens_per_second"], one["peak_memory_bytes"]
    assert again == measured
    return folder, measured


def test_run_goes_from_texts_to_perplexity(whole_path: tuple[Path, dict]) -> None:
    folder, measured = whole_path
    assert measured["training"]["steps"] == 3
    assert [(r["split"], r["length"], r["context_window"]) for r in measured["evaluations"]] == [
        *(("valid", 128, 0), ("valid", 128, 64), ("valid", 512, 0), ("valid", 512, 256)),
        *(("test", 128, 0), ("test", 128, 64), ("test", 512, 0), ("test", 512, 256)),
    ]
    assert {r["num_tokens"] for r in measured["evaluations"]} == {210}
    assert (folder / "data" / "dict.txt").exists() and (folder / "model" / "log.jsonl").exists()


def test_run_of_other_texts_is_refused(whole_path: tuple[Path, dict], texts: list[Path]) -> None:
    result = linbias("run", texts[0], texts[2], texts[1], "-o", whole_path[0], *SMALL)
    assert result.exit_code == 2
    assert "error: --output: must not be another run's" in result.stderr


@pytest.mark.parametrize("held", ["", "model"])
def test_run_in_a_folder_in_use_is_refused(
    held: str, whole_path: tuple[Path, dict], texts: list[Path]
) -> None:
    folder = whole_path[0]
    with hold_run_folder(folder / held, "test"):
        result = linbias("run", *texts, "-o", folder, "--steps", 3, *SMALL, "-q")
    assert result.exit_code == 2
    assert "error: --output: must be used by one run at a time" in result.stderr
    assert str(os.getpid()) in result.stderr


def test_texts_that_fail_leave_the_folder_to_others(texts: list[Path], tmp_path: Path) -> None:
    words, folder = (
        ["-o", tmp_path / "out", "--steps", 3, "--workers", 1, *SMALL, "-q"],
        tmp_path,
    )
    (folder / "empty").write_text("")
    (folder / "latin").write_bytes(b"caf\xe9")
    for wrong in (folder / "empty", folder / "latin"):
        refused = linbias("run", texts[0], texts[1], wrong, *words)
        assert refused.exit_code == 2 and str(wrong) in " ".join(refused.stderr.split())
    assert linbias("run", *texts, *words).exit_code == 0


def test_data_with_other_words_than_the_model_is_refused(
    whole_path: tuple[Path, dict], tmp_path: Path
) -> None:
    folder, _ = whole_path
    data = shutil.copytree(folder / "data", tmp_path / "data")
    lines = (data / "dict.txt").read_text().splitlines()
    (data / "dict.txt").write_text("\n".join(reversed(lines)) + "\n")
    shutil.copy(folder / "data" / "dict.txt", folder / "model" / "dict.txt")
    refused = linbias("evaluate", folder / "model", data, "-q")
    assert refused.exit_code == 2
    assert "error: DATA: must have the words of" in " ".join(refused.stderr.split())


def test_steps_one_by_one_are_the_whole_path(
    whole_path: tuple[Path, dict], texts: list[Path], tmp_path: Path
) -> None:
    folder, measured = whole_path
    data, home = tmp_path / "data", tmp_path / "model"
    given = zip(("--train", "--valid", "--test"), texts, strict=True)
    made = linbias(
        "prepare", *(word for pair in given for word in pair), "-o", data, "--workers", 1, "--json"
    )
    assert json.loads(made.stdout)["valid"]["num_ids"] == 210
    words = ["train", data, "-o", home, "--preset", "tiny", "--steps", 3, *SMALL, "-q"]
    shown = linbias(*words)
    assert shown.exit_code == 0, shown.stderr
    assert "3 steps" in shown.stdout and f"model in {home}" in shown.stdout
    for name in ("model.safetensors", "log.jsonl"):
        assert (home / name).read_bytes() == (folder / "model" / name).read_bytes()
    expected = measured["evaluations"][5]
    words = ["evaluate", home, data, "--split", "test", "--context-window", 64, "-q"]
    shown = linbias(*words)
    assert shown.stdout.splitlines()[-1] == expected["line"]
    assert f"{expected['perplexity']:,.2f}" in shown.stdout.splitlines()[-3]
    result = json.loads(linbias(*words, "--json").stdout)
    assert result["perplexity"] == expected["perplexity"]


@pytest.mark.skipif(not ORIGINAL.exists(), reason="no ../shared/golden/fairseq")
def test_checkpoint_of_the_original_is_evaluated_and_converted(tmp_path: Path) -> None:
    checkpoint, data = ORIGINAL / "ckpt" / "ckpt_A_8heads.pt", ORIGINAL / "data" / "slices"
    options = ["--split", "test", "--length", 128, "-q"]
    line = linbias("evaluate", checkpoint, data, *options).stdout.splitlines()[-1]
    (golden,) = (
        run
        for run in json.loads((ORIGINAL / "eval" / "perplexities.json").read_text())
        if (run["text"], run["l"], run["context_window"]) == ("slice4k", 128, 0)
        and "ckpt_A" in run["checkpoint"]
    )
    bits, perplexity = golden["repo_loss_base2"], golden["repo_perplexity"]
    assert line == f"Loss (base 2): {bits:.4f}, Perplexity: {perplexity:.2f}"
    made = linbias("convert", checkpoint, "-o", tmp_path / "A", "--dict", data / "dict.txt")
    assert made.exit_code == 0, made.stderr
    assert linbias("evaluate", tmp_path / "A", data, *options).stdout.splitlines()[-1] == line


ERRORS = [
    (["prepare", "-o", "{tmp}/x"], "prepare: give either texts or --dataset, and not both"),
    (["prepare", "--dataset", "x", "-o", "{tmp}/x"], "data set must be one of wikitext-2"),
    (["prepare", "--train", "{tmp}/none", "-o", "{tmp}/x"], "no such file"),
    (["train", "{tmp}", "-o", "{tmp}/x", "--preset", "L7"], "error: --preset: must be one of L64, L128"),
    (["train", "{tmp}", "-o", "{tmp}/x", "--preset", "tiny"], "error: DATA: must hold dict.txt"),
    (["train", "{data}", "-o", "{tmp}/x", "--preset", "tiny", "--set", "cutoffs=[2000]"], "--set cutoffs: must be ids that cut [0, 48) into bands of 2 or more, or [] for one band, got [2000]"),
    (["run", "{text}", "{text}", "{text}", "-o", "{tmp}/x", "--set", "a=1"], "error: --set: must be made of PaperConfig's fields, got ['a']"),
    (["run", "{text}", "{text}", "{text}", "-o", "{tmp}/x", "--set", "cutoffs=[9,4]"], "--set cutoffs: must be ids that cut"),
    (["run", "{text}", "{text}", "{text}", "-o", "{tmp}/x", "--preset", "L64"], "error: run: precision 'fp16' must have a GPU"),
    (["train", "{data}", "-o", "{tmp}/x", "--device", "cpu"], "error: --precision: 'fp16' must have a GPU"),
    (["train", "{data}", "-o", "{tmp}/x", "--set", "a"], "--set: must be NAME=VALUE, got 'a'"),
    (["train", "{data}", "-o", "{tmp}/x", "--length", "0"], "--length: must be at least 1"),
    (["train", "{data}", "-o", "{tmp}/x", "--steps", "0"], "--steps: must be at least 1"),
    (["convert", "{tmp}/none.pt", "-o", "{tmp}/x"], "error: CHECKPOINT: must be a file"),
    (["evaluate", "{tmp}/none.pt", "{data}"], "error: MODEL: must be a file"),
    (["evaluate", "{model}", "{tmp}"], "error: DATA: must hold dict.txt"),
    (["evaluate", "{model}", "{data}", "--split", "x"], "error: --split: must be one of"),
    (["evaluate", "{model}", "{data}", "--length", "0"], "error: --length: must be at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), ERRORS)
def test_an_error_is_one_line(
    words: list[str], message: str, whole_path: tuple[Path, dict], tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("to be or not to be\n")
    places = {"tmp": tmp_path, "text": text}
    places |= {"data": whole_path[0] / "data", "model": whole_path[0] / "model"}
    result = linbias(*(word.format(**places) for word in words))
    assert result.exit_code == 2, result.output
    assert not (tmp_path / "x").exists()  # refused before any work
    assert message in result.stderr
    assert re.fullmatch(r"error: .+\n", result.stderr)
    assert result.stdout == ""


@pytest.mark.thorough
@pytest.mark.filterwarnings("always")
def test_a_text_of_few_words_is_read_in_fewer_bands(
    whole_path: tuple[Path, dict], texts: list[Path], tmp_path: Path
) -> None:
    """Regression: the presets' cutoffs were refused once all the text had been prepared."""
    small = SMALL[:-2]  # the cutoffs of the preset
    words = ["--steps", 2, *small, "-q", "--json"]
    said = "cutoffs [2000, 10000] are [] here, since the text has 48 types"
    made = linbias("run", *texts, "-o", tmp_path / "run", "--workers", 1, *words)
    assert made.exit_code == 0 and made.stderr.startswith(f"warning: run: {said}"), made.stderr
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["cutoffs"] == []
    words = ["-o", tmp_path / "x", "--preset", "tiny", *words]
    trained = linbias("train", whole_path[0] / "data", *words)
    assert trained.exit_code == 0 and f"train: {said}" in trained.stderr


def test_a_trained_folder_is_read_by_the_general_commands(
    whole_path: tuple[Path, dict], texts: list[Path]
) -> None:
    folder, measured = whole_path
    run = CliRunner().invoke
    words = ["evaluate", str(folder / "model"), "--corpus", str(texts[2]), "--json", "-q"]
    (result,) = json.loads(run(cli.app, words).stdout)
    ids = 210  # words and line ends, of which the first is read only
    assert (result["length"], result["num_tokens"], result["share"]) == (128, ids - 1, 1.0)
    (blocks,) = (
        r
        for r in measured["evaluations"]
        if (r["split"], r["length"]) == ("test", 512) and not r["context_window"]
    )
    assert result["nll"] / np.log(2) == pytest.approx(blocks["loss_base2"], abs=0.1)
    words = ["generate", str(folder / "model"), "--prompt", "w1 w2", "-n", "4", "--json"]
    assert json.loads(run(cli.app, words).stdout)["text"].startswith("w1 w2")
    files = {path.name for path in (folder / "model").iterdir()}
    assert {"dict.txt", "tokenizer.json", "tokenizer_config.json"} <= files
