"""`--preset annotated`: what it sets, that options which are given win, and a tiny run of it."""

import json
from types import SimpleNamespace

import pytest

import linbias.lm.extrapolation
import linbias.lm.training
from linbias.cli.presets import PRESETS
from linbias.lm.settings import TrainSettings
from linbias.models.loading import load
from test_cli import TINY, run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "lines.txt"
    path.write_text("".join(f"It is {i} times {i}.\n" for i in range(300)))
    return path


class Stopped(Exception):
    pass


@pytest.fixture
def asked(monkeypatch):
    """Stands in for training: `.settings` and `.corpus` are what it was asked for."""
    found = SimpleNamespace()

    def stop(settings: object, corpus: object, *_: object, **__: object) -> None:
        found.settings, found.corpus = settings, corpus
        raise Stopped

    monkeypatch.setattr(linbias.lm.training, "train", stop)
    monkeypatch.setattr(linbias.lm.extrapolation, "extrapolate", stop)
    return found


def test_the_preset_is_the_experiment_of_the_annotated_implementation(asked, corpus):
    run("train", "--preset", "annotated", "--corpus", corpus)
    assert asked.settings == TrainSettings(
        model={
            "position": "alibi",
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "tie_word_embeddings": False,
        },
        length=64,
        batch_size=128,
        epochs=128,
        learning_rate=6e-4,
        learning_rate_floor=0.1,
        warmup_steps=128 * 128 * 20 // (128 * 64),  # tokens of its warmup / tokens of a step
        weight_decay=0.1,
        clip=1.0,
        validate_steps=0.1,
        validate_lengths=(80,),
        prompt="It is ",
    )
    assert asked.corpus.tokenizer.vocab_size == 4 + len(set(corpus.read_text()))


def test_options_that_are_given_win_wherever_they_stand(asked, corpus):
    words = ["--length", 32, "--learning-rate", 1e-3, "--set", "hidden_size=64", "--steps", 7]
    words += ["--tokenizer", "bytes", "--prompt", "Is", "--position", "rotary", "--batch-size", 32]
    for order in ([*words, "--preset", "annotated"], ["--preset", "annotated", *words]):
        run("train", "--corpus", corpus, *order)
        settings = asked.settings
        assert (settings.length, settings.learning_rate, settings.steps) == (32, 1e-3, 7)
        assert (settings.epochs, settings.prompt, settings.batch_size) == (None, "Is", 32)
        assert settings.model["hidden_size"] == 64 and settings.model["position"] == "rotary"
        assert settings.model["hidden_dropout"] == 0.1
        assert settings.validate_lengths == (80,) and settings.learning_rate_floor == 0.1
        assert asked.corpus.tokenizer.vocab_size == 256


def test_without_a_preset_nothing_of_it_is_left(asked, corpus):
    for name in (["--preset", "annotated"], []):
        run("train", "--corpus", corpus, *name)
    assert asked.settings == TrainSettings(model={"position": "alibi"}, steps=1000)


def test_extrapolate_takes_the_same_setting(asked, corpus):
    run("extrapolate", "--preset", "annotated", "--corpus", corpus, "--methods", "alibi,none")
    settings = asked.settings
    assert settings.methods == ("alibi", "none")
    assert (settings.train_lengths, settings.test_lengths_of(64)) == ((64,), [64, 80])
    assert (settings.corpus, settings.tokenizer) == (str(corpus), "characters")
    preset = PRESETS["annotated"]
    training = TrainSettings(**preset.training, **preset.budget, model=preset.model)
    assert settings.training == training
    assert settings.train_settings_of("none", 64, 0).batch_size == 128
    run("extrapolate", "--preset", "annotated", "--corpus", corpus, "--seconds", 9)
    assert asked.settings.training.budget == {**dict.fromkeys(training.budget), "seconds": 9}


@pytest.mark.parametrize("command", ["train", "extrapolate"])
def test_help_lists_what_the_preset_sets(command):
    shown = " ".join(run(command, "--help", columns=300).stdout.split())
    preset = PRESETS["annotated"]
    names = [*preset.text, *preset.budget, *preset.training, *preset.model]
    assert all(f" {name} " in shown for name in names)
    assert "corpus tiny-shakespeare" in shown and "prompt 'It is '" in shown


def test_one_command_trains_validates_continues_and_says_its_settings(corpus, tmp_path):
    words = [
        *("train", "--preset", "annotated", "--corpus", corpus, *TINY, "-o", tmp_path / "run"),
        *("--epochs", 0.3, "--batch-size", 4, "--threads", 1),
    ]
    done = run(*words)
    assert done.exit_code == 0, done.output
    assert "annotated: corpus " in done.stderr
    for word in ("tokenizer characters", "epochs 0.3", "hidden_size 16", "warmup_steps 40"):
        assert word in done.stderr
    lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    validations = [line["validation"] for line in map(json.loads, lines) if "validation" in line]
    assert len(validations) == 4  # ten in a pass, and the last step's
    for validation in validations:
        assert list(validation["lengths"]) == ["64", "80"]
        assert repr(validation["continuation"]) in done.stderr
        for length, scores in validation["lengths"].items():
            assert f"  {length} tokens: loss {scores['loss']:.3f}, " in done.stderr
            assert f"{scores['trained']:.3f} at token 64" in done.stderr
    assert f"{validations[-1]['lengths']['80']['last']:.3f} at token 80" in done.stderr
    config = load(tmp_path / "run").config
    assert (config.train_length, config.vocab_size) == (64, 4 + len(set(corpus.read_text())))
    again = run(*words, "--json")  # it is finished
    assert json.loads(again.stdout)["validation"] == validations[-1]


def test_what_cannot_be_is_refused_by_the_names_of_options(corpus, tmp_path):
    output = tmp_path / "run"
    for words, message in {
        ("--preset", "annotate"): "--preset: must be one of annotated, got 'annotate'",
        ("--preset", "annotated", "--prompt", "Ä"): "--prompt: must be made of the corpus' char",
        ("--preset", "annotated", "--init", corpus): "--preset: must be left out with --init",
        ("--preset", "annotated", "--task", "masked"): "--validate-lengths: must be left out for",
        ("--validate-lengths", "80,x"): "--validate-lengths: must be whole numbers",
        ("--prompt", "It"): "--prompt: must be left out without validate_steps",
    }.items():
        done = run("train", "--corpus", corpus, *words, "-o", output)
        assert done.exit_code == 2, done.output
        assert message in done.stderr
    assert not output.exists()


@pytest.mark.parametrize("command", ["train", "extrapolate"])
def test_without_a_network_the_error_comes_first_and_names_the_way_out(
    command, tmp_path, monkeypatch, no_network
):
    for module in ("models", "start"):
        monkeypatch.setattr(f"linbias.cli.{module}.TrainSettings", None)
    done = run(command, "--preset", "annotated", "-o", tmp_path / "run")
    assert done.exit_code == 2, done.output
    assert "got 'tiny-shakespeare' (the Hugging Face Hub does not answer" in done.stderr
    assert "--corpus text.txt" in done.stderr
    assert not (tmp_path / "run").exists()
