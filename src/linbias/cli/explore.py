"""The command that opens the explorer's page."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from linbias._run.neighbours import considerate
from linbias.cli.console import err, print_path


@considerate()
def explore(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Also show what this model makes of --text: a folder that [bold]train[/] made, a run of "
            "[bold]extrapolate[/] or a model in one, with those of the other methods beside it, or a Hugging Face id."
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="The text file that MODEL reads.")] = None,
    limit_tokens: Annotated[
        int, typer.Option(help="Show MODEL on at most this many tokens, up to 1,024.")
    ] = 256,
    results: Annotated[
        list[Path] | None,
        typer.Option(
            help="Show the run of [bold]extrapolate[/] in this folder instead of the README's. Repeatable."
        ),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path(
        "output/explore.html"
    ),
    no_open: Annotated[
        bool, typer.Option("--no-open", help="Write the page and open no browser.")
    ] = False,
) -> None:
    """Open a page to see and change what the bias does, in one file that needs no network.

    Nothing is sent anywhere: what a model makes of a text stays in the file.

    \b
    [dim]linbias explore[/]
    [dim]linbias explore --results output/extrapolate[/]
    [dim]linbias explore output/train --text README.md[/]
    [dim]linbias explore output/extrapolate --text README.md[/]
    [dim]linbias explore --no-open -o explore.html[/]
    """
    from linbias._run.files import write_whole
    from linbias.explore import page, read_model, read_results

    if output.is_dir():
        raise ValueError(f"explore: --output must be a file, got the folder {output}")
    if (model is None) != (text is None):
        raise ValueError(
            f"explore: MODEL and --text must come together, got {model or text} alone"
        )
    shown = None
    if model is not None and text is not None:
        shown = read_model(model, text, limit_tokens=limit_tokens)
        if not results and Path(model, "results.json").is_file():
            results = [Path(model)]  # of the run that MODEL is
    content = page(results=read_results(results) if results else None, model=shown).encode()
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, content)
    print_path("page:", output)
    if not no_open and not webbrowser.open(output.resolve().as_uri()):
        err.print("There is no browser here: open the page in one by hand.")
