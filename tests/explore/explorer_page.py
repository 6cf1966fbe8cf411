"""The explorer's page as its reader meets it, by names and roles, and what it should show."""

import contextlib
import io
import re
from typing import Any

import numpy as np

import linbias
from linbias import explore
from linbias.explore.data import WORDS
from linbias.schedules import variant_slopes


def explained(state: dict[str, Any]) -> tuple[linbias.Explanation, list[str]]:
    """The same by Python: slopes by name, those set by hand instead, and a right side a quarter as
    steep.
    """
    variant, num_heads = state.get("variant", "symmetric"), state.get("heads", 2)
    left, right = variant_slopes("test", variant, num_heads, state.get("schedule", "halving"))
    if variant == "asymmetric":
        right = [slope / 4 for slope in right]
    for side, slopes in (("left", left), ("right", right)):
        for head, slope in re.findall(r"(\d+):(\S+)", state.get(side, "")):
            if slopes[int(head)] != np.inf:  # a side that is hidden stays so
                slopes[int(head)] = float(slope)
    if variant == "symmetric":
        right = left
    tokens = state.get("text", " ".join(WORDS[:5])).split()
    q, k, v = explore.vectors(tokens, num_heads)
    causal = variant == "causal"
    return linbias.explain(
        q, k, v, left, causal=causal, right_slopes=None if causal else right
    ), tokens


STORY = "The cat sat on the mat and the dog ran home".split()


def last_words_weights(words: list[str], slope: float, positions: Any = None) -> np.ndarray:
    """What the last word gives to each word: attention whose values are the words themselves."""
    q, k, _ = (rows[1:] for rows in explore.vectors(words, num_heads=2))
    return linbias.attention(q, k, np.eye(len(words))[None], [slope], positions=positions)[0, -1]


def ran(code: str) -> tuple[dict[str, Any], str]:
    """The names that a program leaves, and what it prints."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, names)
    return names, out.getvalue()


def styles(nodes: Any, *properties: str) -> list[Any]:
    """Numbers that stand in the styles of elements, by element."""
    rows = nodes.evaluate_all(
        """(nodes, names) => nodes.map(({ style }) =>
          names.map((name) => parseFloat(style.getPropertyValue(name))))""",
        properties,
    )
    return [row[0] for row in rows] if len(properties) == 1 else rows


def printed(value: float, digits: int = 4) -> str:
    """A number as the page prints it: a true minus sign, none on 0, and the sign of infinity."""
    text = f"{value:.{digits}f}"
    if not text.strip("-0."):
        text = text.lstrip("-")
    return text.replace("-", "\u2212").replace("inf", "\u221e")


class Explorer:
    """A page whose view "How" is open: matrices 0 to 2 are scaled q . k, bias and weights."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def __getattr__(self, name: str) -> Any:
        return getattr(self.page, name)

    def cells(self, grid: int = 2) -> list[list[str]]:
        """The numbers that stand in a matrix, each row after its name."""
        rows = self.get_by_role("grid").nth(grid).locator(".heat-row")
        return rows.evaluate_all(
            "rows => rows.map((row) => [...row.children].map((cell) => cell.textContent))"
        )

    def choose(self, legend: str, option: str) -> None:
        self.fold("More to change: words, sides, slopes, heads")
        group = self.get_by_role("group", name=legend, exact=True)
        group.get_by_role("radio", name=option, exact=True).check()

    def choose_head(self, head: int) -> None:
        heads = self.get_by_role("group", name="Head", exact=True)
        heads.get_by_role("radio", name=f"Head {head}, ").check()

    def choose_row(self, token: str) -> None:
        row = self.get_by_role("grid").first.get_by_role("rowheader", name=token, exact=True)
        row.first.click()

    def title(self) -> str:
        return self.locator(".row-panel h3").inner_text()

    def row(self) -> dict[str, list[str]]:
        """The chosen query's row by key: q . k, scaled, bias, scores, weights, without bias."""
        rows = self.locator(".row-table tbody tr").evaluate_all(
            """rows => rows.map(({ cells: [head, ...cells] }) =>
              [head.querySelector("bdi"), ...cells.slice(0, 6)].map((x) => x.textContent))"""
        )
        return {key: numbers for key, *numbers in rows}

    def fold(self, title: str) -> Any:
        """A part below the picture, unfolded."""
        fold = self.locator("details").filter(
            has=self.get_by_role("heading", name=title, exact=True)
        )
        # Tables follow the picture after 60 ms, and at once where a part is unfolded.
        fold.evaluate("fold => { fold.open = true; fold.dispatchEvent(new Event('toggle')); }")
        return fold

    def table(self, title: str, caption: str | None = None) -> list[list[str]]:
        """The body of the first table in a part, or of the one with this caption."""
        fold = self.fold(title)
        tables = fold.locator("table")
        if caption is not None:
            tables = tables.filter(has=self.get_by_text(caption, exact=True))
        texts = "[...row.cells].map((cell) => cell.textContent)"
        return tables.first.evaluate(
            f"({{ tBodies: [{{ rows }}] }}) => [...rows].map((row) => {texts})"
        )
