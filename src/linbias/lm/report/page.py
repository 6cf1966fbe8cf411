"""The report of an extrapolation experiment: the explorer's page, opened on the run's results.

It is made from results.json alone. Without scripts it is a figure, in words as well.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path

from linbias._run.files import write_whole
from linbias.explore import frame
from linbias.lm.report import figures, findings
from linbias.lm.report.records import ExtrapolationResults
from linbias.lm.report.summary import summary


def write_report(results: ExtrapolationResults, folder: Path) -> None:
    png = figures.png(figures.loss_by_length(results.evaluations))
    write_whole(folder / "extrapolation.png", png)
    write_whole(folder / "report.html", html(results).encode())


def html(results: ExtrapolationResults) -> str:
    shown = frame.content_of({"runs": [summary(results, "this run")]}, start="results")
    return frame.html(shown, "\n".join(_static(results)), "Train short, test long")


def _static(results: ExtrapolationResults) -> Iterator[str]:
    """What the page says without scripts."""
    evaluations = results.evaluations
    colours, dark = figures.colours(), figures.colours(dark=True)
    variables = "".join(
        f"--{name}: light-dark({colours[name]}, {dark[name]});" for name in colours
    )
    yield f"<style>.static {{ {variables} }}</style><h1>Train short, test long</h1>"
    yield f"<p>{escape(findings.introduction(evaluations))}</p>"
    words = findings.lengths_in_words(evaluations)
    yield f"<figure>{figures.svg(figures.loss_by_length(evaluations), words)}</figure>"
    yield "<p>Scripts are off here. With them, this page says more; results.json holds it all.</p>"
