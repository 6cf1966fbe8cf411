"""The explorer's page as its reader meets it, by names and roles, and what it should show."""

import re
from typing import Any

import linbias
from linbias import explore
from linbias.explore.data import WORDS
from linbias.variants import variant_slopes

# Tables of the book chapter: weights of both heads and their mean, outputs, scores of head 1 without bias.
HEADS = """
The 0.2879 0.3541 0.2148 0.0642 0.0790
cat 0.3791 0.1520 0.3791 0.0559 0.0339
sat 0.1003 0.1653 0.5527 0.0815 0.1003
on 0.0796 0.1312 0.2163 0.3566 0.2163
mat 0.0341 0.1140 0.1880 0.1528 0.5110

The 0.2142 0.3384 0.1299 0.2052 0.1122
cat 0.3002 0.1901 0.1480 0.2338 0.1279
sat 0.1077 0.2806 0.1776 0.2806 0.1534
on 0.1106 0.1421 0.0899 0.4750 0.1824
mat 0.1545 0.0978 0.1256 0.3271 0.2949

The 0.2510 0.3462 0.1724 0.1347 0.0956
cat 0.3397 0.1710 0.2636 0.1449 0.0809
sat 0.1040 0.2229 0.3652 0.1810 0.1268
on 0.0951 0.1366 0.1531 0.4158 0.1994
mat 0.0943 0.1059 0.1568 0.2400 0.4030
"""
OUTPUT = """
The 0.3274 0.3936 0.1861 0.2613
cat 0.3961 0.1689 0.2120 0.2977
sat 0.1504 0.2154 0.2544 0.3573
on 0.1877 0.2393 0.1811 0.5662
mat 0.2896 0.3695 0.2731 0.4746
"""
SCALED = """
The 0.0000 0.7071 0.7071 0.0000 0.7071
cat 1.4142 0.0000 1.4142 0.0000 0.0000
sat 0.7071 0.7071 1.4142 0.0000 0.7071
on 0.0000 0.0000 0.0000 0.0000 0.0000
mat 0.0000 0.7071 0.7071 0.0000 0.7071
"""


def explained(state: dict[str, Any]) -> tuple[linbias.Explanation, list[str]]:
    """The same by Python: slopes by name, those set by hand instead, and a right side a quarter as steep."""
    variant, num_heads = state.get("variant", "symmetric"), state.get("heads", 2)
    left, right = variant_slopes("test", variant, num_heads, state.get("schedule", "halving"))
    if variant == "asymmetric":
        right = [slope / 4 for slope in right]
    for side, slopes in (("left", left), ("right", right)):
        for head, slope in re.findall(r"(\d+):(\S+)", state.get(side, "")):
            slopes[int(head) - 1] = float(slope)
    if variant == "symmetric":
        right = left
    tokens = state.get("text", " ".join(WORDS[:5])).split()
    q, k, v = explore.vectors(tokens, num_heads)
    causal = variant == "causal"
    return linbias.explain(
        q, k, v, left, causal=causal, right_slopes=None if causal else right
    ), tokens


def chapters_table(text: str) -> list[list[str]]:
    """Lines of words as rows of cells."""
    return [line.split() for line in text.strip().splitlines()]


class Explorer:
    """The bias explorer, open in a browser."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def cells(self, grid: int = 0) -> list[list[str]]:
        """The numbers that stand in the matrix, each row after its name."""
        rows = self.page.get_by_role("grid").nth(grid).locator(".heat-row")
        return rows.evaluate_all(
            "rows => rows.map((row) => [...row.children].map((cell) => cell.textContent))"
        )

    def choose(self, legend: str, option: str) -> None:
        group = self.page.get_by_role("group", name=legend, exact=True)
        group.get_by_role("radio", name=option, exact=True).check()

    def choose_head(self, name: str) -> None:
        self.page.get_by_role("group", name="Head", exact=True).get_by_label(name).check()

    def choose_row(self, token: str) -> None:
        self.page.get_by_role("grid").first.get_by_role(
            "rowheader", name=token, exact=True
        ).first.click()

    def bars(self) -> dict[str, tuple[str, str]]:
        """The chosen query's weights, with the bias and without."""
        rows = self.page.locator(".bars tbody tr")
        shown = rows.evaluate_all(
            "rows => rows.map(({ cells }) => [cells[0].querySelector('bdi'), cells[2], cells[3]].map((x) => x.textContent))"
        )
        return {token: (with_bias, without) for token, with_bias, without in shown}

    def fold(self, title: str) -> Any:
        """A part below the picture, unfolded."""
        fold = self.page.locator("details").filter(
            has=self.page.get_by_role("heading", name=title, exact=True)
        )
        # Tables follow the picture after 60 ms, and at once where a part is unfolded.
        fold.evaluate("fold => { fold.open = true; fold.dispatchEvent(new Event('toggle')); }")
        return fold

    def table(self, title: str, caption: str | None = None) -> list[list[str]]:
        """The body of the first table in a part, or of the one with this caption."""
        fold = self.fold(title)
        tables = fold.locator("table")
        if caption is not None:
            tables = tables.filter(has=self.page.get_by_text(caption, exact=True))
        return tables.first.evaluate(
            "table => [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.textContent))"
        )

    def after_steps(self) -> str:
        return self.fold("Step by step").locator(".after").first.inner_text()
