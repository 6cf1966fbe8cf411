"""The explorer's page in a real browser: every control, keyboard use, texts that are hostile,
widths, notebooks, the command.
"""

import re
import sys
from xml.etree import ElementTree

import pytest

import linbias
from chapter import HEADS, chapters_table
from explorer_page import Explorer, explained
from linbias import explore
from linbias.explore import data
from linbias.explore.data import WORDS
from test_cli import run

MORE = "More to change: words, sides, slopes, heads"


def test_the_slider_overrides_the_slope_of_one_head(open_state):
    page = open_state()
    slider = page.get_by_role("slider", name="Slope")
    slider.press("ArrowLeft")
    slope = 2 ** (-1 - 1 / 8)
    assert slider.get_attribute("aria-valuetext") == f"{slope:g}"
    assert [row[1] for row in page.table("Slopes")] == [f"{slope:g}", "0.25"]
    page.choose_head(1)
    assert slider.get_attribute("aria-valuetext") == "0.25"
    page.fold(MORE)
    page.get_by_role("button", name="Reset slopes").click()
    assert [row[1] for row in page.table("Slopes")] == ["0.5", "0.25"]


TYPED = [
    ("1/8", "0.125", ""),
    ("0,5", "0.5", ""),
    ("0", "0", ""),
    ("-1", "0", "Must be at least 0, got -1"),
    ("", "0", 'Must be a number, got ""'),
    ("1/0", "0", 'Must be a number, got "1/0"'),
    (" .25 ", "0.25", ""),
    ("1001", "0.25", "Must be at most 1000, got 1001"),
    ("<b>1", "0.25", 'Must be a number, got "<b>1"'),
]


def test_a_slope_can_be_typed_and_a_bad_one_changes_nothing(open_state):
    page = open_state()
    field = page.get_by_role("textbox", name="Slope, exact")
    for typed, slope, rule in TYPED:
        field.fill(typed)
        field.blur()
        assert page.table("Slopes")[0][1] == slope, typed
        alerts = page.get_by_role("alert").all_inner_texts()
        assert "".join(alerts) == (f"{rule}; still {slope}." if rule else "")
        assert field.get_attribute("aria-invalid") == ("true" if rule else None)
    # What is being typed stays as it is typed.
    field.fill("")
    field.press_sequentially("0.50")
    assert field.input_value() == "0.50"
    field.blur()
    assert field.input_value() == "0.5"


def test_a_message_of_any_length_leaves_the_slider_free(open_state):
    page = open_state({"viewport": {"width": 360, "height": 900}})
    field = page.get_by_role("textbox", name="Slope, exact")
    field.fill("steep " * 40)
    slider = page.get_by_role("slider", name="Slope").bounding_box()
    message = page.get_by_role("alert").filter(has_text="Must be").bounding_box()
    assert message["height"] > 40
    assert message["y"] >= slider["y"] + slider["height"]


def test_the_legend_says_where_colours_end_before_the_numbers(open_state):
    page = open_state()
    ends = page.locator(".legend span:first-child")
    most = abs(linbias.explain(*explore.vectors(WORDS[:5], 2)).scaled[0]).max()
    end = f"\u2212{most:.2f}"
    # Four steps at slope 1/2 take more off than the largest score, and at slope 1/4 less.
    assert ends.all_inner_texts() == [end, f"\u2264 {end}", "0"]
    page.choose_head(1)
    assert "\u2264" not in "".join(ends.all_inner_texts())
    page.choose_head(0)
    page.choose("Sides", "causal")  # what is hidden has no colour
    page.get_by_role("slider", name="Slope").press("Home")
    assert "\u2264" not in "".join(ends.all_inner_texts())


