"""A command of the paper's code, in either dialect of fairseq, as one of ours.

Until August 2021 `--max-lr` is the peak of the schedule and `--lr` its floor, later `--lr` is the
peak and `--min-lr` the floor. What a command leaves out has fairseq's default.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from linbias.paper.recipe import OPTIONS, PRESETS, RATES, SIZES, Recipe

# Our options, each with the original's flag and its default.
_PREPARE = {
    **{f"--{split}": (f"--{split}pref", "") for split in ("train", "valid", "test")},
    "-o": ("--destdir", "data-bin"),
    "--workers": ("--workers", ""),
    "--dict": ("--srcdict", ""),
    "--nwords": ("--nwordssrc", ""),
    "--threshold": ("--thresholdsrc", ""),
}
_EVALUATE = {
    "--split": ("--gen-subset", "test"),
    "--length": ("--tokens-per-sample", 1024),
    "--context-window": ("--context-window", 0),
}
# Fields of the model by the original's names.
_MODEL = {
    **SIZES,
    **RATES,
    "activation_dropout": "activation_dropout",
    "cutoffs": "adaptive_softmax_cutoff",
}
# Flags that have one value here; fairseq's default is another of all but the last.
_FIXED = {
    "--task": "language_modeling",
    "--arch": "transformer_lm_wiki103",
    "--optimizer": "nag",
    "--lr-scheduler": "cosine",
    "--criterion": "adaptive_loss",
    "--sample-break-mode": "none",
}
_ALIASES = {"--max-sentences": "--batch-size", "-a": "--arch"}
# Flags about how the original computes, stores and prints, or what its architecture has anyway.
_IDLE_SWITCHES = (
    "--skip-invalid-size-inputs-valid-test --no-epoch-checkpoints --no-progress-bar "
    "--adaptive-input --tie-adaptive-weights --tie-adaptive-proj --no-decoder-final-norm"
).split()
_IDLE = (
    *_IDLE_SWITCHES,
    *("--ddp-backend", "--log-format", "--num-workers", "--fp16-init-scale"),
    "--adaptive-input-cutoff",
)
# Flags without a value.
_SWITCHES = [*"--fp16 --bf16 --only-source --disable-validation --cpu".split(), *_IDLE_SWITCHES]
# What a script without a name is recognised by: all of the first flags, and one of the others.
_FLAGS_OF = {
    "preprocess.py": ((), ("--only-source", "--trainpref", "--destdir")),
    "train.py": (("--task", "--arch"), ("--save-dir",)),
    "eval_lm.py": (("--path",), ("--gen-subset", "--context-window")),
}
# How much an evaluation reads at once follows from its length.
_SIZES = ("--batch-size", "--max-tokens", "--max-target-positions", "--model-overrides")


@dataclass
class Translation:
    """Our command for one of the original: its words, what was assumed, and what is left out."""

    words: list[str]
    notes: list[str]
    unknown: list[str]

    @property
    def command(self) -> str:
        """A line for the shell, whose variables stay open."""
        plain = re.compile(r"[\w@%+=:,./${}-]+")
        return " ".join(w if plain.fullmatch(w) else shlex.quote(w) for w in self.words)


def translate(command: str) -> Translation:
    """Translate a command of the paper's README, or of a copy that lost the script's name."""
    line = _fill_variables(command.replace("\\\n", " "))
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ValueError(f"translate: command must be a line for the shell, got {error}") from None
    called = [word.rpartition("/")[2] for word in words]
    named = next((index for index, name in enumerate(called) if name in _PROGRAMS), None)
    if named is not None:
        name, given = called[named], _Given(words[:named], words[named + 1 :])
    elif (start := _start_of_words(words)) is not None:
        given = _Given(words[:start], words[start:])
        name = _script_meant(given, command)
    else:
        known = ", ".join(_PROGRAMS)
        raise ValueError(f"translate: command must call one of {known}, got {command!r}")
    program, idle = _PROGRAMS[name]
    words = ["linbias", "paper", *program(given)]
    return Translation(words=words, notes=given.notes, unknown=given.unknown + given.rest(idle))


def _start_of_words(words: list[str]) -> int | None:
    """Where the words begin of a command that names no script; None where it names another."""
    for index, word in enumerate(words):
        if re.fullmatch(r"python[\d.]*", word.rpartition("/")[2]):
            first = words[index + 1] if index + 1 < len(words) else "-"
            # `python -m module` and `python other.py` do name what they run.
            named = first.endswith(".py") or (first.startswith("-") and not first.startswith("--"))
            return None if named else index + 1
    index = next((i for i, word in enumerate(words) if not re.match(r"\w+=", word)), len(words))
    return index if words[index:] and words[index].startswith("--") else None


def _script_meant(given: _Given, command: str) -> str:
    """The script that alone has the flags of a command, which is noted."""
    fitting = {}
    for script, (every, some) in _FLAGS_OF.items():
        present = [name for name in (*every, *some) if name in given.flags]
        if all(name in present for name in every) and any(name in present for name in some):
            fitting[script] = present
    if given.flags.get("--task", "language_modeling") != "language_modeling":
        fitting.pop("train.py", None)
    if len(fitting) != 1:
        scripts = "; ".join(
            f"{script}: {', '.join((*every, ' or '.join(some)))}"
            for script, (every, some) in _FLAGS_OF.items()
        )
        raise ValueError(
            "translate: command must name its script or have the flags of one alone "
            f"({scripts}; --task is language_modeling), got {command!r}"
        )
    script, flags = fitting.popitem()
    given.notes.append(
        f"the command names no script; taken to be {script}, whose flags {', '.join(flags)} it has"
    )
    return script


def _fill_variables(line: str) -> str:
    """Fill in `$x`, `${x}` and `$((x - 1))` for variables that the line sets to whole numbers."""
    values = {name: int(n) for name, n in re.findall(r"\b(\w+)=(\d+)\s*(?:;|&&)", line)}
    line = re.sub(r"\b\w+=\d+\s*(?:;|&&)", "", line)

    def fill(match: re.Match[str]) -> str:
        name, *change = match.groups()
        added = int(change[0].replace(" ", "")) if change else 0
        return str(values[name] + added) if name in values else match[0]

    line = re.sub(r"\$\(\(\s*\$?(\w+)\s*([+-]\s*\d+)\s*\)\)", fill, line)
    return re.sub(r"\$\{?(\w+)\}?", fill, line)


class _Given:
    """The words around the program: flags with values, and others; what is taken is translated."""

    def __init__(self, before: list[str], after: list[str]) -> None:
        self.before = before
        self.flags: dict[str, str | None] = {}
        self.others: list[str] = []
        self.notes: list[str] = []
        self.unknown: list[str] = []
        words = [p for w in after for p in (w.split("=", 1) if w.startswith("--") else [w])]
        while words:
            name = _ALIASES.get(words[0], words[0])
            del words[0]
            if not name.startswith("--"):
                self.others.append(name)
            elif name in _SWITCHES or not words or words[0].startswith("--"):
                self.flags[name] = None
            else:
                self.flags[name] = words.pop(0)

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a flag, of the type of the default; True where it has none."""
        if name not in self.flags:
            return default
        value = self.flags.pop(name)
        if value is None:
            return True
        try:
            return value if default is None else type(default)(value)
        except ValueError:
            raise ValueError(f"translate: {name} must be a number, got {value!r}") from None

    def take_all(self, table: dict[str, tuple[str, Any]]) -> list[str]:
        """Options of ours, with the values of the original's flags, if they have one."""
        values = {option: self.take(*flag) for option, flag in table.items()}
        return [word for option, value in values.items() if value for word in (option, str(value))]

    def take_data(self) -> str:
        if not self.others:
            raise ValueError("translate: command must name the folder of the data")
        return self.others.pop(0)

    def take_fixed(self, name: str, *, needed: bool) -> None:
        """Read a flag that has one value here, and note another one as unknown."""
        value, only = self.take(name), _FIXED[name]
        if value is None and needed:
            self.unknown.append(f"no {name}: here it is {only}")
        elif value not in (None, only, only.replace("_lm_", "_lm_baevski_")):
            self.unknown.append(f"{name} {value}: here it is {only}")

    def rest(self, idle: tuple[str, ...]) -> list[str]:
        """The words that nothing took."""
        flags = {name: value for name, value in self.flags.items() if name not in idle}
        return [*(n if v is None else f"{n} {v}" for n, v in flags.items()), *self.others]


