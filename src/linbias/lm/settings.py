"""What determines a training run, and an extrapolation experiment: checked records."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from linbias.methods import DECODER, methods_of

TASKS = ("causal", "masked")
PRECISIONS = ("fp32", "bf16", "fp16")  # of matrix products in training
DEVICES = ("auto", "cpu")  # "auto" takes an accelerator where there is one
_TEST_MULTIPLES = (1, 2, 4, 8, 16)  # default test lengths, in training lengths


class Checked:
    """A record whose fields have rules; the error says record, field, rule and value."""

    def _require(self, name: str, holds: bool, rule: str, given: object) -> None:
        if not holds:
            raise ValueError(f"{type(self).__name__}: {name} must be {rule}, got {given!r}")

    def _require_of_each(self, rule: str, holds: Callable[[Any], bool], *names: str) -> None:
        """Refuses the first field that breaks the rule; a None that is the default keeps all."""
        for name in names:
            value = getattr(self, name)
            is_left_out = value is None and getattr(type(self), name) is None
            self._require(name, is_left_out or holds(value), rule, value)


@dataclass(frozen=True)
class TrainSettings(Checked):
    """What determines a run, besides the corpus and the number of processes.

    Exactly one of `steps`, `tokens`, `seconds` and `epochs` says how long to train.

    Attributes:
        model: Fields of `LinbiasConfig` that differ from its defaults; the vocabulary and
            `train_length` follow from the corpus and `length`.
        length: Tokens that a training sequence predicts, each from at most so many before it. With
            task "masked", tokens of a sequence.
        task: "causal", to predict the next token; or "masked", to tell masked tokens from those on
            both sides, with `encoder_position` ("symmetric") in the place of `position`. (For
            `LinbiasForConditionalGeneration` there is Transformers' `Seq2SeqTrainer`.)
        batch_size: Sequences per step, over all processes and accumulated parts together.
        accumulation: Parts that a process computes one after another to save memory.
        steps: Updates of the weights.
        tokens: Tokens to predict, rounded up to whole steps.
        seconds: Training time; a few steps of a throw-away model are timed to find the steps.
        epochs: Passes over the train split, which need not be whole, rounded up to whole steps.
        learning_rate: Peak of the schedule: linear warmup, then a cosine down to the floor.
        learning_rate_floor: As a share of the peak.
        warmup: Share of the steps that raise the learning rate.
        warmup_steps: Their number, in the place of `warmup`.
        weight_decay: Of AdamW, on matrices only; not on an embedding from which the output weights
            are not read.
        clip: Largest norm of the gradient.
        precision: "fp32", "bf16", or "fp16" (GPU only), of matrix products; weights are float32.
        save_steps: Steps between checkpoints.
        seed: Fixes the initial weights, the order of the text, and dropout.
        threads: CPU threads; None leaves PyTorch's choice.
        device: "auto" takes a GPU where there is one; or "cpu".
        init: Folder of a model that `train` made, to go on from. Its tokenizer and its shape stay,
            the optimizer and the schedule start anew.
        validate_steps: Steps between validations, on at most 32,768 tokens from the start of the
            validation split; below 1 a share of an epoch (0.1: ten times in each pass); 0 for
            none.
        fsdp: Transformers' `fsdp_config`, for runs under torchrun; {} takes its defaults.
        context_parallel: Processes that share each sequence (`linbias.torch.context_parallel`),
            under torchrun; the number of processes must be a multiple. For task "causal" and
            position "alibi".

    Raises:
        ValueError: A field breaks its rule.

    Example:
        >>> TrainSettings(model={"position": "rotary"}, length=64, steps=100).batch_size
        32
    """

    model: dict[str, Any] = field(default_factory=dict)
    length: int = 128
    task: str = "causal"
    batch_size: int = 32
    accumulation: int = 1
    steps: int | None = None
    tokens: int | None = None
    seconds: float | None = None
    epochs: float | None = None
    learning_rate: float = 1e-3
    learning_rate_floor: float = 0.0
    warmup: float = 0.05
    warmup_steps: int | None = None
    weight_decay: float = 0.1
    clip: float = 1.0
    precision: str = "fp32"
    save_steps: int = 100
    seed: int = 0
    threads: int | None = None
    device: str = "auto"
    init: str | None = None
    validate_steps: float = 0
    fsdp: dict[str, Any] | None = None
    context_parallel: int = 1

    def __post_init__(self) -> None:
        budget = tuple(self.budget.values())
        is_one = sum(amount is not None for amount in budget) == 1
        self._require(", ".join(self.budget), is_one, "given one at a time", budget)
        each = self._require_of_each
        counts = ("length", "batch_size", "accumulation", "save_steps", "steps", "tokens")
        each("at least 1", lambda n: n >= 1, *counts, "threads", "warmup_steps")
        each("positive", lambda n: n > 0, "seconds", "epochs", "learning_rate")
        each("in [0, 1)", lambda n: 0 <= n < 1, "warmup", "learning_rate_floor")
        each("at least 0", lambda n: n >= 0, "weight_decay", "clip", "validate_steps")
        whole = "a whole number or below 1"
        each(whole, lambda n: n < 1 or n == int(n), "validate_steps")
        length = self.length
        each(f"from 1 to length = {length}", lambda n: 1 <= n <= length, "context_parallel")
        each(f"one of {PRECISIONS}", PRECISIONS.__contains__, "precision")
        each("'auto' or 'cpu'", DEVICES.__contains__, "device")
        seq2seq = " (Seq2SeqTrainer of Transformers trains that)" * (self.task == "seq2seq")
        each(f"one of {TASKS}{seq2seq}", TASKS.__contains__, "task")
        position = self.model.get("position", "alibi")
        shardable = self.context_parallel == 1 or (self.task, position) == ("causal", "alibi")
        rule = "1 unless task is 'causal' and the position 'alibi'"
        self._require("context_parallel", shardable, rule, self.context_parallel)
        if self.task != "causal":
            rule = f"at least 2 for task={self.task!r}"
            self._require("length", self.length >= 2, rule, self.length)
        other = {"causal": "encoder_position", "masked": "position"}[self.task]
        rule = f"without {other}, which task={self.task!r} does not use"
        self._require("model", other not in self.model, rule, self.model.get(other))
        given_elsewhere = {"vocab_size", "train_length"}
        given = sorted(given_elsewhere & set(self.model))
        rule = "without vocab_size and train_length, which follow from corpus and length"
        self._require("model", not given, rule, ", ".join(given))
        if self.model:  # Transformers takes long to load: the other rules come first
            from linbias.models.decoder.config import LinbiasConfig
            from linbias.models.fields import own_fields

            known = sorted(own_fields(LinbiasConfig) - given_elsewhere)
            for name in self.model:
                if name not in known:
                    raise ValueError(
                        f"TrainSettings: model must be made of LinbiasConfig's fields, got "
                        f"{name!r}{_nearest(name, known)}; there are {', '.join(known)}"
                    )

    @property
    def budget(self) -> dict[str, float | None]:
        """How long to train: `steps`, `tokens`, `seconds` and `epochs`, of which one is given."""
        return {name: getattr(self, name) for name in ("steps", "tokens", "seconds", "epochs")}


def _nearest(name: str, known: list[str]) -> str:
    """The names that were perhaps meant, in words; empty where none is near."""
    near = [word for word in known if name in word]
    near = near or difflib.get_close_matches(name, known, n=2, cutoff=0.7)
    return f" (perhaps {' or '.join(near)})" if near else ""


@dataclass(frozen=True)
class ExtrapolateSettings(Checked):
    """What to compare. The defaults show the paper's result on two cores within minutes.

    Attributes:
        methods: Values of `LinbiasConfig.position`.
        train_lengths: Tokens per training sequence.
        test_lengths: Tokens per test segment, besides the training length; None: 2, 4, 8 and 16
            times each training length.
        seeds: One model of each kind per seed; figures show their mean and range.
        corpus: What `load_corpus` reads.
        tokenizer: "bytes" or "bpe".
        vocab_size: Of "bpe".
        max_bytes: Read at most this many bytes of each split; None reads all.
        stride: None tests segments without overlap, else a sliding window (see `evaluate`).
        limit_tokens: Score at most this many tokens of the test split; None scores all.
        training: How to train. The position and length of its model and its seed are set for each
            model, and its batch size so that a step reads equally many tokens at every length.

    Raises:
        ValueError: A field breaks its rule.
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
    limit_tokens: int | None = 32768
    # With so few tokens, many small steps are better. Bits per byte of ALiBi after 500 k tokens:
    # 2.94 with batches of 8 sequences (learning rate 1e-3; 3.06 with 2e-3), 3.28 with 16 (2e-3).
    # After 154 k with batches of 4: 3.60, and 3.59 at 16 times the length; sinusoidal 3.85, 4.22.
    training: TrainSettings = field(default_factory=lambda: TrainSettings(steps=300, batch_size=4))

    def __post_init__(self) -> None:
        for name in ("methods", "train_lengths", "test_lengths", "seeds"):
            values = getattr(self, name)
            differ = values is None or (values and len(set(values)) == len(values))
            self._require(name, bool(differ), "one or more different values", values)
        known = methods_of(DECODER)
        unknown = [method for method in self.methods if method not in known]
        self._require("methods", not unknown, f"among {', '.join(known)}", ", ".join(unknown))
        for name in ("train_lengths", "test_lengths"):
            shortest = min(getattr(self, name) or (1,))
            self._require(name, shortest >= 1, "at least 1", shortest)
        task = self.training.task
        self._require("training.task", task == "causal", "'causal'", task)
        self._require_of_each("at least 1", lambda n: n >= 1, "limit_tokens")
        shortest = min(min(self.test_lengths_of(length)) for length in self.train_lengths)
        in_range = self.stride is None or 1 <= self.stride <= shortest
        self._require(
            "stride", in_range, f"in [1, shortest test length = {shortest}]", self.stride
        )

    def test_lengths_of(self, train_length: int) -> list[int]:
        """The test lengths of a model trained on `train_length`, which is one of them."""
        multiples = [train_length * multiple for multiple in _TEST_MULTIPLES]
        return sorted({train_length, *(self.test_lengths or multiples)})

    def train_settings_of(self, method: str, train_length: int, seed: int) -> TrainSettings:
        """The settings of one model."""
        step_tokens = self.training.batch_size * self.training.length
        return replace(
            self.training,
            model={**self.training.model, "position": method},
            length=train_length,
            batch_size=max(1, step_tokens // train_length),
            seed=seed,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> ExtrapolateSettings:
        """The reverse of `to_dict`, also when it went through JSON; of the training, settings
        that there are no more are left out.
        """
        lists = {name: tuple(value) for name, value in record.items() if isinstance(value, list)}
        known = {f.name for f in fields(TrainSettings)} & record["training"].keys()
        training = TrainSettings(**{name: record["training"][name] for name in known})
        return cls(**{**record, **lists, "training": training})
