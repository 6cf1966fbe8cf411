"""A run of the paper's recipe that takes a second: its data, and how runs are compared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from linbias.paper.dictionary import Dictionary
from linbias.paper.recipe import Recipe
from linbias.paper.store import write_ids
from linbias.paper.train import train
from lm_training import losses, metrics

GOLDEN = Path(__file__).parents[1] / "golden"
ORIGINAL = Path(__file__).resolve().parents[3] / "shared" / "golden" / "fairseq"

MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "cutoffs": [12, 24],
    "adaptive_factor": 2.0,
}
# 63 blocks of 16 make 16 batches of 4, so 3 make a step and 6 steps a pass, of which the last has
# one batch to train on and two that are empty. 14 steps cover three passes, and neither save_steps
# nor validate_steps divides them. Dropout makes the weights depend on the random state.
RECIPE = Recipe(
    length=16,
    model=MODEL,
    max_tokens=64,
    rows_multiple=1,
    batches_per_step=3,
    steps=14,
    warmup_steps=3,
    precision="fp32",
    validate_steps=4,
    save_steps=5,
    log_steps=1,
    device="cpu",
)
# For several processes: dropout falls elsewhere where a batch is read by another process.
SMOOTH = replace(
    RECIPE,
    model=MODEL
    | {f"{name}dropout": 0.0 for name in ("", "attention_", "activation_", "softmax_")},
    batches_per_step=6,
    steps=8,
)


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def write_data(folder: Path) -> Path:
    """Walks over 44 words, of which each has three likely successors."""
    Dictionary.from_counts({f"word{i}": 100 - i for i in range(44)}).write(folder / "dict.txt")
    rng = np.random.default_rng(0)
    for name, length in {"train": 1000, "valid": 200}.items():
        ids = [2]
        while len(ids) < length:
            ids.append(4 + (5 * ids[-1] + int(rng.integers(3))) % 44)
        write_ids(folder / name, [ids])
    return folder


def train_into(data: Path, output: Path, recipe: Recipe = RECIPE, **options: Any) -> Path:
    """Trains without a progress bar; returns the run's folder."""
    train(data, output, recipe, progress=False, **options)
    return output


class KeepMomentum(TrainerCallback):
    """Saves the optimizer's state at the end, beside the run's folder."""

    def __init__(self, output: Path) -> None:
        self.path = output.parent / "momentum.pt"

    def on_train_end(self, args, state, control, optimizer, **_) -> None:
        torch.save(optimizer.state_dict(), self.path)


def assert_same_run(folder: Path, other: Path) -> None:
    """The same weights and losses bit for bit, and the same numbers but for time and memory."""
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    assert losses(folder) == losses(other)
    for name in ("loss_base2", "valid_loss_base2", "best_step", "tokens"):
        assert metrics(folder)[name] == metrics(other)[name]
