"""The report of an extrapolation experiment as one self-contained HTML page.

It is made from the records of results.json alone, so it can be made again without measuring again.
The page needs no network, fits telephones, and follows the reader's choice of light or dark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from matplotlib.figure import Figure

from linbias._run.files import write_whole
from linbias.lm.report import figures, findings
from linbias.lm.report.findings import Finding
from linbias.lm.report.records import EvaluationRecord, ExtrapolationResults, TrainingRecord
from linbias.methods import METHODS


def write_report(results: ExtrapolationResults, folder: Path) -> None:
    """Writes `extrapolation.png` and `report.html`, each whole or not at all."""
    png = figures.png(figures.loss_by_length(results.evaluations))
    write_whole(folder / "extrapolation.png", png)
    write_whole(folder / "report.html", html(results).encode())


def html(results: ExtrapolationResults) -> str:
    """The page."""
    evaluations = results.evaluations
    pooled = findings.records_by_position(results)
    found = findings.findings(evaluations)
    template = resources.files("linbias.lm").joinpath("page.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        light_colours=_variables(figures.colours()),
        dark_colours=_variables(figures.colours(dark=True)),
        introduction=escape(findings.introduction(evaluations)),
        scope=_paragraph(findings.scope(results.trainings)),
        findings=_finding_list(found),
        cautions="".join(map(_paragraph, findings.cautions(results))),
        loss_by_length=_figure(
            figures.loss_by_length, evaluations, findings.lengths_in_words(evaluations)
        ),
        loss_by_position=_figure(
            figures.loss_by_position, pooled, findings.positions_in_words(pooled)
        ),
        length_tables="".join(
            _table(findings.loss_table(evaluations, length))
            for length in findings.train_lengths(evaluations)
        ),
        validations="".join(_validation_tables(results.trainings)),
        budget=escape(findings.budget(results.settings.training)),
        training_table=_table(findings.cost_table(results)),
        facts=_fact_list(results.made),
    )


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


def _figure(
    draw: Callable[..., Figure], evaluations: Sequence[EvaluationRecord], description: str
) -> str:
    """A figure for wide and one for narrow windows, of which the page shows one."""
    wide = figures.svg(draw(evaluations), description)
    narrow = figures.svg(draw(evaluations, narrow=True), description)
    return f'<figure class="wide">{wide}</figure><figure class="narrow">{narrow}</figure>'


def _finding_list(found: Sequence[Finding]) -> str:
    items = [
        f"<li {_colour(finding.method)}><b>{escape(METHODS[finding.method].label)}</b> "
        f"is {escape(_signed(str(finding)))}</li>"
        for finding in found
    ]
    return f'<ul class="findings">{"".join(items)}</ul>'


def _paragraph(text: str | None) -> str:
    return "" if text is None else f"<p>{escape(text)}</p>"


def _validation_tables(trainings: Sequence[TrainingRecord]) -> Iterator[str]:
    """For each training length, what the last validation kept, and how each model continued the prompt."""
    for train_length in findings.train_lengths(trainings):
        validated = findings.validations(trainings, train_length)
        if validated is None:
            continue
        items = [
            f"<li {_colour(kept.method)}><b>{escape(METHODS[kept.method].label)}</b> continues: "
            f"<code>{escape(repr(text))}</code></li>"
            for kept in validated.rows
            for text in kept.continuations
        ]
        yield "<h2>The last validation while training</h2>"
        yield "<p>On the validation split: the mean loss, the loss at single tokens, and the accuracy.</p>"
        yield _table(validated.table(train_length))
        if items:
            yield f'<ul class="findings">{"".join(items)}</ul>'


def _table(found: findings.Table) -> str:
    """A table that scrolls in itself where the window is too narrow; its caption and the methods' names stay."""
    caption = escape(found.caption + (f" ({found.note})" if found.note else ""))
    heads = "".join(
        f'<th scope="col">{head.replace(chr(10), "<br>")}</th>' for head in found.heads
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{caption}"><table>'
        f"<caption><span>{caption}</span></caption><tr><td></td>{heads}</tr>"
        f"{''.join(map(_row, found.rows))}</table></div>"
    )


def _row(row: findings.Row) -> str:
    bars = {number: _bar(share) for number, share in row.bars}
    cells = [
        '<td class="missing">beyond<br>its table</td>'
        if cell is None
        else f"<td>{_signed(cell)}{bars.get(number, '')}</td>"
        for number, cell in enumerate(row.cells)
    ]
    name = f'<th scope="row">{escape(METHODS[row.method].label)}</th>'
    return f"<tr {_colour(row.method)}>{name}{''.join(cells)}</tr>"


def _signed(text: str) -> str:
    """Negative numbers with a minus sign."""
    return re.sub(r"(?<!\w)-(?=\d)", "\N{MINUS SIGN}", text)


def _colour(method: str) -> str:
    return f'style="--colour: var(--{method})"'


def _fact_list(made: dict[str, str]) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in made.items()
    )
    return f"<dl>{items}</dl>"


def _bar(share: float) -> str:
    return f'<span class="bar"><i style="width: {share:.0%}"></i></span>'
