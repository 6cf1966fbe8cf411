"""Training: an interrupted run ends like an unbroken one, and a run's folder is never mistaken."""

import errno
import json
import math
import re
import shutil
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import linbias.lm.training as train_module
from interrupting import SignalAt, fill_the_disk, torchrun
from linbias._run.folders import hold_run_folder
from linbias.data.corpus import load_corpus
from linbias.data.segments import Segments
from linbias.lm import loop
from linbias.lm.text import read_text
from linbias.lm.training import train
from linbias.models import load
from lm_training import SETTINGS, TINY, assert_same_run, history, interrupt, metrics, train_into


def test_every_segment_is_read_once_per_pass_and_predicts_its_next_tokens():
    ids = np.arange(100, dtype=np.uint8)
    segments = Segments(ids, length=7, num_segments=42, seed=3)
    assert segments.per_pass == 14
    batch = segments.__getitems__(list(range(42)))
    assert torch.equal(batch["labels"], batch["input_ids"] + 1)
    firsts = batch["input_ids"][:, 0].view(3, 14)
    assert all(sorted(one.tolist()) == list(range(0, 98, 7)) for one in firsts)
    assert not torch.equal(firsts[0], firsts[1])
    again = Segments(ids, length=7, num_segments=42, seed=3).__getitems__([15, 27, 28])
    assert torch.equal(again["input_ids"], batch["input_ids"][[15, 27, 28]])


def test_result_loads_by_auto_classes_and_metrics_describe_the_run(unbroken):
    model = load(unbroken)
    assert (model.config.train_length, model.config.vocab_size) == (16, 256)
    assert model.config.use_cache
    assert AutoTokenizer.from_pretrained(unbroken)("ab").input_ids == [97, 98]
    measured = metrics(unbroken)
    assert (measured["steps"], measured["tokens"], measured["num_processes"]) == (
        12,
        12 * 6 * 16,
        1,
    )
    assert measured["num_parameters"] == model.num_parameters()
    assert measured["tokens_per_second"] == pytest.approx(
        measured["tokens"] / (measured["steps"] * measured["step_seconds"])
    )
    assert measured["peak_memory_bytes"] > 0
    names = {path.name for path in unbroken.iterdir()}
    assert names == {
        *("settings.json", "metrics.json", "config.json", "generation_config.json"),
        *("model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        *("history.jsonl", "checkpoints"),
    }


@pytest.mark.parametrize("keep", [True, False])
def test_checkpoints_that_a_kill_left_in_a_finished_run_are_deleted(
    keep, unbroken, corpus, tmp_path
):
    run = Path(shutil.copytree(unbroken, tmp_path / "run"))
    last = run / "checkpoints" / "checkpoint-12"
    shutil.copytree(last, last.with_name("checkpoint-10"))
    train(SETTINGS, corpus, run, progress=False, keep_checkpoint=keep)
    assert list(run.glob("checkpoints/*")) == ([last] if keep else [])
    assert_same_run(run, unbroken)


def test_training_learns(corpus, tmp_path):
    settings = replace(SETTINGS, model=TINY, steps=60, learning_rate=1e-2, save_steps=60)
    assert train(settings, corpus, tmp_path, progress=False).loss < 3.0  # from 5.5


@pytest.mark.parametrize(
    "full_at", ["optimizer.pt", pytest.param("model.safetensors", marks=pytest.mark.thorough)]
)
def test_full_disk_leaves_the_checkpoint_before_and_the_run_goes_on_from_it(
    full_at, unbroken, corpus, tmp_path, monkeypatch
):
    with monkeypatch.context() as patch:
        fill_the_disk(patch, lambda path: path.endswith(f"checkpoint-10/{full_at}"))
        with pytest.raises(OSError, match=r"train: could not write to .*No space left"):
            train(SETTINGS, corpus, tmp_path, progress=False)
    assert (tmp_path / "checkpoints" / "checkpoint-5" / "complete.json").exists()
    assert_same_run(train_into(SETTINGS, corpus, tmp_path), unbroken)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 8384 vs 8278"),
    ],
    ids=["by number", "in PyTorch's words"],
)
def test_full_disk_is_named_and_a_run_without_a_checkpoint_says_that(
    error, corpus, tmp_path, monkeypatch
):
    def fail(*_: object) -> None:
        raise error

    little = SimpleNamespace(free=0 if isinstance(error, RuntimeError) else 2**40)
    monkeypatch.setattr("shutil.disk_usage", lambda _: little)
    monkeypatch.setattr(torch, "save", fail)
    said = r"No space left on the disk: .*; no checkpoint was complete yet"
    with pytest.raises(OSError, match=said):
        train(SETTINGS, corpus, tmp_path, progress=False)
    of_computing = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    assert not loop._is_full(of_computing, tmp_path)  # however little is free


