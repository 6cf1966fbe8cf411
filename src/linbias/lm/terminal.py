"""The report of an extrapolation experiment as tables and lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.table import Table
from rich.text import Text

from linbias.lm import findings
from linbias.lm.findings import Finding
from linbias.lm.methods import COLOURS, NAMES
from linbias.lm.records import ExtrapolationResults


def tables(results: ExtrapolationResults) -> Iterator[Table]:
    """Bits per byte by test length, a table for each training length; then the costs."""
    evaluations = results.evaluations
    for train_length in findings.train_lengths(evaluations):
        table = _table(f"Bits per byte, trained on {train_length:,} tokens, tested on")
        for length in findings.test_lengths(evaluations, train_length):
            table.add_column(f"{length:,}\n{length / train_length:g}x", justify="right")
        table.add_column("change", justify="right")
        for row in findings.loss_rows(evaluations, train_length):
            cells = [cell or Text("beyond\nits table", "dim") for cell in row.cells()]
            table.add_row(_name(row.method), *cells, row.change_cell())
        yield table
    table = _table(f"Training, {findings.budget(results.settings.training)}")
    for title in findings.COST_TITLES:
        table.add_column(title, justify="right")
    for cost in findings.costs(results.trainings):
        table.add_row(_name(cost.method), *cost.cells())
    yield table


def sentence(finding: Finding) -> Text:
    """A finding as one line."""
    return Text.assemble(_name(finding.method), f" is {finding}")


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("")
    return table


def _name(method: str) -> Text:
    return Text(NAMES[method], f"bold {COLOURS[method]}")
