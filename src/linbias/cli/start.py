"""The commands to start with: explain, extrapolate, doctor."""

import csv
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from linbias._run.neighbours import considerate
from linbias.cli import options, presets
from linbias.cli.console import err, out, print_json, print_path
from linbias.lm.settings import ExtrapolateSettings


def explain(
    arrays: Annotated[
        Path | None,
        typer.Argument(
            help=r"An .npz file with q, k, v, each \[heads, length, size], and optionally slopes "
            "(default: the paper's for so many heads), right_slopes and tokens (names). Without a "
            "file: 'The cat sat on mat', 2 heads with the slopes 1/2 and 1/4."
        ),
    ] = None,
    query: Annotated[
        str | None,
        typer.Option(help="Every step for a query: its number or token, or 'all'."),
    ] = None,
    head: Annotated[int | None, typer.Option(help="Only this head, counted from 0.")] = None,
    slope: Annotated[
        str | None,
        typer.Option(help="Other slopes: one, or one for each head; 0 is standard attention."),
    ] = None,
    symmetric: Annotated[
        bool,
        typer.Option(
            "--symmetric",
            help="Show the keys after a query, too: as for the five words, where the book chapter does so.",
        ),
    ] = False,
    causal: Annotated[
        bool,
        typer.Option(
            "--causal",
            help="Hide the keys after a query: as for a file, where linbias.attention does so.",
        ),
    ] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print all numbers as CSV, one in a line.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show the weights and the output of attention, with the bias and without, and every step of a row.

    \b
    [dim]linbias explain[/]
    [dim]linbias explain --causal --slope 0.25[/]
    [dim]linbias explain --query cat --head 0[/]
    [dim]linbias explain arrays.npz --csv > numbers.csv[/]
    """
    from linbias import example
    from linbias.cli import matrices

    slopes = None if slope is None else options.parse_floats("--slope", slope)
    if symmetric and causal:
        raise ValueError("--causal: must stand without --symmetric")
    causal = causal or (arrays is not None and not symmetric)
    trace, tokens = example.trace(arrays, causal=causal, slope=slopes)
    plain, _ = example.trace(arrays, causal=causal, slope=[0.0])
    queries = example.find(query, trace, tokens)
    heads = example.find_heads(head, len(trace.weights))
    if as_csv and as_json:
        raise ValueError("--csv: must stand without --json")
    if as_json:
        return print_json(example.to_json(trace, plain, queries, heads))
    if as_csv:
        lines = csv.writer(sys.stdout, lineterminator="\n")
        lines.writerow(example.CSV_TITLES)
        lines.writerows(example.to_csv(trace, plain, queries, heads))
        return
    if query is None:
        out.print(matrices.of(trace, plain, heads))
        if matrices.too_large(trace):
            return
        queries = queries[-1:]
    blocks = [trace.table(query=q, head=h, tokens=tokens) for q in queries for h in heads]
    steps = "\n\n".join(blocks)
    if query is not None:
        return out.print(steps, markup=False, soft_wrap=True)
    if max(map(len, steps.splitlines()), default=0) <= out.width:
        out.print("[bold]Every step of the last row[/]")
        out.print(steps + "\n", markup=False)
    out.print("[dim]--query shows the steps of other rows, --causal hides the later keys.[/]")


@options.with_training_fields(
    "accumulation",
    "validate_steps",
    "seed",
    batch_size=ExtrapolateSettings().training.batch_size,
)
@considerate()
def extrapolate(
    output: options.RunFolder = Path("output/extrapolate"),
    preset: options.Experiment = None,
    methods: options.Methods = "alibi,sinusoidal,rotary",
    train_lengths: Annotated[str, typer.Option(help="Tokens per training sequence.")] = "128",
    test_lengths: Annotated[
        str | None, typer.Option(help="Default: 1, 2, 4, 8, 16 x each training length.")
    ] = None,
    seeds: Annotated[str, typer.Option(help="One model of each kind per seed.")] = "0",
    stride: options.Stride = None,
    limit_tokens: options.LimitTokens = 32768,
    fields: options.Fields = None,
    corpus: options.Corpus = "stdlib",
    tokenizer: options.Tokenizer = "bytes",
    vocab_size: options.VocabSize = 4096,
    max_bytes: options.MaxBytes = None,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    **training: Any,
) -> None:
    """Train short, test long: the paper's experiment, with plots and a report.

    The defaults take about four minutes on two cores.
    Interrupted, the same command continues the run.

    \b
    [dim]linbias extrapolate[/]
    [dim]linbias extrapolate --methods alibi,t5,none --train-lengths 64,128 -o output/more[/]
    [dim]linbias extrapolate --preset annotated --corpus shakespeare.txt --epochs 2 -o output/annotated[/]
    """
    from linbias.data.corpus import find_corpus

    find_corpus(corpus)
    from linbias.lm.settings import TrainSettings

    chosen = presets.named(preset)
    default: dict[str, float | None] = {"steps": ExtrapolateSettings().training.steps}
    training = options.with_budget(training, chosen.budget or default)
    training["model"] = {**chosen.model, **options.parse_fields(fields)}
    settings = ExtrapolateSettings(
        methods=tuple(methods.split(",")),
        train_lengths=options.parse_numbers("--train-lengths", train_lengths) or (),
        test_lengths=options.parse_numbers("--test-lengths", test_lengths),
        seeds=options.parse_numbers("--seeds", seeds) or (),
        corpus=corpus,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        max_bytes=max_bytes,
        stride=stride,
        limit_tokens=limit_tokens,
        training=TrainSettings(**{**chosen.training, **training}),
    )
    if preset is not None and not quiet:
        read = {"corpus": corpus, "tokenizer": tokenizer, "methods": methods}
        read |= {"train_lengths": train_lengths, "test_lengths": test_lengths or "default"}
        words = presets.describe(preset, read, settings.training)
        err.print(words, soft_wrap=True, markup=False)
    from linbias.cli import report
    from linbias.lm import extrapolate as run  # loads torch: the settings are known to be good

    command = shlex.join(["linbias", *sys.argv[1:]])
    results = run(settings, output, command=command, progress=not quiet)
    if as_json:
        print_json(results.to_dict())
        return
    for table in report.tables(results):
        out.print(table)
    for sentence in report.sentences(results):
        out.print(sentence)
    print_path("\nreport:", output / "report.html")


def doctor(
    call: Annotated[
        str | None,
        typer.Option(
            help="B,H,T,S,D,dtype[,backward]: tell instead which implementation such a call takes."
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Tell what this machine can run, and why not the rest.

    \b
    [dim]linbias doctor[/]
    [dim]linbias doctor --call 8,8,128,128,64,bfloat16,backward[/]
    """
    if call is not None:
        from linbias.doctor import explain_call

        choice = explain_call(call)
        if as_json:
            return print_json(choice._asdict())
        table = Table(f"attention of {call}", "", box=box.SIMPLE_HEAD)
        for name, reason in choice.reasons.items():
            taken = "[green]taken[/]" if name == choice.name else escape(str(reason))
            table.add_row(f"[bold]{name}[/]", taken)
        return out.print(table)
    from linbias.doctor import broken, diagnose

    with err.status("looking") as status:
        facts = diagnose(progress=status.update)
    if as_json:
        print_json(facts)
        raise typer.Exit(bool(broken(facts)))
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    for name, value in facts["machine"].items():
        shown = ", ".join(value) if isinstance(value, list) else str(value)
        table.add_row(f"[bold]{name}[/]", escape(shown or "unknown"))
    for name, version in facts["versions"].items():
        table.add_row(f"[bold]{name}[/]", version or "[dim]not installed[/]")
    for part, reason in facts["parts"].items():
        table.add_row(f"[bold]import {part}[/]", _state(reason))
    out.print(table)
    for device in facts["machine"].get("devices", []):
        table = Table("attention on " + device, "", box=box.SIMPLE_HEAD)
        for name, reasons in facts["implementations"].items():
            if device in reasons:
                table.add_row(f"[bold]{name}[/]", _state(reasons[device]))
        out.print(table)
    raise typer.Exit(bool(broken(facts)))


def _state(reason: str | None) -> str:
    return "[green]ready[/]" if reason is None else f"[yellow]off:[/] {escape(reason)}"