@pytest.mark.parametrize(
    ("step", "number"), [(0, signal.SIGINT), (6, signal.SIGINT), (7, signal.SIGTERM)]
)
def test_a_signal_ends_a_run_after_its_step_with_a_checkpoint(
    step, number, unbroken, corpus, tmp_path
):
    arrived: list[int] = []

    def arrive(number: int, _: object) -> None:
        arrived.append(number)

    before = signal.signal(number, arrive)
    try:
        with pytest.raises(KeyboardInterrupt, match="The same command continues from here"):
            train(SETTINGS, corpus, tmp_path, progress=False, callbacks=[SignalAt(step, number)])
        assert arrived == [number] and signal.getsignal(number) is arrive
    finally:
        signal.signal(number, before)
    assert (tmp_path / "checkpoints" / f"checkpoint-{step + 1}" / "complete.json").exists()
    assert not (tmp_path / "model.safetensors").exists()
    assert_same_run(train_into(SETTINGS, corpus, tmp_path), unbroken)
    lines = [
        [(line["step"], line["loss"]) for line in history(run)] for run in (tmp_path, unbroken)
    ]
    assert lines[0] == lines[1]


def test_a_second_signal_ends_a_run_at_once_and_an_ignored_one_never(corpus, tmp_path):
    settings = replace(SETTINGS, steps=2)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        twice = SignalAt(1, signal.SIGINT, times=2)
        with pytest.raises(KeyboardInterrupt) as stopped:
            train(settings, corpus, tmp_path / "run", progress=False, callbacks=[twice])
        assert not stopped.value.args and not list(tmp_path.glob("run/checkpoints/*"))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ignored = SignalAt(0, signal.SIGINT)
        with suppress(KeyboardInterrupt):  # which would end the tests, and not fail this one
            train(settings, corpus, tmp_path / "run", progress=False, callbacks=[ignored])
    finally:
        signal.signal(signal.SIGINT, before)
    assert metrics(tmp_path / "run")["steps"] == 2


@pytest.mark.thorough
def test_a_run_goes_on_with_other_steps_between_checkpoints_and_validations(
    unbroken, corpus, tmp_path
):
    interrupt(corpus, tmp_path, 6)
    path = tmp_path / "settings.json"
    older = json.loads(path.read_text())
    older["settings"] |= {"validate_lengths": [8], "prompt": None}  # which went
    path.write_text(json.dumps(older))
    other = replace(SETTINGS, save_steps=4, validate_steps=3)
    newest = interrupt(corpus, tmp_path, 9, other) / "checkpoint-8"
    assert newest.exists()
    assert_same_run(train_into(other, corpus, tmp_path), unbroken)
    validated = [line["step"] for line in history(tmp_path) if line["validation_loss"]]
    assert validated == [6, 9, 12]
    assert json.loads(path.read_text())["settings"]["save_steps"] == 4


def test_other_settings_and_other_text_are_refused_with_the_difference(unbroken, corpus):
    other = replace(SETTINGS, learning_rate=0.5, model={**TINY, "position": "rotary"})
    with pytest.raises(ValueError, match=r"learning_rate is 0\.001 there and 0\.5 here") as error:
        train(other, corpus, unbroken, progress=False)
    assert "model.hidden_dropout is 0.1 there and None here" in str(error.value)
    assert "model.position is None there and 'rotary' here" in str(error.value)
    with pytest.raises(ValueError, match=r"corpus\.fingerprint is '\w+' there and 'other' here"):
        train(SETTINGS, replace(corpus, fingerprint="other"), unbroken, progress=False)