def test_sides_schedule_and_number_of_heads(open_state):
    page = open_state(row=0)
    page.choose("Sides", "causal")
    # The first query sees itself alone: the last one is shown.
    assert page.title().startswith("What \u201cmat\u201d looks at")
    page.choose("Slope schedule", "paper")
    page.get_by_role("textbox", name="Number of heads, exact").fill("3")
    assert [row[1] for row in page.table("Slopes")] == [f"{x:g}" for x in linbias.slopes(3)]
    assert page.cells(1)[0][1:] == ["0.00", *["\u2212\u221e"] * 4]
    page.choose("Sides", "directional")  # which asks for an even number
    assert [row[0] for row in page.table("Slopes")] == ["0 left", "1 left", "2 right", "3 right"]
    page.choose_head(2)
    assert page.cells(1)[4][1:] == [*["\u2212\u221e"] * 4, "0.00"]
    assert page.get_by_role("slider", name="Slope to the right").count() == 1
    page.choose("Sides", "asymmetric")
    page.get_by_role("textbox", name="Slope to the right, exact").fill("2")
    page.get_by_role("textbox", name="Slope to the left, exact").fill("1")
    assert page.cells(1)[2][1:] == ["\u22122.00", "\u22121.00", "0.00", "\u22122.00", "\u22124.00"]


def test_tokens_are_edited_counted_and_cut(open_state):
    page = open_state()
    page.fold(MORE)
    text = page.get_by_role("textbox", name=re.compile("^Text"))
    length = page.get_by_role("textbox", name="Tokens, exact")
    length.fill("10")
    assert text.input_value().split() == WORDS[:10]
    # The chapter's vectors stay; what Python makes of the others, the page makes, too.
    trace, _ = explained({"text": " ".join(WORDS[:10])})
    assert page.cells()[1][1:] == [f"{x:.2f}" for x in trace.weights[0, 1]]
    assert "linbias.explore.vectors" in page.locator(".text .note").inner_text()
    # Words of one's own come back when the slider that took them away gives more.
    text.fill("one two three four")
    length.fill("2")
    assert text.input_value() == "one two"
    length.fill("6")
    assert text.input_value().split() == ["one", "two", "three", "four", *WORDS[4:6]]
    length.fill("10")
    text.fill("")
    assert len(page.cells()) == 10
    text.fill("word " * 70)
    assert length.input_value() == "64"
    text.fill("\U0001f642" * 33)
    assert page.table("Weights as a table") == [["\U0001f642" * 32, "1.0000"]]


NAUGHTY = '<img/src=x/onerror=alert(1)> </script><b> "quotes" \'&amp; \u05e9\u05dc\u05d5\u05dd'
NAUGHTY = [*NAUGHTY.split(), "e\u0301\u0301\u0301", "$data"]


def test_tokens_are_text_and_never_markup(open_state):
    tokens = NAUGHTY
    page = open_state(text=" ".join(tokens))
    page.fold(MORE)
    text = page.get_by_role("textbox", name=re.compile("^Text"))
    for _ in range(2):
        assert [row[0] for row in page.table("Weights as a table")] == tokens
        assert page.get_by_role("columnheader", name=tokens[0], exact=True).count() > 0
        page.choose_row(tokens[1])
        assert f"\u201c{tokens[1]}\u201d" in page.title()
        tokens = tokens[::-1]
        text.fill(" ".join(tokens))
    own = page.locator("img, b, script:not(#data)")
    assert own.count() == 1  # the page's script


def test_data_cannot_leave_their_element(visit, tmp_path):
    results = data.results()
    results["runs"][0]["name"] = "</script><script>document.title = 'broken'</script><!--"
    results["other"] = "\u2028 \\u003c"
    text = explore.page(results=results)
    path = tmp_path / "page.html"
    path.write_text(text, encoding="utf-8")
    page = visit(path)
    assert page.title() == "linbias explore"
    found = page.evaluate("JSON.parse(document.getElementById('data').textContent).results")
    assert found == results
    with pytest.raises(ValueError, match="not JSON compliant"):
        explore.page(results={"loss": float("nan")})


