"""The story that the explorer opens with, and the steps of the view "How", in a real browser."""

import re
from urllib.parse import urlencode

import pytest

import linbias
from explorer_page import STORY, Explorer, last_words_weights, printed, styles
from linbias import explore
from linbias.explore import data
from linbias.methods import METHODS

(GROUP,) = data.results()["runs"][0]["groups"]


def ink(page):
    """The words and the numbers under them."""
    return page.locator(".ink-word").evaluate_all(
        "words => words.map(({ children }) => [children[1].textContent, children[2].textContent])"
    )


def assert_ink(page, words, slope):
    weights = last_words_weights(words, slope)
    assert ink(page) == [[w, printed(x, 2)] for w, x in zip(words, weights, strict=True)]
    shares = styles(page.locator(".ink-word"), "--ink-share")
    assert shares == pytest.approx(list((weights / weights.max()) ** 0.5))


def test_the_ink_of_the_words_is_their_weight(visit, explorer_file):
    page = visit(explorer_file)
    assert page.get_by_role("tab", name="Why").get_attribute("aria-selected") == "true"
    assert page.locator(".lede").first.inner_text().startswith("ALiBi ")
    assert_ink(page, STORY, 0.5)
    slider = page.get_by_role("slider", name="slope")
    assert slider.get_attribute("aria-valuetext") == "0.5: most weight on \u201cdog\u201d, 0.29"
    slider.press("Home")
    assert_ink(page, STORY, 0.0)
    says = page.locator(".ink-says").first
    back = sum(weight * (10 - s) for s, weight in enumerate(last_words_weights(STORY, 0.0)))
    words = f"content alone decides. \u201chome\u201d looks {back:.1f} words back"
    assert words in says.inner_text()
    slider.press("ArrowRight")
    assert_ink(page, STORY, 0.01)
    box = slider.bounding_box()
    page.mouse.move(box["x"] + 11, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + box["height"] / 2)
    page.mouse.up()
    assert_ink(page, STORY, 1.0)
    assert says.inner_text().endswith("most at itself.")
    page.wait_for_url(lambda address: address.endswith("#slope=1"))


@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_the_idea_is_seen_without_scrolling(visit, explorer_file, size):
    page = visit(explorer_file, viewport={"width": size[0], "height": size[1]})
    for part in (
        ".lede",
        ".links a",
        *(f".slope-story {x}" for x in ("input", ".ink", ".ink-says")),
    ):
        box = page.locator(part).first.bounding_box()
        assert box["y"] + box["height"] <= size[1], part


def loss(method, length):
    line = next(line for line in GROUP["lines"] if line["method"] == method)
    return next((p["y"] for p in line["lengths"] if p["x"] == length), None)


def tips(page):
    """The names and losses at the ends of the lines."""
    texts = page.locator(".tip text").all_text_contents()
    return {text for text in texts if text}


def expected_tips(length):
    found = {line["method"]: loss(line["method"], length) for line in GROUP["lines"]}
    shown = {f"{METHODS[name].label} {y:.3f}" for name, y in found.items() if y is not None}
    ended = f"learned table {loss('learned', 128):.3f}"
    return shown - {ended} | {f"{ended}: its table ends here, at 128"}


def test_the_losses_draw_themselves_along_the_length(visit, explorer_file):
    page = visit(explorer_file)
    slider = page.get_by_role("slider", name="length of the text")
    lengths = GROUP["test_lengths"]
    assert tips(page) == expected_tips(lengths[0])
    drawn = page.locator(".length-drawing clipPath rect")
    widths = []
    for length in lengths[1:]:
        slider.press("ArrowRight")
        assert page.locator(".length-story output").inner_text() == f"{length:,} tokens"
        assert tips(page) == expected_tips(length)
        words = slider.get_attribute("aria-valuetext")
        assert words == page.locator(".length-says").inner_text()
        assert words.startswith(f"At {length:,} tokens, {length // 128} times the training length")
        for line in GROUP["lines"]:
            label, now = METHODS[line["method"]].label, loss(line["method"], length)
            if now is None:
                assert f"{label}: no rows left" in words
            else:
                change = 100 * (now / loss(line["method"], 128) - 1)
                found = re.search(rf"{label} ([+\u2212]?[\d.]+)%", words)
                shown = float(found[1].replace("\u2212", "-"))
                assert shown == pytest.approx(change, abs=0.051)
        widths.append(float(drawn.get_attribute("width")))
    assert widths == sorted(set(widths))
    # Between two lengths the numbers are those of the last one that was measured.
    box = slider.bounding_box()
    page.mouse.click(box["x"] + 0.5 * box["width"], box["y"] + box["height"] / 2)
    assert 512 < int(slider.evaluate("range => 128 * 2 ** (range.value / 32)")) < 1024
    assert tips(page) == expected_tips(512)
    slider.press("ArrowLeft")
    assert page.locator(".length-story output").inner_text() == "512 tokens"
    slider.press("Home")
    assert tips(page) == expected_tips(128)


