"""What the tests of training share: small settings, and what makes two runs the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from interrupting import Stop, StopAt
from linbias.data.corpus import Corpus
from linbias.lm.settings import TrainSettings
from linbias.lm.training import train

TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
# 24 segments make a pass over the corpus, so the 12 steps of 6 cover three passes; save_steps does
# not divide the number of steps; dropout makes the weights depend on the random state as well.
SETTINGS = TrainSettings(
    model={**TINY, "hidden_dropout": 0.1},
    length=16,
    batch_size=6,
    accumulation=2,
    steps=12,
    save_steps=5,
    threads=1,
    device="cpu",
)


def train_into(settings: TrainSettings, corpus: Corpus, output: Path) -> Path:
    """Trains without a progress bar; returns the run's folder."""
    train(settings, corpus, output, progress=False)
    return output


def metrics(folder: Path) -> dict[str, float]:
    return json.loads((folder / "metrics.json").read_text())


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[dict[str, Any]]:
    """The run's history, but for its pace and for what it does not have."""
    lines = (line.items() for line in history(folder))
    return [{n: x for n, x in of if x is not None and "second" not in n} for of in lines]


def assert_same_run(folder: Path, other: Path) -> None:
    """The same weights bit for bit, and the same numbers but for time and memory."""
    assert (folder / "model.safetensors").read_bytes() == (
        other / "model.safetensors"
    ).read_bytes()
    for name in ("loss", "steps", "tokens"):
        assert metrics(folder)[name] == metrics(other)[name]


def interrupt(corpus: Corpus, output: Path, step: int, settings: TrainSettings = SETTINGS) -> Path:
    """Leaves an unfinished run; returns its checkpoints."""
    with pytest.raises(Stop):
        train(settings, corpus, output, progress=False, callbacks=[StopAt(step)])
    return output / "checkpoints"
