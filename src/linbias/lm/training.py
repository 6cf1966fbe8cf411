"""Trains a language model on Transformers' Trainer, and survives being interrupted.

The sequences follow from the seed and the step, and a checkpoint holds all else: a run that is
killed and started again ends with the very weights of an unbroken one (same machine and threads).
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
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PrinterCallback, TrainerCallback, TrainerState, set_seed
from transformers.modeling_outputs import CausalLMOutput

from linbias._run.files import Record, write_json
from linbias._run.folders import open_run_folder
from linbias._run.processes import from_main, num_processes, wait_for_all
from linbias.data.corpus import Corpus
from linbias.data.segments import InShards, MaskedSegments, MaskTokens, Segments
from linbias.data.tokenizers import TokenIds
from linbias.lm.initial import initial_config, initial_model, weights_of
from linbias.lm.loop import Run, RunTrainer, TrainingMetrics
from linbias.lm.settings import TrainSettings
from linbias.lm.watch import FollowSchedule, ProgressBar, StopWatch

# With a time budget, the steps follow from the time that this many steps of a throw-away model
# take. The first ones are not timed.
_WARM_STEPS, _TIMED_STEPS = 2, 8

# What older folders name, and runs have no more; and what a run may continue with other values of:
# its weights do not depend on them.
WENT = ("validate_lengths", "prompt", "tensorboard")
_CADENCE = ("save_steps", "validate_steps", "context_parallel", *WENT)

_VALIDATION_TOKENS = 2**15  # that a validation predicts


@dataclass(frozen=True, kw_only=True)
class LanguageModelMetrics(TrainingMetrics):
    """What a finished run measured."""

    loss: float  # nats per token, mean over the last tenth of the steps
    validation_loss: float | None = None  # of the last validation


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

    A larger budget than before extends the run, finished or not. Steps that are done stay, and the
    learning rate follows the schedule of the new number of steps from there on.

    Args:
        settings: What to train and for how long.
        corpus: Its train split is used, and for validations its valid split; its tokenizer is
            saved with the model. To go on from a model, see `lm.initial.with_tokenizer_of`.
        output: Folder of the run: new, empty, or of the very same run, of which the budget may be
            larger now, and `save_steps` and `validate_steps` others.
        progress: Show progress on standard error.
        keep_checkpoint: Keep the last checkpoint of a finished run, three times the size of the
            model, so that it can be extended.
        callbacks: Further Transformers callbacks.

    Returns:
        What the run measured, as metrics.json keeps it. `output` is then ready for
        `linbias.models.load`.

    Raises:
        ValueError: The folder cannot be written, is in use or belongs to another run; the corpus
            is shorter than a segment; the batch cannot be divided; the settings contradict the
            model to go on from; the budget is smaller than before; the loss ceases to be a finite
            number.
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
    run = LanguageModelRun(settings, corpus, Path(output))
    with _threads(settings.threads):
        metrics: LanguageModelMetrics = run.finish(progress, callbacks, int(keep_checkpoint))
    return metrics


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class LanguageModelRun(Run):
    """A run of `train`: its settings, its corpus, its folder and its model's configuration."""

    settings: TrainSettings
    metrics = LanguageModelMetrics

    def __init__(self, settings: TrainSettings, corpus: Corpus, output: Path) -> None:
        super().__init__(settings, output)
        self.corpus = corpus
        splits = {"train on": corpus.train}
        if settings.validate_steps:
            splits["validate on"] = corpus.valid
        for purpose, ids in splits.items():
            if len(ids) < settings.length + 1:
                raise ValueError(
                    f"train: corpus must hold length + 1 = {settings.length + 1} tokens to "
                    f"{purpose}, got {len(ids)}"
                )
        self._steps_per_epoch()  # refuses a tokenizer without the tokens of the task
        self.config = initial_config(settings, self.corpus)
        self.tokens_per_step = settings.batch_size * settings.length
        readers = self.sharing.of
        if settings.batch_size % (readers * settings.accumulation):
            shared = "" if settings.context_parallel == 1 else " / context_parallel"
            raise ValueError(
                f"TrainSettings: batch_size must be a multiple of processes{shared} x "
                f"accumulation = {readers} x {settings.accumulation}, got {settings.batch_size}"
            )

    def open(self) -> None:
        """Opens the run's folder; a larger budget than before extends the run."""
        settings, corpus = self.settings, self.corpus
        compared = asdict(settings)
        for name in ("init", *settings.budget):
            del compared[name]
        identity: Record = {
            "settings": compared,
            "init": settings.init and weights_of(settings.init),
            "corpus": {"fingerprint": corpus.fingerprint, "splits": corpus.splits},
            "num_processes": num_processes(),
        }
        first_time: dict[str, Callable[[], Any]] = {
            "location": lambda: corpus.location,  # not compared: a corpus may move
            "budget": lambda: settings.budget,
            "steps": self._num_steps,
        }
        path = self.output / "settings.json"
        may_change = [f"settings.{name}" for name in _CADENCE]
        there = open_run_folder(
            path, identity, "train", first_time=first_time, may_change=may_change
        )
        self.steps, budget = there["steps"], there["budget"]
        if not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"train: {path} is damaged (steps is {self.steps!r})")
        if not isinstance(budget, dict) or budget.keys() != settings.budget.keys():
            raise ValueError(f"train: {path} is damaged (budget is {budget!r})")
        if budget == settings.budget:
            return
        if settings.seconds is not None and budget["seconds"] is not None:  # the speed is known
            more = round(self.steps * settings.seconds / budget["seconds"])
        else:
            more = self._num_steps()
        self._check_extension(more)
        self.steps = more
        wait_for_all()  # every process has read the file
        content = {**there, "budget": settings.budget, "steps": more}
        from_main(lambda: write_json(path, content))

    def _check_extension(self, more: int) -> None:
        """Refuses a budget below the run's, or above it without a checkpoint to go on from."""
        if more < self.steps:
            budget = self.settings.budget.items()
            name = next(name for name, amount in budget if amount is not None)
            raise ValueError(
                f"TrainSettings: {name} must be at least that of the run in {self.output}, "
                f"{self.steps:,} steps, got {more:,} steps (a shorter run needs another folder)"
            )
        if more > self.steps and self.is_finished() and not self.checkpoints.exist():
            raise ValueError(
                "train: checkpoints must hold the last one of a finished run to extend it, got "
                f"none in {self.checkpoints.folder} (init={str(self.output)!r} in another folder "
                "goes on from its model)"
            )

    def _num_steps(self) -> int:
        """The budget as a number of steps; a budget in seconds is measured."""
        settings = self.settings
        if settings.steps is not None:
            return settings.steps
        if settings.tokens is not None:
            return math.ceil(settings.tokens / self.tokens_per_step)
        if settings.epochs is not None:
            return math.ceil(settings.epochs * self._steps_per_epoch())
        assert settings.seconds is not None
        return max(1, round(settings.seconds / self._step_seconds()))

    def _step_seconds(self) -> float:
        """The time of a step, measured on a few that nobody keeps."""
        watch = StopWatch(exact=True)
        alone = replace(self.settings, validate_steps=0)
        with tempfile.TemporaryDirectory() as folder:
            trial = LanguageModelRun(alone, self.corpus, Path(folder))
            trial.steps = _WARM_STEPS + _TIMED_STEPS
            trainer = trial.trainer([watch])
            trainer.remove_callback(PrinterCallback)
            trainer.args.save_strategy = "no"
            trainer.train()
        step_seconds = watch.step_seconds(after=_WARM_STEPS)
        assert step_seconds is not None
        return step_seconds

    def _steps_per_epoch(self) -> float:
        """Steps of one pass over the train split, of which the last one may be a part."""
        per_pass = self._segments(self.corpus.train, 1, seed=0).per_pass
        return per_pass / self.settings.batch_size

    def watchers(self, bar: ProgressBar) -> list[TrainerCallback]:
        return [FollowSchedule(bar)]

    def trainer(self, callbacks: list[TrainerCallback]) -> LanguageModelTrainer:
        settings, corpus, shards = self.settings, self.corpus, self.settings.context_parallel
        validation = self._validation_segments() if settings.validate_steps else None
        validate_steps = settings.validate_steps
        if 0 < validate_steps < 1:
            validate_steps = max(1, round(validate_steps * self._steps_per_epoch()))
        # The Trainer averages over batches, which must be of one size for an exact mean.
        whole_batches = validation is not None and len(validation) >= settings.batch_size
        batch_size = settings.batch_size // (self.sharing.of * settings.accumulation)
        validation_batch_size = settings.batch_size // self.sharing.of if whole_batches else 1
        arguments = self.arguments(
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=settings.accumulation,
            weight_decay=settings.weight_decay,
            adam_beta2=0.95,
            # Logs fall on checkpoints, so that an interrupted run logs the same numbers.
            logging_steps=math.gcd(settings.save_steps, 10),
            eval_strategy="steps" if validate_steps else "no",
            eval_steps=int(validate_steps) or self.steps,
            per_device_eval_batch_size=validation_batch_size,
            average_tokens_across_devices=False,  # all have equal numbers of them
        )
        set_seed(settings.seed)
        model = initial_model(settings, self.config)
        # Tied weights are saved once; the Trainer would warn of the other name when it resumes.
        model._keys_to_ignore_on_save = set(model.all_tied_weights_keys)
        train: Any = self._segments(corpus.train, self.steps * settings.batch_size, settings.seed)
        valid: Any = validation
        if shards > 1:
            train = InShards(train, shards, batch_size)
            valid = valid and InShards(valid, shards, validation_batch_size)
        return LanguageModelTrainer(
            self,
            model=model,
            args=arguments,
            data_collator=lambda batch: batch,
            train_dataset=train,
            eval_dataset=valid,
            compute_loss_func=self._mean_loss,
            callbacks=callbacks,
        )

    def schedule(self, steps: int) -> float:
        """Linear warmup, then a cosine down to the floor."""
        settings, warmup = self.settings, self.settings.warmup_steps
        if warmup is None:
            warmup = round(settings.warmup * self.steps)
        if steps < warmup:
            return steps / warmup
        progress = min(1.0, (steps - warmup) / max(1, self.steps - warmup))
        return max(settings.learning_rate_floor, 0.5 * (1 + math.cos(math.pi * progress)))

    def _mean_loss(
        self, outputs: CausalLMOutput, labels: Tensor, num_items_in_batch: Tensor | None = None
    ) -> Tensor:
        settings, shards = self.settings, self.settings.context_parallel
        loss = cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
        if shards > 1:  # processes count alike, and their shards may differ by a token
            loss = loss * (labels.shape[1] * shards / settings.length)
        # The parts of a batch are all of one size; a validation has none.
        return loss / settings.accumulation if torch.is_grad_enabled() else loss

    def _segments(self, ids: TokenIds, count: int, seed: int) -> Segments:
        options: dict[str, Any] = {"num_segments": count, "seed": seed}
        options["length"] = self.settings.length
        if self.settings.task == "masked":
            return MaskedSegments(ids, tokens=MaskTokens.of(self.corpus.tokenizer), **options)
        return Segments(ids, **options)

    def _validation_segments(self) -> Segments:
        """The start of the valid split, once: whole batches, where there is enough for one."""
        length, batch_size = self.settings.length, self.settings.batch_size
        num_tokens = min(len(self.corpus.valid) - 1, max(_VALIDATION_TOKENS, length))
        count = num_tokens // length
        if count > batch_size:
            count -= count % batch_size
        return self._segments(self.corpus.valid[: count * length + 1], count, seed=0)

    def publish_last(self, trainer: Any) -> None:
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.config.use_cache = True  # the Trainer turned it off
        self.publish(trainer)

    def add_files(self, folder: Path) -> None:
        self.corpus.tokenizer.save(folder)

    def losses(self, state: TrainerState) -> Record:
        logged = [(log["step"], log["loss"]) for log in state.log_history if "loss" in log]
        recent = [  # of the last tenth of the steps, each for the steps since the one before
            (loss, step - before)
            for (before, _), (step, loss) in pairwise([(0, 0.0), *logged])
            if step > 0.9 * state.max_steps
        ]
        losses, weights = zip(*recent, strict=True)
        validated = [log for log in state.log_history if "eval_loss" in log]
        return {
            "loss": statistics.fmean(losses, weights),
            "validation_loss": validated[-1]["eval_loss"] if validated else None,
        }


class LanguageModelTrainer(RunTrainer):
    """The Trainer, of which only matrices decay."""

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        """All matrices but the table of token embeddings, unless it also computes the output: the
        row of a rare token would only shrink. Slopes are vectors, which would be pulled towards 1.
        """
        names = super().get_decay_parameter_names(model)
        spared = {name for name, weight in model.named_parameters() if weight.ndim < 2}
        if not model.config.tie_word_embeddings:
            table = model.get_input_embeddings().weight
            spared |= {name for name, weight in model.named_parameters() if weight is table}
        return [name for name in names if name not in spared]
