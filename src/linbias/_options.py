"""Options that several commands share, and the words that they are given as."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for scripts.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Model = Annotated[
    str, typer.Argument(help="A folder that [bold]train[/] made, or a Hugging Face id.")
]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="Folder of the run; the same command continues it.")
]
Corpus = Annotated[
    str,
    typer.Option(
        help="'stdlib' (Python's own source), a text file, folder, glob or Hugging Face data set.",
        rich_help_panel="Text",
    ),
]
MaxBytes = Annotated[
    int | None, typer.Option(help="Read at most so many bytes per split.", rich_help_panel="Text")
]
Tokenizer = Annotated[
    str, typer.Option(help="'bytes', or 'bpe' learned from the text.", rich_help_panel="Text")
]
VocabSize = Annotated[int, typer.Option(help="Tokens of 'bpe'.", rich_help_panel="Text")]
Field = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set a field of the model, e.g. hidden_size=256 or block=parallel. Repeatable.",
        rich_help_panel="Model",
    ),
]


def training_option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Training")


# The budget is one of these three.
Steps = Annotated[int | None, training_option("Train for so many updates of the weights.")]
Tokens = Annotated[int | None, training_option("Or: for so many tokens.")]
Seconds = Annotated[
    float | None, training_option("Or: for about so long (fixed as steps at the start).")
]
BatchSize = Annotated[int, training_option("Sequences per step.")]
LearningRate = Annotated[float, training_option("Peak of the schedule.")]
SaveSteps = Annotated[int, training_option("Steps between checkpoints.")]
Precision = Annotated[str, training_option("'fp32', 'bf16', or on a GPU 'fp16'.")]
Threads = Annotated[int | None, training_option("CPU threads.")]
Tensorboard = Annotated[bool, training_option("Also write a TensorBoard log.", "--tensorboard")]


def budget(
    steps: int | None, tokens: int | None, seconds: float | None, default: int | None
) -> dict[str, Any]:
    """The budget as fields of TrainSettings: `default` steps where none was given."""
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
