"""The command line: `linbias`, or `python -m linbias`.

A command checks and computes nothing: it turns words into a call, and the result into text.
Results go to standard output, progress and errors to standard error. Heavy imports stand inside
the commands, so that `linbias --help` is quick.
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.core import TyperGroup

from linbias._options import (
    BatchSize,
    Corpus,
    Field,
    Json,
    LearningRate,
    MaxBytes,
    Model,
    Output,
    Precision,
    Quiet,
    SaveSteps,
    Seconds,
    Steps,
    Tensorboard,
    Threads,
    Tokenizer,
    Tokens,
    VocabSize,
    budget,
    parse_fields,
    parse_numbers,
    training_option,
)
from linbias.paper.command import app as paper

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class _Commands(TyperGroup):
    """Ends every command well: one line for an error, 2; for Ctrl-C what is left, 130."""

    def invoke(self, context: Any) -> Any:
        try:
            return super().invoke(context)
        except BrokenPipeError:
            raise  # the reader of a pipe went away: no fault of ours
        except (ValueError, NotImplementedError, OSError, ModuleNotFoundError) as error:
            line = " ".join(str(error).split()) or type(error).__name__
            err.print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True)
            raise typer.Exit(2) from error
        except KeyboardInterrupt as interrupt:
            resumable = context.invoked_subcommand in ("train", "extrapolate")
            advice = " The same command goes on from here." if resumable else ""
            err.print(f"\nStopped.{advice}")
            raise typer.Exit(130) from interrupt


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line."""
    app(prog_name="linbias")


def _show_version(asked: bool) -> None:
    if asked:
        from linbias import __version__

        out.print(__version__)
        raise typer.Exit


