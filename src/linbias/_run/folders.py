"""A run's folder: held by one run at a time, and new or of the very same run."""

import errno
import json
import os
import platform
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from linbias._run.files import Record, check_writable, read_json, write_json
from linbias._run.processes import from_main, is_main, wait_for_all

try:
    import fcntl
except ImportError:  # not Unix
    fcntl = None  # type: ignore[assignment]

_LOCK = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP)  # of a file system without locks


@contextmanager
def hold_run_folder(folder: Path, function: str) -> Iterator[None]:
    """Keeps other runs out of a folder, made where it is missing, for the length of the block, by
    a `flock` on a hidden file, which the kernel releases in whatever way the process ends.
    """
    locked: list[int] = []
    from_main(lambda: locked.extend(_lock(folder, function)))
    try:
        yield
    finally:
        for file in locked:
            (folder / _LOCK).unlink(missing_ok=True)
            os.close(file)


def _lock(folder: Path, function: str) -> list[int]:
    """Locks the folder: the open file in a list, which is empty where there are no locks."""
    check_writable(folder, function)
    path = folder / _LOCK
    while fcntl is not None:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_same_file(file, path):
                os.close(file)  # its holder has deleted it in the meantime
                continue
        except BlockingIOError as error:
            os.close(file)
            raise ValueError(
                f"{function}: output must be used by one run at a time, got {folder}, "
                f"held by {_holder(path)}"
            ) from error
        except OSError as error:
            os.close(file)
            if error.errno in _NO_LOCKS:
                break
            raise
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        holder = {"pid": os.getpid(), "host": platform.node(), "since": since}
        os.truncate(file, 0)
        os.write(file, json.dumps(holder).encode())
        return [file]
    warnings.warn(
        f"{function}: output should be locked, got {folder}, where this system has no locks: "
        "do not start a second run in it",
        stacklevel=2,
    )
    return []


def _is_same_file(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _holder(lock: Path) -> str:
    try:
        holder = read_json(lock, "")
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, LookupError):
        return "another process"  # it has not written its name yet


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
