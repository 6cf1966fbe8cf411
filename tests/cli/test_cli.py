"""The command line, in process where that tells the same, else as a person starts it."""

import json
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from inspect import signature
from unittest import mock

import numpy as np
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM
from typer.testing import CliRunner, Result

import linbias
from chapter import HEADS, OUTPUT, chapters_table
from interrupting import torchrun
from linbias import _extras, cli, example
from linbias.cli import console
from linbias.data import load_corpus
from linbias.data.tokenizers import byte_tokenizer
from linbias.doctor import diagnose
from linbias.lm import evaluate
from linbias.lm.settings import ExtrapolateSettings, TrainSettings

TINY = "--set hidden_size=16 --set num_hidden_layers=1 --set num_attention_heads=2".split()


def run(*words: object, columns: int = 100) -> Result:
    console.out.width = columns  # by itself it would keep that of the process that imported it
    environment = {"COLUMNS": str(columns)}
    return CliRunner().invoke(cli.app, [str(word) for word in words], env=environment)


def start(*words: object, **options: object) -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-m", "linbias", *map(str, words)], subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, **options)


@pytest.fixture(scope="module")
def corpus(word_file):
    return word_file


@pytest.fixture(scope="module")
def model(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "train"
    budget = ["--steps", 3, "--length", 16, "--batch-size", 2, "--threads", 1]
    result = run("train", "--corpus", corpus, *TINY, *budget, "-q", "--json", "-o", folder)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["tokens"] == 3 * 2 * 16
    return folder


# explain: the numbers that the book chapter prints

TITLES = ("Weights of head 0, slope 1/2", "Weights of head 1, slope 1/4")
TITLES += ("Weights, average of the 2 heads", "Output, heads side by side")
CHAPTER = dict(zip(TITLES, (*HEADS.split("\n\n"), OUTPUT), strict=True))
STANDARD_THE = ["0.1237", "0.2509", "0.2509", "0.1237", "0.2509"]  # head 0, without a bias


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_explain_prints_the_chapters_matrices_beside_those_without_bias(columns):
    shown = run("explain", columns=columns).stdout
    assert max(map(len, shown.splitlines())) <= columns
    for block, (title, numbers) in zip(shown.split("\n\n"), CHAPTER.items(), strict=False):
        if columns > 40:  # else the second one stands below
            lines = [line.split() for line in block.splitlines()]
            assert " ".join(lines[0]) == title
            rows = [row[1:] for row in chapters_table(numbers)]
            size = len(rows[0])
            assert [line[1 : 1 + size] for line in lines[3:]] == rows
            assert [line[0] for line in lines[3:]] == ["The", "cat", "sat", "on", "mat"]
            assert all(len(line) == 1 + 2 * size for line in lines[3:])
    assert " ".join(STANDARD_THE) in shown


def test_slope_0_is_standard_attention_and_hides_the_same_keys():
    found = json.loads(run("explain", "--slope", "0", "--json").stdout)
    assert [f"{weight:.4f}" for weight in found["weights"][0][0]] == STANDARD_THE
    assert found["weights"] == found["weights_without_bias"]
    assert found["output"] == found["output_without_bias"]
    causal = json.loads(run("explain", "--causal", "--slope", "0.25,0", "--json").stdout)
    assert causal["slopes"] == [0.25, 0.0]
    for name in ("weights", "weights_without_bias"):
        assert causal[name][0][0] == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("query", ["cat", "1", "-4"])
def test_explain_finds_a_query_by_token_and_number(query):
    trace, _ = example.trace(causal=False)
    shown = run("explain", "--query", query, "--head", 0).stdout
    assert shown.rstrip() == trace.table("cat", head=0)
    assert np.round(trace.weights[0, 1], 4).tolist() == [0.3791, 0.1520, 0.3791, 0.0559, 0.0339]


def test_explain_shows_what_the_function_of_that_name_shows():
    trace, tokens = example.trace()
    shown = run("explain", "--causal", "--query", "mat", "--head", 1).stdout
    assert shown.rstrip() == trace.table(head=1, tokens=tokens)
    assert np.isinf(trace.right_slopes).all()  # causal, as linbias.explain and attention are
    assert trace.table(head=1) == trace.table(head=1, tokens=tokens)  # it carries the names


def test_explain_ends_with_every_step_of_the_last_row():
    trace, _ = example.trace(causal=False)
    shown = run("explain").stdout
    steps = shown.partition("Every step of the last row\n")[2]
    assert [trace.table(head=h) for h in range(2)] == steps.split("\n\n")[:2]
    assert "  q [0.0000 1.0000]" in steps  # the query of "mat" in head 1
    assert json.loads(run("explain", "--json").stdout)["q"][1][-1] == [0.0, 1.0]


def test_slopes_prints_every_head_and_its_reach():
    lines = [line.split() for line in run("slopes", 12).stdout.splitlines()]
    rows = [line for line in lines if len(line) == 7 and line[0].isdigit()]
    np.testing.assert_allclose([float(row[1]) for row in rows], linbias.slopes(12), rtol=1e-5)
    assert rows[8] == ["8", "0.707107", "-0.5", "-7.071", "0.00085", "1.414", "ultra-local"]
    found = json.loads(run("slopes", 6, "--schedule", "geometric", "--json").stdout)
    assert found["slopes"] == linbias.slopes(6, "geometric").tolist()


def test_explain_as_json_hides_later_keys_and_has_all_rows():
    found = json.loads(run("explain", "--causal", "--json").stdout)
    assert found["tokens"] == ["The", "cat", "sat", "on", "mat"]
    assert found["slopes"] == [0.5, 0.25]
    trace, _ = example.trace()
    for name in ("weights", "output"):
        assert found[name] == getattr(trace, name).tolist()
    hidden = np.isnan(np.array(found["scores"], np.float64))  # of null
    assert (hidden == np.triu(np.ones((2, 5, 5), bool), 1)).all()


def test_explain_reads_arrays_from_a_file(tmp_path):
    q, k, v = np.zeros((1, 2, 3)), np.zeros((1, 4, 3)), np.arange(4.0).reshape(1, 4, 1)
    np.savez(tmp_path / "arrays.npz", q=q, k=k, v=v, slopes=[0.0], tokens=list("abcd"))
    found = json.loads(run("explain", tmp_path / "arrays.npz", "--json").stdout)
    assert found["query_start"] == 2  # the last query stands at the last key
    assert found["output"][0][0] == [1.0]
    shown = run("explain", tmp_path / "arrays.npz", "--query", "c").stdout
    assert shown.startswith("head 0, slope 0, query c\n")
    np.savez(tmp_path / "sides.npz", q=q[:, :, :1], k=k, v=v)
    assert run("explain", tmp_path / "sides.npz").exit_code == 2
    np.savez(tmp_path / "sides.npz", q=q, k=k, v=v, slopes=[np.inf], right_slopes=[0.5])
    found = json.loads(run("explain", tmp_path / "sides.npz", "--slope", "0.1", "--json").stdout)
    assert (found["slopes"], found["right_slopes"]) == ([None], [0.1])  # hidden as before


def test_explain_names_tokens_as_text_and_says_when_there_are_too_many(tmp_path):
    wide = ["[bold]x", "a\nb", "\u65e5\u672c", "averyveryverylongone"]
    ones = np.ones((1, 4, 1))
    np.savez(tmp_path / "arrays.npz", q=ones, k=ones, v=ones, tokens=wide)
    lines = run("explain", tmp_path / "arrays.npz").stdout.splitlines()
    assert "[bold]x         a\\nb" in lines[2]
    assert "averyveryve\N{HORIZONTAL ELLIPSIS}" in lines[2]
    many = np.ones((1, 65, 1))
    np.savez(tmp_path / "arrays.npz", q=many, k=many, v=many)
    shown = run("explain", tmp_path / "arrays.npz").stdout
    assert shown.startswith("65 queries and 65 keys are too many to print.")


# evaluate, generate, doctor


def test_evaluate_scores_every_length_on_the_same_tokens(model, corpus):
    words = ["evaluate", model, "--corpus", corpus, "--split", "test", "--length", "16,64", "-q"]
    results = json.loads(run(*words, "--json").stdout)
    assert [r["length"] for r in results] == [16, 64]
    assert results[0]["num_tokens"] == results[1]["num_tokens"]
    table = run(*words).stdout
    for r in results:
        assert f"{r['bits_per_byte']:.4f}" in table
    size = results[0]["text_bytes"]
    scored = f"scored {size - 1:,} of {size - 1:,} tokens, {size:,} of {size:,} bytes"
    assert f"{corpus}: {scored} (100.0% of the test split)" in table


@pytest.mark.filterwarnings("always")
def test_a_file_by_its_name_is_scored_whole_and_a_length_beyond_it_is_remarked_on(
    model, corpus, tmp_path
):
    (tmp_path / "note.txt").write_text("to be or not to be")
    words = ["evaluate", model, "--corpus", tmp_path / "note.txt", "--length", "4,64", "-q"]
    shown = run(*words)
    assert "note.txt: scored 17 of 17 tokens, 18 of 18 bytes (100.0% of the file)" in shown.stdout
    said = r"warning: evaluate: length 64 is beyond the 17 tokens .+ by this length\n"
    assert re.fullmatch(said, shown.stderr)
    results = json.loads(run(*words, "--json").stdout)
    assert [(r["length"], len(r["loss_by_position"])) for r in results] == [(4, 4), (17, 17)]
    for r in results:
        assert (r["num_tokens"], r["num_bytes"], r["split"], r["share"]) == (17, 17, None, 1.0)
    part = run(*words[:-3], "--length", 4, "--max-bytes", 9, "--limit-tokens", 4, "-q").stdout
    assert "scored 4 of 8 tokens, 4 of 18 bytes (22.2% of the file)" in part
    # The model's own corpus was not held out as a whole, which is said.
    own = run("evaluate", model, "--corpus", corpus, "--limit-tokens", 99, "-q", "--json")
    said = r"warning: --corpus: text must be one .+ \(split 'test' is what it has not read\)\n"
    assert re.fullmatch(said, own.stderr)


def test_evaluate_computes_on_the_device_that_is_asked_for(model, corpus):
    words = ["evaluate", model, "--corpus", corpus, "--split", "test", "-q", "--json"]
    (plain,) = json.loads(run(*words).stdout)
    (result,) = json.loads(run(*words, "--device", "cpu").stdout)
    assert result["nll"] == plain["nll"]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:read_text")
def test_processes_of_torchrun_share_the_windows_and_print_one_table(model, corpus):
    words = ["evaluate", model, "--corpus", corpus, "--length", 16, "--stride", 3, "-q", "--json"]
    words += ["--batch-tokens", 64, "--limit-tokens", 500, "--device", "cpu"]
    (alone,) = json.loads(run(*words).stdout)
    shared = torchrun("--module", "linbias", *words)
    assert shared.returncode == 0, shared.stderr
    assert shared.stderr.count("warning: --corpus: text must be one") == 1
    (result,) = json.loads(shared.stdout)
    assert result["count_by_position"] == alone["count_by_position"]
    assert result["nll"] == pytest.approx(alone["nll"], rel=1e-14)
    assert result["loss_by_position"] == pytest.approx(alone["loss_by_position"], rel=1e-14)


def test_evaluate_fuses_an_existing_model(corpus, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 16, "n_head": 2, "n_layer": 1}
    bloom = BloomForCausalLM(BloomConfig(**sizes, seq_length=16, initializer_range=0.5)).eval()
    bloom.save_pretrained(tmp_path / "bloom")
    byte_tokenizer().save(tmp_path / "bloom")
    words = ["evaluate", tmp_path / "bloom", "--corpus", corpus, "--split", "test", "-q"]
    words += ["--limit-tokens", 192, "--length", 64]
    (ours,) = json.loads(run(*words, "--json").stdout)
    ids = np.frombuffer(load_corpus(str(corpus)).test.tobytes(), np.uint8)
    theirs = evaluate(bloom, ids, length=64, limit_tokens=192)
    assert ours["fused"] and ours["nll"] == pytest.approx(theirs.nll, rel=1e-6)
    parts = run(*words, columns=40).stdout.split("length")[1:]
    assert len(parts) > 1 and all(" 64 " in part for part in parts)  # each says of which length


def test_a_model_that_returns_tuples_is_evaluated_and_generates(model, corpus, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "return_dict": False}))
    words = ["--corpus", corpus, "--split", "test", "--limit-tokens", 50, "-q", "--json"]
    nll = [json.loads(run("evaluate", m, *words).stdout)[0]["nll"] for m in (folder, model)]
    assert nll[0] == nll[1]
    assert run("generate", folder, "-n", 2).exit_code == 0


