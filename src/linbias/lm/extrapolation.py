"""The paper's experiment: train short, test long, with position methods that alone differ.

A run that was stopped goes on: no finished model is trained again, no measurement repeated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from linbias import _machine
from linbias._run.files import JsonLog, Record, write_json
from linbias._run.folders import hold_run_folder, open_run_folder
from linbias._run.progress import progress_bar
from linbias.data.corpus import Corpus, load_corpus
from linbias.lm.evaluation import evaluate
from linbias.lm.report.page import write_report
from linbias.lm.report.records import EvaluationRecord, ExtrapolationResults, TrainingRecord
from linbias.lm.settings import ExtrapolateSettings
from linbias.lm.training import WENT, train
from linbias.methods import METHODS
from linbias.models.decoder.config import LinbiasConfig
from linbias.models.limits import position_limit
from linbias.models.loading import load


def extrapolate(
    settings: ExtrapolateSettings,
    output: str | os.PathLike[str],
    *,
    command: str = "linbias.lm.extrapolation()",
    progress: bool = True,
) -> ExtrapolationResults:
    """Trains every model, measures it at every length, and writes the report.

    Args:
        settings: What to compare.
        output: Folder of the run: new, empty, or of the very same run, which then continues.
        command: How the run was started, for the report.
        progress: Show progress on standard error.

    Returns:
        What results.json holds.

    Raises:
        ValueError: A setting breaks its rule, the corpus is too short, or the folder cannot be
            written, is in use or belongs to another run.

    Example:
        >>> from linbias.lm.settings import TrainSettings
        >>> training = TrainSettings({"hidden_size": 12, "num_hidden_layers": 1}, steps=1)
        >>> settings = ExtrapolateSettings(
        ...     methods=("alibi",), max_bytes=20_000, limit_tokens=2048, training=training
        ... )
        >>> results = extrapolate(settings, tmp_path / "run", progress=False)
        >>> [record.test_length for record in results.evaluations]
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
    identity = {
        **settings.to_dict(),
        "corpus": {"fingerprint": corpus.fingerprint, "splits": corpus.splits},
    }
    with hold_run_folder(folder, "extrapolate"):
        went = [f"training.{name}" for name in WENT]
        open_run_folder(folder / "settings.json", identity, "extrapolate", may_change=went)
        log = JsonLog(folder / "results.jsonl")
        console = Console(stderr=True, quiet=not progress)
        trainings: list[TrainingRecord] = []
        evaluations: list[EvaluationRecord] = []
        models = list(product(settings.seeds, settings.train_lengths, settings.methods))
        for number, (seed, train_length, method) in enumerate(models, start=1):
            console.print(f"\n[bold]Model {number} of {len(models)}: {METHODS[method].label}[/]")
            model_folder = folder / "models" / f"{method}-L{train_length}-s{seed}"
            key: Record = {"method": method, "train_length": train_length, "seed": seed}
            training = settings.train_settings_of(**key)
            metrics = train(
                training, corpus, model_folder, progress=progress, keep_checkpoint=False
            )
            trainings.append(_record_once(log, TrainingRecord, key, metrics.to_dict))
            model = load(model_folder)
            limit = position_limit(model) or math.inf
            measured = [
                _record_once(
                    log,
                    EvaluationRecord,
                    {**key, "test_length": length},
                    partial(_test, settings, corpus, model, length, progress),
                )
                for length in settings.test_lengths_of(train_length)
                if length <= limit
            ]
            losses = "  ".join(f"{r.test_length:,}: {r.bits_per_byte:.3f}" for r in measured)
            console.print(f"  bits per byte at  {losses}", highlight=False, soft_wrap=True)
            evaluations += measured

        results = ExtrapolationResults(
            made=_describe(settings, corpus, command, trainings, evaluations),
            settings=settings,
            trainings=tuple(trainings),
            evaluations=tuple(evaluations),
        )
        write_json(folder / "results.json", results.to_dict())
        write_report(results, folder)
        return results


def _check_test_split(settings: ExtrapolateSettings, corpus: Corpus) -> None:
    longest = max(max(settings.test_lengths_of(length)) for length in settings.train_lengths)
    num_tokens = min(len(corpus.test) - 1, settings.limit_tokens or len(corpus.test))
    if num_tokens < longest:
        raise ValueError(
            f"extrapolate: test_lengths must be at most {num_tokens}, the tokens to score (corpus "
            f"{corpus.name}, limit_tokens {settings.limit_tokens}), got {longest}"
        )


def _test(
    settings: ExtrapolateSettings, corpus: Corpus, model: Any, length: int, visible: bool
) -> Record:
    task = f"  testing on {length:,} tokens"
    with progress_bar(task, visible=visible) as advance:
        return evaluate(
            model,
            corpus.test,
            length=length,
            stride=settings.stride,
            num_bytes=corpus.num_bytes["test"],
            limit_tokens=settings.limit_tokens,
            progress=advance,
        ).to_dict()


SomeRecord = TypeVar("SomeRecord", TrainingRecord, EvaluationRecord)


def _record_once(
    log: JsonLog, kind: type[SomeRecord], key: Record, measure: Callable[[], Record]
) -> SomeRecord:
    """The record of the log that has these values; if there is none, it is measured."""
    key = {"kind": kind.kind, **key}
    record = log.find(**key)
    if record is None:
        record = {**key, **measure(), "date": _machine.now()}
        log.append(record)
    try:
        return kind.from_dict(record)
    except ValueError as error:
        line = log.records.index(record) + 1
        raise ValueError(f"extrapolate: line {line} of {log.path} is damaged ({error})") from error


def _describe(
    settings: ExtrapolateSettings,
    corpus: Corpus,
    command: str,
    trainings: Sequence[TrainingRecord],
    evaluations: Sequence[EvaluationRecord],
) -> dict[str, str]:
    """How the results were made, in words for the report."""
    seconds = sum(record.metrics.seconds for record in trainings)
    measured = [record.evaluation for record in evaluations]
    seconds += sum(each.num_tokens / each.tokens_per_second for each in measured)
    metrics, num_scored = trainings[0].metrics, measured[0].num_tokens
    training, config = settings.training, LinbiasConfig(**settings.training.model)
    step_tokens = training.batch_size * training.length
    versions = {name: version for name, version in _machine.versions().items() if version}
    threads = torch.get_num_threads()
    return {
        "command": command,
        "date": _machine.now(),
        "time": f"{seconds // 60:.0f} min {seconds % 60:.0f} s of training and testing",
        "machine": f"{_machine.processor()}, {threads} thread{'s' if threads > 1 else ''}",
        "corpus": f"{corpus.name}: {corpus.source}, {corpus.num_bytes['train'] / 1e6:.1f} MB to "
        f"train on, {num_scored:,} tokens of the test split scored",
        "tokens": f"{corpus.tokenizer.vocab_size:,} different ones ({settings.tokenizer})",
        "model": f"{config.num_hidden_layers} layers of width {config.hidden_size}, "
        f"{config.num_attention_heads} heads, {metrics.num_parameters / 1e6:.2f} M parameters",
        "training": f"{metrics.steps:,} steps of {step_tokens:,} tokens, learning rate "
        f"{training.learning_rate:g}, {training.precision}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
