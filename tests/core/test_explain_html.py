"""What notebooks show of an explanation: numbers, tokens as text, nothing that runs."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.image import imread
from numpy.testing import assert_allclose

import linbias
from linbias import example


class Page(HTMLParser):
    """The elements of a page, and the rows of its tables as texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.tables: list[list[list[str]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.attributes += attributes
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_data(self, data):
        if self.tables and self.tables[-1] and self.tables[-1][-1]:
            self.tables[-1][-1][-1] += data

    def handle_endtag(self, tag):
        if tag == "table":
            self.tables[-1].append([])  # text behind it belongs to none


def test_it_shows_the_weights_of_every_head_and_the_steps_of_the_last_row():
    trace, tokens = example.trace()
    page = Page(trace._repr_html_())
    weights, steps = page.tables[:2], page.tables[2:]
    for head, table in enumerate(weights):
        assert table[0] == ["", *tokens]
        assert table[1] == ["The", "1.0000", *["·"] * 4]
        assert table[5] == ["mat", *(f"{w:.4f}" for w in trace.weights[head, -1])]
    opacity = re.search(r"rgba\(179, 64, 27, ([\d.]+)\)\">0.5110<", trace._repr_html_())
    assert float(opacity[1]) == round(0.75 * trace.weights[0, -1, -1], 3)
    assert steps[0][0] == ["key", "q · k", "scaled", "bias", "scores", "weights"]
    written = [
        line.replace("-", "\N{MINUS SIGN}").split()
        for line in trace.table(head=0).splitlines()[3:8]
    ]
    assert steps[0][1:6] == written


def test_tokens_are_text_and_nothing_runs_or_is_loaded():
    ones = np.ones((1, 4, 1))
    tokens = ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "&amp;", "a\n\u202eb"]
    page = Page(linbias.explain(ones, ones, ones, tokens=tokens)._repr_html_())
    assert set(page.elements) <= {
        *("div", "style", "p", "table", "caption", "thead", "tbody", "tr", "th", "td", "bdi")
    }
    assert page.tables[0][0][1:] == [*tokens[:3], "a\\n\\u202eb"]
    assert {name for name, _ in page.attributes} == {"class", "style", "scope", "title"}


def test_large_matrices_are_pictures_whose_opacity_is_the_weight():
    q, k, v = np.random.default_rng(0).normal(size=(3, 9, 300, 4))
    trace = linbias.explain(q, k, v)
    html = trace._repr_html_()
    (first, *others) = re.findall(r'src="data:image/png;base64,([^"]+)"', html)
    assert len(others) == 8 and "<summary>1 more</summary>" in html
    picture = imread(io.BytesIO(base64.b64decode(first)))
    assert picture.shape == (150, 150, 4)
    largest = trace.weights[0].reshape(150, 2, 150, 2).max((1, 3))
    assert_allclose(picture[..., 3], np.sqrt(largest), atol=0.5 / 255)
    row = Page(html).tables[0]
    keys = [int(line[0]) for line in row[1:17]]
    assert keys == sorted(np.argsort(-trace.weights[0, -1])[:16])
    assert len(html) < 500_000


@pytest.mark.parametrize("left", [None, [[0.5], [0.25]]])
def test_of_a_batch_it_shows_the_first(left):
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 1, 3, 2))
    both = linbias.explain(q, k, v, left)
    alone = linbias.explain(q[0], k[0], v[0], None if left is None else left[0])
    assert both._repr_html_().replace(", the first of a batch [2]", "") == alone._repr_html_()


def test_without_keys_it_says_so():
    nothing = np.zeros((1, 0, 2))
    assert "0 keys" in linbias.explain(nothing, nothing, nothing)._repr_html_()
