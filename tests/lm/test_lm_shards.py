"""Training and evaluation of sequences that several processes share, beside one process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from linbias.data.segments import InShards, Segments

pytestmark = pytest.mark.processes

TRAIN = (
    *("train", "--quiet", "--steps", "20", "--length", "62", "--batch-size", "4"),
    *("--set", "hidden_size=32", "--set", "num_attention_heads=4", "--set", "num_hidden_layers=2"),
    *("--save-steps", "4", "--validate-steps", "10", "--max-bytes", "60000"),
)


def start(processes: int, *arguments: str) -> subprocess.Popen[str]:
    options = "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --local-addr=127.0.0.1"
    runner = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", *options.split()]
    command = [sys.executable, *(runner if processes > 1 else []), "-m", "linbias", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def run(processes: int, *arguments: str) -> str:
    process = start(processes, *arguments)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-3000:]
    return out


def losses(folder: Path) -> list[tuple[float, ...]]:
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [tuple(v for k, v in line.items() if "loss" in k and v is not None) for line in lines]


def test_training_in_shards_is_that_of_one_process(tmp_path):
    """Losses within 1e-5 of one process; killed and resumed it ends with the same weights."""
    one, two, killed = (tmp_path / name for name in ("one", "two", "killed"))
    run(1, *TRAIN, "-o", str(one))
    run(2, *TRAIN, "-o", str(two), "--context-parallel", "2")
    expected, found = losses(one), losses(two)
    assert len(expected) == len(found) >= 5
    for a, b in zip(expected, found, strict=True):
        assert b == pytest.approx(a, abs=1e-5)

    process = start(2, *TRAIN, "-o", str(killed), "--context-parallel", "2")
    while not list(killed.glob("checkpoints/checkpoint-*/trainer_state.json")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    time.sleep(3)  # its workers notice
    run(2, *TRAIN, "-o", str(killed), "--context-parallel", "2")
    weights = [load_file(folder / "model.safetensors") for folder in (two, killed)]
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name]), name


@pytest.mark.parametrize("sharded", [(), ("--fsdp",)])
def test_shards_of_sequences_and_parts_of_batches(tmp_path, sharded):
    """Two of four share a sequence, and the two pairs a batch; the model is whole, or sharded."""
    short = (*TRAIN, "--steps", "10", "--validate-steps", "0", "--save-steps", "5")
    run(1, *short, "-o", str(tmp_path / "one"))
    run(4, *short, "-o", str(tmp_path / "four"), "--context-parallel", "2", *sharded)
    expected, found = losses(tmp_path / "one"), losses(tmp_path / "four")
    assert len(expected) == len(found) == 2
    for a, b in zip(expected, found, strict=True):
        assert b == pytest.approx(a, abs=1e-5)


def test_segments_in_shards():
    """Batch j of the loader is shard j % 3 of batch j // 3, which make whole segments."""
    whole = Segments(np.arange(1000, dtype=np.int16), length=10, num_segments=12, seed=0)
    cut = InShards(whole, shards=3, batch_size=2)
    assert len(cut) == 36
    for batch in range(6):
        expected = whole.__getitems__([2 * batch, 2 * batch + 1])
        parts = [cut.__getitems__([6 * batch + 2 * p, 6 * batch + 2 * p + 1]) for p in range(3)]
        assert [part["labels"].shape[1] for part in parts] == [4, 3, 3]
        for name, x in expected.items():
            assert torch.equal(torch.cat([part[name] for part in parts], 1), x)


def evaluated(processes: int, model: Path, *more: str) -> list[dict[str, Any]]:
    out = run(processes, "evaluate", str(model), "--json", *more)
    found: list[dict[str, Any]] = json.loads(out)
    return found


def test_evaluation_in_shards(tmp_path):
    model = tmp_path / "model"
    run(1, *TRAIN, "--steps", "4", "-o", str(model))
    given = ("--length", "1,3,1000", "--limit-tokens", "5000")
    for more in ((), ("--stride", "1", "--length", "7", "--limit-tokens", "100")):
        alone = evaluated(1, model, *given, *more)
        shared = evaluated(3, model, *given, *more, "--context-parallel", "3")
        for a, b in zip(alone, shared, strict=True):
            assert b["nll"] == pytest.approx(a["nll"], rel=1e-6)
            assert b["count_by_position"] == a["count_by_position"]
            assert b["loss_by_position"] == pytest.approx(a["loss_by_position"], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("2",), "--context-parallel: must divide the number of processes, 1"),
        (("0",), "--context-parallel"),
        (("2", "--position", "rotary"), "--context-parallel: must be 1 unless"),
        (("2", "--task", "masked"), "--context-parallel: must be 1 unless"),
    ],
)
def test_refused(tmp_path, arguments, words):
    process = start(1, *TRAIN, "-o", str(tmp_path / "run"), "--context-parallel", *arguments)
    _, err = process.communicate(timeout=200)
    assert process.returncode
    assert words in " ".join(err.split()), err[-2000:]
