"""The explorer's page as its reader meets it, by names and roles, and what it should show."""

import re
from typing import Any

import linbias
from linbias import explore
from linbias.explore.data import WORDS
from linbias.variants import variant_slopes


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
