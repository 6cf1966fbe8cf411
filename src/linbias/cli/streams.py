"""The commands about endless streams: windows, and what --stream makes of evaluate and generate."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.markup import escape

from linbias.cli import options
from linbias.cli.console import bar, err, out, print_json, print_path
from linbias.schedules import written

if TYPE_CHECKING:
    from linbias.lm.streaming import StreamEvaluation, StreamScorer
    from linbias.models.loading import Files
    from linbias.models.window_cache.reach import Reach

_MOST_HEADS = 12  # a column each, up to here
_PLOTS = (".svg", ".png")


def windows(
    model: options.Model,
    tolerance: Annotated[
        float, typer.Option(help="Share of a row's weight that keys beyond the window may hold.")
    ] = 2.0**-24,
    corpus: Annotated[
        str | None,
        options.text_option("A text to read as well, as for evaluate: what its rows need."),
    ] = None,
    limit_tokens: options.LimitTokens = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the windows into this file, such as windows.svg.")
    ] = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Print how many of the nearest keys each head of a model can need, whatever the text: from its weights alone.

    With --corpus, also how many a cache keeps that follows the text, of which it reads 32,768 tokens unless
    --limit-tokens says otherwise.

    \b
    [dim]linbias windows output/train[/]
    [dim]linbias windows output/train --corpus book.txt --plot windows.svg[/]
    [dim]linbias windows bigscience/bloom-560m --tolerance 1e-4[/]
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"--tolerance: must be in (0, 1), got {tolerance}")
    if plot is not None and plot.suffix not in _PLOTS:
        raise ValueError(f"--plot: must end in {' or '.join(_PLOTS)}, got {plot}")
    from linbias.lm.checkpoints import readable_model
    from linbias.models.loading import Files, load
    from linbias.models.window_cache.reach import reach_of_weights

    files = Files.at("windows", readable_model("windows", model))
    loaded = load(files)
    found = reach_of_weights(loaded)
    needed = found.of_heads(tolerance)
    kept, scorer = None, None
    if corpus is not None:
        from linbias.lm import StreamScorer
        from linbias.models.window_cache.cache import WindowCache

        cache = WindowCache.for_model(loaded, max(tolerance, _finest(loaded)), weights=found)
        scorer = StreamScorer(loaded, cache=cache)
        kept = np.array(cache.windows)
        for _ in _read(
            scorer, files, corpus, None, 32_768 if limit_tokens is None else limit_tokens, quiet
        ):
            kept = np.maximum(kept, cache.windows)
        scorer.result()  # refuses a text that is too short
    if plot is not None:
        _draw(plot, needed, kept, found)
    if as_json:
        numbers = {"windows": needed, "lead": found.lead, "slopes": found.slopes}
        lists = {
            name: [[x if math.isfinite(x) else None for x in row] for row in array.tolist()]
            for name, array in numbers.items()
        }
        record = {"model": model, "tolerance": tolerance, **lists, "why_not": found.why_not}
        if scorer is not None and kept is not None:
            read = {"num_tokens": scorer.num_read, "kept": kept.tolist()}
            record |= {"corpus": corpus, **read, "uncertified": scorer.cache.uncertified}
        return print_json(record)
    heads = [f"head {head}\n{written(slope)}" for head, slope in enumerate(found.slopes[0])]
    same = (found.slopes == found.slopes[0]).all()
    _print_table(needed, heads if same else None, "Keys that a head can need, whatever the text")
    for layer, reason in found.why_not.items():
        out.print(f"Layer {layer} has no window: {reason}.")
    out.print(escape(_in_words(needed, tolerance)), soft_wrap=True)
    if scorer is None or kept is None:
        return
    if kept.shape != needed.shape:
        heads = [f"key/value\nhead {head}" for head in range(kept.shape[1])]
    _print_table(
        kept,
        heads if same else None,
        f"Keys that were kept of {scorer.num_read:,} tokens of {corpus}",
    )
    certified = (
        "certified in every row"
        if not scorer.cache.uncertified
        else f"not certified in {scorer.cache.uncertified:,} rows of heads"
    )
    out.print(
        f"{kept.sum():,.0f} keys over {kept.size} heads, {certified}; a cache of all keys holds {kept.size * scorer.num_read:,}.",
        soft_wrap=True,
    )
    if plot is not None:
        print_path("plot:", plot)


def _finest(model: Any) -> float:
    """The smallest tolerance that a cache for the model takes."""
    from linbias.models.window_cache.cache import TOLERANCES

    return TOLERANCES[model.dtype]


def _print_table(keys: Any, heads: list[str] | None, title: str) -> None:
    """A row per layer: its heads, or where they are many, the smallest, middle and largest window."""
    from linbias.cli.tables import NumberTable

    columns = keys
    if heads is None or keys.shape[1] > _MOST_HEADS:
        heads = ["smallest", "median", "largest"]
        columns = np.array([[row.min(), np.median(row), row.max()] for row in keys])
    table = NumberTable("layer", *heads, "sum", title=title)
    for layer, (cells, row) in enumerate(zip(columns, keys, strict=True)):
        table.add_row(str(layer), *map(_keys, cells), _keys(row.sum()))
    out.print(table)


def _keys(count: float) -> str:
    return f"{count:,.0f}" if math.isfinite(count) else "all"


def _in_words(kept: Any, tolerance: float) -> str:
    """What the windows together mean."""
    if not np.isfinite(kept).all():
        return f"{np.isfinite(kept).sum():,} of {kept.size:,} heads have a window; the others need all keys."
    total = kept.sum()
    return (
        f"{total:,.0f} keys over {kept.size} heads: a cache of all keys is larger from {total / kept.size:,.0f} tokens on. "
        f"Keys beyond a window hold at most {tolerance:.2g} of any row's weight, for every text."
    )


def _draw(path: Path, needed: Any, kept: Any, found: Reach) -> None:
    """The windows of all heads, as a PNG or SVG file."""
    from linbias._run.files import write_whole
    from linbias.lm.report import figures

    slopes = found.slopes
    sharing = needed.shape[1] // found.key_heads[0]
    of_keys = slopes.reshape(*slopes.shape[:-1], -1, sharing).min(-1)
    figure = figures.windows(slopes, needed, of_keys, kept)
    words = "Keys that each head can need by its slope"
    image = figures.png(figure) if path.suffix == ".png" else figures.svg_file(figure, words).encode()  # fmt: skip
    write_whole(path, image)


def _read(
    scorer: StreamScorer,
    files: Files,
    corpus: str,
    split: str | None,
    limit_tokens: int | None,
    quiet: bool,
) -> Iterator[int]:
    """Score a text: a file or standard input as it comes, or a split of a corpus. Yields the bytes read, chunk by chunk."""
    from linbias.lm.text import read_text, stream_text

    if limit_tokens is not None and limit_tokens < 1:
        raise ValueError(f"--limit-tokens: must be at least 1, got {limit_tokens}")
    path = Path(corpus).expanduser()
    with ExitStack() as opened:
        if corpus == "-":
            pieces, size = stream_text(files, sys.stdin.buffer, "standard input"), None
        elif split is None and path.is_file():
            file = opened.enter_context(path.open("rb"))
            pieces, size = stream_text(files, file, corpus), path.stat().st_size
        else:
            text = read_text(files, corpus, split)
            pieces, size = iter([(text.ids, text.num_bytes)]), text.num_bytes
        advance = opened.enter_context(bar("reading", quiet))
        num_bytes = 0.0
        for ids, count in pieces:
            for first in range(0, len(ids), scorer.chunk):
                left = math.inf if limit_tokens is None else limit_tokens + 1 - scorer.num_read
                part = ids[first : first + int(min(scorer.chunk, left))]
                if not len(part):
                    return
                scorer.read(part)
                num_bytes += count * len(part) / len(ids)
                if size is not None:
                    advance(round(num_bytes), size)
                yield round(num_bytes)


def evaluate_stream(
    model: str,
    corpus: str,
    split: str | None,
    chunk: int,
    limit_tokens: int | None,
    device: str,
    quiet: bool,
    as_json: bool,
) -> None:
    """Score a text in one pass. Ctrl-C ends it with what was found up to there."""
    from linbias._run.processes import choose_device
    from linbias.lm import StreamScorer
    from linbias.lm.checkpoints import readable_model
    from linbias.models.loading import Files, load

    files = Files.at("evaluate", readable_model("evaluate", model))
    scorer = StreamScorer(load(files, device=choose_device("evaluate", device)), chunk=chunk)
    num_bytes = 0
    try:
        for read in _read(scorer, files, corpus, split, limit_tokens, quiet):
            num_bytes = read
    except KeyboardInterrupt:
        if scorer.num_read > 1:
            _print_result(model, corpus, scorer.result(), num_bytes, as_json)
        raise
    _print_result(model, corpus, scorer.result(), num_bytes, as_json)


def _print_result(
    model: str, corpus: str, found: StreamEvaluation, num_bytes: int, as_json: bool
) -> None:
    bits = found.bits_per_byte(num_bytes)
    if as_json:
        shared = {"model": model, "corpus": corpus, "num_bytes": num_bytes, "bits_per_byte": bits}
        return print_json({**shared, **found.to_dict()})
    keys = sum(sum(layer) for layer in found.windows)
    name = "standard input" if corpus == "-" else corpus
    out.print(
        escape(
            f"{name}: {found.num_tokens:,} tokens of {num_bytes:,} bytes in one pass, each predicted from all before it"
        ),
        soft_wrap=True,
    )
    out.print(
        f"perplexity {found.perplexity:,.3f}, [bold]{bits:.4f}[/] bits per byte, {found.tokens_per_second:,.0f} tokens/s",
        soft_wrap=True,
    )
    certified = (
        f"every row is certified: keys that were dropped hold at most {found.largest_dropped:.1g} of its weight"
        if not found.uncertified
        else f"{found.uncertified:,} rows of heads may miss more than the tolerance, up to {found.largest_dropped:.1g} of their weight"
    )
    out.print(
        f"The cache keeps {keys:,.0f} keys in {found.cache_bytes / 2**20:,.1f} MiB; {certified}.",
        soft_wrap=True,
    )


def generate_stream(
    model: str, prompt: str, most: int | None, temperature: float, top_k: int, seed: int
) -> None:
    """Write a text as it comes, until Ctrl-C, `most` tokens, or the model's end of a text."""
    from linbias.lm.generation import LONG, generate_endlessly

    pieces, cache = generate_endlessly(
        model, prompt, max_new_tokens=most, temperature=temperature, top_k=top_k, seed=seed
    )
    try:
        print(prompt if len(prompt) <= LONG else "", end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
        err.print(
            f"{cache.get_seq_length():,} tokens read and written; the cache takes {cache.num_bytes / 2**20:,.1f} MiB, "
            f"and {cache.uncertified:,} rows of heads are not certified.",
            soft_wrap=True,
        )
