"""The explorer's view "Where": stamps on a ruler and points of a plane, in a real browser."""

import itertools
import re
from urllib.parse import urlencode

import numpy as np
import pytest

from explorer_page import STORY, last_words_weights, printed, styles

COUNTED = [float(s) for s in range(11)]


@pytest.fixture
def where(visit, explorer_file):
    """Open the view in a state, given as in its address, in a window with options of its own."""

    def opened(options=None, **state):
        return visit(explorer_file, urlencode({"view": "where", **state}), **(options or {}))

    return opened


# On a line


def knob(page, word):
    return page.get_by_role("slider", name=f"stamp of \u201c{word}\u201d", exact=True).last


def positions(page):
    """Where the words stand, as the knobs say."""
    texts = page.locator(".knob").evaluate_all(
        "knobs => knobs.map((knob) => knob.ariaValueText.split(':')[0])"
    )
    return [float(text) for text in texts]


def gap(page, s):
    """Pixels between the knob of a word and the next."""
    here, following = (page.locator(".knob").nth(i).bounding_box() for i in (s, s + 1))
    return following["x"] - here["x"]


def assert_line(page, slope, positions):
    """The words' numbers, ink and bars are those of Python's attention at these positions."""
    weights = last_words_weights(STORY, slope, positions)
    words = page.locator(".ruler .ink-word")
    shown = words.evaluate_all(
        "words => words.map((word) => [1, 2].map((child) => word.children[child].textContent))"
    )
    assert shown == [[word, printed(x, 2)] for word, x in zip(STORY, weights, strict=True)]
    # The lines from words to knobs, and the knobs, have the words' ink.
    for part in (words, page.locator(".ruler-line"), page.locator(".ruler li")):
        assert styles(part, "--ink-share") == pytest.approx(list((weights / weights.max()) ** 0.5))
    # Bars and the thin lines across them, the weights of words that are counted, have one scale.
    counted = last_words_weights(STORY, slope, COUNTED)
    most = max(0.35, *weights, *counted)
    bars = np.stack([weights, counted], axis=1) / most
    np.testing.assert_allclose(styles(words, "--share", "--plain"), bars, rtol=1e-6)
    back = sum(weights * (positions[-1] - np.array(positions)))
    assert f"looks {back:.1f} back on average" in page.locator(".stamps .ink-says").inner_text()


def test_the_ink_of_words_at_stamps_is_their_weight(where):
    page = where()
    stands = positions(page)
    assert stands != COUNTED and stands == sorted(stands)
    assert_line(page, 0.5, stands)
    slider = page.locator(".stamps").get_by_role("slider", name="slope")
    assert slider.get_attribute("aria-valuetext") == "0.5: most weight on \u201cdog\u201d, 0.30"
    slider.press("ArrowRight")
    assert_line(page, 0.51, stands)
    slider.press("Home")
    assert_line(page, 0.0, stands)
    assert "it does not matter where words stand" in page.locator(".stamps .ink-says").inner_text()


def drag(page, word, along, across=0):
    box = knob(page, word).bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x + 3, y + 2)  # not at its middle, which must not matter
    page.mouse.down()
    page.mouse.move(x + 3 + along / 2, y + 2 + across / 2)
    page.mouse.move(x + 3 + along, y + 2 + across)
    page.mouse.up()


@pytest.mark.parametrize("width", [1280, 390])  # on a telephone the ruler stands upright
def test_a_stamp_is_dragged_and_never_past_its_neighbours(where, width):
    page = where({"viewport": {"width": width, "height": 900}}, x="0 1 2 3 4 5 6 7 8 9 10")
    page.locator(".ruler").evaluate("ruler => ruler.scrollIntoView({ block: 'center' })")
    stands = positions(page)
    middles = [knob(page, word).bounding_box() for word in ("cat", "sat")]
    unit = [middles[1][axis] - middles[0][axis] for axis in "xy"]
    moves = ("mat", 0.5, 5.5), ("mat", -1.2, 4.3), ("mat", 4, 6.0), ("cat", -1.5, 0.0)
    for word, units, reaches in (*moves, ("home", 2.5, 12.0)):
        drag(page, word, units * unit[0], units * unit[1])
        stands[STORY.index(word)] = reaches
        assert positions(page) == pytest.approx(stands)
        assert_line(page, 0.5, stands)
    # Once let go, the knob follows the pointer no longer.
    page.mouse.move(200, 200)
    assert positions(page) == stands


