"""How much faster are sliding windows scored many at a time? The lines in docs/paper.md.

    python runs/paper_windows.py CHECKPOINT DATA    # a .pt of the original or a folder; what it was trained on

Stride 1, windows of 128 tokens, on all cores; three ways in turn:

    whole      one window at a time, every position of it computed to the end, as the original does
    one        one window at a time, but only the last position in the last block and the softmax
    batched    the same, 128 windows at a time
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from markers import fill
from numpy.typing import NDArray

from linbias import _machine
from linbias.lm.paper.checkpoint import load
from linbias.lm.paper.score import score
from linbias.lm.paper.store import read_data
from linbias.models.paper import PaperForCausalLM

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "paper.md"
RECORDS = ROOT / "records"
LENGTH, ROUNDS = 128, 4
NUM_WINDOWS = {"whole": 300, "one": 400, "batched": 2400}  # about two seconds each


def windows_per_second(kind: str, model: PaperForCausalLM, ids: NDArray[np.int64]) -> float:
    number = NUM_WINDOWS[kind]
    start = time.perf_counter()
    if kind == "whole":
        windows = torch.from_numpy(ids[: LENGTH + number]).unfold(0, LENGTH + 1, 1)
        with torch.inference_mode():
            for window in windows:
                model.log_probs(window[None, :-1], window[None, 1:])[0, -1].item()
    else:
        batch_tokens = LENGTH * (1 if kind == "one" else 128)
        options = {"length": LENGTH, "context_window": LENGTH - 1, "batch_tokens": batch_tokens}
        score(model, ids[: LENGTH + number - 1], **options)
    return number / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("data", type=Path)
    options = parser.parse_args()
    model = load(options.checkpoint)
    ids = read_data(options.data, "valid")[1].tokens.astype(np.int64)
    speeds: dict[str, list[float]] = {kind: [] for kind in NUM_WINDOWS}
    for number in range(ROUNDS + 1):
        for kind, found in speeds.items():
            speed = windows_per_second(kind, model, ids)
            if number:  # the first round warms up
                found.append(speed)
        print(*(f"{kind} {found[-1]:,.0f}" for kind, found in speeds.items() if found))
    record = {
        **{"speeds": speeds, "length": LENGTH, "num_parameters": model.num_parameters()},
        **{"threads": torch.get_num_threads(), "machine": _machine.processor()},
        **{"versions": _machine.versions(), "date": _machine.now()},
    }
    RECORDS.joinpath("paper_windows.json").write_text(json.dumps(record, indent=1) + "\n")
    fill(DOCUMENT, {"windows": sentence(speeds)})


def sentence(speeds: dict[str, list[float]]) -> str:
    median = {kind: statistics.median(found) for kind, found in speeds.items()}
    shown = {
        kind: f"{median[kind]:,.0f} ({min(found):,.0f} to {max(found):,.0f})"
        for kind, found in speeds.items()
    }
    return (
        f"Windows of {LENGTH} tokens that slide by one, per second: {shown['whole']} one at a time as the original computes "
        f"them, {shown['one']} one at a time with only the last position computed to the end, {shown['batched']} in batches: "
        f"**{median['batched'] / median['whole']:.1f}** and **{median['batched'] / median['one']:.1f}** times as many. "
        f"{torch.get_num_threads()} threads, {_machine.processor()}, {_machine.now()}, "
        f"`python runs/paper_windows.py CHECKPOINT DATA`."
    )


if __name__ == "__main__":
    main()
