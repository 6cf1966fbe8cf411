"""`linbias reach`, `linbias evaluate --stream` and `linbias generate --stream`."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from linbias.data.tokenizers import byte_tokenizer
from linbias.lm import StreamScorer, generate
from linbias.models import LinbiasForConditionalGeneration, LinbiasSeq2SeqConfig
from linbias.models.loading import load
from linbias.models.window_cache.reach import Reach, reach_of_weights
from small_models import build
from test_cli import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    build(num_key_value_heads=2).float().save_pretrained(folder)
    return folder


def test_it_prints_the_reach_of_every_head_and_json_has_all_numbers(folder):
    shown, given = run("reach", folder).stdout, reach_of_weights(load(folder))
    expected = given.of_heads()
    for number in (*expected.flat, *expected.sum(1), expected.sum()):
        assert f"{number:,.0f}" in shown
    assert "head 3" in shown and "1/256" in shown
    found = json.loads(run("reach", folder, "--tolerance", "1e-4", "--json").stdout)
    np.testing.assert_array_equal(found["reach"], given.of_heads(1e-4))
    np.testing.assert_allclose(found["lead"], given.lead)
    assert found["tolerance"] == 1e-4 and found["why_not"] == {}


def test_many_heads_are_summed_up(tmp_path):
    build(num_attention_heads=16, hidden_size=32).float().save_pretrained(tmp_path)
    expected = reach_of_weights(load(tmp_path)).of_heads()
    shown = run("reach", tmp_path).stdout
    assert "head" not in shown.splitlines()[1] and "median" in shown
    assert f"{np.median(expected[0]):,.0f}" in shown and f"{expected[1].max():,.0f}" in shown


def test_heads_without_a_reach_need_all_keys(tmp_path, monkeypatch):
    """As of slopes that vanish beside the scores."""
    needed = Reach.of_heads
    monkeypatch.setattr(Reach, "of_heads", lambda *given: needed(*given) + np.inf)
    build().float().save_pretrained(tmp_path)
    shown = run("reach", tmp_path).stdout
    assert "all" in shown and "0 of 8 heads have a reach" in shown


def test_a_model_without_linear_biases_is_refused(tmp_path):
    build(position="rotary").float().save_pretrained(tmp_path)
    result = run("reach", tmp_path)
    assert result.exit_code == 2 and "linear biases" in result.stderr


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    """A model of bytes, and a text for it."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("writer")
    build(vocab_size=256, pad_token_id=0, eos_token_id=None).float().save_pretrained(folder)
    byte_tokenizer().save(folder)
    text = folder / "text.txt"
    text.write_text("Ein Stück Text, Zeile für Zeile.\n" * 100)
    return folder, text


def expected_of(folder, ids, **options):
    scorer = StreamScorer(load(folder), **options)
    scorer.read(ids)
    return scorer.result()


def test_a_text_is_scored_in_one_pass(writer):
    folder, text = writer
    content = text.read_bytes()
    expected = expected_of(folder, np.frombuffer(content, np.uint8))
    words = ["evaluate", folder, "--stream", "--corpus", text]
    shown = run(*words).stdout
    assert f"{len(content) - 1:,} tokens of {len(content):,} bytes in one pass" in shown
    assert f"perplexity {expected.perplexity:,.3f}" in shown
    assert f"{expected.bits_per_byte(len(content)):.4f} bits per byte" in shown
    assert "every row is certified" in shown
    found = json.loads(run(*words, "--limit-tokens", 700, "--json").stdout)
    expected = expected_of(folder, np.frombuffer(content, np.uint8)[:701])
    assert found["num_tokens"] == 700 and found["num_bytes"] == 701
    assert found["nll"] == pytest.approx(expected.nll, rel=1e-6)
    assert found["reach"] == expected.reach and found["uncertified"] == 0


@pytest.mark.processes
def test_a_stream_goes_on_until_it_is_told_to_end(writer):
    folder, _ = writer
    words = ["generate", folder, "--stream", "--prompt", "Ein ", "--temperature", 0]
    shown = run(*words, "-n", 50)
    assert shown.stdout.rstrip("\n") == generate(folder, "Ein ", max_new_tokens=50, temperature=0)
    assert "tokens read and written" in shown.stderr
    command = [sys.executable, "-m", "linbias", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as endless:
        written = b""
        while len(written) < 600:  # more than `generate` writes unasked
            written += os.read(endless.stdout.fileno(), 600)
        endless.send_signal(signal.SIGINT)
        _, errors = endless.communicate()
    assert written.decode(errors="replace").startswith(shown.stdout.rstrip("\n\ufffd"))
    assert endless.returncode == 130 and b"tokens read and written" in errors


ERRORS = {
    "evaluate --stream --length 8": "--length: must be left out with --stream, got 8",
    "evaluate --stream --max-bytes 8": "--max-bytes: must be left out with --stream",
    "evaluate --stream --limit-tokens -3": "--limit-tokens: must be at least 1, got -3",
    "reach --tolerance 0": "--tolerance: must be in (0, 1), got 0.0",
    "reach --tolerance nan": "--tolerance: must be in (0, 1), got nan",
    "generate --stream --json": "--json: must be left out with --stream",
    "generate --stream -n 0": "error: --max-new-tokens: must be at least 1, got 0",
    "generate --stream --prompt=": "error: --prompt: must not be empty",
}


@pytest.mark.parametrize(("words", "message"), ERRORS.items())
def test_what_cannot_be_is_refused(writer, words, message):
    command, *options = words.split()
    result = run(command, writer[0], *options)
    assert result.exit_code == 2 and message in result.stderr


def test_a_model_that_writes_another_text_is_refused(tmp_path):
    config = LinbiasSeq2SeqConfig(vocab_size=256, hidden_size=16, num_attention_heads=2)
    LinbiasForConditionalGeneration(config).save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path)
    commands = (["generate", "--stream"], ["generate"], ["evaluate", "--stream"], ["reach"])
    for words in commands:
        result = run(words[0], tmp_path, *words[1:])
        assert result.exit_code == 2 and "error: MODEL: must " in result.stderr
        assert "causal" in result.stderr


@pytest.mark.processes
def test_a_pipe_is_read_to_its_end_which_must_be_that_of_a_character(writer):
    folder, text = writer
    command = [sys.executable, "-m", "linbias", "evaluate", folder, "--stream", "--corpus", "-"]
    content = text.read_bytes()
    piped = subprocess.run(command, input=content, capture_output=True, check=True)
    expected = expected_of(folder, np.frombuffer(content, np.uint8))
    assert f"perplexity {expected.perplexity:,.3f}" in piped.stdout.decode()
    ended = subprocess.run(command, input=b"abc\xc3", capture_output=True, check=False)
    assert ended.returncode == 2
    assert b"got a byte that is not UTF-8 at byte 3 of standard input" in ended.stderr