BOXES = """all => all.map((one) => one.getBBox())
  .map(({ x, y, width, height }) => ({ x, y, width, height }))"""


@pytest.mark.parametrize("width", [390, 1280])
def test_no_name_of_a_line_is_in_the_way(visit, explorer_file, width):
    page = visit(explorer_file, viewport={"width": width, "height": 900})
    parts = [page.locator(f".length-drawing {part}") for part in (".tip text", ".to-come .drawn")]
    for key in ("Home", "End"):
        page.get_by_role("slider", name="length of the text").press(key)
        names, lines = (part.evaluate_all(BOXES) for part in parts)
        assert len(names) == len(GROUP["lines"])
        for number, one in enumerate(names):
            assert one["x"] + one["width"] <= width - 32
            for other in (*names[:number], *lines):
                overlaps = [
                    one[start] < other[start] + other[size]
                    and other[start] < one[start] + one[size]
                    for start, size in (("x", "width"), ("y", "height"))
                ]
                assert not all(overlaps)


def test_a_link_into_the_story(visit, explorer_file):
    state = urlencode({"slope": 0.125, "words": "one two three", "length": 1024})
    page = visit(explorer_file, state)
    assert_ink(page, ["one", "two", "three"], 0.125)
    assert tips(page) == expected_tips(1024)
    # What makes no sense, an unknown view too, leaves the start; names of one view mean nothing to
    # another.
    page = visit(explorer_file, "view=?&slope=7&words=+&length=1")
    assert_ink(page, STORY, 0.5)
    page = visit(explorer_file, "slope=0.125&length=1024&head=1")
    page.get_by_role("tab", name="Cost").click()
    assert "length" not in page.url
    assert page.get_by_role("radio", name="2,048", exact=True).is_checked()


UNUSUAL = [
    ("<img/src=x/onerror=alert(1)> </script><b> &amp;", ""),
    ("\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd \U0001f642\U0001f642 e\u0301", ""),
    ("word " * 200, "Cut to the first 64 of 200 tokens."),
    ("x" * 40 + " y", "Tokens longer than 32 characters are cut."),
    ("alone", ""),
]


def test_the_words_may_be_anyones(visit, explorer_file):
    page = visit(explorer_file, viewport={"width": 360, "height": 800})
    page.get_by_text("Change the words").click()
    field = page.get_by_role("textbox", name=re.compile("the last one looks back"))
    message = page.locator(".view-why .message").first
    for text, note in UNUSUAL:
        field.fill(text)
        words = [word[:32] for word in text.split()][:64]
        assert_ink(page, words, 0.5)
        assert message.inner_text() == note
        assert page.get_by_role("status").filter(has_text=words[-1]).count() == 1
        assert page.evaluate("document.documentElement.scrollWidth") == 360
    field.fill("  ")
    assert message.inner_text() == "Needs at least one token."
    assert ink(page) == [["alone", "1.00"]]
    assert page.locator("img, b, script:not(#data)").count() == 1  # the page's script


