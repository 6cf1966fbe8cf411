"""The report of an extrapolation experiment as tables and lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from linbias.cli.tables import NumberTable
from linbias.lm.report import findings
from linbias.lm.report.records import ExtrapolationResults
from linbias.methods import METHODS


def tables(results: ExtrapolationResults) -> Iterator[Table]:
    """Bits per byte by test length and what validations kept, for each training length; then the costs."""
    for train_length in findings.train_lengths(results.evaluations):
        yield _table(findings.loss_table(results.evaluations, train_length))
        validated = findings.validations(results.trainings, train_length)
        if validated is not None:
            yield _table(validated.table(train_length))
    yield _table(findings.cost_table(results))


def sentences(results: ExtrapolationResults) -> Iterator[Text]:
    """What the training can show; the findings, a line for each; how each model continued a prompt; what to keep in mind."""
    if scope := findings.scope(results.trainings):
        yield Text(scope)
    for finding in findings.findings(results.evaluations):
        yield Text.assemble(_name(finding.method), f" is {finding}")
    for train_length in findings.train_lengths(results.trainings):
        validated = findings.validations(results.trainings, train_length)
        for row in validated.rows if validated else ():
            for text in row.continuations:
                yield Text.assemble(_name(row.method), f" continues: {text!r}")
    for caution in findings.cautions(results):
        yield Text(caution, "dim")


def _table(found: findings.Table) -> NumberTable:
    """A table for the terminal, with the names of methods before its columns."""
    table = NumberTable("", *found.heads, title=found.caption)
    table.columns[0].justify = "left"
    for row in found.rows:
        table.add_row(
            _name(row.method), *(cell if cell is not None else "-" for cell in row.cells)
        )
    lacking = any(None in row.cells for row in found.rows)
    table.caption = "-: beyond its table of positions" if lacking else found.note or None
    return table


def _name(method: str) -> Text:
    return Text(METHODS[method].label, "bold")
