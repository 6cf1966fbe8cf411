"""`linbias paper`: the whole path, its steps one by one, and errors."""

import json
import re
import shutil

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from linbias import cli
from linbias._run.folders import hold_run_folder
from paper_training import ORIGINAL, assert_same_run

SMALL = [
    *("--set", "hidden_size=32", "--set", "num_hidden_layers=1", "--set", "num_attention_heads=2"),
    *("--set", "intermediate_size=32", "--set", "cutoffs=[10,20]"),
]


def linbias(*words: object) -> Result:
    return CliRunner().invoke(cli.app, ["paper", *map(str, words)], env={"COLUMNS": "120"})


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    words = np.random.default_rng(0).integers(40, size=900)
    paths = [folder / f"wiki.{split}.tokens" for split in ("train", "valid", "test")]
    for path, part in zip(paths, np.split(words, [500, 700]), strict=True):
        path.write_text(
            "\n".join(" ".join(f"w{n}" for n in line) for line in part.reshape(-1, 20))
        )
    return paths


@pytest.fixture(scope="session")
def whole_path(texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("path") / "out"
    words = ["run", *texts, "-o", folder, "--steps", 3, *SMALL, "-q", "--json"]
    result = linbias(*words)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    measured = json.loads(result.stdout)
    again = json.loads(linbias(*words).stdout)  # from what is there, and so at once
    for one in (*measured["evaluations"], *again["evaluations"]):
        del one["tokens_per_second"], one["peak_memory_bytes"]
    assert again == measured
    return folder, measured


def test_run_goes_from_texts_to_perplexity(whole_path):
    folder, measured = whole_path
    assert measured["training"]["steps"] == 3
    assert [(r["split"], r["length"], r["context_window"]) for r in measured["evaluations"]] == [
        *(("valid", 128, 0), ("valid", 128, 64), ("valid", 512, 0), ("valid", 512, 256)),
        *(("test", 128, 0), ("test", 128, 64), ("test", 512, 0), ("test", 512, 256)),
    ]
    assert {r["num_tokens"] for r in measured["evaluations"]} == {210}
    assert (folder / "data" / "dict.txt").exists() and (
        folder / "model" / "history.jsonl"
    ).exists()


def test_run_of_other_texts_is_refused(whole_path, texts):
    result = linbias("run", texts[0], texts[2], texts[1], "-o", whole_path[0], *SMALL)
    assert result.exit_code == 2
    assert "error: --output: must not be another run's" in result.stderr


@pytest.mark.parametrize("held", ["", "model"])
def test_run_in_a_folder_in_use_is_refused(held, whole_path, texts):
    folder = whole_path[0]
    with hold_run_folder(folder / held, "test"):
        result = linbias("run", *texts, "-o", folder, "--steps", 3, *SMALL, "-q")
    assert result.exit_code == 2
    assert "error: --output: must be used by one run at a time" in result.stderr


def test_texts_that_fail_leave_the_folder_to_others(texts, tmp_path):
    words = ["-o", tmp_path / "out", "--steps", 3, *SMALL, "-q"]
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for wrong in (tmp_path / "empty", tmp_path / "latin"):
        refused = linbias("run", texts[0], texts[1], wrong, *words)
        assert refused.exit_code == 2 and str(wrong) in " ".join(refused.stderr.split())
    assert linbias("run", *texts, *words).exit_code == 0


def test_data_with_other_words_than_the_model_is_refused(whole_path, tmp_path):
    folder, _ = whole_path
    data = shutil.copytree(folder / "data", tmp_path / "data")
    lines = (data / "dict.txt").read_text().splitlines()
    (data / "dict.txt").write_text("\n".join(reversed(lines)) + "\n")
    shutil.copy(folder / "data" / "dict.txt", folder / "model" / "dict.txt")
    refused = linbias("evaluate", folder / "model", data, "-q")
    assert refused.exit_code == 2
    assert "error: DATA: must have the words of" in " ".join(refused.stderr.split())


def test_steps_one_by_one_are_the_whole_path(whole_path, texts, tmp_path):
    folder, measured = whole_path
    data, home = tmp_path / "data", tmp_path / "model"
    given = ["--train", texts[0], "--valid", texts[1], "--test", texts[2]]
    made = linbias("prepare", *given, "-o", data, "--json")
    assert json.loads(made.stdout)["valid"]["num_ids"] == 210
    words = ["train", data, "-o", home, "--preset", "tiny", "--steps", 3, *SMALL, "-q"]
    shown = linbias(*words)
    assert shown.exit_code == 0, shown.stderr
    assert "3 steps" in shown.stdout and f"model in {home}" in shown.stdout
    assert_same_run(home, folder / "model")
    expected = measured["evaluations"][5]
    words = ["evaluate", home, data, "--split", "test", "--context-window", 64, "-q"]
    shown = linbias(*words)
    assert shown.stdout.splitlines()[-1] == expected["line"]
    assert f"{expected['perplexity']:,.2f}" in shown.stdout.splitlines()[-3]
    result = json.loads(linbias(*words, "--json").stdout)
    assert result["perplexity"] == expected["perplexity"]


@pytest.mark.skipif(not ORIGINAL.exists(), reason="no ../shared/golden/fairseq")
def test_checkpoint_of_the_original_is_evaluated_and_converted(tmp_path):
    checkpoint, data = ORIGINAL / "ckpt" / "ckpt_A_8heads.pt", ORIGINAL / "data" / "slices"
    options = ["--split", "test", "--length", 128, "-q"]
    line = linbias("evaluate", checkpoint, data, *options).stdout.splitlines()[-1]
    (golden,) = (
        run
        for run in json.loads((ORIGINAL / "eval" / "perplexities.json").read_text())
        if run["scores_file"] == "scores_A_slice4k_l128_cw0.npy"
    )
    bits, perplexity = golden["repo_loss_base2"], golden["repo_perplexity"]
    assert line == f"Loss (base 2): {bits:.4f}, Perplexity: {perplexity:.2f}"
    made = linbias("convert", checkpoint, "-o", tmp_path / "A", "--dict", data / "dict.txt")
    assert made.exit_code == 0, made.stderr
    assert linbias("evaluate", tmp_path / "A", data, *options).stdout.splitlines()[-1] == line


RUN = "run {text} {text} {text} -o {tmp}/x"
TRAIN = "train {data} -o {tmp}/x --preset tiny"
ERRORS = [
    ("prepare -o {tmp}/x", "prepare: give either texts or --dataset, and not both"),
    ("prepare --dataset x -o {tmp}/x", "data set must be one of wikitext-2"),
    ("prepare --train {tmp}/none -o {tmp}/x", "no such file"),
    ("train {tmp} -o {tmp}/x --preset L7", "error: --preset: must be one of L64, L128"),
    ("train {tmp} -o {tmp}/x --preset tiny", "error: DATA: must hold dict.txt"),
    (f"{TRAIN} --set cutoffs=[2000]", "--set cutoffs: must be ids that cut [0, 48) into bands of"),
    (f"{TRAIN} --set a", "--set: must be NAME=VALUE, got 'a'"),
    (f"{TRAIN} --length 0", "--length: must be at least 1"),
    (f"{RUN} --set a=1", "error: --set: must be made of PaperConfig's fields, got ['a']"),
    (f"{RUN} --set cutoffs=[9,4]", "--set cutoffs: must be ids that cut"),
    (f"{RUN} --preset L64", "error: run: precision 'fp16' must have a GPU"),
    ("convert {tmp}/none.pt -o {tmp}/x", "error: CHECKPOINT: must be a file"),
    ("evaluate {tmp}/none.pt {data}", "error: MODEL: must be a file"),
    ("evaluate {model} {tmp}", "error: DATA: must hold dict.txt"),
    ("evaluate {model} {data} --split x", "error: --split: must be one of"),
    ("evaluate {model} {data} --length 0", "error: --length: must be at least 1, got 0"),
]


@pytest.mark.parametrize(("words", "message"), ERRORS)
def test_an_error_is_one_line(words, message, whole_path, tmp_path):
    text = tmp_path / "text"
    text.write_text("to be or not to be\n")
    places = {"data": whole_path[0] / "data", "model": whole_path[0] / "model"}
    result = linbias(*words.format(**places, tmp=tmp_path, text=text).split())
    assert result.exit_code == 2, result.output
    assert not (tmp_path / "x").exists()  # refused before any work
    assert message in result.stderr
    assert re.fullmatch(r"error: .+\n", result.stderr)
    assert result.stdout == ""


@pytest.mark.thorough
@pytest.mark.filterwarnings("always")
def test_a_text_of_few_words_is_read_in_fewer_bands(whole_path, texts, tmp_path):
    """Regression: the presets' cutoffs were refused once all the text had been prepared."""
    small = SMALL[:-2]  # the cutoffs of the preset
    words = ["--steps", 2, *small, "-q", "--json"]
    said = "cutoffs [2000, 10000] are [] here, since the text has 48 types"
    made = linbias("run", *texts, "-o", tmp_path / "run", *words)
    assert made.exit_code == 0 and made.stderr.startswith(f"warning: run: {said}"), made.stderr
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config["cutoffs"] == []
    words = ["-o", tmp_path / "x", "--preset", "tiny", *words]
    trained = linbias("train", whole_path[0] / "data", *words)
    assert trained.exit_code == 0 and f"train: {said}" in trained.stderr


def test_a_trained_folder_is_read_by_the_general_commands(whole_path, texts):
    folder, measured = whole_path
    run = CliRunner().invoke
    words = ["evaluate", str(folder / "model"), "--corpus", str(texts[2]), "--json", "-q"]
    (result,) = json.loads(run(cli.app, words).stdout)
    ids = 210  # words and line ends, of which the first is read only
    assert (result["length"], result["num_tokens"], result["share"]) == (128, ids - 1, 1.0)
    blocks = measured["evaluations"][6]  # of the test text, at 512 without overlap
    assert result["nll"] / np.log(2) == pytest.approx(blocks["loss_base2"], abs=0.1)
    words = ["generate", str(folder / "model"), "--prompt", "w1 w2", "-n", "4", "--json"]
    assert json.loads(run(cli.app, words).stdout)["text"].startswith("w1 w2")
    files = {path.name for path in (folder / "model").iterdir()}
    assert {"dict.txt", "tokenizer.json", "tokenizer_config.json"} <= files
