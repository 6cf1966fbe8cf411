"""A run's folder: whose it is, and which of its checkpoints can be trusted.

Transformers' Trainer writes a checkpoint as a folder of many files, straight under its final name.
A run that is killed, or a disk that fills up, leaves a folder that looks like a checkpoint and is
none. So a checkpoint counts only once `complete.json` stands in it: a list of its files and their
sizes, written when every process has saved its part. Until then its predecessors are kept.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

_MARK = "complete.json"
_KEPT = 2  # the newest, and one before it in case the newest is damaged later


def is_main() -> bool:
    """Whether this process writes the files: the only one, or the first under torchrun."""
    return not distributed.is_initialized() or distributed.get_rank() == 0


def wait_for_all() -> None:
    """Returns when every process has come here."""
    if distributed.is_initialized():
        distributed.barrier()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file under another name, then rename it: whoever reads `path` finds it whole."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file that is there whole or not at all."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def check_writable(folder: Path, function: str = "train") -> None:
    """Makes the folder and a file in it, so that a long job fails at its start, not at its end.

    Args:
        folder: Made with its parents where it is missing.
        function: Whom the error names.

    Raises:
        ValueError: That did not work.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"{function}: output must be a folder to write in, got {folder} ({error})"
        ) from error


def check_same(
    there: dict[str, Any], here: dict[str, Any], folder: Path, function: str = "train"
) -> None:
    """Refuses a folder that was made with other settings, and lists the difference.

    Args:
        there: What the folder was made with, as read from its JSON.
        here: What is asked for now.
        folder: For the error.
        function: Whom the error names.

    Raises:
        ValueError: Something in `there`, read from the folder, is not as it is `here`.
    """
    old, new = dict(_flat(there)), dict(_flat(json.loads(json.dumps(here))))
    changes = [
        f"{name} is {old.get(name)!r} there and {new.get(name)!r} here"
        for name in sorted(old | new)
        if old.get(name) != new.get(name)
    ]
    if changes:
        raise ValueError(
            f"{function}: output must not be another run's, got {folder} ({'; '.join(changes)})"
        )


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


class Checkpoints(TrainerCallback):
    """Marks finished checkpoints, deletes what they replace, and finds the one to go on from.

    Attributes:
        folder: Where the Trainer puts its `checkpoint-<step>` folders.
        seconds: Training time up to the newest complete checkpoint, over all sessions.
        saving: Whether a checkpoint is being written now.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = 0.0
        self.saving = False

    def latest(self) -> Path | None:
        """The newest complete checkpoint; those that are not complete are deleted."""
        found = sorted(self.folder.glob("checkpoint-*"), key=_step)
        complete = [checkpoint for checkpoint in found if _is_complete(checkpoint)]
        wait_for_all()  # every process has looked before the first one deletes
        if is_main():
            for checkpoint in set(found) - set(complete):
                shutil.rmtree(checkpoint)
        if not complete:
            return None
        mark = json.loads((complete[-1] / _MARK).read_text(encoding="utf-8"))
        self.seconds = mark["seconds"]
        return complete[-1]

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._start = time.perf_counter() - self.seconds

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.saving = control.should_save

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        wait_for_all()
        self.seconds = time.perf_counter() - self._start
        if is_main():
            newest = self.folder / f"checkpoint-{state.global_step}"
            write_json(newest / _MARK, {"seconds": self.seconds, "bytes": _file_sizes(newest)})
            for old in sorted(self.folder.glob("checkpoint-*"), key=_step)[:-_KEPT]:
                shutil.rmtree(old)
        self.saving = False


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.split("-")[1])


def _is_complete(checkpoint: Path) -> bool:
    try:
        mark = json.loads((checkpoint / _MARK).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(mark["bytes"] == _file_sizes(checkpoint))


def _file_sizes(folder: Path) -> dict[str, int]:
    """Relative path -> bytes of every file but the mark (FSDP checkpoints have sub-folders)."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (_MARK, f".{_MARK}.partial")
    }