def test_generate_is_fixed_by_its_seed(model):
    words = ["generate", model, "--prompt", "train ", "-n", 20]
    texts = [json.loads(run(*words, "--seed", s, "--json").stdout)["text"] for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith("train ")
    assert run(*words, "--seed", 1).stdout.strip() == texts[0].strip()


def test_a_prompt_comes_from_standard_input_and_a_long_one_is_not_shown(model):
    long = "train short test long " * 10  # of 220 characters
    words = ["generate", str(model), "-n", "8", "-p", "-"]
    found = json.loads(CliRunner().invoke(cli.app, [*words, "--json"], input=long + "\n").stdout)
    assert found["prompt"] == long  # without the last line end
    shown = CliRunner().invoke(cli.app, words, input=long).stdout
    assert "train short" not in shown
    assert shown.strip() and found["text"].endswith(shown.strip())
    wrong = CliRunner().invoke(cli.app, words, input=b"a\xff")
    assert "error: --prompt: must be UTF-8 text, got another byte at 1" in wrong.stderr


def test_a_trained_model_is_trained_on_with_another_length(model, corpus, tmp_path):
    words = ["train", "--init", model, "--corpus", corpus, "--length", 32, "--steps", 2]
    words += ["--batch-size", 2, "--threads", 1, "--validate-steps", 1, "-o", tmp_path / "on"]
    result = run(*words, "--set", "hidden_dropout=0.1")
    assert result.exit_code == 0, result.output
    said = r"loss \d\.\d{3} bits per byte, (\d\.\d{3}) on the validation"
    shown = re.search(said, result.stdout)
    metrics = json.loads((tmp_path / "on" / "metrics.json").read_text())
    assert float(shown[1]) == pytest.approx(metrics["validation_loss"] / np.log(2), abs=6e-4)
    config = json.loads((tmp_path / "on" / "config.json").read_text())
    assert config.items() >= {"train_length": 32, "hidden_size": 16, "hidden_dropout": 0.1}.items()


def test_doctor_tells_what_runs_and_why_the_rest_does_not(monkeypatch):
    found = json.loads(run("doctor", "--json").stdout)
    assert set(found) == {"machine", "versions", "parts", "implementations"}
    assert found["implementations"]["dense"] == {"cpu": None}
    from linbias.torch.impl import dense

    monkeypatch.setattr(dense, "why_not", lambda call: "needs a moon [full]")
    shown = run("doctor").stdout
    assert "off: needs a moon [full]" in shown
    assert found["versions"]["torch"] in shown


def test_doctor_says_what_cannot_be_imported(monkeypatch):
    monkeypatch.setattr("linbias.doctor.PARTS", {"linbias.torch": "linbias.absent"})
    result = run("doctor")
    assert result.exit_code == 1
    assert "No module named 'linbias.absent'" in result.stdout


def test_what_was_not_installed_is_no_fault(monkeypatch):
    monkeypatch.setattr("linbias.doctor.PARTS", {"linbias.torch": "linbias.torch"})
    monkeypatch.setitem(_extras.PARTS, "linbias.torch", ("torch", ("moon",)))
    result = run("doctor")
    assert result.exit_code == 0
    said = "linbias.torch needs moon, which is not installed: pip install 'linbias[torch]'"
    assert said in " ".join(result.stdout.split())
    assert re.search("numpy cpu +ready", result.stdout)


def test_doctor_names_each_step_before_it_takes_time():
    steps = []
    with mock.patch("linbias.doctor._why_not_importable", lambda part: steps.append(part) or "x"):
        diagnose(progress=steps.append)
    assert steps[:2] == ["importing linbias.torch", "linbias.torch"]


# errors: one line, exit status 2, no traceback

RUN = ["train", *TINY, "--length", "16", "--batch-size", "2", "--threads", "1"]  # as of `model`
TEXT = "--corpus {corpus} --split test"
# By the start of a command, the rest of it and what the error says.
ERRORS = {
    "evaluate": {
        "./absent": "error: MODEL: must be a folder with a config.json, got './absent'",
        "{model} --length a": "--length: must be whole numbers such as 128,256",
        f"{{model}} {TEXT} --length 0": "error: --length: must be at least 1",
        "{model} --corpus {corpus} --split no": "--split: must be one of train, valid, test",
        "{model} --corpus /no/such": "error: --corpus: must be 'stdlib', a file or folder",
        "{model} --corpus {tmp}/one": "text must hold two tokens or more, got 1 in",
        "{model} --corpus {tmp}/nul": "--corpus: files must be UTF-8 text, got a NUL at byte 1",
        "{model} --device tpu": "error: --device: must be 'auto', 'cpu', or a GPU",
    },
    "train": {
        "--set width": "--set: must be NAME=VALUE, got 'width'",
        "--set heads=1": "LinbiasConfig's fields, got 'heads' (perhaps num_attention_heads or",
        "--set return_dict=false": "LinbiasConfig's fields, got 'return_dict'",
        "--position rope -o {tmp}/x": "rope",
        "--validate-steps -1": "--validate-steps: must be at least 0, got -1",
        "--steps 1 --tokens 1": "--steps, --tokens, --seconds, --epochs: must be given one at a",
        "--corpus {tmp}/empty": "files must be text files that are not hidden, got none in {tmp}",
        "--init ./absent": "--init: must be a folder that `linbias train` made, got 'absent'",
    },
    "train --init {model}": {
        "--tokenizer bpe": "--tokenizer: must be left out with --init, whose tokenizer stays",
        "--vocab-size 300": "--vocab-size: must be left out with --init",
        "--corpus {corpus} --set hidden_size=32": "must be 16, as in the model of init, got 32",
        "--corpus {corpus} --position none": "--position: must be 'alibi', as in the model",
    },
    "train --corpus {corpus}": {
        "-o {tmp}/x --batch-size 4 --accumulation 3": "processes x accumulation = 1 x 3",
        "-o {tmp}/x --set num_hidden_layers=1000000": "num_hidden_layers: must be at most",
        "-o {tmp}/x --position rope": "--position: must be one of",
        "-o {tmp}/x --context-parallel 2": "-parallel: must divide the number of processes, 1",
        "-o {tmp}/x --context-parallel 0": "-parallel: must be from 1 to length = 128, got 0",
        "-o {tmp}/x --context-parallel 2 --position rotary": "-parallel: must be 1 unless task is",
        "-o {tmp}/x --context-parallel 2 --task masked": "-parallel: must be 1 unless task is",
        "-o {corpus}": "error: --output: must be a folder to write in",
        "-o {model}": "error: --output: must not be another run's",
        " ".join(
            [*RUN[1:], "-o {model} --steps 2"]
        ): "of the run in {model}, 3 steps, got 2 steps",
    },
    "extrapolate": {
        "--methods rope": "--methods: must be among alibi",
        "--batch-size 0": "--batch-size: must be at least 1, got 0",
        "--test-lengths 1,x": "--test-lengths: must be whole numbers",
    },
    "generate": {
        "{model} --prompt=": "error: --prompt: must not be empty",
        "{model} --prompt a\udcff": "got '\\udcff' at character 1",
        "{model} --top-k=-1": "error: --temperature, --top-k: must be at least 0, got 0.8, -1",
        "{corpus}": "error: MODEL: must be a folder with a config.json",
    },
    "explain": {
        "{corpus}": "error: ARRAYS: must be an .npz file of numbers, as numpy.savez writes it",
        "{tmp}/absent": "ARRAYS: must be an .npz file, got {tmp}/absent (No such file",
        "{tmp}/code.npz": "ARRAYS: must be an .npz file of numbers",
        "--query dog": "error: --query: must be a number or token, got 'dog'",
        "--query 5": "error: --query: must be in [-5, 5), got 5",
        "--slope=-1": "error: --slope: must be at least 0 and finite, got -1",
        "--slope nan": "error: --slope: must be at least 0 and finite, got nan",
        "--slope steep": "--slope: must be numbers such as 0.5,0.25, got 'steep'",
        "--slope 1,2,3": "error: --slope: must be one number or 2, one for each head, got 3",
        "--head 2": "error: --head: must be in [0, 2), got 2",
        "--causal --symmetric": "--causal: must stand without --symmetric",
        "--json --head 0": "--head: must be left out with --json, which has all rows, got 0",
    },
    "slopes": {"0": "error: HEADS: must be at least 1, got 0"},
}
CALLS = [
    (f"{start} {rest}", said) for start, table in ERRORS.items() for rest, said in table.items()
]


@pytest.mark.parametrize(("words", "message"), CALLS)
def test_an_error_is_one_line(words, message, model, corpus, tmp_path):
    places = {"model": model, "corpus": corpus, "tmp": tmp_path}
    (tmp_path / "empty" / ".git").mkdir(parents=True)
    (tmp_path / "empty" / ".git" / "HEAD").write_text("a")
    (tmp_path / "one").write_text("a")
    (tmp_path / "nul").write_text("a\0b")
    np.savez(tmp_path / "code.npz", q=np.array([print], dtype=object))
    result = run(*words.format(**places).split())
    assert result.exit_code == 2, result.output
    assert message.format(**places) in result.stderr
    assert re.fullmatch(r"error: .+\n", result.stderr)
    assert result.stdout == ""


@pytest.mark.parametrize("word", console._GONE)
def test_what_went_says_what_does_its_work(word):
    advice = console._GONE[word]
    result = run(*(["slopes", "8", word, "a"] if word.startswith("--") else [word, "a"]))
    assert result.exit_code == 2
    said = " ".join(result.stderr.replace("│", " ").split())
    assert f"There is no {word}: {advice}." in said
    for name in re.findall(r"linbias(?:\.\w+)+", advice):
        assert pkgutil.resolve_name(name)


def test_a_group_of_commands_says_it_of_its_own():
    assert "There is no translate: docs/paper.md" in run("paper", "translate", "a").stderr


@pytest.mark.filterwarnings("always")
def test_a_warning_is_one_line_beside_the_result(model, corpus):
    result = run("evaluate", model, "--corpus", corpus.parent, "--length", 16, "--json")
    assert result.stderr == ""  # the one file of the folder, cut as before
    with (corpus.parent / "more.txt").open("w") as file:
        file.write("other words")
    result = run("evaluate", model, "--corpus", corpus.parent, "--length", 16, "-q", "--json")
    (corpus.parent / "more.txt").unlink()
    assert re.fullmatch(r"warning: --corpus: must be split .+\n", result.stderr)
    assert len(json.loads(result.stdout)) == 1


@pytest.mark.parametrize(
    "words", [["generate", "output/absent"], ["train", "--corpus", "output/absent", "-o", "{tmp}"]]
)
def test_a_folder_that_is_not_there_is_said_without_retries(words, tmp_path, no_network):
    result = run(*(word.format(tmp=tmp_path) for word in words))
    assert result.exit_code == 2, result.output
    assert "output/absent" in result.stderr
    assert "folder" in result.stderr
    assert len(no_network) == 1


@pytest.mark.processes
def test_a_real_process_ends_with_one_line_and_no_traceback():
    process = start("evaluate", "./absent")
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (2, "")
    assert stderr.startswith("error: MODEL: must be a folder")
    assert stderr.count("\n") == 1


def test_help_is_quick_and_names_every_command():
    code = (
        "import sys, linbias.cli; sys.exit(any(m in sys.modules for m in ('torch', 'matplotlib')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    shown = run("--help").stdout
    for command in ("train", "evaluate", "extrapolate", "generate", "explain", "doctor"):
        assert command in shown
        assert run(command, "--help").exit_code == 0
    assert run("--version").stdout.strip() == "0.1.0"


REFUSED = [
    "train --steps 0",
    "extrapolate --steps 0",
    "extrapolate --methods rope",
    "paper train data -o run --steps 0",
]


def test_wrong_settings_are_said_before_anything_heavy_is_loaded():
    code = f"""
import sys
from linbias import cli
for words in {REFUSED}:
    try:
        cli.app(words.split())
    except SystemExit as end:
        assert end.code == 2, words
print(*{{"torch", "transformers", "matplotlib"}} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
    assert done.stderr.count("error: ") == len(REFUSED)
    assert done.stderr.count("--steps: must be at least 1, got 0") == 3


def test_defaults_of_the_command_line_are_those_of_the_settings():
    settings = ExtrapolateSettings()
    option = {name: p.default for name, p in signature(cli.start.extrapolate).parameters.items()}
    for name in ("methods", "train_lengths", "seeds"):
        assert option[name] == ",".join(map(str, getattr(settings, name)))
    for name in ("corpus", "tokenizer", "vocab_size", "max_bytes", "stride", "limit_tokens"):
        assert option[name] == getattr(settings, name)
    for name in ("batch_size", "learning_rate", "precision", "save_steps", "threads"):
        assert option[name] == getattr(settings.training, name)
    option = {name: p.default for name, p in signature(cli.models.train).parameters.items()}
    for field in fields(TrainSettings):
        if field.name in option and field.name not in ("fsdp", "length"):
            assert option[field.name] == field.default, field.name
    # With --init these are the model's; without, those of the settings.
    kept = ("length", "position", "tokenizer", "vocab_size")
    assert [option[name] for name in kept] == [None] * 4
    shown = run("train", "--help", columns=200).stdout
    assert TrainSettings.length == 128 and "Default: 128, or as --init was trained" in shown


# Ctrl-C, as a person does it


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(("at", "said"), [(1, "Nothing new was saved"), (3, "The same command")])
def test_ctrl_c_says_whether_a_training_saved_anything(at, said, corpus, tmp_path, monkeypatch):
    def interrupt(self, args, state, control, **_):
        if state.global_step == at:
            raise KeyboardInterrupt

    monkeypatch.setattr("linbias.lm.watch.FiniteLoss.on_step_begin", interrupt, raising=False)
    words = [*RUN, "--steps", 5, "--save-steps", 2, "--corpus", corpus, "-o", tmp_path / "run"]
    result = run(*words, "-q")
    assert result.exit_code == 130
    assert result.stderr.strip().startswith(f"Stopped. {said}")
    result = run("evaluate", tmp_path / "run", "--corpus", corpus, "--limit-tokens", 20, "-q")
    assert "training has not finished" in result.stderr
    assert result.exit_code == (2 if at == 1 else 0), result.output


@pytest.mark.processes
def test_ctrl_c_leaves_a_run_that_the_same_command_ends(corpus, tmp_path):
    folder = tmp_path / "run"
    words = [
        *("extrapolate", "--methods", "alibi", "--train-lengths", 16, "--test-lengths", 32),
        *("--corpus", corpus, *TINY, "--batch-size", 2, "--steps", 400, "--save-steps", 40),
        *("--threads", 1, "-o", folder, "-q"),
    ]
    # A shell that runs the tests in the background ignores Ctrl-C, and so would the command.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = start(*words, env={**os.environ, "OMP_NUM_THREADS": "1"})
    deadline = time.monotonic() + 60
    while not list(folder.glob("models/*/checkpoints/*/complete.json")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stdout == ""
    assert stderr.strip() == "Stopped. The same command continues from here."

    result = run(*words, "--json")
    assert result.exit_code == 0, result.stderr
    results = json.loads(result.stdout)
    assert [r["test_length"] for r in results["evaluations"]] == [16, 32]
    assert results["trainings"][0]["steps"] == 400
    assert (folder / "report.html").exists()