def _prepare(given: _Given) -> list[str]:
    if not given.take("--only-source"):
        given.unknown.append("no --only-source: texts in two languages are not known here")
    return ["prepare", *given.take_all(_PREPARE)]


def _evaluate(given: _Given) -> list[str]:
    path = given.take("--path")
    if not isinstance(path, str):
        raise ValueError("translate: command must have --path, the model")
    if path.endswith("/"):
        given.notes.append(
            f"--path {path} is a folder; the original reads a file, "
            f"such as {path}checkpoint_best.pt"
        )
    given.take_fixed("--sample-break-mode", needed=False)
    return ["evaluate", path, given.take_data(), *given.take_all(_EVALUATE)]


def _train(given: _Given) -> list[str]:
    for name in _FIXED:
        given.take_fixed(name, needed=name != "--sample-break-mode")
    data, output = given.take_data(), given.take("--save-dir", "checkpoints")
    recipe = _recipe(given)
    preset = f"L{recipe.length}" if f"L{recipe.length}" in PRESETS else "L512"
    standard = PRESETS[preset]
    # Another number of steps would stretch warmup and cosine; said last, these stay.
    names = [name for name in OPTIONS if getattr(recipe, name) != getattr(standard, name)]
    if recipe.steps != standard.steps:
        names += [name for name in ("warmup_steps", "period") if name not in names]
    elif recipe.cosine_period == standard.cosine_period and "period" in names:
        names.remove("period")
    words = ["train", data, "-o", output, "--preset", preset]
    for name in names:
        if (value := getattr(recipe, name)) is not None:
            words += ["--" + name.replace("_", "-"), str(value).removesuffix(".0")]
    for name, flag in _MODEL.items():
        if (value := given.take(f"--{flag.replace('_', '-')}")) is not None:
            words += ["--set", f"{name}=[{value}]" if name == "cutoffs" else f"{name}={value}"]
    return words


