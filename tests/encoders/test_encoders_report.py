"""The report of `evidence/runs/encoders.py`, of records that are made up."""

import json
import math
import sys
from itertools import product

import pytest

from documents import ROOT

LENGTHS = [64, 128, 256]
METHODS = ["symmetric", "asymmetric", "rotary", "learned"]
# Bits of seed 1 at each length; seed 2 has 0.1 more.
BITS = {
    "symmetric": [3.0, 2.9, 2.9],
    "asymmetric": [2.8, 2.7, 2.6],
    "rotary": [2.5, 2.9, 5.0],
    "learned": [3.2],
}


def records() -> list[dict[str, object]]:
    plan = {"test_lengths": LENGTHS, "methods": METHODS, "margin": 24}
    plan |= {"steps": 9, "batch_size": 2, "length": 64}
    made = {"kind": "made", "plan": plan, "texts": {"stdlib": "8.5 MB to train on"}}
    rows = [{**made, "machine": "a machine", "versions": {"torch": "2"}, "date": "today"}]
    rows.append({"kind": "tune", "method": "rotary", "lr": 0.1, "validation_loss": 1.0})
    for method, seed in product(METHODS, (1, 2)):
        key, tests = {"corpus": "stdlib", "method": method, "seed": seed}, []
        for margin, (length, bits) in product((0, 24), zip(LENGTHS, BITS[method], strict=False)):
            gain = bits if margin == 0 else 2.5  # nothing is gained amid other tokens
            nll = (gain + 0.1 * (seed - 1)) * math.log(2)
            test = {"margin": margin, "length": length, "nll": nll}
            tests.append({**test, "num_scored": 9, "num_tokens": 60})
        slopes = {"left": [0.5, 0.25 * seed], "right": [0.5, 0.125]}
        trained = {"num_parameters": 1e6, "tokens": 1e6, "seconds": 60.0, "lr": 0.1}
        rows.append({"kind": "model", **key, **trained, "slopes": slopes, "tests": tests})
    return rows


@pytest.fixture
def report(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "evidence" / "runs"), *sys.path])
    import encoders_report

    yield encoders_report
    for name in ("encoders_report", "paper_report", "update_readme"):
        sys.modules.pop(name, None)


def test_the_report_says_what_the_records_say(report, tmp_path):
    kept, document = tmp_path / "encoders.jsonl", tmp_path / "encoders.md"
    kept.write_text("".join(json.dumps(record) + "\n" for record in records()))
    document.write_text((ROOT / "docs" / "results" / "encoders.md").read_text())
    report.write(kept, document)
    text = document.read_text()
    assert "Not measured yet" not in text and (tmp_path / "encoders.png").stat().st_size > 10_000
    assert "Least loss at 64: rotary (2.550 bits" in text
    assert "Least loss at 256: asymmetric, learned (2.650)" in text
    recommended = 'longer than in training: `encoder_position="asymmetric"`'
    assert f"Recommended where inputs may be {recommended}" in text
    assert "| rotary | 2.550 ± 0.050 | 2.950 ± 0.050 | 5.050 ± 0.050 |" in text
    assert "| learned table | 3.250 ± 0.050 |  |  |" in text
    numbered = (line for line in text.splitlines() if line[:2] == "| " and line[3:4] == ".")
    verdicts = {line[2]: line for line in numbered}
    assert verdicts["1"].endswith("**holds**: 2.950 against 3.050, 2.650 against 2.850; 4 of 4 |")
    assert "**holds**: 0.000 bits gained against 0.200 in blocks; 2 of 2" in verdicts["2"]
    assert "**holds**: 2.550 against 2.950; 2 of 2" in verdicts["3"]
    assert "not measured" in verdicts["4"] and "not measured" in verdicts["7"]
    assert "**holds**: 2.850 against 3.050; 2 of 2" in verdicts["5"]
    assert "of the others symmetric is best, 2.950; 2 of 2" in verdicts["8"]
    assert ", before | 0.5000 ± 0.0000 | 0.3750 ± 0.1250 |" in text


def test_a_seed_that_a_method_lacks_is_left_out(report):
    rows = [r for r in records() if (r.get("method"), r.get("seed")) != ("rotary", 2)]
    assert report.Found(rows).seeds == {"stdlib": [1]}
