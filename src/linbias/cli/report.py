"""The report of an extrapolation experiment as tables and lines for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from linbias.cli.tables import NumberTable
from linbias.lm import findings
from linbias.lm.records import ExtrapolationResults
from linbias.methods import METHODS


def tables(results: ExtrapolationResults) -> Iterator[Table]:
    """Bits per byte by test length and what validations kept, for each training length; then the costs."""
    evaluations = results.evaluations
    for train_length in findings.train_lengths(evaluations):
        lengths = findings.test_lengths(evaluations, train_length)
        heads = [f"{length:,}\n{length / train_length:g}x" for length in lengths]
        title = f"Bits per byte, trained on {train_length:,} tokens, tested on"
        table = _table(title, [*heads, "change"])
        for row in findings.loss_rows(evaluations, train_length):
            if None in row.losses:
                table.caption = "-: beyond its table of positions"
            cells = [cell or "-" for cell in row.cells()]
            table.add_row(_name(row.method), *cells, row.change_cell())
        yield table
        validated = findings.validations(results.trainings, train_length)
        if validated is not None:
            title = f"Nats per token, last validation while training on {train_length:,} tokens"
            table = _table(title, [title.replace(" at ", "\nat ") for title in validated.titles])
            for kept in validated.rows:
                if None in kept.losses:
                    table.caption = "-: beyond its table of positions"
                table.add_row(_name(kept.method), *(cell or "-" for cell in kept.cells()))
            yield table
    title = f"Training, {findings.budget(results.settings.training)}"
    table = _table(title, [title.replace(" ", "\n") for title in findings.COST_TITLES])
    table.caption = findings.COST_CAPTION
    for cost in findings.costs(results.trainings):
        table.add_row(_name(cost.method), *cost.cells())
    yield table


def sentences(results: ExtrapolationResults) -> Iterator[Text]:
    """The findings, a line for each; how each model continued a prompt; and what to keep in mind."""
    found = findings.findings(results.evaluations)
    for finding in found:
        yield Text.assemble(_name(finding.method), f" is {finding}")
    for train_length in findings.train_lengths(results.trainings):
        validated = findings.validations(results.trainings, train_length)
        for row in validated.rows if validated else ():
            for text in row.continuations:
                yield Text.assemble(_name(row.method), f" continues: {text!r}")
    if caution := findings.caution(found):
        yield Text(caution, "dim")


def _table(title: str, heads: list[str]) -> NumberTable:
    """A table with the names of methods before its columns."""
    table = NumberTable(title=title)
    table.add_column("")
    for head in heads:
        table.add_column(head, justify="right")
    return table


def _name(method: str) -> Text:
    return Text(METHODS[method].label, "bold")
