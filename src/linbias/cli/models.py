"""The commands for models: train, evaluate, generate, convert."""

import math
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from linbias.cli import options
from linbias.cli.console import (
    bar,
    evaluation_table,
    is_first_process,
    out,
    print_json,
    print_path,
    training_in_words,
)
from linbias.cli.options import option
from linbias.cli.streams import evaluate_stream, generate_stream
from linbias.data import SPLITS
from linbias.lm.settings import TrainSettings

_ENCODER = ("encoder_position", "symmetric")

_ONE_PASS = "Read the text in one pass and constant memory, each token after all before it."
_SPLIT = f"One of {', '.join(SPLITS)}. Default: the whole of a file, the test split of all else."
_PROMPT = "Text to continue; '-' reads standard input. Default: 'def '."
_ENDLESS = "Write in constant memory: without an end, unless -n is given. Ctrl-C ends it."


@options.with_training_fields()
def train(
    output: options.RunFolder = Path("output/train"),
    task: options.Task = "causal",
    init: options.Init = None,
    position: options.PositionOrKept = None,
    fields: options.Fields = None,
    corpus: options.Corpus = "stdlib",
    tokenizer: options.TokenizerOrKept = None,
    vocab_size: options.VocabSizeOrKept = None,
    max_bytes: options.MaxBytes = None,
    length: options.LengthOrKept = None,
    fsdp: options.Fsdp = False,
    context_parallel: options.Shards = 1,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
    **training: Any,
) -> None:
    """Train a language model, for 1,000 steps unless another budget is given.

    The same command continues an interrupted run; more steps extend a run.
    The loss as it went is in history.jsonl, in the run's folder.

    \b
    [dim]linbias train --seconds 100[/]
    [dim]linbias train --corpus wikitext-103 --tokenizer bpe --steps 20000 -o output/wiki[/]
    [dim]linbias train --init output/wiki --corpus book.txt --length 512 -o output/book[/]
    [dim]linbias train --task masked --position symmetric --length 64 -o output/masked[/]
    [dim]torchrun --nproc-per-node 2 -m linbias train --steps 1000[/]
    [dim]torchrun --nproc-per-node 2 -m linbias train --batch-size 1 --context-parallel 2[/]
    """
    from linbias.data.corpus import find_corpus, load_corpus

    find_corpus(corpus)
    given = {
        **training,
        "task": task,
        "fsdp": {} if fsdp else None,
        "context_parallel": context_parallel,
    }
    if init is not None:
        kept = {"--tokenizer": tokenizer, "--vocab-size": vocab_size}
        options.refuse(kept, "--init, whose tokenizer stays")
    settings = _settings(given, init, length, position, options.parse_fields(fields))
    from linbias.lm import train as run  # loads torch: the settings are known to be good

    text = load_corpus(
        corpus,
        tokenizer=options.given_or(tokenizer, "bytes"),
        vocab_size=options.given_or(vocab_size, 4096),
        max_bytes=max_bytes,
    )
    if init is not None:
        from linbias.lm.initial import with_tokenizer_of

        text = with_tokenizer_of(str(init), text)
    metrics = run(settings, text, output, progress=not quiet)
    if not is_first_process():
        return
    if as_json:
        return print_json({"model": str(output), **metrics.to_dict()})

    def bits(nats: float, split: str) -> str:
        per_byte = 1 if task == "masked" else len(getattr(text, split)) / text.num_bytes[split]
        return f"{nats / math.log(2.0) * per_byte:.3f}"

    unit = "masked token" if task == "masked" else "byte"
    words = f"loss {bits(metrics.loss, 'train')} bits per {unit}"
    if metrics.validation_loss is not None:
        words = f"{words}, {bits(metrics.validation_loss, 'valid')} on the validation split"
    out.print(f"{training_in_words(metrics)}; {words}", soft_wrap=True)
    print_path("model in", output)


def _settings(
    given: dict[str, Any],
    init: Path | None,
    length: int | None,
    position: str | None,
    model: dict[str, Any],
) -> TrainSettings:
    """The settings: the given options, and what follows from --init."""
    method, default = ("position", "alibi") if given["task"] == "causal" else _ENCODER
    if init is None:
        position, trained = options.given_or(position, default), TrainSettings.length
    else:
        from linbias.lm.initial import config_of

        trained = config_of(str(init)).train_length
    if position is not None:
        model = {**model, method: position}
    return TrainSettings(
        **options.with_budget(given, steps=1000),
        model=model,
        length=options.given_or(length, trained),
        init=None if init is None else str(init),
    )