def test_the_page_links_to_the_paper_and_its_own_documentation(visit, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(explore.page(docs="index.html"), encoding="utf-8")
    links = visit(path).locator(".links a").all()
    addresses = [link.get_attribute("href") for link in links]
    assert addresses == ["https://arxiv.org/abs/2108.12409", "index.html"]
    assert [link.inner_text() for link in links] == ["The paper", "Documentation"]


# The steps of "How"


def test_steps_lead_through_the_arithmetic(open_state, visit, explorer_file):
    page = open_state()
    seen = set()
    for name, head, slopes, row in (
        ("Slope 0 is plain attention", 0, ["0", "0.25"], "cat"),
        ("One word\u2019s row", 0, ["0.5", "0.25"], "on"),
        ("Hide the future", 0, ["0.5", "0.25"], "mat"),
        ("A steep and a flat head", 0, [f"{x:g}" for x in linbias.slopes(8)], "dog"),
        ("Scores plus bias", 0, ["0.5", "0.25"], "cat"),
    ):
        button = page.get_by_role("button", name=name)
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        assert page.title().startswith(f"What \u201c{row}\u201d looks at, head {head}")
        assert [cells[1] for cells in page.table("Slopes")] == slopes
        says = page.locator(".step-says").inner_text()
        seen.add(says)
        assert says in page.get_by_role("status").all_inner_texts()
        page.wait_for_timeout(90)  # the address follows the picture after 60 ms
        again = Explorer(visit(explorer_file, page.url.partition("#")[2]))
        assert again.locator("[aria-pressed=true]").inner_text().endswith(name)
        assert again.title().startswith(f"What \u201c{row}\u201d looks at, head {head}")
        page = again
    assert len(seen) == 5
    page.get_by_role("slider", name="Slope").press("ArrowLeft")
    assert page.locator(".steps [aria-pressed=true]").count() == 0
    assert page.locator(".step-says").inner_text().startswith("Head 0, slope 0.4585: ")
    for state in ({"left": "0:0.3"}, {"step": "heads", "left": "0:0.3"}):  # a slope is not
        assert open_state(**state).locator(".steps [aria-pressed=true]").count() == 0
    # Another head of a step is still that step.
    page = open_state(step="heads", head=7)
    assert page.title() == "What \u201cdog\u201d looks at, head 7, slope 1/256"
    assert page.locator(".steps [aria-pressed=true]").count() == 1


def test_what_a_step_says_of_its_numbers_is_so(open_state):
    page = open_state(step="row")
    weights = [float(numbers[4]) for numbers in page.row().values()]
    assert {numbers[0] for numbers in page.row().values()} == {"0.0000"}
    assert sorted(weights) == weights[:1] + sorted(weights[1:])
    assert max(weights) == weights[3]
    page = open_state(step="plain")
    assert {cell for row in page.cells(1) for cell in row[1:]} == {"0.00"}
    page = open_state(step="future")
    assert page.cells()[1][3:] == ["0.00"] * 3


def test_a_row_under_the_pointer_shows_in_all_three(open_state):
    page = open_state()
    grids = page.get_by_role("grid")
    grids.nth(1).get_by_role("row").nth(3).get_by_role("gridcell").nth(1).hover()
    assert page.locator(".heat-row.pointed").count() == 3
    assert page.title().startswith("What \u201csat\u201d looks at")
    readouts = page.locator(".view-how .readout").all_inner_texts()
    expected = ["0.7071", "\u22120.5000", "0.1653"]
    assert readouts == [f"sat \u2192 cat  {number}" for number in expected]
    page.mouse.move(5, 5)
    assert page.locator(".heat-row.pointed").count() == 0
    assert page.title().startswith("What \u201ccat\u201d looks at")


def test_links_are_copied(open_state, explorer_file):
    page = open_state({"permissions": ["clipboard-read", "clipboard-write"]}, head=1)
    link = page.get_by_role("button", name="Copy link")
    link.press("Enter")
    page.get_by_role("button", name="Link copied").wait_for()
    clipboard = "navigator.clipboard.readText()"
    assert page.evaluate(clipboard) == f"{explorer_file.resolve().as_uri()}#view=how&head=1"
    link.wait_for()  # named so again
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    link.click()
    page.get_by_role("button", name="The browser refuses its clipboard").wait_for()


def test_on_a_phone_the_slider_stays_with_what_it_moves(open_state):
    page = open_state({"viewport": {"width": 390, "height": 844}})
    page.get_by_role("grid").nth(2).evaluate("grid => grid.scrollIntoView({ block: 'end' })")
    slider = page.get_by_role("slider", name="Slope").bounding_box()
    matrix = page.get_by_role("grid").nth(2).bounding_box()
    assert 0 <= slider["y"] < matrix["y"]
    assert matrix["y"] + matrix["height"] <= 845


# In the documentation


def test_the_documentations_first_page_has_the_slope(visit, tmp_path):
    path = tmp_path / "index.html"
    script = explore.slope_card("place")
    path.write_text(
        f'<!DOCTYPE html><div id="place"><img alt="slope"></div><script>{script}</script>', "utf-8"
    )
    page = visit(path)
    assert page.locator("img").count() == 0
    assert_ink(page, STORY, 0.5)
    page.get_by_role("slider", name="slope").press("End")
    assert_ink(page, STORY, 1.0)


FRAME = """<!DOCTYPE html>
<iframe src="explorer.html" style="width: 700px; height: 50px"></iframe>
<script>
  addEventListener("message", ({ data }) => {
    globalThis.told = data.linbiasHeight;
    document.querySelector("iframe").style.height = `${told}px`;
  });
</script>"""


def test_a_frame_is_told_its_height_and_follows_the_theme(visit, tmp_path):
    (tmp_path / "explorer.html").write_text(explore.page(), encoding="utf-8")
    path = tmp_path / "frame.html"
    path.write_text(FRAME, encoding="utf-8")
    page = visit(path)
    frame = page.frame_locator("iframe")
    page.wait_for_function("() => globalThis.told > 500")
    assert page.evaluate("told") == frame.locator("#app").evaluate("app => app.offsetHeight")
    before = page.evaluate("told")
    frame.get_by_text("Change the words").click()
    page.wait_for_function("before => globalThis.told > before", arg=before)
    frame.get_by_text("Change the words").click()
    page.wait_for_function("before => globalThis.told === before", arg=before)
    for theme in ("dark", "light"):
        page.evaluate("theme => localStorage.setItem('theme', theme)", theme)
        frame.locator(f"#app[data-theme={theme}]").wait_for()
    page.evaluate("localStorage.clear()")
