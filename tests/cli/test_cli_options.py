"""One thing has one name: the options of all commands."""

from typing import Any

import pytest
import typer

from linbias import cli

# Every option of every command. A new one that means what another one means takes its name.
NAMES = """
    accumulation batch-size batch-tokens batches-per-step call causal clip
    context-parallel context-window corpus dataset device dict epochs fsdp head init
    initial-learning-rate json learning-rate length limit-tokens log-steps max-bytes
    max-new-tokens max-tokens methods min-learning-rate momentum no-open
    nwords output period position precision preset prompt
    query quiet results rows-multiple save-steps schedule seconds seed seeds set shrink
    slope split steps stream stride symmetric t-mult task temperature
    text test test-lengths threads threshold tokenizer tokens tolerance top-k train
    train-lengths valid validate-steps version vocab-size warmup-steps
    weight-decay
""".split()
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
SHORT = {"--output": "-o", "--quiet": "-q", "--prompt": "-p", "--max-new-tokens": "-n"}


def commands(command: Any, path: str = "linbias") -> list[tuple[str, Any]]:
    children = getattr(command, "commands", {}).items()
    found = [commands(child, f"{path} {name}") for name, child in children]
    return [(path, command), *(pair for pairs in found for pair in pairs)]


COMMANDS = commands(typer.main.get_command(cli.app))


def options_of(command: Any) -> list[Any]:
    return [p for p in command.params if p.opts[0].startswith("-") and p.name != "help"]


every_command = pytest.mark.parametrize(
    ("path", "command"), COMMANDS, ids=[path for path, _ in COMMANDS]
)


def test_there_are_all_commands():
    names = "explain explore extrapolate doctor train evaluate generate convert".split()
    names += [f"paper {name}" for name in ("prepare", "train", "convert", "evaluate", "run")]
    assert {path.removeprefix("linbias ") for path, _ in COMMANDS} >= {*names}


@every_command
def test_every_option_has_one_spelling(path, command):
    for option in options_of(command):
        (name,) = (word for word in option.opts if word.startswith("--"))
        assert not option.secondary_opts  # no --no-quiet
        short = [word for word in option.opts if not word.startswith("--")]
        assert short == [SHORT[name]] if name in SHORT else not short


def test_no_two_options_mean_the_same():
    options = [option for _, command in COMMANDS for option in options_of(command)]
    used = {name[2:] for option in options for name in option.opts if name.startswith("--")}
    assert used == set(NAMES), "an option is new or gone: does another one mean the same?"
    words = used | {word for name in used for word in name.split("-")}
    for synonyms in SYNONYMS:
        assert len(words & synonyms) <= 1, f"two spellings of one thing: {words & synonyms}"
