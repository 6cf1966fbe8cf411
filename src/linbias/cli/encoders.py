"""The commands for existing encoders: convert."""

from pathlib import Path
from typing import Annotated

import typer

from linbias.cli.console import print_path
from linbias.cli.options import NewFolder


def convert(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of jina-embeddings-v2, MosaicBERT or DNABERT-2."),
    ],
    output: NewFolder,
    back: Annotated[
        bool, typer.Option("--back", help="Write the form that the original code reads.")
    ] = False,
) -> None:
    """Turn an existing ALiBi encoder into a folder that Transformers loads without remote code.

    After [bold]import linbias.transformers[/] the Auto classes load it, and SentenceTransformer those of jina.

    \b
    [dim]linbias convert jina-embeddings-v2-base-en -o jina[/]
    [dim]linbias convert jina -o original --back[/]
    """
    from linbias.transformers import convert as run

    run(folder, output, back=back)
    print_path("model in", output)
