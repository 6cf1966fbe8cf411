"""A command of the paper's code as one of ours.

The original's commands are fairseq's, in two dialects: until August 2021 `--max-lr` is the peak of the schedule and `--lr`
its floor, later `--lr` is the peak and `--min-lr` the floor. What a command leaves out has fairseq's default.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from linbias.lm.paper.recipe import PRESETS, Recipe


@dataclass
class Translation:
    """Our command for one of the original.

    Attributes:
        words: The command.
        notes: What was assumed.
        unknown: What of the original's command is left out because it has no counterpart.
    """

    words: list[str]
    notes: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def command(self) -> str:
        """A line for the shell, whose variables stay open."""
        plain = re.compile(r"[\w@%+=:,./${}-]+")
        return " ".join(w if plain.fullmatch(w) else shlex.quote(w) for w in self.words)


def translate(command: str) -> Translation:
    """Translate a command of fairseq as the paper's README has it: preprocess, train or eval-lm.

    Shell variables that the command itself sets (`l=1024; ... $l ... $((l-1))`) are filled in.

    Args:
        command: A line for the shell; line ends after a backslash are allowed.

    Returns:
        Our command, and what it leaves out.

    Raises:
        ValueError: It is no command of these, or lacks what ours needs.

    Example:
        >>> found = translate("l=512; fairseq-eval-lm data --path best.pt --gen-subset valid --tokens-per-sample $l --nbest 4")
        >>> found.command
        'linbias paper evaluate best.pt data --split valid --length 512'
        >>> found.unknown
        ['--nbest 4']

    Source: README of the paper's repository; the defaults are those of its code.
    """
    line = _fill_variables(command.replace("\\\n", " "))
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"translate: command must be a line for the shell, got {error}") from None
    for index, word in enumerate(words):
        name = word.rpartition("/")[2]
        if name in _PROGRAMS:
            given = _Given(words[index + 1 :])
            found = _PROGRAMS[name](given, words[:index])
            found.unknown += given.rest()
            return found
    known = ", ".join(_PROGRAMS)
    raise ValueError(f"translate: command must call one of {known}, got {command!r}")


def _fill_variables(line: str) -> str:
    """Fill in `$name`, `${name}` and `$((name - 1))` for variables that the line sets to whole numbers."""
    values = {name: int(n) for name, n in re.findall(r"\b(\w+)=(\d+)\s*(?:;|&&)", line)}
    line = re.sub(r"\b\w+=\d+\s*(?:;|&&)", "", line)

    def compute(found: re.Match[str]) -> str:
        name, sign, number = found.groups()
        if name not in values:
            return found[0]
        return str(values[name] + (int(number) if sign == "+" else -int(number)))

    line = re.sub(r"\$\(\(\s*\$?(\w+)\s*([+-])\s*(\d+)\s*\)\)", compute, line)
    return re.sub(r"\$\{?(\w+)\}?", lambda found: str(values.get(found[1], found[0])), line)


class _Given:
    """The words after the program: flags with their values, and the others."""

    def __init__(self, words: Sequence[str]) -> None:
        self.flags: dict[str, str | None] = {}
        self.others: list[str] = []
        words = [part for word in words for part in _parts(word)]
        index = 0
        while index < len(words):
            name = _ALIASES.get(words[index], words[index])
            index += 1
            if not name.startswith("--"):
                self.others.append(name)
            elif name in _SWITCHES or index == len(words) or words[index].startswith("--"):
                self.flags[name] = None
            else:
                self.flags[name] = words[index]
                index += 1

    def take(self, name: str, convert: Callable[[str], Any] = str, default: Any = None) -> Any:
        """The value of a flag, which is then read."""
        if name not in self.flags:
            return default
        value = self.flags.pop(name)
        try:
            return convert(value) if value is not None else True
        except ValueError:
            raise ValueError(f"translate: {name} must be a number, got {value!r}") from None

    def require(self, name: str, what: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise ValueError(f"translate: command must have {name}, {what}")
        return value

    def data(self) -> str:
        if not self.others:
            raise ValueError("translate: command must name the folder of the data")
        return self.others.pop(0)

    def ignore(self, names: Sequence[str]) -> None:
        for name in names:
            self.flags.pop(name, None)

    def rest(self) -> list[str]:
        flags = (
            name if value is None else f"{name} {value}" for name, value in self.flags.items()
        )
        return [*flags, *self.others]


def _parts(word: str) -> tuple[str, ...]:
    name, equals, value = word.partition("=")
    return (name, value) if equals and name.startswith("--") else (word,)


def _prepare(given: _Given, _: Sequence[str]) -> Translation:
    words = ["linbias", "paper", "prepare"]
    for split in ("train", "valid", "test"):
        path = given.take(f"--{split}pref")
        words += [] if path is None else [f"--{split}", path]
    words += ["-o", given.take("--destdir", default="data-bin")]
    for name, option in (
        ("--workers", "--workers"),
        ("--srcdict", "--dict"),
        ("--nwordssrc", "--nwords"),
        ("--thresholdsrc", "--threshold"),
    ):
        value = given.take(name)
        words += [] if value is None else [option, value]
    unknown = []
    if not given.take("--only-source"):
        unknown.append("no --only-source: texts in two languages are not known here")
    return Translation(words, unknown=unknown)


def _evaluate(given: _Given, _: Sequence[str]) -> Translation:
    words = ["linbias", "paper", "evaluate", given.require("--path", "the model"), given.data()]
    length = given.take("--tokens-per-sample", int, 1024)
    words += ["--split", given.take("--gen-subset", default="test"), "--length", str(length)]
    window = given.take("--context-window", int, 0)
    words += ["--context-window", str(window)] if window else []
    unknown = _fixed(given, {"--sample-break-mode": "none"})
    # How many are read at once, and that the model may read so many, follow from the length.
    sizes = ("--batch-size", "--max-tokens", "--max-target-positions", "--model-overrides")
    given.ignore((*sizes, *_WITHOUT_EFFECT))
    return Translation(words, unknown=unknown)


def _train(given: _Given, before: Sequence[str]) -> Translation:
    notes: list[str] = []
    unknown = _fixed(
        given,
        {
            "--task": "language_modeling",
            "--arch": "transformer_lm_wiki103",
            "--optimizer": "nag",
            "--lr-scheduler": "cosine",
            "--criterion": "adaptive_loss",
            "--sample-break-mode": "none",
        },
        needed=5,
    )
    data, output = given.data(), given.take("--save-dir", default="checkpoints")
    recipe = Recipe(**_recipe(given, before, notes))
    preset = f"L{recipe.length}" if f"L{recipe.length}" in PRESETS else "L512"
    words = ["linbias", "paper", "train", data, "-o", output, "--preset", preset]
    standard = PRESETS[preset]
    # Another number of steps would stretch warmup and cosine; said last, these stay.
    names = [name for name in _OPTIONS if getattr(recipe, name) != getattr(standard, name)]
    if recipe.steps != standard.steps:
        names += [name for name in ("warmup_steps", "period") if name not in names]
    elif recipe.cosine_period == standard.cosine_period and "period" in names:
        names.remove("period")
    for name in names:
        value = getattr(recipe, name)
        if value is not None:
            words += ["--" + name.replace("_", "-"), str(value).removesuffix(".0")]
    for flag, (name, write) in _MODEL.items():
        value = given.take(flag)
        words += [] if value is None else ["--set", f"{name}={write(value)}"]
    given.ignore(_WITHOUT_EFFECT)
    return Translation(words, notes, unknown)


def _recipe(given: _Given, before: Sequence[str], notes: list[str]) -> dict[str, Any]:
    """The fields of the recipe, fairseq's defaults where the command is silent."""
    length = given.take("--tokens-per-sample", int, 1024)
    steps = given.take("--max-update", int)
    if not steps:
        raise ValueError("translate: command must have --max-update, the number of steps")
    warmup = given.take("--warmup-updates", int, 0)
    period = given.take("--lr-period-updates", float, -1.0)
    schedule = _learning_rates(given)
    clip = given.take("--clip-norm", float, 0.0)
    if clip <= 0:
        clip = 1e9
        notes.append(
            "the original does not clip gradients without --clip-norm, nor does --clip 1e9"
        )
    validate = given.take("--validate-interval-updates", int) or None
    if given.take("--disable-validation"):
        validate = 0
    log_steps = given.take("--log-interval", int, 100)
    save_steps = given.take("--save-interval-updates", int) or 10 * log_steps
    return {
        "length": length,
        "max_tokens": _max_tokens(given, length),
        "rows_multiple": given.take("--required-batch-size-multiple", int, 8),
        "batches_per_step": given.take("--update-freq", int, 1) * _num_gpus(given, before, notes),
        "steps": steps,
        "warmup_steps": warmup,
        "period": int(period) if period > 0 else max(1, steps - warmup),
        "t_mult": given.take("--t-mult", float, 1.0),
        "shrink": given.take("--lr-shrink", float, 0.1),
        "momentum": given.take("--momentum", float, 0.99),
        "weight_decay": given.take("--weight-decay", float, 0.0),
        "clip": clip,
        "precision": _precision(given),
        "seed": given.take("--seed", int, 1),
        "validate_steps": validate,
        "log_steps": log_steps,
        "save_steps": save_steps,
        **schedule,
    }


