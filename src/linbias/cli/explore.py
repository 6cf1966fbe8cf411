"""The command that opens the explorer's page."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from linbias.cli.console import err, print_path


def explore(
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path(
        "output/explore.html"
    ),
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Write the page and open no browser.")
    ] = False,
) -> None:
    """Open a page to see and change what the bias does, in one file that needs no network.

    \b
    [dim]linbias explore[/]
    [dim]linbias explore --no-open -o explore.html[/]
    """
    from linbias.explore import page
    from linbias.runs.files import write_whole

    if output.is_dir():
        raise ValueError(f"explore: --output must be a file, got the folder {output}")
    content = page().encode()
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, content)
    print_path("page:", output)
    if not no_open and not webbrowser.open(output.resolve().as_uri()):
        err.print("There is no browser here: open the page in one by hand.")