def test_another_split_of_the_same_corpus_is_refused_by_its_run_and_told_by_evaluation(tmp_path):
    files = tmp_path / "files" / "corp"
    files.mkdir(parents=True)
    for i in range(40):
        (files / f"{i}.txt").write_text(f"{i} times {i} is {i * i}\n")
    settings = replace(SETTINGS, steps=1, batch_size=2)
    run = train_into(settings, load_corpus(str(files)), tmp_path / "run")
    read_text(run, str(files))  # the same split: no warning
    above = str(files.parent)
    with pytest.raises(ValueError, match=r"corpus\.splits\.train is '\w+' there and '\w+' here"):
        train(settings, load_corpus(above), run, progress=False)
    with pytest.warns(UserWarning, match=r"read_text: corpus must be split as in training"):
        read_text(run, above, max_bytes=1000)
    with pytest.warns(UserWarning, match=r"read_text: text must be one that the model was not"):
        read_text(run, f"{files}/7.txt")
    (tmp_path / "other.txt").write_text("another text " * 9)
    read_text(run, str(tmp_path / "other.txt"))


def test_folder_in_use_is_refused(corpus, tmp_path):
    in_use = pytest.raises(
        ValueError, match="train: output must be used by one run at a time, got"
    )
    with hold_run_folder(tmp_path, "test"), in_use:
        train(SETTINGS, corpus, tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "num_tokens", "message"),
    [
        ({}, 16, r"must hold length \+ 1 = 17 tokens .* got 16"),
        ({"model": {"num_attention_heads": 5}}, None, "hidden_size must be a multiple of 5"),
        ({"precision": "fp16"}, None, "precision 'fp16' must have a GPU"),
        ({"accumulation": 4}, None, "multiple of processes x accumulation = 1 x 4, got 6"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    change, num_tokens, message, corpus, tmp_path
):
    with pytest.raises(ValueError, match=message):
        given = replace(corpus, train=corpus.train[:num_tokens])
        train(replace(SETTINGS, **change), given, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_loss_that_is_not_finite_ends_the_run(corpus, tmp_path):
    settings = replace(SETTINGS, learning_rate=1e30, warmup=0.0)
    with pytest.raises(ValueError, match="train: loss must stay finite, got nan"):
        train(settings, corpus, tmp_path, progress=False)


@pytest.mark.thorough
def test_parts_of_a_batch_add_up_to_it(corpus, tmp_path):
    weights, losses = [], []
    for accumulation in (1, 3):
        settings = replace(SETTINGS, model=TINY, accumulation=accumulation)
        output = train_into(settings, corpus, tmp_path / str(accumulation))
        weights.append(load_file(output / "model.safetensors"))
        losses.append(metrics(output)["loss"])
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-4, rtol=0)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


IN_EACH_PROCESS = """
import sys
from dataclasses import replace
from torch import distributed, save
from transformers import TrainerCallback
from interrupting import Stop, StopAt
from linbias.data.corpus import load_corpus
from linbias.lm.training import train
from test_lm_train import SETTINGS, TINY

text, folder = sys.argv[1:]
settings = replace(SETTINGS, model=TINY, accumulation=1, validate_steps=6)
corpus = load_corpus(text)
corpus = replace(corpus, valid=corpus.train[: 5 * 16 + 1])  # five segments, an odd number


class KeepWeights(TrainerCallback):
    def on_train_end(self, args, state, control, model, **_):
        save(model.state_dict(), f"{folder}/rank{distributed.get_rank()}.pt")


def run(name, settings=settings, callbacks=()):
    train(settings, corpus, f"{folder}/{name}", progress=False, callbacks=callbacks)


run("unbroken", callbacks=[KeepWeights()])
sharded, shards = replace(settings, fsdp={}), replace(settings, context_parallel=2)
run("shards", shards)
kinds = {"resumed": settings, "sharded": sharded, "resumed-shards": shards}
for name, kind in kinds.items():
    try:
        run(name, kind, callbacks=[StopAt(7)])
    except Stop:
        run(name, kind)
try:
    run("held")
except ValueError as error:
    print(error, file=open(f"{folder}/refused{distributed.get_rank()}", "w"))
distributed.destroy_process_group()
"""


@pytest.mark.processes
def test_two_processes_train_the_model_of_one(corpus, text, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(IN_EACH_PROCESS)
    with hold_run_folder(tmp_path / "held", "test"):
        done = torchrun(script, text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "missing keys" not in done.stderr
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])
    assert_same_run(tmp_path / "resumed", tmp_path / "unbroken")
    assert_same_run(tmp_path / "resumed-shards", tmp_path / "shards")

    for rank in (0, 1):  # the first one asks for the lock, and both end alike
        refusal = (tmp_path / f"refused{rank}").read_text()
        assert f"one run at a time, got {tmp_path}/held" in refusal

    alone_settings = replace(SETTINGS, model=TINY, accumulation=1, validate_steps=6)
    corpus = replace(corpus, valid=corpus.train[: 5 * 16 + 1])
    alone = load_file(train_into(alone_settings, corpus, tmp_path / "alone") / "model.safetensors")
    kinds = ("alone", "unbroken", "resumed", "sharded", "shards")
    histories = [history(tmp_path / kind) for kind in kinds]
    for lines in histories:  # one line each, of the first process, with the loss over all
        assert [line["step"] for line in lines] == [5, 6, 10, 12]
        for name in ("loss", "validation_loss"):
            losses, expected = ([line[name] or 0.0 for line in h] for h in (lines, histories[0]))
            assert losses == pytest.approx(expected, rel=1e-4)
    for kind in ("unbroken", "sharded", "shards"):
        weights = load_file(tmp_path / kind / "model.safetensors")
        for name, value in alone.items():
            torch.testing.assert_close(weights[name], value, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="num_processes is 2 there and 1 here"):
        train(alone_settings, corpus, tmp_path / "unbroken", progress=False)


@pytest.mark.thorough
def test_budgets_in_tokens_and_seconds_become_steps_once(corpus, tmp_path, monkeypatch):
    by_tokens = replace(SETTINGS, steps=None, tokens=4 * 96 + 1)
    assert train(by_tokens, corpus, tmp_path / "tokens", progress=False).steps == 5

    by_seconds = replace(SETTINGS, steps=None, seconds=0.2)
    interrupt(corpus, tmp_path / "s", 1, by_seconds)
    steps = json.loads((tmp_path / "s" / "settings.json").read_text())["steps"]
    monkeypatch.setattr(
        train_module.LanguageModelRun, "_step_seconds", None
    )  # a second measurement would fail
    assert train(by_seconds, corpus, tmp_path / "s", progress=False).steps == steps


@pytest.mark.thorough
def test_epochs_are_passes_over_the_text(corpus, tmp_path):
    per_pass = (len(corpus.train) - 1) // 16
    settings = replace(SETTINGS, steps=None, epochs=1.5, validate_steps=0.5)
    valid = replace(corpus, valid=corpus.train)
    run = train_into(settings, valid, tmp_path)
    assert metrics(run)["steps"] == math.ceil(1.5 * per_pass / 6)
    steps = [line["step"] for line in history(run) if line["validation_loss"] is not None]
    half = round(0.5 * per_pass / 6)
    assert steps[:2] == [half, 2 * half]
    more = train(replace(settings, epochs=2.25), valid, tmp_path, progress=False)
    assert more.steps == math.ceil(2.25 * per_pass / 6)


def test_the_learning_rate_does_not_go_below_its_floor(corpus, tmp_path):
    settings = replace(SETTINGS, learning_rate_floor=0.25, warmup_steps=3, save_steps=1)
    run = train_into(settings, corpus, tmp_path)
    expected = []
    for step in range(12):  # a line's rate is that of its step
        cosine = 0.5 * (1 + math.cos(math.pi * (step - 3) / 9))
        expected.append(1e-3 * (step / 3 if step < 3 else max(0.25, cosine)))
    assert [line["learning_rate"] for line in history(run)] == pytest.approx(expected)


@pytest.mark.thorough
def test_untied_token_embeddings_do_not_decay(corpus, tmp_path, monkeypatch):
    decayed = []
    names_of = train_module.LanguageModelTrainer.get_decay_parameter_names

    def keep(*arguments):
        decayed.append(names_of(*arguments))
        return decayed[-1]

    monkeypatch.setattr(train_module.LanguageModelTrainer, "get_decay_parameter_names", keep)
    for tied in (True, False):
        model = {**SETTINGS.model, "tie_word_embeddings": tied}
        train_into(replace(SETTINGS, model=model, steps=1), corpus, tmp_path / str(tied))
    assert "model.embed_tokens.weight" in decayed[0]
    assert not {"model.embed_tokens.weight", "model.norm.weight"} & set(decayed[-1])
    assert "lm_head.weight" in decayed[-1]


@pytest.mark.thorough
def test_progress_is_a_bar_on_stderr_or_nothing(corpus, tmp_path, capfd):
    settings = replace(SETTINGS, steps=4, save_steps=1, validate_steps=3)
    interrupt(corpus, tmp_path / "quiet", 2, settings)
    train(settings, corpus, tmp_path / "quiet", progress=False)
    assert capfd.readouterr() == ("", "")
    train(settings, corpus, tmp_path / "loud")
    out, err = capfd.readouterr()
    assert out == "" and "nan" not in err
    last = err.strip().split("\r")[-1]
    losses = r"loss=\d\.\d{3} nats, validation=\d\.\d{3} nats"
    assert re.fullmatch(rf"training: 100%.* 384/384 \[.* tokens/s, {losses}\]", last)


def test_bfloat16_trains_float32_weights(corpus, tmp_path):
    output = train_into(replace(SETTINGS, precision="bf16", steps=2), corpus, tmp_path)
    assert {value.dtype for value in load_file(output / "model.safetensors").values()} == {
        torch.float32
    }


BAD_SETTINGS = [
    ("steps, tokens, seconds, epochs must be given one at a time", {"steps": None}),
    ("steps, tokens, seconds, epochs must be given one at a time", {"tokens": 5}),
    ("steps must be at least 1, got 0", {"steps": 0}),
    ("length must be at least 1, got 0", {"length": 0}),
    ("batch_size must be at least 1, got -1", {"batch_size": -1}),
    ("seconds must be positive, got 0", {"steps": None, "seconds": 0}),
    ("learning_rate must be positive, got 0", {"learning_rate": 0}),
    (r"warmup must be in \[0, 1\), got 1", {"warmup": 1}),
    ("weight_decay must be at least 0, got -1", {"weight_decay": -1}),
    ("precision must be one of .* got 'fp8'", {"precision": "fp8"}),
    ("device must be 'auto' or 'cpu', got 'tpu'", {"device": "tpu"}),
    ("model must be without vocab_size and train_length", {"model": {"vocab_size": 3}}),
    ("validate_steps must be at least 0, got -1", {"validate_steps": -1}),
    ("validate_steps must be a whole number or below 1, got 1.5", {"validate_steps": 1.5}),
    ("epochs must be positive", {"steps": None, "epochs": 0.0}),
    (r"learning_rate_floor must be in \[0, 1\)", {"learning_rate_floor": 1.0}),
    (
        "model must be without position, which task='masked'",
        {"task": "masked", "model": {"position": "alibi"}},
    ),
    (r"task must be one of \(.*\), got 'both'", {"task": "both"}),
    (r"task must be one of .*\(Seq2SeqTrainer of Transformers trains that\)", {"task": "seq2seq"}),
    ("length must be at least 2 for task='masked', got 1", {"task": "masked", "length": 1}),
]


@pytest.mark.parametrize(("message", "change"), BAD_SETTINGS)
def test_bad_setting_is_refused(message, change):
    with pytest.raises(ValueError, match=f"TrainSettings: {message}"):
        replace(SETTINGS, **change)


NO_FIELDS = {
    "depth": "; there are attention_dropout, .*window$",
    "heads": r" \(perhaps num_attention_heads or num_key_value_heads\); there are",
    "hiden_size": r" \(perhaps hidden_size or head_size\);",
}


@pytest.mark.parametrize(("name", "advice"), NO_FIELDS.items())
def test_what_is_no_field_of_a_model_is_refused_with_those_that_are(name, advice):
    rule = "TrainSettings: model must be made of LinbiasConfig's fields, got"
    with pytest.raises(ValueError, match=f"{rule} '{name}'{advice}"):
        replace(SETTINGS, model={name: 3})
