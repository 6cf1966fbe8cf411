"""The command line: `linbias`, or `python -m linbias`.

A command checks and computes nothing: it turns words into a call, and the result into text on
standard output; all else goes to standard error. Heavy imports are inside the commands.
"""

from typing import Annotated

import typer

from linbias.cli import models, paper, start, streams
from linbias.cli.console import new_group, out

# To add a command, write a function and its line here. An option that another command has keeps
# its name (`options.py`; tests/cli/test_cli_options.py refuses two). tests/cli/test_cli.py lists
# errors. `[` in a help text is markup: write `\\[`.
app = new_group()
for name, panel, command in (
    ("explain", "Start here", start.explain),
    ("slopes", "Start here", start.slopes),
    ("explore", "Start here", start.explore),
    ("extrapolate", "Start here", start.extrapolate),
    ("doctor", "Start here", start.doctor),
    ("train", "Models", models.train),
    ("evaluate", "Models", models.evaluate),
    ("generate", "Models", models.generate),
    ("reach", "Models", streams.reach),
    ("convert", "Models", models.convert),
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