def _learning_rates(given: _Given) -> dict[str, float]:
    peak = given.take("--max-lr", float)
    if peak is not None:  # the older dialect, in which --min-lr ends the run
        floor = given.take("--lr", float, 0.25)
        given.take("--min-lr")
    else:
        peak, floor = given.take("--lr", float, 0.25), given.take("--min-lr", float, 0.0)
    if given.flags.get("--stop-min-lr") and float(given.flags["--stop-min-lr"] or 0) <= floor:
        given.take("--stop-min-lr")  # which is never reached
    initial = given.take("--warmup-init-lr", float, -1.0)
    return {
        "learning_rate": peak,
        "min_learning_rate": floor,
        "initial_learning_rate": peak if initial < 0 else initial,
    }


def _max_tokens(given: _Given, length: int) -> int:
    tokens, rows = given.take("--max-tokens", int), given.take("--batch-size", int)
    sizes = [size for size in (tokens, rows and rows * length) if size]
    if not sizes:
        raise ValueError("translate: command must have --max-tokens or --batch-size")
    return min(sizes)


def _num_gpus(given: _Given, before: Sequence[str], notes: list[str]) -> int:
    """As many as the command says, by a flag or in its environment, or 8."""
    said = given.take("--distributed-world-size", int)
    for word in before:
        if word.startswith("CUDA_VISIBLE_DEVICES="):
            said = said or len(word.partition("=")[2].split(","))
    if said:
        return int(said)
    notes.append("8 GPUs are assumed, as the paper had; --distributed-world-size says others")
    return 8


