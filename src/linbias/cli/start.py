"""The commands to start with: explain, slopes, explore, extrapolate, doctor."""

import shlex
import sys
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from linbias.cli import options
from linbias.cli.console import err, out, print_json, print_path
from linbias.cli.options import option
from linbias.lm.settings import ExtrapolateSettings, TrainSettings

_SYMMETRIC = "Show the keys after a query, too: as for the five words, like the book chapter."
_CAUSAL = "Hide the keys after a query: as for a file, where linbias.attention does so."
_CALL = "B,H,T,S,D,dtype[,backward]: tell instead which implementation such a call takes."
_DEFAULTS = ExtrapolateSettings()
_RESULTS = "Show the run of [bold]extrapolate[/] in this folder, not the README's. Repeatable."
_PAGE = Path("output/explore.html")

_FAR = 10  # the distance at which slopes are compared


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
        str | None, option("Every step for a query: its number or token, or 'all'.")
    ] = None,
    head: Annotated[int | None, option("Only this head, counted from 0.")] = None,
    slope: Annotated[
        str | None, option("Other slopes: one, or one for each head; 0 is standard attention.")
    ] = None,
    symmetric: Annotated[bool, option(_SYMMETRIC, "--symmetric")] = False,
    causal: Annotated[bool, option(_CAUSAL, "--causal")] = False,
    as_json: options.Json = False,
) -> None:
    """Show weights and output of attention, with the bias and without, and every step of a row.

    \b
    [dim]linbias explain[/]
    [dim]linbias explain --causal --slope 0.25[/]
    [dim]linbias explain --query cat --head 0[/]
    [dim]linbias explain arrays.npz --json > numbers.json[/]
    """
    from linbias import example
    from linbias.cli import matrices

    slopes = options.parse_numbers("--slope", slope, float)
    if symmetric and causal:
        raise ValueError("--causal: must stand without --symmetric")
    causal = causal or (arrays is not None and not symmetric)
    trace, tokens = example.trace(arrays, causal=causal, slope=slopes)
    plain, _ = example.trace(arrays, causal=causal, slope=[0.0])
    if as_json:
        options.refuse({"--query": query, "--head": head}, "--json, which has all rows")
        return print_json(example.to_json(trace, plain))
    queries = example.find(query, trace, tokens)
    heads = example.find_heads(head, len(trace.weights))
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


def slopes(
    heads: Annotated[int, typer.Argument(help="Number of heads.")],
    schedule: Annotated[
        str, option("How slopes fall from head to head: paper, geometric, halving or mpt.")
    ] = "paper",
    as_json: options.Json = False,
) -> None:
    """Print the slope of every head, and how far it lets the head see.

    \b
    [dim]linbias slopes 8[/]
    [dim]linbias slopes 12 --schedule geometric[/]
    """
    from linbias import schedules
    from linbias.cli.tables import NumberTable
    from linbias.explore.data import CHARACTERS

    values = schedules.slopes(heads, schedule)
    if as_json:
        return print_json({"slopes": values.tolist(), "schedule": schedule})
    added_at, left_at = f"bias\nat {_FAR}", f"factor\nat {_FAR}"
    title = f"Slopes of {heads} heads, schedule {schedule}"
    titles = ("head", "slope", "2 to the", added_at, left_at, "1/e at", "reach")
    table = NumberTable(*titles, title=title)
    for head, slope in enumerate(values):
        added = -_FAR * slope
        left = f"{np.exp(added):.2g}" if added < -5 else f"{np.exp(added):.3f}"
        numbers = (f"{slope:.6g}", f"{np.log2(slope):g}", f"{added:.4g}", left, f"{1 / slope:.4g}")
        character = next(name for least, name in CHARACTERS if -added >= least)
        table.add_row(str(head), *numbers, character.lower())
    out.print(table)
    out.print(
        f"[dim]bias: what is added to a score at distance {_FAR}; factor: what that leaves of a "
        "weight; 1/e at: the distance that leaves 37%.[/]"
    )


