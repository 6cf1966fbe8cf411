"""What all commands share: where text goes, how errors end, tables, and the groups' settings."""

import json
import os
import re
import warnings
from collections.abc import Iterable, Sequence
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

_RESUMABLE = ("train", "extrapolate", "embed", "run")


class _Commands(TyperGroup):
    """Commands that end an error with one line and status 2, and Ctrl-C with status 130."""

    def invoke(self, context: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(context)
        except BrokenPipeError:
            raise  # the reader of a pipe went away, which is no error of the command
        except (ValueError, NotImplementedError, OSError, ModuleNotFoundError) as error:
            line = " ".join(str(error).split()) or type(error).__name__
            if isinstance(error, ModuleNotFoundError) and "pip install" not in line:
                line += ": this command needs pip install 'linbias[lm]'"
            line = _by_option(line, self.get_command(context, context.invoked_subcommand or ""))
            err.print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as interrupt:
            err.print(f"\nStopped.{_advice(context.invoked_subcommand, interrupt)}")
            raise typer.Exit(130) from interrupt


def _advice(command: str | None, interrupt: KeyboardInterrupt) -> str:
    """What to do after Ctrl-C. A training says whether it has a checkpoint; the others keep all that was done."""
    if command == "train" and not str(interrupt):
        return " Nothing new was saved: the same command starts again from step 0."
    return " The same command continues from here." if command in _RESUMABLE else ""


def _by_option(line: str, command: Any) -> str:
    """An error of a record of settings, which names class and field, with the option instead.

    `TrainSettings: batch_size must be at least 1` becomes `--batch-size: must be at least 1`, and
    `LinbiasConfig: block must be one of ...` becomes `--set block: must be one of ...`.
    """
    found = re.match(r"[A-Z]\w+: (\w+(?:, \w+)*|\w+ and \w+) must ", line)
    if not found or command is None:
        return line
    options = {parameter.name: parameter.opts[0] for parameter in command.params}
    names = re.split(r", | and ", found[1])
    if "fields" in options:  # --set, which sets any field of the model
        others = {name: f"{options['fields']} {name}" for name in names}
        options = {**others, **options, "model": options["fields"]}
    if "position" in options:
        options["encoder_position"] = options["position"]
    options["train_length"] = options.get("length", options.get("train_lengths", "--length"))
    if not all(name in options for name in names):
        return line
    return f"{', '.join(options[name] for name in names)}: must {line[found.end() :]}"


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """A warning as one line, as errors are."""
    line = " ".join(str(message).split())
    err.print(f"[bold yellow]warning:[/] {escape(line)}", soft_wrap=True)


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
    return progress_bar(task, visible=not quiet, console=err)


# How tables show what evaluations measured: by title, the name of the number and its form.
_COLUMNS = {
    **{"split": ("split", ""), "length": ("length", ","), "context": ("context_window", ",")},
    **{"stride": ("stride", ","), "perplexity": ("perplexity", ",.3f")},
    "bits per byte": ("bits_per_byte", ".4f"),
    **{
        f"bits per\n{kind} token": ("bits_per_hidden_token", ".4f")
        for kind in ("masked", "written")
    },
    **{"accuracy": ("accuracy", ".1%"), "tokens": ("num_tokens", ",")},
    **{"masked": ("num_scored", ","), "scored": ("num_scored", ",")},
    "tokens/s": ("tokens_per_second", ",.0f"),
}


def evaluation_table(
    results: Iterable[Any], *titles: str, slopes: Sequence[str] | None = None
) -> Table:
    """What evaluations measured, a row each.

    Args:
        results: The evaluations.
        titles: The columns to show before tokens per second and memory.
        slopes: For a second column, how the slopes of each evaluation were scaled. With the first it says which row
            is which.
    """
    shown = (*titles, "tokens/s")
    heads = [*shown, "memory"]
    if slopes is None:
        table = NumberTable(*heads)
    else:
        table = NumberTable(heads[0], "slopes", *heads[1:], num_labels=2)
    for number, result in enumerate(results):
        cells = []
        for name, form in (_COLUMNS[title] for title in shown):
            value = getattr(result, name)
            cells.append("-" if value is None else f"{value:{form}}")
        if slopes is not None:
            cells.insert(1, slopes[number])
        table.add_row(*cells, f"{result.peak_memory_bytes / 2**20:,.0f} MiB")
    return table


def is_first_process() -> bool:
    """Whether this process prints results: under torchrun, the first one does."""
    return int(os.environ.get("RANK", "0")) == 0
