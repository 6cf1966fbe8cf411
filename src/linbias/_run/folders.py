"""A run's folder: held by one run at a time, and new or of the very same run."""

import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from linbias._run.files import Record, check_writable, read_json, write_json
from linbias._run.processes import from_main, is_main, wait_for_all


@contextmanager
def hold_run_folder(folder: Path, function: str) -> Iterator[None]:
    """Keeps other runs out of a folder, made where it is missing, for the length of the block, by
    a lock of the system, which ends in whatever way the process does.
    """
    lock = FileLock(folder / ".lock")
    from_main(lambda: _hold(lock, folder, function))
    try:
        yield
    finally:
        if lock.is_locked:
            Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def _hold(lock: FileLock, folder: Path, function: str) -> None:
    check_writable(folder, function)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"{function}: output must be used by one run at a time, got {folder}, in use"
        ) from None
    except (NotImplementedError, OSError):  # of a file system without locks
        warnings.warn(
            f"{function}: output should be locked, got {folder}, where this system has no locks: "
            "do not start a second run in it",
            stacklevel=2,
        )


def open_run_folder(
    path: Path,
    settings: Mapping[str, Any],
    function: str,
    *,
    first_time: Mapping[str, Callable[[], Any]] | None = None,
    may_change: Collection[str] = (),
) -> Record:
    """Opens the folder of a new run, or of one of the same settings but for those that
    `may_change`; `first_time` computes further entries of its file, which are not compared and
    returned as well.
    """
    folder, first_time = path.parent, first_time or {}
    check_writable(folder, function)
    is_new = not path.exists()
    if is_new and any(not child.name.startswith(".") for child in folder.iterdir()):
        raise ValueError(f"{function}: output must be empty or hold this run, got {folder}")
    wait_for_all()  # the first process writes only when all processes have seen an empty folder
    if is_new:
        computed = {name: compute() for name, compute in first_time.items()}
        if is_main():
            write_json(path, {**settings, **computed})
        wait_for_all()
    record = read_json(path, function)
    compared = {name: value for name, value in record.items() if name not in first_time}
    differences = list_differences(compared, settings, but=may_change)
    if differences:
        raise ValueError(
            f"{function}: output must not be another run's, got {folder} ({differences})"
        )
    missing = [name for name in first_time if name not in record]
    if missing:
        raise ValueError(f"{function}: {path} is damaged (it lacks {', '.join(missing)})")
    if list_differences(compared, settings):
        record = {**record, **settings}
        wait_for_all()  # every process has read the file
        from_main(lambda: write_json(path, record))
    return record


def list_differences(
    there: Mapping[str, Any], here: Mapping[str, Any], *, but: Collection[str] = ()
) -> str:
    """The settings, but for some, in which two runs differ, in words; empty where none does."""
    old = dict(_flatten(there))
    new = dict(_flatten(json.loads(json.dumps(here))))  # tuples are lists in a file
    return "; ".join(
        f"{name} is {old.get(name)!r} there and {new.get(name)!r} here"
        for name in [*old, *(name for name in new if name not in old)]
        if old.get(name) != new.get(name) and name not in but
    )


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
