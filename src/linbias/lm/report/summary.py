"""What the explorer's page shows of `linbias extrapolate`: losses, findings and tables, ready for
JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from linbias.lm.report import findings
from linbias.lm.report.records import EvaluationRecord, ExtrapolationResults

_DIGITS = 5  # decimals of a loss: what a page that draws and prints them can show


def read_results(folders: Sequence[Path]) -> dict[str, Any]:
    """Read the runs that `linbias extrapolate` left in folders.

    Args:
        folders: One or more.

    Returns:
        JSON values, for `page` and `widget` of `linbias.explore`: `runs`, of each what its charts
        show.

    Raises:
        ValueError: A folder holds no finished run, or one that cannot be read.

    Example:
        >>> linbias.explore.page(results=read_results(["output/extrapolate"]))  # doctest: +SKIP
    """
    paths = [Path(folder) for folder in folders]
    return {"runs": [summary(read_run("explore", path), path.resolve().name) for path in paths]}


def read_run(function: str, folder: Path) -> ExtrapolationResults:
    """Read what a run left in its folder; an error names the function that was asked for it."""
    rule = f"{function}: results must be a folder that `linbias extrapolate` finished"
    path = folder / "results.json"
    if not path.is_file():
        state = "no results.json"
        if (folder / "results.jsonl").is_file():
            state = "begun and not finished: the same command continues it"
        raise ValueError(f"{rule}, got {folder} ({state})")
    try:
        results = ExtrapolationResults.from_dict(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{rule}, got {path}, which is damaged ({reason:.200})") from error
    if not results.evaluations:
        raise ValueError(f"{rule}, got {path}, which holds no evaluation")
    return results


def summary(results: ExtrapolationResults, name: str) -> dict[str, Any]:
    """What the page shows of a run: groups by training length, sentences, and how it was made.

    The README's run, which evidence/runs writes, has neither the sentences nor the tables.
    """
    evaluations, pooled = results.evaluations, findings.records_by_position(results)
    groups = []
    for train_length in findings.train_lengths(evaluations):
        test_lengths = findings.test_lengths(evaluations, train_length)
        lines = [
            _line(method, train_length, evaluations, pooled, test_lengths[-1])
            for method in findings.methods(evaluations)
            if findings.curve(evaluations, method, train_length)
        ]
        groups.append({"train_length": train_length, "test_lengths": test_lengths, "lines": lines})
    return {
        "name": name,
        "made": results.made,
        "num_seeds": len({record.seed for record in evaluations}),
        "groups": groups,
        "scope": findings.scope(results.trainings),
        "findings": [
            {"method": finding.method, "says": f"is {finding}"}
            for finding in findings.findings(evaluations)
        ],
        "cautions": findings.cautions(results),
        "scored": findings.HOW_SCORED,
        "cost": _table(findings.cost_table(results)) if results.trainings else None,
    }


def _table(table: findings.Table) -> dict[str, Any]:
    rows = [{"method": row.method, "cells": row.cells} for row in table.rows]
    return {**table._asdict(), "rows": rows}


def _line(
    method: str,
    train_length: int,
    evaluations: Sequence[EvaluationRecord],
    pooled: Sequence[EvaluationRecord],
    longest: int,
) -> dict[str, Any]:
    points = findings.curve(evaluations, method, train_length)
    same = [r for r in pooled if (r.method, r.train_length) == (method, train_length)]
    positions, bits = findings.loss_by_position(same) if same else ([], [])
    last = points[-1].test_length
    return {
        "method": method,
        "limit": last if last < longest else None,
        "lengths": [
            {"x": p.test_length, "y": _loss(p.mean), "low": _loss(p.low), "high": _loss(p.high)}
            for p in points
        ],
        "positions": [
            {"x": round(x, 2), "y": _loss(y)} for x, y in zip(positions, bits, strict=True)
        ],
    }


def _loss(bits: float) -> float | None:
    """A loss as JSON knows it: None for a model that diverged."""
    return round(bits, _DIGITS) if math.isfinite(bits) else None
