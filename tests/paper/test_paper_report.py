"""What `evidence/runs/paper_report.py` keeps of a new run: speed may be measured again alone."""

import sys

import pytest

from documents import ROOT


@pytest.fixture
def report(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "evidence" / "runs"), *sys.path])
    import paper_report

    yield paper_report
    for name in ("paper_report", "update_readme"):
        sys.modules.pop(name, None)


def test_speed_measured_again_replaces_speed_alone(report):
    kept = report.read_kept().records
    made = {**report.Found(kept).made, "machine": "another machine", "date": "today"}
    speed = [{**made, "kind": "speed made"}]
    for position, tokens in (("alibi", 200.0), ("sinusoidal", 100.0)):
        key = {"kind": "training speed", "position": position, "length": 256, "round": 0}
        speed.append({**key, "tokens_per_second": tokens})
    trained = {**report.Found(kept).of("train")[0], "loss_base2": 99.0}  # to be timed alone
    renewed = report.renewed(kept, [made, trained, *speed])

    comparison = [r for r in kept if r["kind"] not in report.SPEED]
    assert [r for r in renewed if r["kind"] not in report.SPEED] == comparison
    assert [r for r in renewed if r["kind"] in report.SPEED] == speed
    parts = report.parts(report.Found(renewed))
    assert report.where(report.Found(kept).made) in parts["made"]
    assert "Speed: another machine, torch" in parts["made"]
    assert "**holds**: 200 against 100 (+100.0%); 1 of 1" in parts["claims"]
    assert "| ALiBi |  | 200 ± 0 | " in parts["costs"]
    assert report.renewed(renewed, comparison) == comparison + speed
    assert report.renewed(kept, comparison + speed) == comparison + speed


def test_speed_of_another_plan_is_refused(report):
    kept = report.read_kept().records
    made = report.Found(kept).made
    other = {**made, "plan": {**made["plan"], "length": 32}}
    message = r"^paper_report: plan must be that of .*got .*'length': 32"
    with pytest.raises(ValueError, match=message):
        report.renewed(kept, [other, {**made, "kind": "speed made"}])
