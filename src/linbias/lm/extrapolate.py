"""The paper's experiment: train short, test long, with every way of telling positions.

    for each seed, training length, method:  train a model      models/<method>-L<length>-s<seed>/
        for each test length:                measure its loss   a line of results.jsonl
    then:  results.json, extrapolation.png, report.html

Models that are compared differ in `position` alone: the same corpus, order of text, seed and
budget. Stopped at any moment, the run goes on where it was when it is started again: finished
models are not trained again (see `linbias.lm.train`), and no measurement is repeated.
"""

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from linbias import _machine
from linbias.data.corpus import Corpus, load_corpus
from linbias.lm import report
from linbias.lm.evaluate import evaluate, position_limit
from linbias.lm.figures import NAMES, Record
from linbias.lm.train import TrainSettings, train
from linbias.models.config import POSITIONS, LinbiasConfig
from linbias.models.load import load_model
from linbias.runs.checkpoints import check_same, check_writable, write_json

_TIMES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class ExtrapolateSettings:
    """What to compare. The defaults show the paper's claim on two cores within minutes.

    Attributes:
        methods: values of `LinbiasConfig.position`.
        train_lengths: tokens per training sequence.
        test_lengths: tokens per test segment, besides the training length; None is 2, 4, 8 and 16
            times each training length.
        seeds: one model of each kind per seed; figures show their mean and range.
        corpus: what `load_corpus` reads.
        tokenizer: "bytes" or "bpe".
        vocab_size: of "bpe".
        max_bytes: read at most so many bytes of each split; None is all.
        stride: None tests segments without overlap, else a sliding window (see `evaluate`).
        eval_tokens: tokens of the test split to score; None is all.
        training: all else about training; its model's position, length and seed are set for each
            model, and batch_size so that a step reads batch_size * length tokens at every length.

    Raises:
        ValueError: a field breaks its rule.
    """

    methods: tuple[str, ...] = ("alibi", "sinusoidal", "rotary")
    train_lengths: tuple[int, ...] = (128,)
    test_lengths: tuple[int, ...] | None = None
    seeds: tuple[int, ...] = (0,)
    corpus: str = "stdlib"
    tokenizer: str = "bytes"
    vocab_size: int = 4096
    max_bytes: int | None = None
    stride: int | None = None
    eval_tokens: int | None = 32768
    # With so few tokens the number of steps counts. Bits per byte of ALiBi after 500 k tokens:
    # 2.94 with batches of 8 sequences (learning rate 1e-3; 3.06 with 2e-3), 3.28 with 16 (2e-3).
    training: TrainSettings = field(default_factory=lambda: TrainSettings(steps=450, batch_size=8))

    def __post_init__(self) -> None:
        for name in ("methods", "train_lengths", "test_lengths", "seeds"):
            values = getattr(self, name)
            if values is not None and (not values or len(set(values)) < len(values)):
                _refuse(name, "one or more different values", values)
        unknown = [method for method in self.methods if method not in POSITIONS]
        if unknown:
            _refuse("methods", f"among {', '.join(POSITIONS)}", ", ".join(unknown))
        for name in ("train_lengths", "test_lengths"):
            if min(getattr(self, name) or (1,)) < 1:
                _refuse(name, "at least 1", min(getattr(self, name)))
        if self.eval_tokens is not None and self.eval_tokens < 1:
            _refuse("eval_tokens", "at least 1", self.eval_tokens)
        shortest = min(min(self.tests_of(length)) for length in self.train_lengths)
        if self.stride is not None and not 1 <= self.stride <= shortest:
            _refuse("stride", f"in [1, shortest test length = {shortest}]", self.stride)

    def tests_of(self, train_length: int) -> list[int]:
        """The test lengths of a model trained on `train_length`, that length itself among them."""
        return sorted({train_length, *(self.test_lengths or [train_length * n for n in _TIMES])})

    def training_of(self, method: str, train_length: int, seed: int) -> TrainSettings:
        """The settings of one model."""
        step_tokens = self.training.batch_size * self.training.length
        return replace(
            self.training,
            model={**self.training.model, "position": method},
            length=train_length,
            batch_size=max(1, step_tokens // train_length),
            seed=seed,
        )


def _refuse(name: str, rule: str, given: object) -> None:
    raise ValueError(f"extrapolate: {name} must be {rule}, got {given}")


def extrapolate(
    settings: ExtrapolateSettings,
    output: str | os.PathLike[str],
    *,
    command: str = "linbias.lm.extrapolate()",
    progress: bool = True,
) -> Record:
    """Train every model, measure it at every length, and write the report.

    Args:
        settings: what to compare.
        output: folder of the run; new, empty, or of the same run, which is then continued.
        command: how the run was started, for the report.
        progress: show on standard error what is going on.

    Returns:
        What stands in results.json: `made` (facts about the run), `settings`, `trainings` (a
        record per model: seconds, tokens_per_second, peak_memory_bytes, ...) and `evaluations` (a
        record per model and test length: an Evaluation's fields, method, train_length, seed).

    Raises:
        ValueError: a setting breaks its rule, the corpus is unfit, or the folder cannot be written
            or belongs to another run.

    Example:
        >>> training = TrainSettings({"hidden_size": 12, "num_hidden_layers": 1}, steps=1)
        >>> settings = ExtrapolateSettings(
        ...     methods=("alibi",), max_bytes=20_000, eval_tokens=2048, training=training
        ... )
        >>> results = extrapolate(settings, tmp_path / "run", progress=False)
        >>> [record["test_length"] for record in results["evaluations"]]
        [128, 256, 512, 1024, 2048]

    Source: Press, Smith and Lewis, ICLR 2022, figure 1.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("extrapolate: must run as one process; use train for several (torchrun)")
    folder = Path(output)
    corpus = load_corpus(
        settings.corpus,
        tokenizer=settings.tokenizer,
        vocab_size=settings.vocab_size,
        max_bytes=settings.max_bytes,
    )
    _check_test_split(settings, corpus)
    _open(folder, settings, corpus)
    log = _Log(folder / "results.jsonl")
    console = Console(stderr=True, quiet=not progress)

    trainings, evaluations = [], []
    models = list(product(settings.seeds, settings.train_lengths, settings.methods))
    for number, (seed, train_length, method) in enumerate(models, start=1):
        console.print(f"\n[bold]Model {number} of {len(models)}: {NAMES[method]}[/]")
        home = train(
            settings.training_of(method, train_length, seed),
            corpus,
            folder / "models" / f"{method}-L{train_length}-s{seed}",
            progress=progress,
        )
        key = {"method": method, "train_length": train_length, "seed": seed}
        trainings.append(log.once({"kind": "training", **key}, partial(_metrics, home)))
        evaluations += _test(settings, key, home, corpus, log, console)

    results = {
        "made": _facts(settings, corpus, command, trainings, evaluations),
        "settings": asdict(settings),
        "trainings": trainings,
        "evaluations": evaluations,
    }
    write_json(folder / "results.json", results)
    report.write(results, folder)
    return results


def _check_test_split(settings: ExtrapolateSettings, corpus: Corpus) -> None:
    longest = max(max(settings.tests_of(length)) for length in settings.train_lengths)
    given = min(len(corpus.test) - 1, settings.eval_tokens or len(corpus.test))
    if given < longest:
        raise ValueError(
            f"extrapolate: test_lengths must be at most {given}, the tokens to score (corpus "
            f"{corpus.name}, eval_tokens {settings.eval_tokens}), got {longest}"
        )


def _open(folder: Path, settings: ExtrapolateSettings, corpus: Corpus) -> None:
    """Write settings.json into a new folder, or check that the one there is the same."""
    check_writable(folder)
    path = folder / "settings.json"
    asked = {**asdict(settings), "fingerprint": corpus.fingerprint}
    if path.exists():
        check_same(json.loads(path.read_text(encoding="utf-8")), asked, folder)
    elif any(not child.name.startswith(".") for child in folder.iterdir()):
        raise ValueError(f"extrapolate: output must be an empty or new folder, got {folder}")
    else:
        write_json(path, asked)


class _Log:
    """One JSON line per measurement. A line that a crash left without its end does not count."""

    def __init__(self, path: Path) -> None:
        self.path = path
        whole, _, torn = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
        if torn:
            os.truncate(path, path.stat().st_size - len(torn))
        self.records: list[Record] = [json.loads(line) for line in whole.splitlines()]

    def once(self, key: Record, measure: Callable[[], Record]) -> Record:
        """The record that has these values, or else a new one, measured and appended."""
        for record in self.records:
            if record.items() >= key.items():
                return record
        record = {**key, **measure(), "date": _machine.now()}
        with self.path.open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.records.append(record)
        return record


def _metrics(home: Path) -> Record:
    metrics: Record = json.loads((home / "metrics.json").read_text(encoding="utf-8"))
    return metrics


def _test(
    settings: ExtrapolateSettings,
    key: Record,
    home: Path,
    corpus: Corpus,
    log: _Log,
    console: Console,
) -> list[Record]:
    """The model's record at every test length that it can read."""
    model = load_model(home)
    limit = position_limit(model) or math.inf
    lengths = [length for length in settings.tests_of(key["train_length"]) if length <= limit]
    bar = Progress(
        TextColumn("  {task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    records = []
    with bar:
        for length in lengths:
            task = bar.add_task(f"testing on {length:,} tokens")

            def measure(length: int = length, task: TaskID = task) -> Record:
                return evaluate(
                    model,
                    corpus.test,
                    length=length,
                    stride=settings.stride,
                    num_bytes=corpus.num_bytes["test"],
                    limit_tokens=settings.eval_tokens,
                    progress=lambda done, total: bar.update(task, completed=done, total=total),
                ).to_dict()

            place = {"kind": "evaluation", **key, "test_length": length}
            records.append(log.once(place, measure))
            bar.remove_task(task)
    losses = "  ".join(f"{r['test_length']:,}: {r['bits_per_byte']:.3f}" for r in records)
    console.print(f"  bits per byte at  {losses}", highlight=False, soft_wrap=True)
    return records


def _facts(
    settings: ExtrapolateSettings,
    corpus: Corpus,
    command: str,
    trainings: Sequence[Record],
    evaluations: Sequence[Record],
) -> dict[str, str]:
    """How the results were made, in words for the report."""
    seconds = sum(record["seconds"] for record in trainings)
    seconds += sum(record["num_tokens"] / record["tokens_per_second"] for record in evaluations)
    training, config = settings.training, LinbiasConfig(**settings.training.model)
    step_tokens = training.batch_size * training.length
    num_parameters = trainings[0]["num_parameters"] / 1e6
    versions = {name: version for name, version in _machine.versions().items() if version}
    return {
        "command": command,
        "date": _machine.now(),
        "time": f"{seconds // 60:.0f} min {seconds % 60:.0f} s of training and testing",
        "machine": f"{_machine.processor()}, {torch.get_num_threads()} threads",
        "corpus": f"{corpus.name}: {corpus.source}, {corpus.num_bytes['train'] / 1e6:.1f} MB to "
        f"train on, {evaluations[0]['num_tokens']:,} tokens of the test split scored",
        "tokens": f"{corpus.tokenizer.vocab_size:,} different ones ({settings.tokenizer})",
        "model": f"{config.num_hidden_layers} layers of width {config.hidden_size}, "
        f"{config.num_attention_heads} heads, {num_parameters:.2f} M parameters",
        "training": f"{trainings[0]['steps']:,} steps of {step_tokens:,} tokens, learning rate "
        f"{training.learning_rate:g}, {training.precision}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
