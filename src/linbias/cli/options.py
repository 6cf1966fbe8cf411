"""The options that commands have in common, and the conversion of their values.

One thing has one name, in all commands; tests/cli/test_cli_options.py lists them.
"""

import inspect
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from linbias.cli import presets
from linbias.lm.settings import TrainSettings
from linbias.methods import DECODER, ENCODER, methods_of

T = TypeVar("T")


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

# Text
Corpus = Annotated[
    str,
    text_option(
        "'stdlib' (Python's own source), a text file, folder, glob, or Hugging Face data set; "
        "wikitext-2, wikitext-103 and tiny-shakespeare are short names."
    ),
]
MaxBytes = Annotated[int | None, text_option("Read at most this many bytes per split.")]
_TOKENIZERS = "'bytes', 'characters', or 'bpe' learned from the text."
Tokenizer = Annotated[str, text_option(_TOKENIZERS)]
VocabSize = Annotated[int, text_option("Tokens of 'bpe'.")]

# Evaluation
Device = Annotated[
    str, typer.Option(help="'auto' takes a GPU where there is one; or 'cpu', 'cuda:1'.")
]
PrecisionOrOwn = Annotated[
    str | None,
    typer.Option(help="'fp32', 'bf16', or on a GPU 'fp16'. Default: that of the weights."),
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
Init = Annotated[
    Path | None,
    typer.Option(
        help="Go on from the model in this folder; its shape and its tokenizer stay.",
        rich_help_panel="Model",
    ),
]
# With --init, these are the model's.
_DECODER, _ENCODER = (", ".join(methods_of(model)) for model in (DECODER, ENCODER))
PositionOrKept = Annotated[
    str | None,
    typer.Option(
        help=f"One of {_DECODER}. Default: alibi. With --task masked, and for the encoder of "
        f"seq2seq: one of {_ENCODER}. Default: symmetric.",
        rich_help_panel="Model",
    ),
]
TokenizerOrKept = Annotated[str | None, text_option(f"{_TOKENIZERS} Default: bytes.")]
VocabSizeOrKept = Annotated[int | None, text_option("Tokens of 'bpe'. Default: 4096.")]
Methods = Annotated[str, typer.Option(help=f"Any of {_DECODER}.")]

# Whole experiments
Experiment = Annotated[
    str | None,
    typer.Option(
        "--preset",
        callback=presets.apply,
        is_eager=True,
        help="Set a whole experiment; options that are given win. "
        + " ".join(
            f"'{name}' sets {presets.all_in_words(preset)}."
            for name, preset in presets.PRESETS.items()
        ),
    ),
]

# Training
Task = Annotated[
    str,
    training_option(
        "'causal': the next token; 'masked': masked tokens, from those on both sides; 'seq2seq': "
        "spans that were taken out of a text."
    ),
]
LengthOrKept = Annotated[
    int | None, training_option("Tokens per sequence. Default: 128, or as --init was trained.")
]
ValidateLengths = Annotated[
    str | None,
    training_option("Validate at these lengths as well, such as 80,128, with more numbers."),
]
ContinuedPrompt = Annotated[
    str | None,
    training_option("Continue this text after each validation, by 25 tokens.", "--prompt", "-p"),
]
Pieces = Annotated[
    int,
    training_option(
        "Processes that share each sequence, a piece each (torchrun).", "--context-parallel"
    ),
]
Fsdp = Annotated[bool, training_option("Shard the model over processes (torchrun).", "--fsdp")]


# Fields of `TrainSettings` that are options, each with its meaning. The budget is one of the first
# four.
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
    "tensorboard": "Also write a TensorBoard log.",
}


def with_training_fields(
    *without: str, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command that takes `**training` the options of training, but for some.

    Their defaults are those of the settings, or others.
    """
    words = {name: help for name, help in _TRAINING.items() if name not in without}
    values = {name: getattr(TrainSettings, name) for name in words} | defaults
    return lambda command: with_fields(command, TrainSettings, words, values)


def with_fields(
    command: Callable[..., None], record: type, words: dict[str, str], defaults: dict[str, Any]
) -> Callable[..., None]:
    """Put an option for each of these fields of a record in the place of the command's `**`."""
    own = inspect.signature(command, eval_str=True)
    kinds = get_type_hints(record)
    shown = [p for p in own.parameters.values() if p.kind != p.VAR_KEYWORD]
    for name, help in words.items():
        kind = kinds[name] if defaults[name] is not None else kinds[name] | None
        flag = [f"--{name.replace('_', '-')}"] if kind is bool else []
        shown.append(
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults[name],
                annotation=Annotated[kind, training_option(help, *flag)],
            )
        )
    command.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
    return command


def with_budget(training: dict[str, Any], default: dict[str, float | None]) -> dict[str, Any]:
    """The fields of `TrainSettings`, with `default` as their budget where none is given."""
    is_given = any(training[name] is not None for name in ("steps", "tokens", "seconds", "epochs"))
    return training if is_given else {**training, **default}


def given_or(value: T | None, default: T) -> T:
    """The value of an option, or its default where it was not given."""
    return default if value is None else value


def refuse(options: Mapping[str, object], reason: str) -> None:
    """Refuses options that were given, by name, for a reason such as "--stream"."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}: must be left out with {reason}, got {value}")


def read_prompt(prompt: str | None, file: Path | None, *, default: str) -> str:
    """The text of --prompt, of standard input or of --prompt-file, without a last line end."""
    if prompt is not None and file is not None:
        raise ValueError(f"--prompt-file: must be left out with --prompt, got {file}")
    if file is None and prompt != "-":
        return given_or(prompt, default)
    option = "--prompt" if file is None else "--prompt-file"
    try:
        text = (sys.stdin.buffer.read() if file is None else file.read_bytes()).decode()
    except OSError as error:
        raise ValueError(
            f"{option}: must be a file that can be read, got {file} ({error.strerror})"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{option}: must be UTF-8 text, got another byte at {error.start}"
        ) from error
    return text.removesuffix("\n").removesuffix("\r")


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
    return None if words is None else _parse(option, words, int, "whole numbers such as 128,256")


def parse_floats(option: str, words: str) -> tuple[float, ...]:
    """0.5,0.25 as numbers."""
    return _parse(option, words, float, "numbers such as 0.5,0.25")


def _parse(option: str, words: str, kind: Callable[[str], T], rule: str) -> tuple[T, ...]:
    try:
        return tuple(map(kind, words.split(",")))
    except ValueError:
        raise ValueError(f"{option}: must be {rule}, got {words!r}") from None


def parse_slope_scales(words: str | None) -> tuple[float | str | None, ...] | None:
    """none,interpolate,0.5 as values of `slope_scale`."""
    return None if words is None else tuple(map(parse_slope_scale, words.split(",")))


def parse_slope_scale(word: str) -> float | str | None:
    """none, interpolate or a positive number as `slope_scale` of a model."""
    if word in ("none", "interpolate"):
        return None if word == "none" else word
    try:
        scale = float(word)
    except ValueError:
        scale = 0.0
    if not 0.0 < scale < float("inf"):
        raise ValueError(
            f"--slope-scale: must be none, interpolate or a positive number, got {word!r}"
        )
    return scale
