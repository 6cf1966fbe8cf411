"""The explorer in a real browser: every control, and every number against `linbias.explain`."""

from pathlib import Path

import pytest

from linbias import explore


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explore") / "explore.html"
    path.write_text(explore.page(), encoding="utf-8")
    return path


def test_the_start_is_the_chapters_first_head(visit, file):
    page = visit(file)
    row = page.get_by_role("grid").get_by_role("row").nth(1)
    assert row.get_by_role("gridcell").all_inner_texts() == [
        "0.2879",
        "0.3541",
        "0.2148",
        "0.0642",
        "0.0790",
    ]
