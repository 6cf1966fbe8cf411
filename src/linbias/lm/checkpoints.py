"""Which of a run's checkpoints are complete and undamaged, and which are no longer needed.

One counts only with its `complete.json`, written when every process has saved its part, with the
SHA-256 of every file and of itself: a kill or a full disk leaves what merely looks like one.
"""

import hashlib
import json
import re
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState

from linbias._run.files import Record, read_json, sha256, write_json
from linbias._run.processes import from_main, is_main, wait_for_all
from linbias.models.loading import Files, load

_MARK = "complete.json"
_NUM_KEPT = 2  # the newest, and the one before it in case the newest is damaged later


class Checkpoints(TrainerCallback):
    """Marks complete checkpoints, deletes those that they replace, and knows the newest."""

    def __init__(
        self, folder: Path, add_files: Callable[[Path], object] = lambda folder: None
    ) -> None:
        self.folder, self.add_files = folder, add_files
        self.seconds = 0.0
        self.saving = False

    def latest(self) -> Path | None:
        """The newest undamaged checkpoint, if any was completed; every process calls this."""
        newest = from_main(self._find)
        if newest is not None:
            self.seconds = float(read_json(newest / _MARK, "train")["seconds"])
        return newest

    def _find(self) -> Path | None:
        newest, passed_over, damages = _newest(self.folder)
        if damages and newest is None:
            raise ValueError(
                f"train: checkpoints must have an undamaged one to go on from, got "
                f"{', '.join(damages)} in {self.folder} (delete it to train from the start)"
            )
        if damages and newest is not None:
            warnings.warn(
                f"train: checkpoints must be undamaged, got {', '.join(damages)} in "
                f"{self.folder}; going on from {newest.name}",
                stacklevel=2,
            )
        for checkpoint in passed_over:
            shutil.rmtree(checkpoint)
        return newest

    def delete(self, *, all_but: int = 0) -> None:
        """Deletes all but so many of the newest, once the model itself is saved."""
        if is_main():
            there = _list(self.folder)
            for checkpoint in there[: len(there) - all_but]:
                shutil.rmtree(checkpoint)
            if not all_but and self.folder.exists():
                shutil.rmtree(self.folder)

    def exist(self) -> bool:
        """Whether any was ever completed."""
        return any((checkpoint / _MARK).exists() for checkpoint in _list(self.folder))

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        state.compute_steps(args, state.max_steps)  # the checkpoint may be of another cadence
        self._start = time.perf_counter() - self.seconds

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **_: Any) -> None:
        self.saving = control.should_save

    def on_save(self, args: Any, state: TrainerState, control: Any, **_: Any) -> None:
        wait_for_all()
        self.seconds = time.perf_counter() - self._start
        if is_main():
            newest = self.folder / f"checkpoint-{state.global_step}"
            self.add_files(newest)
            mark = {"seconds": self.seconds, "sha256": _digests(newest)}
            write_json(newest / _MARK, {**mark, "mark": _digest_of(mark)})
            for replaced in _list(self.folder)[:-_NUM_KEPT]:
                shutil.rmtree(replaced)
        self.saving = False


def readable_model(function: str, path: str | Path) -> str | Path:
    """The folder to read a model from: of an unfinished run, its newest undamaged checkpoint."""
    folder = Path(path)
    if (folder / "config.json").exists() or not _is_run(folder):
        return path
    newest, _, damages = _newest(folder / "checkpoints")
    if newest is None:
        there = f"damaged ones: {', '.join(damages)}" if damages else "none"
    elif not any(newest.glob("*.safetensors")) or not (newest / "tokenizer.json").exists():
        there = f"{newest.name} without a whole model and its tokenizer"
        newest = None
    if newest is None:
        raise ValueError(
            f"{function}: path must hold a model or an undamaged checkpoint, got {folder}, where "
            f"training has not finished, with {there} (the command that began it continues it; "
            "--save-steps sets how often it saves)"
        )
    warnings.warn(
        f"{function}: training has not finished in {folder}; reading {newest.name}", stacklevel=2
    )
    return newest


def open_model(
    function: str, path: str | Path, argument: str = "folder", *, device: Any = None
) -> tuple[Files, PreTrainedModel]:
    files = Files.at(function, readable_model(function, path), argument)
    return files, load(files, device=device)


def _is_run(folder: Path) -> bool:
    try:
        return "steps" in read_json(folder / "settings.json", "")
    except (OSError, ValueError):
        return (folder / "recipe.json").is_file()


def _newest(folder: Path) -> tuple[Path | None, list[Path], list[str]]:
    """The newest undamaged checkpoint, those after it, and what is damaged in complete ones."""
    passed_over: list[Path] = []
    damages: list[str] = []
    for checkpoint in reversed(_list(folder)):
        if (checkpoint / _MARK).exists():
            damage = _damage(checkpoint)
            if damage is None:
                return checkpoint, passed_over, damages
            damages.append(f"{checkpoint.name} ({damage})")
        passed_over.append(checkpoint)
    return None, passed_over, damages


def _list(folder: Path) -> list[Path]:
    """All checkpoints, complete or not, oldest first, and no other entry of the folder."""
    steps = {}
    for path in folder.glob("checkpoint-*"):
        number = re.fullmatch(r"checkpoint-([0-9]+)", path.name)
        if number and path.is_dir() and not path.is_symlink():
            steps[path] = int(number[1])
    return sorted(steps, key=lambda path: steps[path])


def _damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint that has its mark; None if it is whole."""
    try:
        mark = read_json(checkpoint / _MARK, "train")
        whole = mark.pop("mark") == _digest_of(mark)
    except (OSError, ValueError, LookupError):
        whole = False
    if not whole:
        return f"{_MARK} is damaged"
    there, expected = _digests(checkpoint), mark["sha256"]
    for state, names in (
        ("missing", expected.keys() - there.keys()),
        ("not of it", there.keys() - expected.keys()),
        ("damaged", {name for name in expected if there.get(name) != expected[name]}),
    ):
        if names:
            return f"{', '.join(sorted(names))} {'are' if len(names) > 1 else 'is'} {state}"
    return None


def _digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but the mark, by relative path (FSDP checkpoints have sub-folders)."""
    return {
        path.relative_to(folder).as_posix(): sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (_MARK, f".{_MARK}.partial")
    }


def _digest_of(mark: Record) -> str:
    return hashlib.sha256(json.dumps(mark, sort_keys=True).encode()).hexdigest()
