"""The options that commands have in common, and the conversion of their values.

One thing has one name, in all commands; tests/test_cli_options.py lists them.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from linbias.data import SPLITS
from linbias.paper.recipe import PRESETS


def text_option(help: str, *names: str) -> Any:
    """An option in the panel of those that choose a text."""
    return typer.Option(*names, help=help, rich_help_panel="Text")


def training_option(help: str, *names: str) -> Any:
    """An option in the panel of those about training."""
    return typer.Option(*names, help=help, rich_help_panel="Training")


# For every command
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]

# Folders and files
_OUTPUT = ("--output", "-o")
RunFolder = Annotated[
    Path, typer.Option(*_OUTPUT, help="Folder of the run; the same command continues it.")
]
NewFolder = Annotated[Path, typer.Option(*_OUTPUT, help="Folder to make.")]
Model = Annotated[
    str, typer.Argument(help="A folder that [bold]train[/] made, or a Hugging Face id.")
]
PaperData = Annotated[
    Path, typer.Argument(help="Folder that [bold]prepare[/] or the original made.")
]

# Text
Corpus = Annotated[
    str,
    text_option(
        "'stdlib' (Python's own source), a text file, folder, glob or Hugging Face data set."
    ),
]
MaxBytes = Annotated[int | None, text_option("Read at most this many bytes per split.")]
Tokenizer = Annotated[str, text_option("'bytes', or 'bpe' learned from the text.")]
VocabSize = Annotated[int, text_option("Tokens of 'bpe'.")]
Split = Annotated[str, text_option(f"One of {', '.join(SPLITS)}.")]
Workers = Annotated[int, text_option("Processes that read text.")]

# Evaluation
Device = Annotated[
    str, typer.Option(help="'auto' takes a GPU where there is one; or 'cpu', 'cuda:1'.")
]
BatchTokens = Annotated[int, typer.Option(help="Tokens per forward pass.")]
LimitTokens = Annotated[int | None, typer.Option(help="Score at most this many tokens.")]
Stride = Annotated[
    int | None,
    typer.Option(help="Slide a window by this many tokens (1: exact) instead of segments."),
]

# The model
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set a field of the model, e.g. hidden_size=256. Repeatable.",
        rich_help_panel="Model",
    ),
]
_POSITIONS = "alibi, sinusoidal, learned, rotary, t5 or none"
Position = Annotated[str, typer.Option(help=f"{_POSITIONS}.", rich_help_panel="Model")]
PaperPosition = Annotated[
    str, typer.Option(help="alibi, sinusoidal, rotary, t5 or none.", rich_help_panel="Model")
]
CheckpointPosition = Annotated[
    str | None,
    typer.Option(
        help="For a .pt file: alibi, or sinusoidal or none for models of unchanged fairseq.",
        rich_help_panel="Model",
    ),
]

# Training. The budget is one of steps, tokens and seconds.
Steps = Annotated[int | None, training_option("Train for this many updates of the weights.")]
Tokens = Annotated[int | None, training_option("Or: for this many tokens.")]
Seconds = Annotated[
    float | None, training_option("Or: for about this long (becomes steps at the start).")
]
PresetSteps = Annotated[
    int | None,
    training_option("Updates of the weights; warmup and cosine keep their shares."),
]
Preset = Annotated[str, training_option(f"One of {', '.join(PRESETS)}.")]
Length = Annotated[int, training_option("Tokens per sequence.")]
BatchSize = Annotated[int, training_option("Sequences per step.")]
LearningRate = Annotated[float, training_option("Peak of the schedule.")]
SaveSteps = Annotated[int, training_option("Steps between checkpoints.")]
Precision = Annotated[str, training_option("'fp32', 'bf16', or on a GPU 'fp16'.")]
Seed = Annotated[int, training_option("Fixes weights, order of the text and dropout.")]
Threads = Annotated[int | None, training_option("CPU threads.")]
Tensorboard = Annotated[bool, training_option("Also write a TensorBoard log.", "--tensorboard")]
Fsdp = Annotated[bool, training_option("Shard the model over processes (torchrun).", "--fsdp")]


def budget(
    steps: int | None, tokens: int | None, seconds: float | None, default: int | None
) -> dict[str, Any]:
    """The budget as fields of `TrainSettings`: `default` steps where none is given."""
    if steps is tokens is seconds is None:
        steps = default
    return {"steps": steps, "tokens": tokens, "seconds": seconds}


def parse_fields(pairs: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE words as a dictionary: numbers, true, false and null as in JSON, else text."""
    fields = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set: must be NAME=VALUE, got {pair!r}")
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value
    return fields


def parse_numbers(option: str, words: str | None) -> tuple[int, ...] | None:
    """128,256 as numbers."""
    if words is None:
        return None
    try:
        return tuple(int(word) for word in words.split(","))
    except ValueError:
        raise ValueError(
            f"{option}: must be whole numbers such as 128,256, got {words!r}"
        ) from None
