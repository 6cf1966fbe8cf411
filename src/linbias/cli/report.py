"""The report of an extrapolation experiment as tables and lines for the terminal."""

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from linbias.cli.tables import NumberTable
from linbias.lm.report import findings
from linbias.lm.report.records import ExtrapolationResults
from linbias.methods import METHODS


def tables(results: ExtrapolationResults) -> Iterator[Table]:
    """The losses for each training length, then the costs."""
    for train_length in findings.train_lengths(results.evaluations):
        yield _table(findings.loss_table(results.evaluations, train_length))
    yield _table(findings.cost_table(results))


def sentences(results: ExtrapolationResults) -> Iterator[Text]:
    """What the training can show, findings, and what to keep in mind."""
    if scope := findings.scope(results.trainings):
        yield Text(scope)
    for finding in findings.findings(results.evaluations):
        yield Text.assemble(_name(finding.method), f" is {finding}")
    for caution in findings.cautions(results):
        yield Text(caution, "dim")


def _table(content: findings.Table) -> NumberTable:
    """A table for the terminal, with the names of methods before its columns."""
    table = NumberTable("", *content.heads, title=content.caption)
    table.columns[0].justify = "left"
    for row in content.rows:
        table.add_row(_name(row.method), *("-" if cell is None else cell for cell in row.cells))
    lacking = any(None in row.cells for row in content.rows)
    table.caption = "-: beyond its table of positions" if lacking else content.note or None
    return table


def _name(method: str) -> Text:
    return Text(METHODS[method].label, "bold")
