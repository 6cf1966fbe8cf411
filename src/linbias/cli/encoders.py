"""The commands for existing encoders: embed, convert."""

from pathlib import Path
from typing import Annotated

import typer

from linbias._run.neighbours import considerate
from linbias.cli import options
from linbias.cli.console import bar, out, print_json, print_path
from linbias.cli.options import option

_ENCODERS = "Folder of jina-embeddings-v2, MosaicBERT or DNABERT-2"
_FILES = (
    'Text files, folders or globs; a document per file; .jsonl files with a "text" (and "id") '
    "per line; '-' for JSON lines from standard input."
)
_SPANS = (
    "Also a vector for each passage, which has seen the whole document: 'sentences', or a number "
    "of tokens."
)


@considerate()
def embed(
    model: Annotated[str, typer.Argument(help=f"{_ENCODERS}, or one that [bold]convert[/] made.")],
    files: Annotated[list[str], typer.Argument(help=_FILES)],
    output: Annotated[Path, option("File to make: .npy, .jsonl or .parquet.", "--output", "-o")],
    pooling: Annotated[str, option("'mean' of all tokens, or 'cls', the first one.")] = "mean",
    normalize: Annotated[bool, option("Make vectors of length 1.", "--normalize")] = False,
    spans: Annotated[str | None, option(_SPANS)] = None,
    max_length: Annotated[
        int | None, option("Read at most this many tokens of a document. Default: all.")
    ] = None,
    slope_scale: Annotated[
        str | None,
        option("none, 'interpolate' or a factor on the slopes. Default: as the model says."),
    ] = None,
    batch_tokens: options.BatchTokens = 16384,
    device: options.Device = "auto",
    precision: options.PrecisionOrOwn = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Turn long documents into vectors, each read whole. The same command continues a stopped run.

    Beside a .npy file, .ids.json names its rows; beside a .jsonl file, .settings.json says how it
    was made. Rows of the other formats hold id, num_tokens and vector of each document, in order.
    With --spans they hold spans (first character, one past the last) and span_vectors; beside a
    .npy file, .ids.json and .spans.npy do.

    \b
    [dim]linbias embed jina-embeddings-v2-base-en book.txt letters/*.txt -o vectors.npy[/]
    [dim]linbias embed jina documents.jsonl -o vectors.parquet --normalize[/]
    [dim]linbias embed jina book.txt -o vectors.parquet --spans sentences[/]
    [dim]cat documents.jsonl | linbias embed jina - -o vectors.jsonl[/]
    """
    from linbias._run.processes import choose_device
    from linbias.models import embed as run
    from linbias.models.embedding.documents import read_documents

    changes = {}
    if slope_scale is not None:
        changes["slope_scale"] = options.parse_slope_scale(slope_scale)
    documents, is_finished = read_documents(files), output.exists()
    with bar(f"embedding {len(documents):,} documents", quiet) as advance:
        result = run(
            model,
            documents,
            output,
            pooling=pooling,
            normalize=normalize,
            spans=int(spans) if spans is not None and spans.isdecimal() else spans,
            max_length=max_length,
            batch_tokens=batch_tokens,
            device=choose_device("embed", device),
            precision=precision,
            progress=advance,
            **changes,
        )
    num_tokens, size = sum(result.num_tokens), result.vectors.shape[1]
    num_spans = sum(map(len, result.spans))
    if as_json:
        counts = {"size": size, "num_tokens": num_tokens, "num_shortened": result.num_shortened}
        counts |= {} if spans is None else {"num_spans": num_spans}
        made = {"model": model, "output": str(output), "documents": len(documents)}
        return print_json({**made, **counts})
    shortened = "" if max_length is None else f", {result.num_shortened:,} shortened"
    passages = "" if spans is None else f", {num_spans:,} passages"
    out.print(
        f"{len(documents):,} documents, {num_tokens:,} tokens, the longest "
        f"{max(result.num_tokens):,}{shortened}{passages}; {size:,} numbers each",
        soft_wrap=True,
    )
    print_path("finished before: vectors in" if is_finished else "vectors in", output)


def convert(
    folder: Annotated[Path, typer.Argument(help=f"{_ENCODERS}.")],
    output: options.NewFolder,
    back: Annotated[
        bool, option("Write the form that the original code reads.", "--back")
    ] = False,
) -> None:
    """Turn an existing ALiBi encoder into a folder that Transformers loads without remote code.

    After [bold]import linbias.models[/] the Auto classes load it, SentenceTransformer those of
    jina.

    \b
    [dim]linbias convert jina-embeddings-v2-base-en -o jina[/]
    [dim]linbias convert jina -o original --back[/]
    """
    from linbias.models import convert as run

    run(folder, output, back=back)
    print_path("model in", output)
