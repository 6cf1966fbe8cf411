"""Trains a language model on Transformers' Trainer, and survives being interrupted.

A run has a folder:

    settings.json      the settings; written first, compared when the run continues
    history.jsonl      the loss as it went, a line every few steps (see `linbias.lm.watch`)
    checkpoints/       the Trainer's; of a finished run the last one, from which it can be extended
    model.safetensors, config.json, tokenizer.json, ...      the result, for `linbias.models.load`
    metrics.json       written last: a run is finished when its number of steps is in it

A run that is called with more steps than it was made for is extended, finished or not. Steps that
are done stay as they are, and the learning rate follows the schedule of the new number of steps from
there on: it goes up to where that schedule has it, from 0 where the run was finished.

The training sequences are a pure function of the seed and the step, and a checkpoint holds all
else that the future depends on. A run that is killed at any moment and started again therefore
ends with the very weights, bit for bit, of an unbroken one (same machine, same threads). Ctrl-C and
SIGTERM leave a checkpoint of the step that they came in.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, set_seed
from transformers.integrations import TensorBoardCallback
from transformers.modeling_outputs import CausalLMOutput

from linbias._run.files import Record, write_json
from linbias._run.folders import hold_run_folder, open_run_folder
from linbias._run.processes import Sharing, from_main, is_main, wait_for_all
from linbias.data.corpus import Corpus
from linbias.data.masked import MaskedSegments, MaskTokens
from linbias.data.segments import InPieces, Segments
from linbias.data.spans import SpanSegments, SpanTokens
from linbias.data.tokenizers import TokenIds
from linbias.lm.checkpoints import Checkpoints
from linbias.lm.initial import initial_config, initial_model, weights_of
from linbias.lm.loop import (
    TrainingMetrics,
    is_finished,
    publish,
    run_trainer,
    trainer_arguments,
    uses_cpu,
)
from linbias.lm.settings import TrainSettings
from linbias.lm.trainer import LanguageModelTrainer
from linbias.lm.validate import MAX_TOKENS, Validation, Validations, record
from linbias.lm.watch import FiniteLoss, FollowSchedule, LossHistory, ProgressBar, StopWatch
from linbias.models.decoder.config import LinbiasConfig
from linbias.models.loading import no_bars

# With a time budget, the steps follow from the time that this many steps of a throw-away model
# take. The first ones are not timed.
_WARM_STEPS, _TIMED_STEPS = 2, 8

# What a run may continue with other values of, since its weights do not depend on them.
_CADENCE = ("save_steps", "validate_steps", "validate_lengths", "prompt", "context_parallel")


@dataclass(frozen=True, kw_only=True)
class LanguageModelMetrics(TrainingMetrics):
    """What a finished run measured.

    Attributes:
        loss: Nats per predicted token, mean over the last tenth of the steps.
        validation_loss: Nats per predicted token of the last validation; None without any.
        validation: What else the last validation kept, as of `linbias.lm.validate`; None where it was the loss only.
    """

    loss: float
    validation_loss: float | None = None
    validation: Record | None = None


def train(
    settings: TrainSettings,
    corpus: Corpus,
    output: str | os.PathLike[str],
    *,
    progress: bool = True,
    keep_checkpoint: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
) -> LanguageModelMetrics:
    """Trains a model, continues or extends a run, or returns one that is finished.

    The text is cut into segments of `length` + 1 tokens that overlap by one: of each, the first
    `length` are read and the last `length` predicted. Segments come in an order shuffled anew for
    each pass over the text. Sets the global random seeds. Under torchrun every process calls this,
    with a corpus loaded the same way.

    Args:
        settings: What to train and for how long.
        corpus: Its train split is used, and for validations its valid split; its tokenizer is saved
            with the model. To go on from a model, see `linbias.lm.initial.with_tokenizer_of`.
        output: Folder of the run: new, empty, or of the very same run, of which the budget may be
            larger now, and `save_steps` and what is validated others.
        progress: Show progress on standard error.
        keep_checkpoint: Keep the last checkpoint of a finished run, three times the size of the
            model, so that it can be extended.
        callbacks: Further Transformers callbacks.

    Returns:
        What the run measured, as metrics.json keeps it. `output` is then ready for
        `linbias.models.load`.

    Raises:
        ValueError: The folder cannot be written, is in use or belongs to another run; the corpus is shorter
            than a segment; the batch cannot be divided; the settings contradict the model to go on from;
            the budget is smaller than before; the loss ceases to be a finite number.
        OSError: A file could not be written (disk full). The last complete checkpoint is intact,
            and the same call continues from there.

    Example:
        >>> from linbias.data.corpus import load_corpus
        >>> settings = TrainSettings({"hidden_size": 48}, length=32, batch_size=4, steps=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     corpus = load_corpus(max_bytes=9999)
        ...     train(settings, corpus, folder, progress=False).tokens
        256
    """
    output = Path(output)
    on_cpu = uses_cpu(settings.device, settings.precision)
    _check_corpus(settings, corpus)
    corpus = _for_task(settings, corpus)
    config = initial_config(settings, corpus)  # may refuse, and should before anything is written
    Validation.of(settings, corpus, _limit(config))  # likewise
    PartialState(cpu=on_cpu)  # joins the other processes, if there are any
    _check_batch(settings)
    with hold_run_folder(output, "train"), _threads(settings.threads), no_bars():
        steps = _open_run(settings, corpus, output)
        if not _is_finished(output, steps):
            _run(settings, corpus, output, steps, progress, callbacks)
        # Of a finished run, too: it may have been killed here.
        Checkpoints(output / "checkpoints").delete(all_but=int(keep_checkpoint))
        wait_for_all()
    return LanguageModelMetrics.read(output)


def _check_corpus(settings: TrainSettings, corpus: Corpus) -> None:
    splits = {"train on": corpus.train}
    if settings.validate_steps:
        splits["validate on"] = corpus.valid
    for purpose, ids in splits.items():
        if len(ids) <= settings.length:
            raise ValueError(
                f"train: corpus must hold length + 1 = {settings.length + 1} tokens to {purpose}, "
                f"got {len(ids)}"
            )


def _for_task(settings: TrainSettings, corpus: Corpus) -> Corpus:
    """The corpus with the tokens that a task needs, or the error that there are none."""
    if settings.task == "masked":
        MaskTokens.of(corpus.tokenizer)
    if settings.task == "seq2seq":
        corpus = replace(corpus, tokenizer=corpus.tokenizer.with_sentinels())
        SpanTokens.of(corpus.tokenizer)
    return corpus


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Sets PyTorch's CPU threads for the length of the block; None leaves them alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_batch(settings: TrainSettings) -> None:
    readers = Sharing.by("train", settings.context_parallel).of
    if settings.batch_size % (readers * settings.accumulation):
        processes = (
            "processes" if settings.context_parallel == 1 else "processes / context_parallel"
        )
        raise ValueError(
            f"TrainSettings: batch_size must be a multiple of {processes} x accumulation = "
            f"{readers} x {settings.accumulation}, got {settings.batch_size}"
        )


def _open_run(settings: TrainSettings, corpus: Corpus, output: Path) -> int:
    """Opens the run's folder, and returns the number of steps."""
    compared = asdict(settings)
    for name in ("init", *settings.budget):
        del compared[name]
    identity: Record = {
        "settings": compared,
        "init": settings.init and weights_of(settings.init),
        "corpus": {"fingerprint": corpus.fingerprint, "splits": corpus.splits},
        "num_processes": PartialState().num_processes,
    }
    first_time: dict[str, Callable[[], Any]] = {
        "location": lambda: corpus.location,  # not compared: a corpus may move
        "budget": lambda: settings.budget,
        "steps": lambda: _num_steps(settings, corpus),
    }
    path = output / "settings.json"
    may_change = [f"settings.{name}" for name in _CADENCE]
    record = open_run_folder(path, identity, "train", first_time=first_time, may_change=may_change)
    steps, budget = record["steps"], record["budget"]
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"train: {path} is damaged (steps is {steps!r})")
    if not isinstance(budget, dict) or budget.keys() != settings.budget.keys():
        raise ValueError(f"train: {path} is damaged (budget is {budget!r})")
    if budget == settings.budget:
        return steps
    if settings.seconds is not None and budget["seconds"] is not None:  # the speed is known
        more = round(steps * settings.seconds / budget["seconds"])
    else:
        more = _num_steps(settings, corpus)
    _check_extension(settings, steps, more, output)
    wait_for_all()  # every process has read the file
    content = {**record, "budget": settings.budget, "steps": more}
    from_main(lambda: write_json(path, content))
    return more