def evaluate(
    model: options.Model,
    length: Annotated[
        str | None, option("Tokens read at a time; several as 128,256,512. Default: as trained.")
    ] = None,
    stride: options.Stride = None,
    limit_tokens: options.LimitTokens = None,
    batch_tokens: options.BatchTokens = 16384,
    context_parallel: Annotated[
        int, option("Processes that read each segment together, a shard each (torchrun).")
    ] = 1,
    stream: Annotated[bool, option(_ONE_PASS, "--stream")] = False,
    corpus: options.Corpus = "stdlib",
    split: Annotated[str | None, options.text_option(_SPLIT)] = None,
    max_bytes: options.MaxBytes = None,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Measure how well a model predicts a text, at any length. Works with every causal model, and
    with those that train --task masked made.

    \b
    [dim]linbias evaluate output/train --length 128,512,2048[/]
    [dim]linbias evaluate output/train --length 256 --stride 1 --limit-tokens 5000[/]
    [dim]linbias evaluate gpt2 --corpus book.txt --length 1024[/]
    [dim]zcat library.gz | linbias evaluate output/train --stream --corpus -[/]
    [dim]linbias evaluate bigscience/bloom-560m --length 2048,8192[/]
    [dim]torchrun --nproc-per-node 2 -m linbias evaluate output/train --context-parallel 2[/]
    """
    lengths = options.parse_numbers("--length", length)
    if stream:
        others = {
            "--length": length,
            "--stride": stride,
            "--max-bytes": max_bytes,
            "--context-parallel": None if context_parallel == 1 else context_parallel,
        }
        options.refuse(others, "--stream")
        return evaluate_stream(model, corpus, split, limit_tokens, device, quiet, as_json)
    from linbias.lm.hidden import HiddenEvaluation
    from linbias.lm.measure import evaluate_text

    scores = evaluate_text(
        model,
        corpus,
        split,
        bar=partial(bar, quiet=quiet or not is_first_process()),
        lengths=lengths,
        context_parallel=context_parallel,
        max_bytes=max_bytes,
        device=device,
        stride=stride,
        batch_tokens=batch_tokens,
        limit_tokens=limit_tokens,
    )
    if not is_first_process():
        return
    if as_json:
        return print_json([{"model": model, "corpus": corpus, **row} for row in scores.rows()])
    columns = ["bits per byte", "tokens"]
    if isinstance(scores.results[0], HiddenEvaluation):
        columns = ["bits per\nmasked token", "accuracy", "masked"]
    columns = ["length", "stride", "perplexity", *columns]
    out.print(escape(scores.describe()), soft_wrap=True)
    out.print(evaluation_table(scores.results, *columns))


def generate(
    model: options.Model,
    prompt: Annotated[str | None, option(_PROMPT, "--prompt", "-p")] = None,
    max_new_tokens: Annotated[
        int | None, option("Tokens to write at most. Default: 200.", "--max-new-tokens", "-n")
    ] = None,
    temperature: Annotated[float, option("0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, option("Sample among this many tokens; 0: among all.")] = 0,
    seed: Annotated[int, option("The same seed writes the same text.")] = 0,
    stream: Annotated[bool, option(_ENDLESS, "--stream")] = False,
    as_json: options.Json = False,
) -> None:
    """Continue a text with a model. A prompt of more than 200 characters is not shown again.

    \b
    [dim]linbias generate output/train --prompt "import " -n 400[/]
    [dim]linbias generate output/train --prompt - -n 400 < chapter.txt[/]
    [dim]linbias generate output/train --stream | head -c 1000000[/]
    """
    text_before = options.read_prompt(prompt, default="def ")
    if stream:
        if as_json:
            raise ValueError("--json: must be left out with --stream")
        return generate_stream(model, text_before, max_new_tokens, temperature, top_k, seed)
    from linbias.lm import generate as run

    text = run(
        model,
        text_before,
        max_new_tokens=200 if max_new_tokens is None else max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        stream=not as_json,
    )
    if as_json:
        print_json({"model": model, "prompt": text_before, "text": text})


def convert(
    folder: Annotated[
        Path, typer.Argument(help="Folder of jina-embeddings-v2, MosaicBERT or DNABERT-2.")
    ],
    output: options.NewFolder,
) -> None:
    """Turn an existing ALiBi encoder into a folder that Transformers loads without remote code.

    After [bold]linbias.models.install()[/] the Auto classes load it, SentenceTransformer those of
    jina; [bold]linbias.models.embed[/] makes vectors of whole documents with them.

    \b
    [dim]linbias convert jina-embeddings-v2-base-en -o jina[/]
    """
    from linbias.models import convert as run

    run(folder, output)
    print_path("model in", output)