def test_the_matrix_is_walked_by_keyboard(open_state):
    page = open_state(row=0)
    rows = page.get_by_role("grid").nth(2).get_by_role("row")
    rows.nth(1).focus()
    said = page.get_by_role("status")
    steps = ("ArrowDown", 2), ("ArrowDown", 3), ("ArrowUp", 2), ("End", 5), ("Home", 1)
    for key, row in steps:
        page.keyboard.press(key)
        assert rows.nth(row).get_attribute("aria-selected") == "true"
        assert rows.nth(row).evaluate("row => row === document.activeElement")
        if row == 3:
            assert "Query sat, head 0: most weight on sat, 0.5527" in said.all_inner_texts()
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowRight")
            assert "sat to cat: 0.1653" in said.all_inner_texts()
    assert [row.get_attribute("tabindex") for row in rows.all()[1:]] == ["0", *["-1"] * 4]
    assert rows.nth(1).get_attribute("aria-label") == "The: largest 0.3541 at cat"


def test_the_state_stands_in_the_address(open_state, visit, explorer_file):
    page = open_state()
    page.choose("Sides", "asymmetric")
    page.get_by_role("textbox", name=re.compile("^Text")).fill("a & b=c # d%")
    page.choose_head(1)
    page.get_by_role("textbox", name="Slope to the right, exact").fill("0.3")
    page.choose_row("#")
    shown, page_title = page.cells(), page.title()
    page.wait_for_timeout(90)  # the address follows the picture after 60 ms
    again = Explorer(visit(explorer_file, page.evaluate("location.hash.slice(1)")))
    assert again.cells() == shown
    assert again.title() == page_title
    # Another address shows another state, and leaves nothing of the first that could fail.
    again.evaluate("location.hash = 'view=how&head=1'")
    again.get_by_role("heading", name="What \u201ccat\u201d looks at, head 1").wait_for()
    assert again.table("Weights as a table") == chapters_table(HEADS.split("\n\n")[1])
    assert open_state(left="0:1/8").table("Slopes")[0][1] == "0.125"
    # A state that makes no sense shows the start.
    again = open_state(
        text=" ", heads="99", head="7", row="x", variant="up", left="0:-3 1:nan 9:1", step="?"
    )
    assert again.table("Weights as a table") == chapters_table(HEADS.split("\n\n")[0])


def test_light_and_dark(open_state):
    page = open_state(options={"color_scheme": "dark"})
    ground = "getComputedStyle(document.querySelector('.explore')).backgroundColor"
    picture = "document.querySelector('.heatmap canvas').toDataURL()"
    dark, dark_picture = page.evaluate(ground), page.evaluate(picture)
    page.emulate_media(color_scheme="light")
    assert page.evaluate(ground) != dark
    # The documentation's pages, which keep the reader's choice, are followed.
    page.evaluate("localStorage.theme = 'dark'")
    page.reload()
    assert page.evaluate(ground) == dark and page.evaluate(picture) == dark_picture
    tell = "to => dispatchEvent(new StorageEvent('storage', { key: 'theme', newValue: to }))"
    page.evaluate(tell, "<b>")
    assert page.evaluate(ground) == dark
    page.evaluate(tell, "light")
    assert page.evaluate(ground) != dark and page.evaluate(picture) != dark_picture


PLACES = """() => {
  const parts = [...document.querySelectorAll(".control, figure, details, .row-panel")];
  return parts.filter((part) => part.offsetParent).map((part) => {
    const { top, left, width, height } = part.getBoundingClientRect();
    return [top + scrollY, left, width, height];
  });
}"""
SHIFT = """() => new Promise((done) => {
  const sum = (list) => list.getEntries().reduce((total, entry) => total + entry.value, 0);
  const observer = new PerformanceObserver((list) => done(sum(list)));
  observer.observe({ type: "layout-shift", buffered: true });
  setTimeout(() => done(0), 50);
})"""