def _check_extension(settings: TrainSettings, steps: int, more: int, output: Path) -> None:
    """Refuses a budget below that of the run, and one above it where nothing is left to go on from."""
    if more < steps:
        name = next(name for name, amount in settings.budget.items() if amount is not None)
        raise ValueError(
            f"TrainSettings: {name} must be at least that of the run in {output}, {steps:,} steps, "
            f"got {more:,} steps (a shorter run needs another folder)"
        )
    checkpoints = Checkpoints(output / "checkpoints")
    if more > steps and _is_finished(output, steps) and not checkpoints.exist():
        raise ValueError(
            f"train: checkpoints must hold the last one of a finished run to extend it, got none in "
            f"{checkpoints.folder} (init={str(output)!r} in another folder goes on from its model)"
        )


def _is_finished(output: Path, steps: int) -> bool:
    """Whether the folder holds the model after so many steps."""
    return is_finished(output) and LanguageModelMetrics.read(output).steps == steps


def _num_steps(settings: TrainSettings, corpus: Corpus) -> int:
    """The budget as a number of steps; a budget in seconds is measured."""
    if settings.steps is not None:
        return settings.steps
    if settings.tokens is not None:
        return math.ceil(settings.tokens / (settings.batch_size * settings.length))
    if settings.epochs is not None:
        return math.ceil(settings.epochs * _steps_per_epoch(settings, corpus))
    assert settings.seconds is not None
    return max(1, round(settings.seconds / _step_seconds(settings, corpus)))