def test_of_knobs_at_one_place_the_one_that_can_move_is_dragged(where):
    page = where(x="0 1 2 3 4 5 6 6 6 12 12")
    unit = gap(page, 0)
    drag(page, "home", -2 * unit)  # it lies over "ran", which alone can go to the left
    assert positions(page)[-2:] == [10, 12]
    drag(page, "dog", -0.5 * unit)
    assert positions(page)[6:9] == [5.5, 6, 6]
    drag(page, "dog", unit)
    assert positions(page)[6:9] == [5.5, 6, 7]


def test_a_stamp_is_moved_by_keys(where):
    page = where(x="0 1 2 3 4 5 6 7 8 9 10")
    mat = knob(page, "mat")
    mat.focus()
    keys = "ArrowRight ArrowUp ArrowLeft ArrowDown PageUp ArrowRight PageDown Home ArrowLeft End"
    places = (5.1, 5.2, 5.1, 5.0, 6.0, 6.0, 5.0, 4.0, 4.0, 6.0)
    for key, place in zip(keys.split(), places, strict=True):
        mat.press(key)
        assert positions(page) == [*COUNTED[:5], place, *COUNTED[6:]], key
        assert float(mat.get_attribute("aria-valuenow")) == place
        assert_line(page, 0.5, positions(page))
    bounds = [mat.get_attribute(f"aria-value{end}") for end in ("min", "max")]
    assert bounds == ["4", "6"]
    assert mat.get_attribute("aria-valuetext").startswith("6: weight 0.")


def test_reset_counts_again(where):
    page = where()
    reset = page.get_by_role("button", name="Reset to 0, 1, 2 \u2026")
    reset.press("Enter")
    assert positions(page) == COUNTED
    assert_line(page, 0.5, COUNTED)
    assert "The words are counted" in page.locator(".stamps .ink-says").inner_text()
    assert reset.is_disabled()
    # These are the numbers with which the page opens.
    numbers = page.locator(".ruler .ink-number").all_inner_texts()
    page.get_by_role("tab", name="Why").click()
    assert page.locator(".view-why .ink-number").all_inner_texts() == numbers
    page.get_by_role("tab", name="Where").click()
    knob(page, "home").press("ArrowRight")
    assert reset.is_enabled()


@pytest.mark.parametrize("width", [320, 744, 1280])
def test_no_word_covers_another_wherever_they_stand(where, width):
    for x in ("", " ".join("0" * 11), "0 1 6 6 6 6 6 6 6 11 12", " ".join(["12"] * 11)):
        page = where({"viewport": {"width": width, "height": 900}}, x=x)
        axis, size = ("y", "height") if width == 320 else ("x", "width")
        boxes = [word.bounding_box() for word in page.locator(".ruler .ink-word").all()]
        for one, next_one in itertools.pairwise(boxes):
            assert one[axis] + one[size] <= next_one[axis] + 0.1
        box = page.locator(".ruler").bounding_box()
        assert box[axis] - 0.1 <= boxes[0][axis]
        assert boxes[-1][axis] + boxes[-1][size] <= box[axis] + box[size] + 0.1
        assert page.evaluate("document.documentElement.scrollWidth") == width


# In the plane


def plane_weights(query, slope):
    """What token `query` gives to each, restated: token 0 is global, the others stand as seeds in
    a sunflower.
    """
    seed = np.arange(72)
    angle = seed * np.pi * (3 - 5**0.5)
    points = (seed + 0.5)[:, None] ** 0.5 * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    distances = np.zeros(73)
    if query > 0:
        distances[1:] = np.hypot(*(points - points[query - 1]).T)
    parts = np.exp(-slope * distances)
    return parts / parts.sum()


def dots(page):
    return page.get_by_role("radiogroup", name="Token that looks").get_by_role("radio")


def assert_plane(page, query, slope=0.5):
    """Numbers and ink are those of this query."""
    weights = plane_weights(query, slope)
    shown = dots(page).evaluate_all(
        "dots => dots.map((dot) => [dot.ariaLabel, dot.classList.contains('looks')])"
    )
    names = ["global token", *(f"point {i}" for i in range(1, 73))]
    assert shown == [
        [f"{name}: {printed(weights[i])}", i == query] for i, name in enumerate(names)
    ]
    inks = styles(dots(page), "--ink-share")
    assert inks == pytest.approx(list((weights / weights.max()) ** 0.5))
    says = page.locator(".plane-story .ink-says").inner_text()
    assert (f"Point {query} gives {printed(weights[query])} to itself" in says) == (query > 0)
    assert ("The global token stands nowhere: " in says) == (query == 0)


