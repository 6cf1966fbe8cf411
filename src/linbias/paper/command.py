"""`linbias paper`: the paper's path, from token files to perplexity.

As in `linbias.cli`, a command computes nothing itself, and heavy imports stand inside.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from linbias._options import Json, Quiet, parse_fields, training_option
from linbias.paper.recipe import PRESETS, Recipe

out, err = Console(highlight=False), Console(stderr=True, highlight=False)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _paper() -> None:
    """The paper's own path on WikiText: its data format, recipe, checkpoints and numbers.

    [bold cyan]linbias paper run[/] goes all of it on two cores, from token files to perplexity.
    """


ALL_CORES = os.cpu_count() or 1

Out = Annotated[Path, typer.Option("--out", "-o", help="Folder of the result.")]
Workers = Annotated[int, typer.Option(help="Processes that read text.")]
Preset = Annotated[str, training_option(f"One of {', '.join(PRESETS)}.")]
Position = Annotated[str, training_option("alibi, sinusoidal, rotary, t5 or none.")]
Updates = Annotated[
    int | None, training_option("Updates of the weights; warmup and cosine keep their shares.")
]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Set a field of PaperConfig, e.g. dropout=0.1 or cutoffs=[2000,6000]. Repeatable.",
        rich_help_panel="Training",
    ),
]
FilePosition = Annotated[
    str | None,
    typer.Option(help="Of a .pt file: alibi; or sinusoidal or none, of unchanged fairseq."),
]
BatchTokens = Annotated[int, typer.Option(help="Tokens per forward pass.")]

Window = tuple[str, int, int]  # the split, and how it is read: length and context_window


def _text(help: str) -> Any:
    return typer.Argument(help=help, exists=True, dir_okay=False)


@app.command()
def prepare(
    folder: Out,
    train: Annotated[Path | None, typer.Option(help="Text to train on, a line each.")] = None,
    valid: Annotated[Path | None, typer.Option(help="Text to validate on.")] = None,
    test: Annotated[Path | None, typer.Option(help="Text to test on.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Instead: 'wikitext-103' or 'wikitext-2', by network.")
    ] = None,
    dictionary: Annotated[
        Path | None, typer.Option("--dict", help="A dict.txt to use; default: count the words.")
    ] = None,
    workers: Workers = ALL_CORES,
    nwords: Annotated[int, typer.Option(help="Largest dictionary; -1: all words.")] = -1,
    threshold: Annotated[int, typer.Option(help="Leave out words that are rarer.")] = -1,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Turn texts into ids: dict.txt, and .bin and .idx files as fairseq makes and reads them.

    \b
    [dim]linbias paper prepare --train wiki.train.tokens --valid wiki.valid.tokens --test wiki.test.tokens -o data[/]
    [dim]linbias paper prepare --dataset wikitext-103 -o data[/]
    """
    from linbias.data import prepare as steps

    texts = {
        name: path for name, path in (("train", train), ("valid", valid), ("test", test)) if path
    }
    if bool(texts) == bool(dataset):
        raise ValueError("prepare: give either texts or --dataset, and not both")
    options: dict[str, Any] = {"dictionary": dictionary, "workers": workers}
    options |= {"nwords": nwords, "threshold": threshold}
    with _progress("reading text", quiet) as advance:
        if dataset:
            made = steps.prepare_dataset(dataset, folder, **options, progress=advance)
        else:
            made = steps.prepare(texts, folder, **options, progress=advance)
    if as_json:
        splits = {name: vars(split) for name, split in made.splits.items()}
        _print_json({"data": str(folder), "dictionary": made.dictionary_size, **splits})
        return
    for name, split in made.splits.items():
        out.print(
            f"{name}: {split.num_lines:,} lines, {split.num_ids:,} ids, "
            f"{split.num_replaced:,} words replaced by <unk>"
        )
    out.print(f"{made.dictionary_size:,} types; data in [bold]{escape(str(folder))}[/]")


