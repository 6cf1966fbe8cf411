"""The commands about endless streams: reach, and --stream of evaluate and generate."""

import math
from functools import partial
from typing import Annotated, Any

import numpy as np
from rich.markup import escape

from linbias.cli import options
from linbias.cli.console import bar, err, out, print_json
from linbias.schedules import written

_MOST_HEADS = 12  # a column each, up to here


def reach(
    model: options.Model,
    tolerance: Annotated[
        float, options.option("Share of a row's weight that keys beyond the reach may hold.")
    ] = 2.0**-24,
    as_json: options.Json = False,
) -> None:
    """Print how many of the nearest keys each head of a model can need, whatever the text: from
    its weights alone. (What a text makes a cache keep: linbias evaluate --stream.)

    \b
    [dim]linbias reach output/train[/]
    [dim]linbias reach bigscience/bloom-560m --tolerance 1e-4[/]
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"--tolerance: must be in (0, 1), got {tolerance}")
    from linbias.lm.checkpoints import open_model
    from linbias.models.window_cache.reach import reach_of_weights

    weights = reach_of_weights(open_model("reach", model)[1])
    needed = weights.of_heads(tolerance)
    if as_json:
        numbers = {"reach": needed, "lead": weights.lead, "slopes": weights.slopes}
        lists = {
            name: [[x if math.isfinite(x) else None for x in row] for row in array.tolist()]
            for name, array in numbers.items()
        }
        said = {"model": model, "tolerance": tolerance, "why_not": weights.why_not}
        return print_json(said | lists)
    heads = [f"head {head}\n{written(slope)}" for head, slope in enumerate(weights.slopes[0])]
    same = (weights.slopes == weights.slopes[0]).all()
    _print_table(needed, heads if same else None, "Keys that a head can need, whatever the text")
    for layer, reason in weights.why_not.items():
        out.print(f"Layer {layer} has no reach: {reason}.")
    out.print(escape(_in_words(needed, tolerance)), soft_wrap=True)


def _print_table(keys: Any, heads: list[str] | None, title: str) -> None:
    """A row per layer: its heads or, of many, the smallest, middle and largest reach."""
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
    """What the reach of all heads together means."""
    if not np.isfinite(kept).all():
        number = f"{np.isfinite(kept).sum():,} of {kept.size:,}"
        return f"{number} heads have a reach; the others need all keys."
    total = kept.sum()
    return (
        f"{total:,.0f} keys over {kept.size} heads: a cache of all keys is larger from "
        f"{total / kept.size:,.0f} tokens on. Keys beyond the reach hold at most "
        f"{tolerance:.2g} of any row's weight, for every text."
    )


def evaluate_stream(
    model: str,
    corpus: str,
    split: str | None,
    limit_tokens: int | None,
    device: str,
    quiet: bool,
    as_json: bool,
) -> None:
    """Score a text in one pass. Ctrl-C ends it with what was found up to there."""
    from linbias._run.processes import choose_device
    from linbias.lm.checkpoints import open_model
    from linbias.lm.streaming import StreamScorer, read_corpus

    files, loaded = open_model("evaluate", model, device=choose_device("evaluate", device))
    scorer, num_bytes = StreamScorer(loaded), 0
    options: Any = {"limit_tokens": limit_tokens, "bar": partial(bar, quiet=quiet)}
    try:
        for read in read_corpus(scorer, files, corpus, split, caller="evaluate", **options):
            num_bytes = read
    except KeyboardInterrupt:
        if scorer.num_read > 1:
            _print_result(model, corpus, scorer.result(), num_bytes, as_json)
        raise
    _print_result(model, corpus, scorer.result(), num_bytes, as_json)


def _print_result(model: str, corpus: str, result: Any, num_bytes: int, as_json: bool) -> None:
    bits = result.bits_per_byte(num_bytes)
    if as_json:
        shared = {"model": model, "corpus": corpus, "num_bytes": num_bytes, "bits_per_byte": bits}
        return print_json({**shared, **result.to_dict()})
    keys = sum(sum(layer) for layer in result.reach)
    name = "standard input" if corpus == "-" else corpus
    dropped = f"{result.largest_dropped:.1g} of"
    certified = (
        f"every row is certified: keys that were dropped hold at most {dropped} its weight"
        if not result.uncertified
        else f"{result.uncertified:,} rows of heads may miss more than the tolerance, up to "
        f"{dropped} their weight"
    )
    for line in (
        f"{escape(name)}: {result.num_tokens:,} tokens of {num_bytes:,} bytes in one pass, each "
        "predicted from all before it",
        f"perplexity {result.perplexity:,.3f}, [bold]{bits:.4f}[/] bits per byte, "
        f"{result.tokens_per_second:,.0f} tokens/s",
        f"The cache keeps {keys:,.0f} keys in {result.cache_bytes / 2**20:,.1f} MiB; {certified}.",
    ):
        out.print(line, soft_wrap=True)


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
            f"{cache.get_seq_length():,} tokens read and written; the cache takes "
            f"{cache.num_bytes / 2**20:,.1f} MiB, and {cache.uncertified:,} rows of heads are not "
            "certified.",
            soft_wrap=True,
        )