def _recipe(given: _Given) -> Recipe:
    """The recipe, with fairseq's defaults where the command is silent."""
    fields = {
        name: given.take(flag.partition(" ")[0].rstrip(","), default)
        for name, (_, flag, default) in OPTIONS.items()
        if flag
    }
    if not fields["steps"]:
        raise ValueError("translate: command must have --max-update, the number of steps")
    rows = given.take("--batch-size", 0) * fields["length"]
    if not (rows or fields["max_tokens"]):
        raise ValueError("translate: command must have --max-tokens or --batch-size")
    fields["max_tokens"] = min(rows or math.inf, fields["max_tokens"] or math.inf)
    peak = given.take("--max-lr", 0.0)
    if peak > 0:  # the older dialect, in which --min-lr ends the run
        fields["learning_rate"], fields["min_learning_rate"] = peak, fields["learning_rate"]
    if float(given.flags.get("--stop-min-lr") or "inf") <= fields["min_learning_rate"]:
        given.take("--stop-min-lr")  # which is never reached
    if fields["initial_learning_rate"] < 0:
        fields["initial_learning_rate"] = fields["learning_rate"]
    if fields["clip"] <= 0:
        fields["clip"] = 1e9
        given.notes.append(
            "the original does not clip gradients without --clip-norm, nor does --clip 1e9"
        )
    if fields["period"] <= 0:
        fields["period"] = max(1, fields["steps"] - fields["warmup_steps"])
    fields["period"] = int(fields["period"])
    halves = given.take("--bf16")
    fields["precision"] = "fp16" if fields["precision"] is True else "bf16" if halves else "fp32"
    fields["batches_per_step"] *= _num_gpus(given)
    is_blind = given.take("--disable-validation")
    fields["validate_steps"] = 0 if is_blind else fields["validate_steps"] or None
    fields["save_steps"] = fields["save_steps"] or 10 * fields["log_steps"]
    return Recipe(**fields)


def _num_gpus(given: _Given) -> int:
    """As many as a flag or the environment says, or 8."""
    said: int = given.take("--distributed-world-size", 0)
    for word in given.before:
        if word.startswith("CUDA_VISIBLE_DEVICES="):
            said = said or len(word.partition("=")[2].split(","))
    if not said:
        said = 8
        given.notes.append(
            "8 GPUs are assumed, as the paper had; --distributed-world-size says others"
        )
    return said


# By the program's name: how its words are translated, and which of its flags change nothing here.
_PROGRAMS: dict[str, tuple[Callable[[_Given], list[str]], tuple[str, ...]]] = {
    **dict.fromkeys(("fairseq-train", "train.py"), (_train, _IDLE)),
    **dict.fromkeys(("fairseq-eval-lm", "eval_lm.py"), (_evaluate, _SIZES + _IDLE)),
    **dict.fromkeys(("fairseq-preprocess", "preprocess.py"), (_prepare, ())),
}