def explore(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Also show what this model makes of --text: a folder that [bold]train[/] made, "
            "a run of [bold]extrapolate[/] or a model in one, with those of the other methods "
            "beside it, or a Hugging Face id."
        ),
    ] = None,
    text: Annotated[Path | None, option("The text file that MODEL reads.")] = None,
    limit_tokens: Annotated[
        int, option("Show MODEL on at most this many tokens, up to 1,024.")
    ] = 256,
    results: Annotated[list[Path] | None, option(_RESULTS)] = None,
    output: Annotated[Path, option("HTML file to write.", "--output", "-o")] = _PAGE,
    no_open: Annotated[bool, option("Write the page and open no browser.", "--no-open")] = False,
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
    from linbias.explore import page, read_model

    if output.is_dir():
        raise ValueError(f"explore: --output must be a file, got the folder {output}")
    if (model is None) != (text is None):
        given = model or text
        raise ValueError(f"explore: MODEL and --text must come together, got {given} alone")
    shown = None
    if model is not None and text is not None:
        shown = read_model(model, text, limit_tokens=limit_tokens)
        if not results and Path(model, "results.json").is_file():
            results = [Path(model)]  # of the run that MODEL is
    runs = None
    if results:
        from linbias.lm import read_results

        runs = read_results(results)
    content = page(results=runs, model=shown).encode()
    output.parent.mkdir(parents=True, exist_ok=True)
    write_whole(output, content)
    print_path("page:", output)
    if not no_open and not webbrowser.open(output.resolve().as_uri()):
        err.print("There is no browser here: open the page in one by hand.")


@options.with_training_fields(
    "accumulation", "validate_steps", "seed", batch_size=_DEFAULTS.training.batch_size
)
def extrapolate(
    output: options.RunFolder = Path("output/extrapolate"),
    methods: options.Methods = "alibi,sinusoidal,rotary",
    train_lengths: Annotated[str, option("Tokens per training sequence.")] = "128",
    test_lengths: Annotated[
        str | None, option("Default: 1, 2, 4, 8, 16 x each training length.")
    ] = None,
    seeds: Annotated[str, option("One model of each kind per seed.")] = "0",
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
    """Train short, test long: the paper's experiment, with a figure and a report.

    The defaults take three minutes on two cores.
    Interrupted, the same command continues the run.

    \b
    [dim]linbias extrapolate[/]
    [dim]linbias extrapolate --methods alibi,t5,none --train-lengths 64,128 -o output/more[/]
    """
    from linbias.data.corpus import find_corpus

    find_corpus(corpus)
    training = options.with_budget(training, _DEFAULTS.training.steps)
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
        training=TrainSettings(**training, model=options.parse_fields(fields)),
    )
    from linbias.cli import report
    from linbias.lm import extrapolate as run  # loads torch: the settings are known to be good

    command = shlex.join(["linbias", *sys.argv[1:]])
    results = run(settings, output, command=command, progress=not quiet)
    if as_json:
        return print_json(results.to_dict())
    for table in report.tables(results):
        out.print(table)
    for sentence in report.sentences(results):
        out.print(sentence)
    print_path("\nreport:", output / "report.html")


def doctor(
    call: Annotated[str | None, option(_CALL)] = None,
    as_json: options.Json = False,
) -> None:
    """Tell what this machine can run, and why not the rest.

    \b
    [dim]linbias doctor[/]
    [dim]linbias doctor --call 8,8,128,128,64,bfloat16,backward[/]
    """
    from linbias.doctor import broken, diagnose, explain_call

    if call is not None:
        choice = explain_call(call)
        if as_json:
            return print_json(choice._asdict())
        table = Table(f"attention of {call}", "", box=box.SIMPLE_HEAD)
        for name, reason in choice.reasons.items():
            taken = "[green]taken[/]" if name == choice.name else escape(str(reason))
            table.add_row(f"[bold]{name}[/]", taken)
        return out.print(table)
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
