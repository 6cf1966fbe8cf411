"""The plans of `evidence/runs/extrapolation.py`: their tables, from records that are made up."""

import json
import sys
from dataclasses import asdict
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from contract import rows
from documents import ROOT
from small_models import build, tokens

PLAN = "learned-steps"


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "evidence" / "runs"), *sys.path])
    import update_readme

    yield update_readme.extrapolation_report, update_readme
    for name in ("extrapolation", "extrapolation_report", "update_readme"):
        sys.modules.pop(name, None)


def records(plan: Any) -> list[dict[str, Any]]:
    """Of plan and models; seed 2 reads 2 % more than seed 1, seed 3 likewise."""
    found = [{"kind": "plan", **asdict(plan), "bytes": {"train": 9e6}}]
    growths = dict.fromkeys(plan.test_lengths, 1.0) | {plan.test_lengths[-1]: 1.1}
    for number, (method, seed) in enumerate(product(plan.seeds, (1, 2, 3))):
        share = 0.05 * number
        model = {"kind": "model", "method": method, "seed": seed, "rate": 0.004, "tokens": 2e6}
        model |= {"seconds": 60, "num_parameters": 8e5, "machine": "a machine", "versions": {}}
        model |= {"date": "2026-01-01", "sliding": {}, "positions": []}
        model["segments"] = {n: (2.0 + seed / 10) * growth for n, growth in growths.items()}
        left = {"read": [[share, 1.0]], "step": [[0.25, seed]], "dropped": seed / 1e9}
        found.append({**model, "near_to_far": left})
    return found


def test_the_tables_say_what_the_records_say(runs, tmp_path, monkeypatch):
    report, update = runs
    made = records(report.PLANS[PLAN])
    for lines, words in ((made[:1], "Not measured yet"), (made[:-3], "Not measured yet")):
        (tmp_path / f"{PLAN}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
        monkeypatch.setattr(report, "records_of", lambda name: tmp_path / f"{name}.jsonl")
        assert words in update.learned_steps_tables()
    (tmp_path / f"{PLAN}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in made))
    text = update.learned_steps_tables()
    assert "| ALiBi | 2.200 | 2.200 | 2.200 | 2.200 | 2.200 | 2.420 | +10.0% |" in text
    assert "| ALiBi | 52% | 2 of 6 | 0.25 to 3 | 3e-09 |" in text
    assert "| forget gates | 60% | 0 of 6 | 0.25 to 3 | 3e-09 |" in text
    assert "3 of ALiBi (0.110), forget gates (0.110), CABLE, no weights (0.110)" in text
    assert f"--plan {PLAN}`" in text and "slides" not in text


@pytest.mark.parametrize(
    "position", rows("forget rotary", *((n,) for n in ("alibi", "forget", "cable", "rotary")))
)
def test_what_is_left_unread_is_what_no_row_sees(runs, position):
    from extrapolation import TILE, read_near_to_far

    torch.manual_seed(0)
    model = build(position=position, num_hidden_layers=1, initializer_range=0.1)
    ids = tokens(1, 200)
    found = read_near_to_far(model, ids[0].numpy())
    assert "attend" not in vars(model.model.position)
    if position == "rotary":
        assert found is None
        return
    (read,), (step,) = found["read"], found["step"]
    weights = model(ids, output_attentions=True).attentions[0][0].detach().numpy()
    assert found["length"] == 200 and 0 <= found["dropped"] <= 2.0**-24
    assert min(read) < 1 and len(read) == len(step) == 4
    if position == "alibi":
        expected = [m * 199 / 200 for m in (1 / 4, 1 / 16, 1 / 64, 1 / 256)]
        assert step == pytest.approx(expected, abs=1e-6)
        # Whatever weighs more than what may be left lies within the tiles that are read.
        rows, keys = np.nonzero(weights[0] > 2.0**-24)
        needed = {row // TILE: min(keys[rows // TILE == row // TILE]) for row in rows}
        least = sum(row + 1 - needed[row // TILE] for row in range(200)) / (200 * 201 / 2)
        assert read[0] >= least - 1e-5
