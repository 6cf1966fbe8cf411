"""The report of an extrapolation experiment: the explorer's page, opened on the run's results.

It is made from results.json alone. Without scripts it says the same in text, tables and a figure.
"""

import re
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

from linbias._run.files import write_whole
from linbias.explore import frame
from linbias.explore.static import scrolling_table
from linbias.lm.report import figures, findings
from linbias.lm.report.records import ExtrapolationResults
from linbias.lm.report.summary import summary
from linbias.methods import METHODS


def write_report(results: ExtrapolationResults, folder: Path) -> None:
    png = figures.png(figures.loss_by_length(results.evaluations))
    write_whole(folder / "extrapolation.png", png)
    write_whole(folder / "report.html", html(results).encode())


def html(results: ExtrapolationResults) -> str:
    shown = frame.content_of({"runs": [summary(results, "this run")]}, start="results")
    return frame.html(shown, "\n".join(_static(results)), "Train short, test long")


def _static(results: ExtrapolationResults) -> Iterator[str]:
    """What the page says without scripts."""
    evaluations, trainings = results.evaluations, results.trainings
    colours, dark = figures.colours(), figures.colours(dark=True)
    variables = "".join(
        f"--{name}: light-dark({colours[name]}, {dark[name]});" for name in colours
    )
    yield f"<style>.static {{ {variables} }}</style><h1>Train short, test long</h1>"
    yield from _paragraphs([findings.introduction(evaluations), findings.scope(trainings)])
    yield _list((found.method, f"is {found}") for found in findings.findings(evaluations))
    yield from _paragraphs(findings.cautions(results))
    words = findings.lengths_in_words(evaluations)
    yield f"<figure>{figures.svg(figures.loss_by_length(evaluations), words)}</figure>"
    for length in findings.train_lengths(evaluations):
        yield _table(findings.loss_table(evaluations, length))
    yield _table(findings.cost_table(results))
    yield from _paragraphs([findings.HOW_SCORED])
    facts = results.made.items()
    yield f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>' for k, v in facts)}</dl>"


def _paragraphs(texts: Iterable[str | None]) -> Iterator[str]:
    return (f"<p>{escape(text)}</p>" for text in texts if text)


def _list(sentences: Iterable[tuple[str, str]]) -> str:
    items = (
        f"<li>{escape(METHODS[m].label)} {escape(_signed(text))}</li>" for m, text in sentences
    )
    return f"<ul>{''.join(items)}</ul>"


def _table(table: findings.Table) -> str:
    caption = table.caption + (f" ({table.note})" if table.note else "")
    names = [METHODS[row.method].label for row in table.rows]
    rows = [
        ["beyond its table" if cell is None else _signed(cell) for cell in row.cells]
        for row in table.rows
    ]
    return scrolling_table(caption, table.heads, names, rows)


def _signed(text: str) -> str:
    return re.sub(r"(?<!\w)-(?=\d)", "\N{MINUS SIGN}", text)
