"""Reports by the rules of axe-core: contrast, names, roles, keyboard; and narrow windows."""

import math

import pytest

import browser
from linbias.lm.report import page
from linbias.lm.report.records import ExtrapolationResults
from linbias.lm.settings import ExtrapolateSettings
from test_lm_findings import record, trained

pytest.importorskip("axe_playwright_python", reason="pip install 'linbias[dev]'")


@pytest.fixture(scope="module")
def report_file(tmp_path_factory):
    """A report in which every colour of a method is used, and tables that are wider than a
    telephone.
    """
    methods = ("alibi", "sinusoidal", "rotary", "learned", "t5", "none")
    lengths = [2**n for n in range(2, 9)]
    records = [
        record(method, n, 3.0 + 0.1 * i + 0.05 * math.log2(n))
        for i, method in enumerate(methods)
        for n in (lengths[:1] if method == "learned" else lengths)
    ]
    settings = ExtrapolateSettings(methods=methods, train_lengths=(4,))
    results = ExtrapolationResults({}, settings, (trained(1000),), tuple(records))
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page.html(results), encoding="utf-8")
    return path


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 320])
def test_the_report_breaks_no_rule(visit, report_file, theme, width):
    window = {"width": width, "height": 900}
    # Its policy lets no other script run, and so not axe either.
    shown = visit(report_file, color_scheme=theme, viewport=window, bypass_csp=True)
    assert browser.violations(shown) == []
    assert shown.evaluate("document.documentElement.scrollWidth") == width


def test_a_table_that_is_cut_says_so_and_can_be_scrolled_by_keyboard(visit, report_file):
    shown = visit(report_file, viewport={"width": 360, "height": 800})
    table = shown.get_by_role("region").first
    assert table.evaluate("box => box.scrollWidth > box.clientWidth")
    assert "linear-gradient" in table.evaluate("box => getComputedStyle(box).backgroundImage")
    # Captions can be read whole, and the names stay.
    ends = shown.locator("main [role=region] caption span").evaluate_all(
        "all => all.map((words) => words.getBoundingClientRect().right)"
    )
    assert len(ends) == 2 and max(ends) <= 360
    table.press("End")
    table.press("ArrowRight")
    shown.wait_for_function("box => box.scrollLeft > 0", arg=table.element_handle())
    assert table.locator("th[scope=row]").first.bounding_box()["x"] >= 0
