"""Files that are whole, logs that survive a crash, folders that stay one run's, memory."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from linbias._run.files import (
    JsonLog,
    move_into_place,
    new_file,
    read_json,
    write_whole,
)
from linbias._run.folders import hold_run_folder, list_differences, open_run_folder
from linbias.paper.dictionary import Dictionary


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# Files


def test_a_failure_and_a_full_disk_leave_the_previous_file(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    write_whole(path, b"previous")
    with pytest.raises(ValueError, match="half"), new_file(path) as file:
        file.write(b"1234")
        raise ValueError("half of it is missing")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"next")
    assert path.read_bytes() == b"previous"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left.*scores\.npz"):
        write_whole(tmp_path / "scores.npz", b"x")
    monkeypatch.undo()
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match=r"No space left.*dict\.txt"):
        Dictionary.from_counts({"a": 1}).write(tmp_path / "dict.txt")
    assert not list(tmp_path.iterdir())


def test_a_model_moves_into_place_with_its_configuration_last(tmp_path, monkeypatch):
    source, moved = tmp_path / ".partial", []
    source.mkdir()
    for name in ("config.json", "model.safetensors", "dict.txt"):
        (source / name).write_text(name)
    os_replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (moved.append(Path(b).name), os_replace(a, b)))
    move_into_place(source, tmp_path)
    assert moved[-1] == "config.json"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(moved)


@pytest.mark.parametrize("content", ["{", "[]", "7"])
def test_json_that_is_damaged_is_named(tmp_path, content):
    (tmp_path / "metrics.json").write_text(content)
    with pytest.raises(ValueError, match=r"^train: .*metrics\.json is damaged"):
        read_json(tmp_path / "metrics.json", "train")
    with pytest.raises(ValueError, match=r"^train: .*absent\.json must exist"):
        read_json(tmp_path / "absent.json", "train")


# Logs


def test_a_log_keeps_what_was_appended_and_cuts_off_a_line_without_its_end(tmp_path):
    path = tmp_path / "results.jsonl"
    log = JsonLog(path)
    log.append({"length": 64, "bits": 2.5})
    log.append({"length": 128, "bits": (1, 2)})
    whole = path.read_bytes()
    path.write_bytes(whole[:9])
    assert JsonLog(path).records == [] and path.read_bytes() == b""
    for size in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:size])
        torn = JsonLog(path)
        assert torn.records == [{"length": 64, "bits": 2.5}]
        assert torn.find(length=128) is None
        torn.append({"length": 128, "bits": [1, 2]})
        assert path.read_bytes() == whole
    assert log.records == JsonLog(path).records
    assert log.find(bits=[1, 2]) == {"length": 128, "bits": [1, 2]}


def test_a_log_with_a_damaged_line_is_refused_and_left_alone(tmp_path):
    (tmp_path / "log").write_text('{"a": 1}\n{"b\n{"c": 3}\n')
    with pytest.raises(ValueError, match=r"JsonLog: line 2 of .*log is damaged"):
        JsonLog(tmp_path / "log")
    assert len((tmp_path / "log").read_text().splitlines()) == 3
    (tmp_path / "log").write_text('{"a": 1}\n3\n')
    with pytest.raises(ValueError, match=r"line 2 of .*log is damaged \(it holds no JSON object"):
        JsonLog(tmp_path / "log")


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "log"
    log = JsonLog(path)
    log.append({"step": 1})
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)  # the line is in the file, but may not be on the disk
        with pytest.raises(OSError, match=rf"No space left on device: '{path}'"):
            log.append({"step": 2})
    log.append({"step": 3})
    assert JsonLog(path).records == log.records == [{"step": 1}, {"step": 3}]


def test_a_log_starts_again_from_other_records(tmp_path):
    log = JsonLog(tmp_path / "log")
    log.append({"step": 7})
    log.restart({"step": step} for step in (1, 2))
    log.append({"step": 3})
    assert log.records == JsonLog(tmp_path / "log").records
    assert [record["step"] for record in log.records] == [1, 2, 3]


# Folders


def test_a_folder_continues_the_same_run_and_no_other(tmp_path):
    path = tmp_path / "run" / "settings.json"
    open_run_folder(path, {"lengths": (1, 2), "model": {"size": 8}}, "train")
    (path.parent / "model.safetensors").write_text("")
    open_run_folder(path, {"lengths": (1, 2), "model": {"size": 8}}, "train")
    with pytest.raises(
        ValueError, match=r"another run's, .* \(model\.size is 8 there and 9 here\)"
    ):
        open_run_folder(path, {"lengths": (1, 2), "model": {"size": 9}}, "train")


def test_what_a_new_run_computes_is_read_afterwards_and_not_compared(tmp_path):
    path = tmp_path / "settings.json"
    first = open_run_folder(path, {"seed": 1}, "train", first_time={"steps": lambda: 7})

    def never() -> int:
        raise AssertionError("computed again")

    assert open_run_folder(path, {"seed": 1}, "train", first_time={"steps": never}) == first
    assert json.loads(path.read_text()) == {"seed": 1, "steps": 7}


def test_a_run_does_not_move_into_a_folder_with_other_files(tmp_path):
    (tmp_path / ".hidden").write_text("")
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match=r"^run: output must be empty or hold this run"):
        open_run_folder(tmp_path / "texts.json", {}, "run")
    assert not (tmp_path / "texts.json").exists()


def test_settings_that_one_run_lacks_are_differences():
    assert list_differences({"a": 1}, {"a": 1, "b": None}) == ""
    assert list_differences({"a": 1, "b": {"c": 2}}, {"a": 1}) == "b.c is 2 there and None here"


# One run at a time

HOLD = """
import sys, time
from pathlib import Path
from linbias._run.folders import hold_run_folder
with hold_run_folder(Path(sys.argv[1]), "train"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_held_by_one_run_until_it_ends_in_whatever_way(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=r"^extrapolate: output must be used by one"):
            hold_run_folder(tmp_path / "run", "extrapolate").__enter__()
        assert other.poll() is None
        other.kill()  # as kill -9: its file stays behind
    with hold_run_folder(tmp_path / "run", "train"):
        with pytest.raises(ValueError, match="one run at a time"):
            hold_run_folder(tmp_path / "run", "train").__enter__()
    assert not list((tmp_path / "run").iterdir())


def test_where_there_are_no_locks_a_run_says_so_and_starts(tmp_path, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    held = hold_run_folder(tmp_path, "train")
    with pytest.warns(UserWarning, match="train: output should be locked, got"):
        held.__enter__()
    held.__exit__(None, None, None)
