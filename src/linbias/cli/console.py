"""What all commands share: where text goes, how errors end, tables, and the groups' settings."""

import json
import os
import re
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from linbias._run.progress import Advance, progress_bar
from linbias.cli.tables import NumberTable

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

_RESUMABLE = ("train", "extrapolate", "run")
# Commands and options that went, and what to use.
_GONE = {
    "bias": "linbias.bias gives the matrices, linbias slopes says how far heads see",
    "--back": "a fine-tuned encoder stays a folder of Transformers",
    "--tensorboard": "history.jsonl in the run's folder has the loss as it went",
    "--no-fuse": "linbias.models.unfuse undoes it, linbias.lm.evaluate scores any model",
    "--prompt-file": "--prompt - reads standard input",
    "--chunk": "linbias.lm.StreamScorer has it",
    "--max-bias": "linbias.slopes has it",
    "--slope-scale": "linbias.models.load(folder, slope_scale=2) has it, for linbias.lm.evaluate",
    "--precision": "linbias.models.load(folder, dtype=...) has it, for linbias.lm.evaluate",
    "--resume": "a run goes on where the same command is given again; scores are made at once",
    "--csv": "--json prints the same numbers",
    "embed": "linbias.models.embed does it, examples/embed_many.py for a corpus",
    "windows": "linbias reach prints how far heads see",
    "translate": "docs/paper.md has a table of the original's flags and ours",
}

# Arguments of commands, and what the functions behind them call the same in their errors.
_ALSO_CALLED = {
    "data": ("folder",),
    "model": ("path", "folder"),
    "checkpoint": ("path",),
    "folder": ("path",),
    "corpus": ("name",),
    "heads": ("num_heads",),
    "position": ("encoder_position",),
    "length": ("train_length",),
    "train_lengths": ("train_length",),
    "fields": ("model",),
}
# Functions that read what one argument of a command names: all of their errors are about it.
_READERS = {
    **dict.fromkeys(("load_corpus", "read_text", "stream_text"), "corpus"),
    **dict.fromkeys(("read_data", "read_ids"), "data"),
}


class _Commands(TyperGroup):
    """Commands that end an error with one line and status 2, and Ctrl-C with status 130."""

    def resolve_command(self, context: Any, args: list[str]) -> Any:
        command: Any = self.get_command(context, args[0])
        words = [] if hasattr(command, "commands") else args[1:]  # whose own group looks at them
        known = {name for parameter in getattr(command, "params", ()) for name in parameter.opts}
        for word in [*args[:1], *({word for word in words if word[:2] == "--"} - known)]:
            if word in _GONE and self.get_command(context, word) is None:
                context.fail(f"There is no {word}: {_GONE[word]}.")
        return super().resolve_command(context, args)

    def invoke(self, context: Any) -> Any:
        def as_typed(line: object) -> str:
            name = context.invoked_subcommand or ""
            return _as_typed(" ".join(str(line).split()), self.get_command(context, name))

        def show_warning(message: Warning | str, *_: object, **__: object) -> None:
            err.print(f"[bold yellow]warning:[/] {escape(as_typed(message))}", soft_wrap=True)

        try:
            with warnings.catch_warnings():
                warnings.showwarning = show_warning
                return super().invoke(context)
        except BrokenPipeError:
            raise  # the reader of a pipe went away, which is no error of the command
        except (ValueError, NotImplementedError, OSError, ModuleNotFoundError) as error:
            line = as_typed(error) or type(error).__name__
            if isinstance(error, ModuleNotFoundError) and "pip install" not in line:
                line += ": this command needs pip install 'linbias[lm]'"
            err.print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as interrupt:
            err.print(f"\nStopped.{_advice(context.invoked_subcommand, interrupt)}")
            raise typer.Exit(130) from interrupt


def _advice(command: str | None, interrupt: KeyboardInterrupt) -> str:
    """What to do after Ctrl-C: a training says whether it has a checkpoint, others keep all."""
    if command == "train" and not str(interrupt):
        return " Nothing new was saved: the same command starts again from step 0."
    return " The same command continues from here." if command in _RESUMABLE else ""


def _as_typed(line: str, command: Any) -> str:
    """An error or a warning in terms of the command line: `generate: path must be` becomes `MODEL:
    must be`, `LinbiasConfig: block must be` becomes `--set block: must be`.
    """
    start = re.match(r"([A-Za-z_][\w.]*): (?=\S)", line)
    if not start or command is None:
        return line
    caller, rest = start[1], line[start.end() :]
    typed = {}
    for parameter in command.params:
        option = parameter.opts[0]
        typed[parameter.name] = option if option[0] == "-" else parameter.name.upper()
    for name, others in _ALSO_CALLED.items():
        if name in typed:
            typed = {**dict.fromkeys(others, typed[name]), **typed}
    argument = re.match(r"(\w+(?:, \w+)*|\w+ and \w+)( '[^']*')? must ", rest)
    if argument and "." not in caller:
        names = re.split(r", | and ", argument[1])
        if "fields" in typed and caller.endswith("Config"):  # --set sets any field of the model
            typed = {**{name: f"{typed['fields']} {name}" for name in names}, **typed}
        if all(name in typed for name in names):
            options = ", ".join(typed[name] for name in names)
            return f"{options}:{argument[2] or ''} must {rest[argument.end() :]}"
    return f"{typed.get(_READERS.get(caller, ''), command.name)}: {rest}"


def new_group() -> typer.Typer:
    """A group of commands with the settings that all groups share."""
    return typer.Typer(
        cls=_Commands,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_show_locals=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def print_json(value: Any) -> None:
    """Prints a result for scripts, on one line."""
    print(json.dumps(value))


def print_path(words: str, path: Path) -> None:
    """Prints where a result is, on one line however long the path is."""
    out.print(f"{words} [bold]{escape(str(path))}[/]", soft_wrap=True)


def bar(task: str, quiet: bool) -> AbstractContextManager[Advance]:
    """A progress bar on standard error."""
    return progress_bar(task, visible=not quiet)


# How tables show what evaluations measured: by title, the name of the number and its form.
_COLUMNS = {
    "split": ("split", ""),
    "length": ("length", ","),
    "context": ("context_window", ","),
    "stride": ("stride", ","),
    "perplexity": ("perplexity", ",.3f"),
    "bits per byte": ("bits_per_byte", ".4f"),
    "bits per\nmasked token": ("bits_per_hidden_token", ".4f"),
    "accuracy": ("accuracy", ".1%"),
    "tokens": ("num_tokens", ","),
    "masked": ("num_scored", ","),
    "tokens/s": ("tokens_per_second", ",.0f"),
}


def evaluation_table(results: Iterable[Any], *titles: str) -> Table:
    """What evaluations measured, a row each."""
    shown = (*titles, "tokens/s")
    table = NumberTable(*shown, "memory")
    for result in results:
        cells = []
        for name, form in (_COLUMNS[title] for title in shown):
            value = getattr(result, name)
            cells.append("-" if value is None else f"{value:{form}}")
        table.add_row(*cells, f"{result.peak_memory_bytes / 2**20:,.0f} MiB")
    return table


def training_in_words(metrics: Any) -> str:
    """What a training took, but for its losses."""
    return (
        f"{metrics.num_parameters / 1e6:.2f} M parameters, {metrics.steps:,} steps, "
        f"{metrics.tokens / 1e6:.2f} M tokens in {metrics.seconds:.0f} s "
        f"({metrics.tokens_per_second:,.0f} tokens/s)"
    )


def is_first_process() -> bool:
    """Whether this process prints results: under torchrun, the first one does."""
    return int(os.environ.get("RANK", "0")) == 0