def test_the_page_fits_every_width_and_nothing_jumps(open_state):
    phone = {"viewport": {"width": 360, "height": 800}}
    page = open_state(phone, text=" ".join(WORDS[:20]), heads=16)
    assert page.evaluate(SHIFT) == 0
    page.evaluate(
        "() => document.querySelectorAll('details').forEach((fold) => (fold.open = true))"
    )
    page.wait_for_timeout(30)  # until the tables are filled
    slider = page.get_by_role("slider", name="Slope")
    for width in (360, 768, 1280, 1600):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        places = page.evaluate(PLACES)
        for key in ("ArrowLeft", "Home"):
            slider.press(key)
        page.wait_for_timeout(90)  # until the tables have followed
        assert page.evaluate(PLACES) == places


def numbers_of_both_heads():
    return {
        cell for head in HEADS.split("\n\n")[:2] for row in chapters_table(head) for cell in row
    }


def test_without_scripts_a_picture_remains(visit, explorer_file):
    page = visit(explorer_file, java_script_enabled=False)
    assert page.locator("noscript svg g rect").count() == 50
    assert numbers_of_both_heads() <= set(page.locator("noscript svg text").all_text_contents())


def test_the_page_is_one_small_file():
    text = explore.page()
    assert len(text.encode()) < 1_000_000
    # Addresses are those of links, and of what a name in a picture means.
    assert set(re.findall(r"https?://[^\"\s]+", text)) == {
        "https://arxiv.org/abs/2108.12409",
        "http://www.w3.org/2000/svg",
    }


# In a notebook

MODEL = """(values) => {
  const listeners = [];
  return globalThis.model = {
    saved: {}, // what Python would know
    get: (name) => values[name],
    set(name, value) { values[name] = value; listeners.forEach((listener) => listener()); },
    save_changes() { Object.assign(this.saved, values); },
    on: (event, listener) => listeners.push(listener),
  };
}"""


@pytest.fixture
def open_widget(chromium):
    """Draw the widget in a page that is no notebook."""
    pytest.importorskip("anywidget")
    page = chromium.new_page()
    page.set_default_timeout(5000)

    def opened(state):
        widget = explore.widget(state=state)
        script = widget._esm.replace("export default", "globalThis.widget =")
        page.add_script_tag(content=script, type="module")
        page.wait_for_function("() => globalThis.widget")
        names = ("data", "stylesheet", "state")
        page.evaluate(MODEL, {name: getattr(widget, name) for name in names})
        page.evaluate("document.body.append(document.createElement('div'))")
        page.evaluate("widget.render({ model, el: document.body.lastChild })")
        return page

    yield opened
    page.close()


def test_the_widget_draws_itself_and_shares_its_state(open_widget):
    page = open_widget("view=how&head=1")
    shown = Explorer(page)
    heads = [chapters_table(table) for table in HEADS.split("\n\n")]
    assert shown.table("Weights as a table") == heads[1]
    shown.choose_row("sat")
    page.wait_for_function("() => model.saved.state === 'head=1&row=2&view=how'")
    assert page.get_by_role("button", name="Copy link").count() == 0  # there is no address
    page.evaluate("model.set('state', 'view=how&row=0')")
    assert shown.table("Weights as a table") == heads[0]
    assert shown.title().startswith("What \u201cThe\u201d looks at")


# JupyterLab may draw a widget before its place stands in the page, and takes cells out that are
# scrolled away.
DRAWN_BEFORE = """() => {
  const el = document.createElement("div");
  widget.render({ model, el });
  document.body.lastChild.replaceWith(el);
}"""
AWAY = "() => { globalThis.away = document.body.lastChild; away.remove(); }"
BACK = "() => document.body.append(away)"
PICTURES = """async () => {
  for (let i = 0; i < 2; i += 1) await new Promise(requestAnimationFrame);
  const { shadowRoot } = document.body.lastChild;
  return [...shadowRoot.querySelectorAll("canvas")].map((canvas) => canvas.toDataURL());
}"""