def kept(page):
    """The token that stays when the pointer goes."""
    return dots(page).evaluate_all("dots => dots.findIndex((dot) => dot.ariaChecked === 'true')")


def test_the_ink_of_points_is_what_the_one_under_the_pointer_gives_them(where):
    page = where()
    start = kept(page)
    assert_plane(page, start)
    dots(page).nth(40).hover()
    assert_plane(page, 40)
    assert kept(page) == start
    page.mouse.move(5, 5)
    assert_plane(page, start)
    # Near a point is enough, and a click keeps it.
    box = dots(page).nth(7).bounding_box()
    page.mouse.click(box["x"] + box["width"] + 3, box["y"] + 3)
    page.mouse.move(5, 5)
    assert_plane(page, 7)
    assert kept(page) == 7
    dots(page).nth(0).click()
    assert_plane(page, 0)
    says = page.locator(".plane-story .ink-says").inner_text()
    assert len(set(re.findall(r"0\.\d{4}", says))) == 1


def test_the_slope_changes_the_ink_and_the_lines_of_equal_weight(where):
    page = where(query=12)
    slider = page.locator(".plane-story").get_by_role("slider", name="slope")
    slider.press("ArrowLeft")
    assert_plane(page, 12, 0.49)
    weights = plane_weights(12, 0.49)
    assert slider.get_attribute("aria-valuetext") == f"0.49: {printed(weights[12])} on itself"
    says = page.locator(".plane-story .ink-says")
    assert f"{printed(np.sort(weights)[-3])} to the nearest point" in says.inner_text()
    rings = page.locator(".plane .ring")
    radii = [float(re.search(r"a(\S+) ", ring.get_attribute("d"))[1]) for ring in rings.all()]
    assert np.exp(-0.49 * np.array(radii)) == pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 16])
    slider.press("Home")
    assert_plane(page, 12, 0.0)
    assert {ring.get_attribute("d") for ring in rings.all()} == {""}


def test_points_are_walked_by_keys(where):
    page = where(query=1)
    first = dots(page).nth(1)
    page.locator(".stamps .knob").last.press("Tab")
    assert first.evaluate("dot => dot === document.activeElement")
    assert first.get_attribute("tabindex") == "0"
    dots(page).nth(40).hover()  # a pointer that lies there does not hide where the keys lead
    x = first.bounding_box()["x"]
    first.press("ArrowRight")
    query = kept(page)
    assert_plane(page, query)
    assert dots(page).nth(query).evaluate("dot => dot === document.activeElement")
    assert dots(page).nth(query).bounding_box()["x"] > x
    # Every token is reached.
    reached = page.evaluate(
        """() => {
          const dots = [...document.querySelectorAll(".plane .dot")];
          const [seen, open] = [new Set([1]), [1]];
          while (open.length > 0) {
            const from = open.pop();
            for (const key of ["ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown"]) {
              dots[from].dispatchEvent(new KeyboardEvent("keydown", { key, cancelable: true }));
              const to = dots.findIndex((dot) => dot.ariaChecked === "true");
              if (!seen.has(to)) open.push(to);
              seen.add(to);
            }
          }
          return seen.size;
        }"""
    )
    assert reached == 73


# Links


def test_a_link_brings_stamps_and_points_back(where, visit, explorer_file):
    page = where()
    knob(page, "sat").press("ArrowLeft")
    page.get_by_role("slider", name="slope").first.press("ArrowRight")
    page.get_by_role("slider", name="slope").last.press("End")
    dots(page).nth(33).click()
    stands = positions(page)
    page.wait_for_timeout(90)  # the address follows the picture after 60 ms
    address = page.evaluate("location.hash.slice(1)")
    again = visit(explorer_file, address)
    assert positions(again) == stands
    assert_line(again, 0.51, stands)
    assert_plane(again, 33, 1.0)
    # Only what differs stands there, and what makes no sense is left at the start.
    page = where()
    start = positions(page)
    knob(page, "home").press("ArrowLeft")
    page.wait_for_timeout(90)
    names = page.evaluate("[...new URLSearchParams(location.hash.slice(1)).keys()]")
    assert set(names) == {"x", "view"}
    eight = " ".join(map(str, range(1, 9)))
    for x in (
        "0 1 2",
        f"0 {eight} 10 9",
        f"0 {eight} 9 99",
        "a b c d e f g h i j k",
        f"-1 {eight} 9 10",
    ):
        page = where(x=x, slope="2", plane="", query="73")
        assert positions(page) == start, x
        assert_line(page, 0.5, start)
        assert_plane(page, 24)
