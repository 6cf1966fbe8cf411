"""The command line: `linbias`, or `python -m linbias`.

A command checks and computes nothing: it turns words into a call, and the result into text.
Results go to standard output, progress and errors to standard error. Heavy imports are inside
the commands, so that `linbias --help` is quick.

To add a command: a function in a module of this folder, and its line below. Everything that can be
wrong is refused before work starts. An option that another command has keeps its name (`options.py`);
a new one is listed in tests/cli/test_cli_options.py. tests/cli/test_cli.py asks what it prints,
`--json`, and each error. `[` in a help text is markup: write `\\[`.

    console   what commands share: output, errors, progress, tables
    options   the options that they have in common
    presets   whole experiments, by name
"""

from typing import Annotated

import typer

from linbias.cli import biases, encoders, explore, models, start, streams
from linbias.cli.console import new_group, out
from linbias.paper import command as paper

app = new_group()
for name, panel, command in (
    ("explain", "Start here", start.explain),
    ("slopes", "Start here", biases.slopes),
    ("bias", "Start here", biases.bias),
    ("explore", "Start here", explore.explore),
    ("extrapolate", "Start here", start.extrapolate),
    ("doctor", "Start here", start.doctor),
    ("train", "Models", models.train),
    ("evaluate", "Models", models.evaluate),
    ("generate", "Models", models.generate),
    ("windows", "Models", streams.windows),
    ("embed", "Models", encoders.embed),
    ("convert", "Models", encoders.convert),
):
    app.command(name, rich_help_panel=panel)(command)
app.add_typer(paper.app, name="paper", rich_help_panel="The paper")


def main() -> None:
    """Runs the command line."""
    app(prog_name="linbias")


def _print_version(wanted: bool) -> None:
    if wanted:
        from linbias import __version__

        out.print(__version__)
        raise typer.Exit


@app.callback()
def _linbias(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Attention with linear biases (ALiBi): train short, test long.

    New here? [bold cyan]linbias explore[/] shows the idea on five words to click and change,
    [bold cyan]linbias explain[/] as numbers, and [bold cyan]linbias extrapolate[/] the paper's
    result on real text, within minutes.
    """