@pytest.mark.parametrize("state", ["view=how&head=1", "view=cost"])
def test_the_widgets_pictures_have_the_colours_of_where_it_stands(state, open_widget):
    page = open_widget(state)
    light = page.evaluate(PICTURES)
    page.evaluate(DRAWN_BEFORE)
    assert page.evaluate(PICTURES) == light
    page.evaluate(AWAY)
    page.emulate_media(color_scheme="dark")
    page.evaluate(BACK)
    dark = page.evaluate(PICTURES)
    page.evaluate(AWAY)
    page.emulate_media(color_scheme="light")
    page.evaluate(BACK)
    assert page.evaluate(PICTURES) == light
    page.evaluate("document.body.dataset.jpThemeLight = false")
    assert page.evaluate(PICTURES) == dark
    page.evaluate(DRAWN_BEFORE)
    assert page.evaluate(PICTURES) == dark
    assert all(set(pair) and pair[0] != pair[1] for pair in zip(light, dark, strict=True))


def test_keys_stay_in_the_widget_wherever_it_was_clicked(open_widget):
    page = open_widget("view=how")
    # JupyterLab listens before the widget and heeds an attribute, other notebooks listen after it.
    page.evaluate("""() => {
      globalThis.heard = [];
      const heeded = "[data-lm-suppress-shortcuts]";
      const hear = ({ key, target }) => target.closest(heeded) || heard.push(key);
      document.addEventListener("keydown", hear, { capture: true });
      document.addEventListener("keydown", ({ key }) => heard.push(key));
    }""")
    page.get_by_role("slider", name="Slope").press("a")
    page.get_by_role("textbox", name="Slope, exact").press("x")
    Explorer(page).fold(MORE)
    names = (f".heat-{part} .heat-name" for part in ("columns", "row"))
    reset = "button:has-text('Reset slopes')"  # disabled by the first click
    why = "button:has-text('Why')"
    how = ("h2", ".step-says", *names, ".how-slopes", reset, reset)
    for place in (*how, why, "h1", ".view-why .lede", ".ink-word", ".ink-says"):
        page.locator(place).first.click(force=True)
        page.wait_for_timeout(50)  # until the browser takes the focus from what was disabled
        page.keyboard.press("x")
        assert page.evaluate("heard") == [], place
    # What cannot be used by keys has no frame.
    assert (
        page.locator(".explore").evaluate("root => getComputedStyle(root).outlineStyle") == "none"
    )
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("b")
    assert page.evaluate("heard") == ["b", "b"]


def test_a_page_that_cannot_run_the_widget_has_a_picture_of_it():
    pytest.importorskip("anywidget")
    shown, _ = explore.widget()._repr_mimebundle_()
    assert shown["application/vnd.jupyter.widget-view+json"]["model_id"]
    assert len(shown["text/plain"]) < 100  # and not all that the widget holds
    picture = ElementTree.fromstring(shown["image/svg+xml"])
    texts = {text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert numbers_of_both_heads() <= texts


def test_a_missing_anywidget_is_named(monkeypatch):
    monkeypatch.setattr("linbias._extras._is_installed", lambda package: False)
    monkeypatch.delitem(sys.modules, "linbias.explore.notebook", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'linbias\[notebook\]'"):
        explore.widget()


# The command


def test_the_command_writes_the_page_and_opens_it(monkeypatch, tmp_path):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: not opened.append(address))
    path = tmp_path / "new folder" / "page.html"
    for options in ([], ["--no-open"]):
        assert run("explore", "-o", path, *options).exit_code == 0
        assert opened == [path.as_uri()]
    assert path.read_text(encoding="utf-8") == explore.page()
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    result = run("explore", "-o", path)
    assert (result.exit_code, "There is no browser here" in result.output) == (0, True)
    result = run("explore", "-o", tmp_path)
    assert (result.exit_code, "--output must be a file" in result.output) == (2, True)


def test_vectors_name_what_they_lack():
    with pytest.raises(
        ValueError, match="vectors: needs tokens and heads, got 0 tokens and num_heads=2"
    ):
        explore.vectors([], 2)
