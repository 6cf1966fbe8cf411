"""One thing has one name: the options of all commands, and what each of them means."""

from typing import Any

import pytest
import typer

from linbias import cli

# Every option of every command, and its meaning. An option that is new comes here, with a meaning
# that no other option has: if there is one with the same meaning, use its name.
MEANINGS = {
    "--accumulation": "parts of a batch, computed one after another",
    "--batch-size": "sequences per step of training",
    "--batch-tokens": "tokens per forward pass",
    "--back": "write the original form",
    "--batches-per-step": "batches per step of training",
    "--call": "sizes of a call to choose an implementation for",
    "--clip": "largest norm of the gradient",
    "--context-window": "tokens of earlier blocks that are read again",
    "--corpus": "text to train and test on",
    "--csv": "print the result as CSV",
    "--dataset": "data set that is fetched instead of texts",
    "--device": "where to compute",
    "--dict": "dictionary file",
    "--epochs": "passes over the text to train on",
    "--fsdp": "shard the model",
    "--fuse": "run an existing model fused, which is the default by now",
    "--no-fuse": "run an existing model on Transformers' own attention",
    "--head": "head to show",
    "--init": "model to go on from",
    "--initial-learning-rate": "where the warmup starts",
    "--json": "print the result as JSON",
    "--learning-rate": "peak of the schedule",
    "--length": "tokens that a model reads at a time",
    "--limit-tokens": "most tokens to score or to show",
    "--log-steps": "steps between lines of the log",
    "--max-bytes": "most bytes of text to read",
    "--max-length": "most tokens of a document",
    "--max-new-tokens": "tokens to write",
    "--max-tokens": "most tokens in a batch of training",
    "--methods": "position methods to compare",
    "--min-learning-rate": "floor of the schedule",
    "--momentum": "momentum",
    "--no-open": "open no browser",
    "--normalize": "make vectors of length 1",
    "--nwords": "size of the dictionary of words",
    "--output": "folder or file to write",
    "--period": "steps of the first cosine",
    "--pooling": "what is made of hidden states",
    "--position": "position method of a model",
    "--precision": "number format of matrix products",
    "--preset": "recipe to start from",
    "--prompt": "text to continue",
    "--prompt-file": "file with the text to continue",
    "--query": "query to show",
    "--quiet": "show no progress",
    "--results": "folder of a finished extrapolation",
    "--resume": "file of scores to continue from",
    "--rows-multiple": "multiple of blocks in a batch",
    "--save-steps": "steps between checkpoints",
    "--seconds": "training time",
    "--seed": "seed",
    "--seeds": "seeds of several models",
    "--set": "field of the model",
    "--shrink": "factor on the height of further cosines",
    "--slope": "slopes instead of the schedule's",
    "--slope-scale": "factor on the slopes",
    "--split": "train, valid or test",
    "--steps": "updates of the weights",
    "--stride": "tokens by which a window moves",
    "--symmetric": "show later keys",
    "--t-mult": "factor on the length of further cosines",
    "--task": "what a model learns to predict",
    "--temperature": "divisor of logits",
    "--tensorboard": "write a TensorBoard log",
    "--text": "one text for a model to read",
    "--test": "text file to test on",
    "--test-lengths": "lengths to test at",
    "--threads": "CPU threads",
    "--threshold": "least count of a word",
    "--tokenizer": "kind of tokenizer",
    "--tokens": "tokens to train on",
    "--top-k": "tokens to sample among",
    "--train": "text file to train on",
    "--train-length": "length that the model was trained at",
    "--train-lengths": "lengths to train at",
    "--valid": "text file to validate on",
    "--validate-lengths": "further lengths to validate at",
    "--validate-steps": "steps between validations",
    "--version": "version",
    "--vocab-size": "tokens of byte pair encoding",
    "--warmup-steps": "steps that raise the learning rate",
    "--weight-decay": "share of a weight that a step takes away",
    "--workers": "processes that read text",
}
# Words for the same thing, of which the options use at most one.
SYNONYMS = [
    {"output", "out", "folder", "dir", "directory", "dest"},
    {"split", "subset", "part"},
    {"steps", "updates", "update", "iterations", "every", "interval"},
    {"limit", "eval", "only"},
    {"rate", "lr"},
    {"json", "as-json"},
    {"quiet", "silent", "progress", "verbose"},
    {"corpus", "input"},
    {"length", "block", "sequence"},
    {"position", "encoding"},
    {"precision", "dtype"},
    {"workers", "jobs", "processes"},
    {"valid", "validation", "dev"},
    {"dict", "dictionary"},
    {"checkpoint", "model"},
]
SHORT = {
    "--output": "-o",
    "--quiet": "-q",
    "--prompt": "-p",
    "--max-new-tokens": "-n",
}


def commands(command: Any, path: str = "linbias") -> list[tuple[str, Any]]:
    children = getattr(command, "commands", {}).items()
    found = [commands(child, f"{path} {name}") for name, child in children]
    return [(path, command), *(pair for pairs in found for pair in pairs)]


COMMANDS = commands(typer.main.get_command(cli.app))


def options_of(command: Any) -> list[Any]:
    return [p for p in command.params if p.opts[0].startswith("-") and p.name != "help"]


def test_there_are_all_commands():
    assert {path.removeprefix("linbias ") for path, _ in COMMANDS} >= {
        *(
            "explain",
            "explore",
            "extrapolate",
            "doctor",
            "train",
            "evaluate",
            "generate",
            "embed",
            "convert",
        ),
        *(f"paper {name}" for name in ("prepare", "train", "convert", "evaluate", "run")),
    }


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[path for path, _ in COMMANDS])
def test_every_option_is_known_by_one_name(path, command):
    for option in options_of(command):
        (name,) = (word for word in option.opts if word.startswith("--"))
        assert not option.secondary_opts  # no --no-quiet
        assert name in MEANINGS, f"{path} {name}: give it a meaning that no other option has"
        short = [word for word in option.opts if not word.startswith("--")]
        assert short == [SHORT[name]] if name in SHORT else not short


def test_no_two_options_mean_the_same():
    assert len(set(MEANINGS.values())) == len(MEANINGS)
    used = {
        word
        for _, command in COMMANDS
        for option in options_of(command)
        for name in option.opts
        for word in (name[2:], *name[2:].split("-"))
        if name.startswith("--")
    }
    for synonyms in SYNONYMS:
        assert len(used & synonyms) <= 1, f"two spellings of one thing: {used & synonyms}"


def test_the_list_of_meanings_has_no_option_that_is_gone():
    names = {name for _, c in COMMANDS for option in options_of(c) for name in option.opts}
    assert set(MEANINGS) <= names