def _step_seconds(settings: TrainSettings, corpus: Corpus) -> float:
    """The time of a step, measured on a few that nobody keeps."""
    watch = StopWatch(exact=True)
    with tempfile.TemporaryDirectory() as folder:
        steps = _WARM_STEPS + _TIMED_STEPS
        without_validation = replace(settings, validate_steps=0, validate_lengths=(), prompt=None)
        trainer = _trainer(without_validation, corpus, Path(folder), steps, [watch])
        trainer.remove_callback(PrinterCallback)
        trainer.args.save_strategy = "no"
        trainer.train()
    step_seconds = watch.step_seconds(after=_WARM_STEPS)
    assert step_seconds is not None
    return step_seconds


def _steps_per_epoch(settings: TrainSettings, corpus: Corpus) -> float:
    """Steps of one pass over the train split, of which the last one may be a part."""
    return _segments(settings, corpus, corpus.train, 1, seed=0).per_pass / settings.batch_size


def _run(
    settings: TrainSettings,
    corpus: Corpus,
    output: Path,
    steps: int,
    progress: bool,
    callbacks: Sequence[TrainerCallback],
) -> None:
    checkpoints = Checkpoints(output / "checkpoints", corpus.tokenizer.save)
    tokens_per_step = settings.batch_size * settings.length
    bar = ProgressBar(tokens_per_step, visible=progress and is_main())
    history = LossHistory(output / "history.jsonl", tokens_per_step, more=_validation_entry)
    schedule, watch = FollowSchedule(bar), StopWatch()
    all_callbacks = [checkpoints, FiniteLoss(), history, bar, schedule, watch, *callbacks]
    if settings.validate_lengths or settings.prompt:
        all_callbacks.append(Validations(settings.length, bar.console))
    if settings.tensorboard:
        all_callbacks.append(TensorBoardCallback())
        all_callbacks[-1].logging_dir = str(output / "tensorboard")
    trainer = _trainer(settings, corpus, checkpoints.folder, steps, all_callbacks)

    def save() -> None:
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.config.use_cache = True  # the Trainer turned it off
        publish(trainer, checkpoints, output, corpus.tokenizer.save)

    peak_memory_bytes = run_trainer(trainer, checkpoints, bar, output, at_the_end=save)
    if is_main():
        LanguageModelMetrics(
            loss=_final_loss(trainer.state),
            validation_loss=_validation_loss(trainer.state),
            validation=_last_validation(trainer.state),
            steps=steps,
            tokens=steps * tokens_per_step,
            seconds=checkpoints.seconds,
            step_seconds=watch.step_seconds(),
            peak_memory_bytes=peak_memory_bytes,
            num_parameters=trainer.model.num_parameters(),
            num_processes=trainer.args.world_size,
        ).write(output)


