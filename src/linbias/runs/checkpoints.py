"""Which of a run's checkpoints are complete, and which are no longer needed.

Transformers' Trainer writes a checkpoint as a folder of many files, straight under its final name.
A run that is killed, or a disk that fills up, leaves a folder that looks like a checkpoint and is
none. So a checkpoint counts only if it has a `complete.json`: a list of its files and their sizes,
written when every process has saved its part. Until then the checkpoints before it are kept.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from linbias.runs.files import Record, read_json, write_json
from linbias.runs.processes import is_main, wait_for_all

_MARK = "complete.json"
_NUM_KEPT = 2  # the newest, and the one before it in case the newest is damaged later


class Checkpoints(TrainerCallback):
    """Marks complete checkpoints, deletes those that they replace, and finds the newest.

    Args:
        folder: Where the Trainer puts its `checkpoint-<step>` folders.

    Attributes:
        seconds: Training time up to the newest complete checkpoint, over all sessions.
        saving: Whether a checkpoint, or the model, is being written now.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seconds = 0.0
        self.saving = False

    def latest(self) -> Path | None:
        """The newest complete checkpoint; those that are not complete are deleted."""
        found = self._list()
        complete = [checkpoint for checkpoint in found if _is_complete(checkpoint)]
        wait_for_all()  # the first process deletes only when all processes have listed the folder
        if is_main():
            for checkpoint in set(found) - set(complete):
                shutil.rmtree(checkpoint)
        if not complete:
            return None
        self.seconds = _read_mark(complete[-1])["seconds"]
        return complete[-1]

    def delete(self) -> None:
        """Deletes them all, once the model itself is saved."""
        if is_main():
            shutil.rmtree(self.folder)

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
            for replaced in self._list()[:-_NUM_KEPT]:
                shutil.rmtree(replaced)
        self.saving = False

    def _list(self) -> list[Path]:
        """All checkpoints, complete or not, oldest first."""
        return sorted(self.folder.glob("checkpoint-*"), key=lambda c: int(c.name.split("-")[1]))


def _read_mark(checkpoint: Path) -> Record:
    return read_json(checkpoint / _MARK, "train")


def _is_complete(checkpoint: Path) -> bool:
    try:
        return bool(_read_mark(checkpoint)["bytes"] == _file_sizes(checkpoint))
    except (OSError, ValueError, LookupError):
        return False


def _file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file but the mark, by relative path (FSDP checkpoints have sub-folders)."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (_MARK, f".{_MARK}.partial")
    }