@app.callback()
def _linbias(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Attention with linear biases (ALiBi): train short, test long.

    New here? [bold cyan]linbias explain[/] shows the idea on five words, and
    [bold cyan]linbias extrapolate[/] the paper's claim on real text, within minutes.
    """


@app.command(rich_help_panel="Start here")
def explain(
    arrays: Annotated[
        Path | None,
        typer.Argument(
            help="An .npz file with q, k, v, each [heads, length, size], and if you like left, "
            "right (slopes) and tokens (names). Default: 'The cat sat on mat'."
        ),
    ] = None,
    query: Annotated[
        str | None, typer.Option(help="A query's number or token, or 'all'. Default: the first.")
    ] = None,
    head: Annotated[int | None, typer.Option(help="Only this head, counted from 0.")] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="Hide the keys after the query.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show every step of attention: q.k, scaled, minus the penalty, softmax, output.

    \b
    [dim]linbias explain[/]
    [dim]linbias explain --query cat --head 0[/]
    [dim]linbias explain arrays.npz --causal --query -1 --json[/]
    """
    from linbias import example

    trace, tokens = example.trace(arrays, causal)
    num_heads, num_queries, _ = trace.weight.shape
    queries = example.find(query, tokens, num_queries)
    if head is not None and not 0 <= head < num_heads:
        raise ValueError(f"explain: head must be in [0, {num_heads}), got {head}")
    heads = list(range(num_heads)) if head is None else [head]
    if as_json:
        _print_json(example.steps(trace, tokens, queries, heads))
        return
    blocks = [trace.table(query=q, head=h, tokens=tokens) for q in queries for h in heads]
    out.print("\n\n".join(blocks), markup=False, soft_wrap=True)


@app.command(rich_help_panel="Start here")
def extrapolate(
    output: Output = Path("output/extrapolate"),
    methods: Annotated[
        str, typer.Option(help="Any of alibi, sinusoidal, rotary, learned, t5, none.")
    ] = "alibi,sinusoidal,rotary",
    train_lengths: Annotated[str, typer.Option(help="Tokens per training sequence.")] = "128",
    test_lengths: Annotated[
        str | None, typer.Option(help="Default: 1, 2, 4, 8, 16 x each training length.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="One model of each kind per seed.")] = "0",
    stride: Annotated[
        int | None, typer.Option(help="Test with a sliding window that moves by so many tokens.")
    ] = None,
    eval_tokens: Annotated[int, typer.Option(help="Tokens to score at each length.")] = 32768,
    fields: Field = None,
    corpus: Corpus = "stdlib",
    tokenizer: Tokenizer = "bytes",
    vocab_size: VocabSize = 4096,
    max_bytes: MaxBytes = None,
    steps: Steps = None,
    tokens: Tokens = None,
    seconds: Seconds = None,
    batch_size: BatchSize = 8,
    learning_rate: LearningRate = 1e-3,
    precision: Precision = "fp32",
    save_steps: SaveSteps = 100,
    threads: Threads = None,
    tensorboard: Tensorboard = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train short, test long: the paper's experiment, with plots and a report.

    The defaults take about four minutes on two cores. Interrupted, the same command goes on
    where it was.

    \b
    [dim]linbias extrapolate[/]
    [dim]linbias extrapolate --methods alibi,t5,none --train-lengths 64,128 -o output/more[/]
    """
    from linbias.lm import report
    from linbias.lm.extrapolate import ExtrapolateSettings
    from linbias.lm.extrapolate import extrapolate as run
    from linbias.lm.train import TrainSettings

    settings = ExtrapolateSettings(
        methods=tuple(methods.split(",")),
        train_lengths=parse_numbers("--train-lengths", train_lengths) or (),
        test_lengths=parse_numbers("--test-lengths", test_lengths),
        seeds=parse_numbers("--seeds", seeds) or (),
        corpus=corpus,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_bytes=max_bytes,
        stride=stride,
        eval_tokens=eval_tokens,
        training=TrainSettings(
            model=parse_fields(fields),
            batch_size=batch_size,
            **budget(steps, tokens, seconds, default=ExtrapolateSettings().training.steps),
            learning_rate=learning_rate,
            precision=precision,
            save_steps=save_steps,
            threads=threads,
            tensorboard=tensorboard,
        ),
    )
    command = shlex.join(["linbias", *sys.argv[1:]])
    results = run(settings, output, command=command, progress=not quiet)
    if as_json:
        _print_json(results)
        return
    for table in report.tables(results):
        out.print(table)
    for finding in report.findings(results["evaluations"]):
        out.print(report.sentence(finding), soft_wrap=True)
    out.print(f"\nreport: [bold]{escape(str(output / 'report.html'))}[/]", soft_wrap=True)


@app.command(rich_help_panel="Start here")
def doctor(as_json: Json = False) -> None:
    """Tell what this machine can run, and why not the rest."""
    from linbias.doctor import diagnose

    found = diagnose()
    broken = any(found["parts"].values())
    if as_json:
        _print_json(found)
        raise typer.Exit(broken)
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for name, value in found["machine"].items():
        shown = ", ".join(value) if isinstance(value, list) else str(value)
        table.add_row(f"[bold]{name}[/]", escape(shown or "unknown"))
    for name, version in found["versions"].items():
        table.add_row(f"[bold]{name}[/]", version or "[dim]not installed[/]")
    for part, reason in found["parts"].items():
        table.add_row(f"[bold]import {part}[/]", _state(reason))
    out.print(table)
    for device in found["machine"].get("devices", []):
        table = Table("attention on " + device, "", box=box.SIMPLE_HEAD)
        for name, reasons in found["implementations"].items():
            table.add_row(f"[bold]{name}[/]", _state(reasons[device]))
        out.print(table)
    raise typer.Exit(broken)


@app.command(rich_help_panel="Models")
def train(
    output: Output = Path("output/train"),
    position: Annotated[
        str,
        typer.Option(
            help="alibi, sinusoidal, learned, rotary, t5 or none.", rich_help_panel="Model"
        ),
    ] = "alibi",
    fields: Field = None,
    corpus: Corpus = "stdlib",
    tokenizer: Tokenizer = "bytes",
    vocab_size: VocabSize = 4096,
    max_bytes: MaxBytes = None,
    length: Annotated[int, training_option("Tokens per sequence.")] = 128,
    steps: Steps = None,
    tokens: Tokens = None,
    seconds: Seconds = None,
    batch_size: BatchSize = 32,
    accumulation: Annotated[
        int, training_option("Parts of a batch computed one after another.")
    ] = 1,
    learning_rate: LearningRate = 1e-3,
    precision: Precision = "fp32",
    save_steps: SaveSteps = 100,
    seed: Annotated[int, training_option("Fixes weights, order of the text and dropout.")] = 0,
    threads: Threads = None,
    tensorboard: Tensorboard = False,
    fsdp: Annotated[
        bool, training_option("Shard the model over processes (torchrun).", "--fsdp")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train a language model, for 1,000 steps unless told otherwise.

    Interrupted, the same command goes on where it was.

    \b
    [dim]linbias train --seconds 100[/]
    [dim]linbias train --corpus wikitext-103 --tokenizer bpe --steps 20000 -o output/wiki[/]
    [dim]torchrun --nproc-per-node 2 -m linbias train --steps 1000[/]
    """
    from linbias.data.corpus import load_corpus
    from linbias.lm.train import TrainSettings
    from linbias.lm.train import train as run

    settings = TrainSettings(
        model={"position": position, **parse_fields(fields)},
        length=length,
        batch_size=batch_size,
        accumulation=accumulation,
        **budget(steps, tokens, seconds, default=1000),
        learning_rate=learning_rate,
        precision=precision,
        save_steps=save_steps,
        seed=seed,
        threads=threads,
        tensorboard=tensorboard,
        fsdp={} if fsdp else None,
    )
    text = load_corpus(corpus, tokenizer=tokenizer, vocab_size=vocab_size, max_bytes=max_bytes)
    folder = run(settings, text, output, progress=not quiet)
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    if int(os.environ.get("RANK", "0")) > 0:
        return  # under torchrun the first process speaks for all
    if as_json:
        _print_json({"model": str(folder), **metrics})
        return
    out.print(
        f"{metrics['num_parameters'] / 1e6:.2f} M parameters, "
        f"{metrics['tokens'] / 1e6:.2f} M tokens in {metrics['seconds']:.0f} s "
        f"({metrics['tokens_per_second']:,.0f} tokens/s); "
        f"loss {metrics['loss']:.3f} nats per token\nmodel in [bold]{escape(str(folder))}[/]"
    )


@app.command(rich_help_panel="Models")
def evaluate(
    model: Model,
    length: Annotated[
        str | None,
        typer.Option(help="Tokens read at a time; several as 128,256,512. Default: as trained."),
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Slide a window by so many tokens (1: exact), not segments.")
    ] = None,
    limit_tokens: Annotated[int | None, typer.Option(help="Score only so many tokens.")] = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens per forward pass.")] = 16384,
    corpus: Corpus = "stdlib",
    split: Annotated[
        str, typer.Option(help="train, valid or test.", rich_help_panel="Text")
    ] = "test",
    max_bytes: MaxBytes = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure how well a model predicts a text, at any length. Works with every causal model.

    \b
    [dim]linbias evaluate output/train --length 128,512,2048[/]
    [dim]linbias evaluate output/train --length 256 --stride 1 --limit-tokens 5000[/]
    [dim]linbias evaluate gpt2 --corpus book.txt --length 1024[/]
    """
    from linbias.data.corpus import load_corpus
    from linbias.lm.evaluate import evaluate as measure
    from linbias.models.load import encode, load_model

    lengths = parse_numbers("--length", length)
    loaded = load_model(model)
    text = load_corpus(corpus, max_bytes=max_bytes)
    if split not in text.num_bytes:
        raise ValueError(f"--split: must be one of {', '.join(text.num_bytes)}, got {split!r}")
    text_bytes = getattr(text, split).tobytes()  # ids of the byte tokenizer are the bytes
    ids = encode(model, text_bytes)
    results = []
    for tokens in lengths or (getattr(loaded.config, "train_length", 1024),):
        with _progress(f"reading {tokens:,} tokens at a time", quiet) as advance:
            results.append(
                measure(
                    loaded,
                    ids,
                    length=tokens,
                    stride=stride,
                    num_bytes=len(text_bytes),
                    batch_tokens=batch_tokens,
                    limit_tokens=limit_tokens,
                    progress=advance,
                )
            )
    if as_json:
        _print_json([{"model": model, "corpus": corpus, **r.to_dict()} for r in results])
        return
    table = Table(box=box.SIMPLE_HEAD)
    titles = ("length", "stride", "nll", "perplexity", "bits/byte", "tokens", "tokens/s", "memory")
    for title in titles:
        table.add_column(title, justify="right")
    for r in results:
        table.add_row(
            f"{r.length:,}",
            "-" if r.stride is None else f"{r.stride:,}",
            f"{r.nll:.4f}",
            f"{r.perplexity:,.3f}",
            f"{r.bits_per_byte:.4f}",
            f"{r.num_tokens:,}",
            f"{r.tokens_per_second:,.0f}",
            f"{r.peak_memory_bytes / 2**20:,.0f} MiB",
        )
    out.print(table)


@app.command(rich_help_panel="Models")
def generate(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Text to go on from.")] = "def ",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="How many.")] = 200,
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Choose among so many; 0: among all.")] = 0,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.")] = 0,
    as_json: Json = False,
) -> None:
    """Let a model go on writing.

    \b
    [dim]linbias generate output/train --prompt "import " -n 400[/]
    """
    from linbias.lm.generate import generate as run

    text = run(
        model,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stream=not as_json,
    )
    if as_json:
        _print_json({"model": model, "prompt": prompt, "text": text})


app.add_typer(paper, name="paper", rich_help_panel="The paper")


def _state(reason: str | None) -> str:
    return "[green]ready[/]" if reason is None else f"[yellow]off:[/] {escape(reason)}"


def _print_json(value: Any) -> None:
    print(json.dumps(value))


@contextmanager
def _progress(task: str, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error, as a function to call with (done, total)."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
        console=err,
        transient=True,
        disable=quiet or not err.is_terminal,
    )
    with bar:
        number = bar.add_task(task)
        yield lambda done, total: bar.update(number, completed=done, total=total)
