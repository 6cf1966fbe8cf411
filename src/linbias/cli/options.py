"""The options that commands have in common, and the conversion of their values.

One thing has one name, in all commands; tests/cli/test_cli_options.py refuses two.
"""

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from linbias.lm.settings import TrainSettings
from linbias.methods import DECODER, ENCODER, methods_of

T = TypeVar("T")
Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def option(help: str, *names: str, panel: str | None = None, **more: Any) -> Any:
    """An option by its help and, where they do not follow from the parameter, its names."""
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


text_option = partial(option, panel="Text")
model_option = partial(option, panel="Model")
training_option = partial(option, panel="Training")

# For every command
Json = Annotated[bool, option("Print the result as JSON, for scripts.", "--json")]
Quiet = Annotated[bool, option("Show no progress.", "--quiet", "-q")]

# Folders and files
_OUTPUT = ("--output", "-o")
RunFolder = Annotated[Path, option("Folder of the run; the same command continues it.", *_OUTPUT)]
NewFolder = Annotated[Path, option("Folder to make.", *_OUTPUT)]
Model = Annotated[
    str, typer.Argument(help="A folder that [bold]train[/] made, or a Hugging Face id.")
]

# Text
Corpus = Annotated[
    str,
    text_option(
        "'stdlib' (Python's own source), a text file, folder, or Hugging Face data set; "
        "wikitext-2, wikitext-103 and tiny-shakespeare are short names."
    ),
]
MaxBytes = Annotated[int | None, text_option("Read at most this many bytes per split.")]
_TOKENIZERS = "'bytes', or 'bpe' learned from the text."
Tokenizer = Annotated[str, text_option(_TOKENIZERS)]
VocabSize = Annotated[int, text_option("Tokens of 'bpe'.")]

# Evaluation
Device = Annotated[str, option("'auto' takes a GPU where there is one; or 'cpu', 'cuda:1'.")]
BatchTokens = Annotated[int, option("Tokens per forward pass.")]
LimitTokens = Annotated[int | None, option("Score at most this many tokens.")]
Stride = Annotated[
    int | None, option("Slide a window by this many tokens (1: exact) instead of segments.")
]

# The model
_FIELDS = "Set a field of the model, e.g. hidden_size=256. Repeatable."
Fields = Annotated[list[str] | None, model_option(_FIELDS, "--set", metavar="NAME=VALUE")]
Init = Annotated[
    Path | None,
    model_option("Go on from the model in this folder; its shape and its tokenizer stay."),
]
# With --init, these are the model's.
_DECODER, _ENCODER = (", ".join(methods_of(model)) for model in (DECODER, ENCODER))
PositionOrKept = Annotated[
    str | None,
    model_option(
        f"One of {_DECODER}. Default: alibi. With --task masked: one of {_ENCODER}. Default: "
        "symmetric."
    ),
]
TokenizerOrKept = Annotated[str | None, text_option(f"{_TOKENIZERS} Default: bytes.")]
VocabSizeOrKept = Annotated[int | None, text_option("Tokens of 'bpe'. Default: 4096.")]
Methods = Annotated[str, option(f"Any of {_DECODER}.")]

# Training
Task = Annotated[
    str,
    training_option(
        "'causal': the next token; 'masked': masked tokens, from those on both sides."
    ),
]
LengthOrKept = Annotated[
    int | None, training_option("Tokens per sequence. Default: 128, or as --init was trained.")
]
_SHARDS = "Processes that read each sequence together, a shard each (torchrun)."
Shards = Annotated[int, training_option(_SHARDS, "--context-parallel")]
Fsdp = Annotated[bool, training_option("Shard the model over processes (torchrun).", "--fsdp")]

# Fields of `TrainSettings` that are options, and what they are. The first four are budgets.
_TRAINING = {
    "steps": "Train for this many updates of the weights.",
    "tokens": "Or: for this many tokens.",
    "seconds": "Or: for about this long (becomes steps at the start).",
    "epochs": "Or: for this many passes over the text, such as 0.5.",
    "batch_size": "Sequences per step.",
    "accumulation": "Parts of a batch computed one after another.",
    "learning_rate": "Peak of the schedule.",
    "precision": "'fp32', 'bf16', or on a GPU 'fp16'.",
    "save_steps": "Steps between checkpoints.",
    "validate_steps": "Steps between validations; below 1 a share of an epoch; 0: none.",
    "seed": "Fixes weights, order of the text and dropout.",
    "threads": "CPU threads.",
}


def with_training_fields(*without: str, **defaults: Any) -> Decorator:
    """Give a command that takes `**training` the options of training, but for some."""
    words = {name: help for name, help in _TRAINING.items() if name not in without}
    values = {name: getattr(TrainSettings, name) for name in words} | defaults
    return with_fields(TrainSettings, words, values)


def with_fields(record: type, words: dict[str, str], defaults: dict[str, Any]) -> Decorator:
    """Put an option for each of these fields of a record in the place of a command's `**`."""
    kinds = get_type_hints(record)

    def with_options(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        shown = [p for p in own.parameters.values() if p.kind != p.VAR_KEYWORD]
        for name, help in words.items():
            default = defaults[name]
            kind = kinds[name] if default is not None else kinds[name] | None
            flag = [f"--{name.replace('_', '-')}"] if kind is bool else []
            annotation: Any = Annotated[kind, training_option(help, *flag)]
            keyword = inspect.Parameter.KEYWORD_ONLY
            shown.append(inspect.Parameter(name, keyword, default=default, annotation=annotation))
        command.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
        return command

    return with_options


def with_budget(training: dict[str, Any], steps: int | None) -> dict[str, Any]:
    """The fields of `TrainSettings`, with so many steps as their budget where none is given."""
    is_given = any(training[name] is not None for name in ("steps", "tokens", "seconds", "epochs"))
    return training if is_given else {**training, "steps": steps}


def given_or(value: T | None, default: T) -> T:
    """The value of an option, or its default where it was not given."""
    return default if value is None else value


def refuse(options: Mapping[str, object], reason: str) -> None:
    """Refuses options that were given, by name, for a reason such as "--stream"."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}: must be left out with {reason}, got {value}")


def read_prompt(prompt: str | None, *, default: str) -> str:
    """The text of --prompt, or of standard input without a last line end."""
    if prompt != "-":
        return given_or(prompt, default)
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--prompt: must be UTF-8 text, got another byte at {error.start}"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


def parse_fields(pairs: list[str] | None) -> dict[str, Any]:
    """NAME=VALUE words as a dictionary, of values as in JSON or else text."""
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


def parse_numbers(option: str, words: str | None, kind: Any = int) -> Any:
    """128,256 or, of the kind float, 0.5,0.25 as numbers."""
    try:
        return None if words is None else tuple(map(kind, words.split(",")))
    except ValueError:
        rule = "whole numbers such as 128,256" if kind is int else "numbers such as 0.5,0.25"
        raise ValueError(f"{option}: must be {rule}, got {words!r}") from None