@app.command()
def train(
    data: Annotated[Path, typer.Argument(help="Folder that [bold]prepare[/] or fairseq made.")],
    folder: Out,
    preset: Preset = "L512",
    position: Position = "alibi",
    length: Annotated[int | None, training_option("Tokens per block.")] = None,
    max_tokens: Annotated[int | None, training_option("Most tokens in a batch.")] = None,
    batches_per_update: Annotated[
        int | None, training_option("Batches per update, over all processes together.")
    ] = None,
    updates: Updates = None,
    warmup: Annotated[int | None, training_option("Updates that raise the learning rate.")] = None,
    lr: Annotated[float | None, training_option("Peak of the schedule.")] = None,
    fields: Fields = None,
    precision: Annotated[
        str | None, training_option("'fp32', 'bf16', or on a GPU 'fp16'.")
    ] = None,
    seed: Annotated[
        int | None, training_option("Fixes weights, order of the text and dropout.")
    ] = None,
    validate_every: Annotated[
        int | None, training_option("Updates between validations; 0: none.")
    ] = None,
    save_every: Annotated[int | None, training_option("Updates between checkpoints.")] = None,
    log_every: Annotated[
        int | None, training_option("Updates between lines of log.jsonl.")
    ] = None,
    device: Annotated[
        str | None, training_option("'auto' takes a GPU where there is one.")
    ] = None,
    fsdp: Annotated[
        bool, training_option("Shard the model over processes (torchrun).", "--fsdp")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train with the paper's recipe. Interrupted, the same command goes on where it was.

    L64 to L3072 are the rows of the paper's table, and read what eight GPUs of the original read;
    any number of processes may share that work. What is not given is the preset's.

    \b
    [dim]linbias paper train data -o wt2 --preset tiny[/]
    [dim]linbias paper train data -o wt103 --preset L512 --precision bf16[/]
    [dim]torchrun --nproc-per-node 8 -m linbias paper train data -o wt103[/]
    """
    changes: dict[str, Any] = {
        **{"length": length, "max_tokens": max_tokens, "batches_per_update": batches_per_update},
        **{"warmup": warmup, "lr": lr, "precision": precision, "seed": seed, "device": device},
        **{"validate_every": validate_every, "save_every": save_every, "log_every": log_every},
        "fsdp": {} if fsdp else None,
    }
    recipe = _recipe(preset, position, updates, fields)
    recipe = replace(recipe, **{k: v for k, v in changes.items() if v is not None})
    metrics = _train(data, folder, recipe, quiet)
    if int(os.environ.get("RANK", "0")) > 0:
        return  # under torchrun the first process speaks for all
    if as_json:
        _print_json({"model": str(folder), **metrics})
        return
    out.print(f"{_told(metrics)}\nmodel in [bold]{escape(str(folder))}[/]", soft_wrap=True)


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(help="The original's .pt file.")],
    folder: Annotated[Path, typer.Argument(help="Folder to make.")],
    dictionary: Annotated[
        Path | None, typer.Option("--dict", help="The dict.txt it was trained with, to go along.")
    ] = None,
    position: FilePosition = None,
) -> None:
    """Turn a checkpoint of the paper's code into a folder that Transformers loads.

    Nothing in the file is run.

    \b
    [dim]linbias paper convert checkpoint_best.pt alibi-512 --dict data/dict.txt[/]
    """
    from linbias.paper.checkpoint import convert as run

    run(checkpoint, folder, dictionary=dictionary, position=position)
    out.print(f"model in [bold]{escape(str(folder))}[/]", soft_wrap=True)


@app.command()
def evaluate(
    model: Annotated[
        Path, typer.Argument(help="A folder of a model, or the original's .pt file.")
    ],
    data: Annotated[Path, typer.Argument(help="Folder that [bold]prepare[/] or fairseq made.")],
    subset: Annotated[str, typer.Option(help="valid, test or train.")] = "valid",
    length: Annotated[
        int | None, typer.Option(help="Tokens read at a time. Default: as trained.")
    ] = None,
    context_window: Annotated[
        int, typer.Option(help="So many of them read again; length - 1: a sliding window.")
    ] = 0,
    batch_tokens: BatchTokens = 16384,
    resume: Annotated[
        Path | None, typer.Option(help="Keep scores in this file, and go on from it.")
    ] = None,
    position: FilePosition = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Score a text as the original does, and print what it prints.

    \b
    [dim]linbias paper evaluate wt103 data --length 1024[/]
    [dim]linbias paper evaluate checkpoint_best.pt data --length 512 --context-window 511 --resume scores.npz[/]
    """
    from linbias.data.dictionary import check_words
    from linbias.paper.checkpoint import load

    loaded = load(model, position=position)
    if (model / "dict.txt").is_file():
        check_words(model / "dict.txt", data / "dict.txt")
    length = loaded.config.train_length if length is None else length
    result = _evaluate(loaded, data, (subset, length, context_window), batch_tokens, resume, quiet)
    if as_json:
        _print_json({"model": str(model), "data": str(data), **result})
        return
    out.print(_table([result]))
    out.print(result["line"])


@app.command()
def run(
    train: Annotated[Path, _text("Text to train on.")],
    valid: Annotated[Path, _text("Text to validate on.")],
    test: Annotated[Path, _text("Text to test on.")],
    folder: Out,
    preset: Preset = "tiny",
    position: Position = "alibi",
    updates: Updates = None,
    fields: Fields = None,
    workers: Workers = ALL_CORES,
    batch_tokens: BatchTokens = 16384,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Go the whole path: prepare, train, evaluate without overlap and with a sliding window.

    Interrupted, the same command goes on where it was.

    \b
    [dim]linbias paper run wiki.train.tokens wiki.valid.tokens wiki.test.tokens -o output/paper[/]
    """
    from linbias.data import prepare as steps
    from linbias.paper.checkpoint import load
    from linbias.paper.train import claim, fingerprint
    from linbias.runs.checkpoints import check_writable

    recipe = _recipe(preset, position, updates, fields)
    texts = {"train": train, "valid": valid, "test": test}
    check_writable(folder, "run")
    claim(folder / "texts.json", {name: fingerprint(text) for name, text in texts.items()}, "run")
    data, home = folder / "data", folder / "model"
    if not data.exists():
        try:
            with _progress("reading text", quiet) as advance:
                made = steps.prepare(texts, data, workers=workers, progress=advance)
            empty = [str(texts[name]) for name, split in made.splits.items() if not split.num_ids]
            if empty:
                shutil.rmtree(data)
                raise ValueError(f"run: texts must have at least a line each, got {empty[0]}")
        except ValueError:
            (folder / "texts.json").unlink()  # other texts may still come here
            raise
    metrics = _train(data, home, recipe, quiet)
    model = load(home)
    results = []
    for window in _windows(recipe.length):
        scores = folder / "scores-{}-{}-{}.npz".format(*window)
        results.append(_evaluate(model, data, window, batch_tokens, scores, quiet))
    if as_json:
        _print_json({"training": metrics, "evaluations": results})
        return
    out.print(_told(metrics), soft_wrap=True)
    out.print(_table(results))


def _windows(length: int) -> list[Window]:
    """What `run` measures: the training length and four times it, without and with overlap."""
    return [
        (subset, tokens, context)
        for subset in ("valid", "test")
        for tokens in (length, 4 * length)
        for context in (0, tokens // 2)
    ]


def _recipe(preset: str, position: str, updates: int | None, fields: list[str] | None) -> Recipe:
    if preset not in PRESETS:
        raise ValueError(f"--preset: must be one of {', '.join(PRESETS)}, got {preset!r}")
    recipe = PRESETS[preset] if updates is None else PRESETS[preset].lasting(updates)
    return replace(recipe, position=position, model={**recipe.model, **parse_fields(fields)})


def _train(data: Path, folder: Path, recipe: Recipe, quiet: bool) -> dict[str, Any]:
    from linbias.paper.train import train as run

    run(data, folder, recipe, progress=not quiet)
    metrics: dict[str, Any] = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    return metrics


def _told(metrics: dict[str, Any]) -> str:
    best = ""
    if "valid_ppl" in metrics:
        best = f"; validation {metrics['valid_loss_base2']:.3f} bits, "
        best += f"perplexity {metrics['valid_ppl']:.2f}, at update {metrics['best_update']:,}"
    return (
        f"{metrics['num_parameters'] / 1e6:.2f} M parameters, {metrics['updates']:,} updates, "
        f"{metrics['tokens'] / 1e6:.2f} M tokens in {metrics['seconds']:.0f} s "
        f"({metrics['tokens_per_second']:,.0f} tokens/s); "
        f"training {metrics['loss_base2']:.3f} bits per token{best}"
    )


def _evaluate(
    model: Any, data: Path, window: Window, batch_tokens: int, resume: Path | None, quiet: bool
) -> dict[str, Any]:
    import torch

    from linbias.data.prepare import read_data
    from linbias.paper.checkpoint import check_dictionary
    from linbias.paper.evaluate import score

    subset, length, context_window = window
    dictionary, ids = read_data(data, subset)
    check_dictionary(dictionary, model.config, data / "dict.txt", "evaluate")
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    with _progress(f"{subset}, {length:,} tokens at a time", quiet) as advance:
        scores = score(
            model,
            ids.tokens,
            length=length,
            context_window=context_window,
            batch_tokens=batch_tokens,
            resume=resume,
            progress=advance,
        )
    return {
        "subset": subset,
        "length": length,
        "context_window": context_window,
        "num_tokens": len(scores.log_probs),
        "loss_base2": scores.loss_base2,
        "perplexity": scores.perplexity,
        "line": scores.original_line,
        "tokens_per_second": scores.tokens_per_second,
        "peak_memory_bytes": scores.peak_memory_bytes,
    }


def _table(results: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    titles = ("subset", "length", "context", "tokens", "bits", "perplexity", "tokens/s", "memory")
    for title in titles:
        table.add_column(title, justify="right")
    for r in results:
        table.add_row(
            r["subset"],
            f"{r['length']:,}",
            f"{r['context_window']:,}",
            f"{r['num_tokens']:,}",
            f"{r['loss_base2']:.4f}",
            f"{r['perplexity']:,.2f}",
            f"{r['tokens_per_second']:,.0f}",
            f"{r['peak_memory_bytes'] / 2**20:,.0f} MiB",
        )
    return table


def _print_json(value: Any) -> None:
    print(json.dumps(value))


@contextmanager
def _progress(task: str, quiet: bool) -> Iterator[Callable[[int, int | None], None]]:
    """A bar on standard error, as a function to call with (done, total); None: bytes, of who knows how many."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn("{task.percentage:3.0f} %", "{task.completed:,} bytes"),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=quiet or not err.is_terminal,
    )
    with bar:
        number = bar.add_task(task, total=None)
        yield lambda done, total: bar.update(number, completed=done, total=total)