def _precision(given: _Given) -> str:
    chosen = [name for name in ("fp16", "bf16") if given.take(f"--{name}")]
    return chosen[0] if chosen else "fp32"


def _fixed(given: _Given, values: dict[str, str], needed: int = 0) -> list[str]:
    """Read flags that have one value here; name those that have another, and of the first `needed` those that lack."""
    unknown = []
    for index, (name, only) in enumerate(values.items()):
        value = given.take(name)
        if value is None and index < needed:
            unknown.append(f"no {name}: here it is {only}")
        elif value not in (None, only, only.replace("_lm_", "_lm_baevski_")):
            unknown.append(f"{name} {value}: here it is {only}")
    return unknown


# Fields of the recipe that are options of `linbias paper train` of the same name.
_OPTIONS = (
    *("length", "max_tokens", "rows_multiple", "batches_per_step", "steps", "learning_rate"),
    *("warmup_steps", "initial_learning_rate", "period", "min_learning_rate", "t_mult", "shrink"),
    *("momentum", "weight_decay", "clip", "precision", "seed"),
    *("validate_steps", "log_steps", "save_steps"),
)
_MODEL: dict[str, tuple[str, Callable[[str], str]]] = {
    "--decoder-layers": ("num_hidden_layers", str),
    "--decoder-embed-dim": ("hidden_size", str),
    "--decoder-attention-heads": ("num_attention_heads", str),
    "--decoder-ffn-embed-dim": ("intermediate_size", str),
    "--dropout": ("dropout", str),
    "--attention-dropout": ("attention_dropout", str),
    "--activation-dropout": ("activation_dropout", str),
    "--adaptive-softmax-dropout": ("softmax_dropout", str),
    "--adaptive-softmax-cutoff": ("cutoffs", "[{}]".format),
    "--adaptive-input-factor": ("adaptive_factor", str),
}
_ALIASES = {"--max-sentences": "--batch-size", "-a": "--arch"}
_SWITCHES = {
    *("--fp16", "--bf16", "--only-source", "--disable-validation", "--no-epoch-checkpoints"),
    *("--skip-invalid-size-inputs-valid-test", "--no-progress-bar", "--no-decoder-final-norm"),
    *("--adaptive-input", "--tie-adaptive-weights", "--tie-adaptive-proj", "--cpu"),
}
# How the original computes, stores and prints; and what its architecture has anyway.
_WITHOUT_EFFECT = (
    *("--skip-invalid-size-inputs-valid-test", "--ddp-backend", "--no-epoch-checkpoints"),
    *("--no-progress-bar", "--log-format", "--num-workers", "--fp16-init-scale"),
    *("--adaptive-input", "--tie-adaptive-weights", "--tie-adaptive-proj"),
    *("--no-decoder-final-norm", "--adaptive-input-cutoff"),
)
_PROGRAMS: dict[str, Callable[[_Given, Sequence[str]], Translation]] = {
    "fairseq-train": _train,
    "train.py": _train,
    "fairseq-eval-lm": _evaluate,
    "eval_lm.py": _evaluate,
    "fairseq-preprocess": _prepare,
    "preprocess.py": _prepare,
}