def _trainer(
    settings: TrainSettings,
    corpus: Corpus,
    folder: Path,
    steps: int,
    callbacks: list[TrainerCallback],
) -> Trainer:
    sharing, pieces = Sharing.by("train", settings.context_parallel), settings.context_parallel
    validation = _validation_segments(settings, corpus) if settings.validate_steps else None
    # The Trainer averages over batches, which must be of one size for an exact mean.
    whole_batches = validation is not None and len(validation) >= settings.batch_size
    batch_size = settings.batch_size // (sharing.of * settings.accumulation)
    validation_batch_size = settings.batch_size // sharing.of if whole_batches else 1
    arguments = trainer_arguments(
        folder,
        device=settings.device,
        precision=settings.precision,
        fsdp=settings.fsdp,
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=settings.accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=_warmup_steps(settings, steps),
        weight_decay=settings.weight_decay,
        adam_beta2=0.95,
        max_grad_norm=settings.clip,
        seed=settings.seed,
        save_steps=settings.save_steps,
        # Logs fall on checkpoints, so that an interrupted run logs the same numbers.
        logging_steps=math.gcd(settings.save_steps, 10),
        eval_strategy="steps" if settings.validate_steps else "no",
        eval_steps=_steps_between_validations(settings, corpus) or steps,
        per_device_eval_batch_size=validation_batch_size,
        # Only where spans are written do devices have unequal numbers of tokens.
        average_tokens_across_devices=settings.task == "seq2seq",
    )
    set_seed(settings.seed)
    config = initial_config(settings, corpus)
    model = initial_model(settings, config)
    # Tied weights are saved once; the Trainer would warn of the other name when it resumes.
    model._keys_to_ignore_on_save = set(model.all_tied_weights_keys)

    def mean_loss(
        outputs: CausalLMOutput, labels: Tensor, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        loss = cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        if pieces > 1:  # processes count alike, and their pieces may differ by a token
            loss = loss * (labels.shape[1] * pieces / settings.length)
        if settings.task == "seq2seq" and num_items_in_batch is not None:  # parts are unequal
            return loss * ((labels != -100).sum() / num_items_in_batch)
        # The parts of a batch are all of one size; a validation has none.
        return loss / settings.accumulation if torch.is_grad_enabled() else loss

    num_segments = steps * settings.batch_size
    train: Any = _segments(settings, corpus, corpus.train, num_segments, settings.seed)
    valid: Any = validation
    if pieces > 1:
        train = InPieces(train, pieces, batch_size)
        valid = valid and InPieces(valid, pieces, validation_batch_size)
    return LanguageModelTrainer(
        model,
        arguments,
        data_collator=lambda batch: batch,
        train_dataset=train,
        eval_dataset=valid,
        pieces=sharing.group,
        compute_loss_func=mean_loss,
        callbacks=callbacks,
        learning_rate_floor=settings.learning_rate_floor,
        validation=Validation.of(settings, corpus, _limit(config)),
    )


def _limit(config: LinbiasConfig) -> int | None:
    """The longest input that a model reads; None for any."""
    return config.train_length if config.method == "learned" else None


def _warmup_steps(settings: TrainSettings, steps: int) -> int:
    number = settings.warmup_steps
    return round(settings.warmup * steps) if number is None else number


def _steps_between_validations(settings: TrainSettings, corpus: Corpus) -> int:
    """0 for no validation."""
    steps = settings.validate_steps
    if not 0 < steps < 1:
        return int(steps)
    return max(1, round(steps * _steps_per_epoch(settings, corpus)))


def _segments(
    settings: TrainSettings, corpus: Corpus, ids: TokenIds, count: int, seed: int
) -> Segments:
    """The sequences of the task."""
    options: dict[str, Any] = {"length": settings.length, "num_segments": count, "seed": seed}
    if settings.task == "masked":
        return MaskedSegments(ids, tokens=MaskTokens.of(corpus.tokenizer), **options)
    if settings.task == "seq2seq":
        return SpanSegments(ids, tokens=SpanTokens.of(corpus.tokenizer), **options)
    return Segments(ids, **options)


def _validation_segments(settings: TrainSettings, corpus: Corpus) -> Segments:
    """The start of the valid split, every segment once: whole batches, where there is enough for one."""
    length, batch_size = settings.length, settings.batch_size
    num_tokens = min(len(corpus.valid) - 1, max(MAX_TOKENS, length))
    count = num_tokens // length
    if count > batch_size:
        count -= count % batch_size
    ids = corpus.valid[: count * length + 1]
    return _segments(settings, corpus, ids, count, seed=0)


def _final_loss(state: TrainerState) -> float:
    """The mean of the losses that were logged in the last tenth of the steps, by steps."""
    logged = [(log["step"], log["loss"]) for log in state.log_history if "loss" in log]
    spans = [(0, 0.0), *logged]
    recent = [
        (loss, step - before)
        for (before, _), (step, loss) in pairwise(spans)
        if step > 0.9 * state.max_steps
    ]
    losses, weights = zip(*recent, strict=True)
    return statistics.fmean(losses, weights)


def _last_validation(state: TrainerState) -> Record | None:
    records = [found for log in state.log_history if (found := record(log)) is not None]
    return records[-1] if records else None


def _validation_entry(logs: Record) -> Record:
    """What a line of the history has of a validation beside its loss."""
    found = record(logs)
    return {} if found is None else {"validation": found}


def _validation_loss(state: TrainerState) -> float | None:
    losses = [log["eval_loss"] for log in state.log_history if "eval_loss" in log]
    return losses[-1] if losses else None
