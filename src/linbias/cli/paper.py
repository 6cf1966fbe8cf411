"""The commands `linbias paper ...`: the paper's path, from token files to perplexity."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from linbias.cli import options
from linbias.cli.console import (
    bar,
    evaluation_table,
    is_first_process,
    new_group,
    out,
    print_json,
    print_path,
    training_in_words,
)
from linbias.cli.options import model_option, option, text_option, training_option
from linbias.data import SPLITS
from linbias.methods import PAPER, methods_of
from linbias.paper.recipe import OPTIONS, PRESETS, Recipe, recipe_from_preset

Data = Annotated[Path, typer.Argument(help="Folder that [bold]prepare[/] or the original made.")]
Preset = Annotated[str, training_option(f"One of {', '.join(PRESETS)}.")]
Position = Annotated[str, model_option(f"One of {', '.join(methods_of(PAPER))}.")]
CheckpointPosition = Annotated[
    str | None,
    model_option("For a .pt file: alibi, or sinusoidal or none for models of unchanged fairseq."),
]

app = new_group()


@app.callback()
def _paper() -> None:
    """The paper's own path on WikiText: its data format, recipe, checkpoints and numbers.

    [bold cyan]linbias paper run[/] does all of it on two cores, from token files to perplexity.
    """


def _text_file(help: str) -> Any:
    return typer.Argument(help=help, exists=True, dir_okay=False)


@app.command()
def prepare(
    output: options.NewFolder,
    train: Annotated[Path | None, text_option("Text to train on.")] = None,
    valid: Annotated[Path | None, text_option("Text to validate on.")] = None,
    test: Annotated[Path | None, text_option("Text to test on.")] = None,
    dataset: Annotated[
        str | None,
        text_option("Instead of texts: 'wikitext-103' or 'wikitext-2', over the network."),
    ] = None,
    dictionary: Annotated[
        Path | None, text_option("A dict.txt to use. Default: count the words.", "--dict")
    ] = None,
    nwords: Annotated[int, text_option("Size of the dictionary; -1: all words.")] = -1,
    threshold: Annotated[int, text_option("Leave out words that are rarer.")] = -1,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Turn texts into ids: dict.txt, and .bin and .idx files as fairseq makes and reads them.

    \b
    [dim]linbias paper prepare --train wiki.train.tokens --valid wiki.valid.tokens -o data[/]
    [dim]linbias paper prepare --dataset wikitext-103 -o data[/]
    """
    from linbias.paper.prepare import prepare as run

    files = {"train": train, "valid": valid, "test": test}
    texts = {split: path for split, path in files.items() if path}
    if bool(texts) == bool(dataset):
        raise ValueError("prepare: give either texts or --dataset, and not both")
    with bar("reading text", quiet) as advance:
        made = run(
            dataset or texts,
            output,
            dictionary=dictionary,
            nwords=nwords,
            threshold=threshold,
            progress=advance,
        )
    if as_json:
        return print_json({"data": str(output), **made.to_dict()})
    for name, split in made.splits.items():
        out.print(
            f"{name}: {split.num_lines:,} lines, {split.num_ids:,} ids, "
            f"{split.num_replaced:,} words replaced by <unk>"
        )
    print_path(f"{made.dictionary_size:,} types; data in", output)


_WORDS = {
    name: f"{help} [dim]({original})[/]" if original else help
    for name, (help, original) in OPTIONS.items()
}


@app.command()
@options.with_fields(Recipe, _WORDS, dict.fromkeys(_WORDS))  # None keeps the preset's value
def train(
    data: Data,
    output: options.RunFolder,
    preset: Preset = "L512",
    position: Position = "alibi",
    fields: options.Fields = None,
    fsdp: options.Fsdp = False,
    context_parallel: options.Shards = 1,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    **recipe_fields: Any,
) -> None:
    """Train with the paper's recipe. Interrupted, the same command continues the run.

    The presets L64 to L3072 are the rows of the paper's table. A step reads
    what eight GPUs of the original read, and any number of processes may
    share that work. Options that are not given have the preset's value; the
    original's flags stand in brackets.

    \b
    [dim]linbias paper train data -o wt2 --preset tiny[/]
    [dim]linbias paper train data -o wt103 --preset L512 --precision bf16[/]
    [dim]torchrun --nproc-per-node 8 -m linbias paper train data -o wt103[/]
    """
    model = options.parse_fields(fields)
    recipe = recipe_from_preset(
        preset,
        model=model,
        position=position,
        fsdp={} if fsdp else None,
        context_parallel=context_parallel,
        **recipe_fields,
    )
    from linbias.paper.train import train as run  # loads torch: the recipe is known to be good

    metrics = run(data, output, recipe, fit="cutoffs" not in model, progress=not quiet)
    if not is_first_process():
        return
    if as_json:
        return print_json({"model": str(output), **metrics.to_dict()})
    _print_training(metrics)
    print_path("model in", output)


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(help="The original's .pt file.")],
    output: options.NewFolder,
    dictionary: Annotated[
        Path | None,
        text_option("The dict.txt that the model was trained with, to go along.", "--dict"),
    ] = None,
    position: CheckpointPosition = None,
) -> None:
    """Turn a checkpoint of the paper's code into a folder that Transformers loads.

    Nothing in the file is run.

    \b
    [dim]linbias paper convert checkpoint_best.pt -o alibi-512 --dict data/dict.txt[/]
    """
    from linbias.paper.checkpoint import convert as run

    run(checkpoint, output, dictionary=dictionary, position=position)
    print_path("model in", output)


@app.command()
def evaluate(
    model: Annotated[
        Path, typer.Argument(help="A folder of a model, or the original's .pt file.")
    ],
    data: Data,
    split: Annotated[str, text_option(f"One of {', '.join(SPLITS)}.")] = "valid",
    length: Annotated[int | None, option("Tokens read at a time. Default: as trained.")] = None,
    context_window: Annotated[
        int,
        option("Tokens of the blocks before that are read again; length - 1: a sliding window."),
    ] = 0,
    batch_tokens: options.BatchTokens = 16384,
    position: CheckpointPosition = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Score a text as the original does, and print what it prints.

    \b
    [dim]linbias paper evaluate wt103 data --length 1024[/]
    [dim]linbias paper evaluate best.pt data --length 512 --context-window 511[/]
    """
    from linbias.paper.score import evaluate as measure
    from linbias.paper.score import load_for

    loaded = load_for(model, data, position=position)
    with bar(f"scoring {split}", quiet) as advance:
        result = measure(
            loaded,
            data,
            split,
            length=length,
            context_window=context_window,
            batch_tokens=batch_tokens,
            progress=advance,
        )
    if as_json:
        return print_json({"model": str(model), "data": str(data), **result.to_dict()})
    _print_scores([result])
    out.print(result.line)


@app.command()
def run(
    train: Annotated[Path, _text_file("Text to train on.")],
    valid: Annotated[Path, _text_file("Text to validate on.")],
    test: Annotated[Path, _text_file("Text to test on.")],
    output: options.RunFolder,
    preset: Preset = "tiny",
    position: Position = "alibi",
    steps: Annotated[int | None, training_option(OPTIONS["steps"][0])] = None,
    fields: options.Fields = None,
    batch_tokens: options.BatchTokens = 16384,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Do it all: prepare, train, evaluate without overlap and with a sliding window.

    Interrupted, the same command continues the run. A text with fewer words
    than a preset was made for is read with fewer bands of words.

    \b
    [dim]linbias paper run wiki.train.tokens wiki.valid.tokens wiki.test.tokens -o output/paper[/]
    """
    from linbias.paper.pipeline import run as run_path

    model = options.parse_fields(fields)
    training, evaluations = run_path(
        {"train": train, "valid": valid, "test": test},
        output,
        recipe_from_preset(preset, steps=steps, model=model, position=position),
        fit="cutoffs" not in model,
        batch_tokens=batch_tokens,
        progress=not quiet,
    )
    if as_json:
        measured = [evaluation.to_dict() for evaluation in evaluations]
        return print_json({"training": training.to_dict(), "evaluations": measured})
    _print_training(training)
    _print_scores(evaluations)


def _print_training(metrics: Any) -> None:
    words = f"{training_in_words(metrics)}; training perplexity {metrics.ppl:.2f}"
    if metrics.valid_ppl is not None:
        best = f"{metrics.valid_ppl:.2f} on the validation text at step {metrics.best_step:,}"
        words = f"{words}, {best}"
    out.print(words, soft_wrap=True)


def _print_scores(results: Iterable[Any]) -> None:
    out.print(evaluation_table(results, "split", "length", "context", "tokens", "perplexity"))
