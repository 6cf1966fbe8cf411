"""The annotated pages: all of the source, once, in order, beside its own words, with the numbers that a run gives."""

import html
import importlib
import re
import sys

import pytest

from documents import ROOT

sys.path.insert(0, str(ROOT / "docs"))
try:
    annotate, follow = importlib.import_module("annotate"), importlib.import_module("follow")
finally:
    sys.path.pop(0)

PAGES = {page.name: page for page in annotate.PAGES}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("annotated")
    return {path.stem: path.read_text(encoding="utf-8") for path in annotate.write(folder)}


def plain(text):
    return html.unescape(re.sub(r"<[^>]+>", "", text))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_holds_every_line_of_code_once_and_in_order(written, name):
    source = PAGES[name].source.read_text(encoding="utf-8").splitlines()
    shown = re.findall(
        r'<span class="line" id="L(\d+)"><a [^>]*>(\d+)</a>(.*)</span>', written[name]
    )
    numbers = [int(number) for number, _, _ in shown]
    assert numbers == sorted(set(numbers))
    for number, label, line in shown:
        assert number == label and plain(line) == source[int(number) - 1]
    prose = {
        number
        for number, line in enumerate(source, 1)
        if number not in numbers and line.strip() and not line.lstrip().startswith("#")
    }
    docstrings, _, _ = annotate._definitions(annotate.ast.parse("\n".join(source)))
    assert prose == {
        n
        for first, (end, _) in docstrings.items()
        for n in range(first, end + 1)
        if source[n - 1].strip()
    }


@pytest.mark.parametrize("name", PAGES)
def test_every_word_of_comments_and_docstrings_is_on_the_page(written, name):
    prose = " ".join(
        re.findall(r"`````\{container\} prose\n(.*?)\n`````\n", written[name], re.DOTALL)
    )
    words = set(re.findall(r"\w+", prose.replace("\\", "")))
    source = PAGES[name].source.read_text(encoding="utf-8")
    for row in annotate.rows(source):
        assert set(re.findall(r"\w+", row.prose.replace("\\", ""))) <= words
    said = " ".join(re.findall(r"^ *# (.*)$", source, re.MULTILINE))
    assert set(re.findall(r"\w+", said)) <= words


def values(text, name):
    """What stands under `name`, as the page shows it: the texts of its blocks."""
    found = re.findall(rf"<b>{name}</b>[^<]*<div class=\"texts\">(.*?)</div>", text, re.DOTALL)
    return [re.findall(r"<pre>(.*?)</pre>", block, re.DOTALL) for block in found]


def test_the_definition_shows_the_book_chapters_tables(written):
    (weights,) = values(written["definition"], "weight")
    assert "cat 0.3791 0.1520 0.3791 0.0559 0.0339" in weights[0]
    assert "on  0.1106 0.1421 0.0899 0.4750 0.1824" in weights[1]
    (output,) = values(written["definition"], "output")
    assert "mat 0.2896 0.3695" in output[0] and "mat 0.2731 0.4746" in output[1]


def test_the_layer_computes_the_definitions_output(written):
    assert "0.3274 0.3936 0.1861 0.2613" in plain(written["layer"])


def test_values_stand_below_the_line_that_set_them(tmp_path):
    source = tmp_path / "module.py"
    source.write_text(
        'def double(x):\n    """Twice."""\n    y = (\n        2 * x\n    )\n    for i in (1, 2):\n        z = y + i\n    return z\n'
    )
    names = {}
    exec(compile(source.read_text(), str(source), "exec"), names)
    found = follow.record(source, lambda: [names["double"](3), names["double"](4)])
    said = {line: [(v.name, v.texts) for v in values] for line, values in found.items()}
    assert said == {
        1: [("x", ["3"])],
        5: [("y", ["6"])],
        6: [("i", ["1"])],
        7: [("z", ["7"])],
        8: [("returns", ["8"])],
    }


def test_markdown_keeps_what_it_means():
    text = "One * two [H].\n\n    a  b\n\nArgs:\n    x, y: First\n        and more.\n\n| a | b |\n|---|---|\n| c | d |\n|   | e |"
    assert annotate.markdown(text).split("\n\n") == [
        "One \\* two \\[H\\].",
        "```text\na  b\n```",
        "**Args**",
        "- **x, y**: First and more.",
        "| a | b |\n| --- | --- |\n| c | d e |",
        "",
    ]


def test_rows_begin_at_comments_functions_and_after_them():
    source = '"""A module."""\n\n# About the constant.\nX = 1\n\n\n@cached\ndef f(\n    x,\n):\n    """Double."""\n\n    # Two parts\n    # to it.\n    y = x\n    return y + x\n\n\nZ = f(X)  # stays\n'
    cut = [(row.heading, " ".join(row.prose.split()), row.code) for row in annotate.rows(source)]
    assert cut == [
        ("", "A module. About the constant.", [(4, 4)]),
        ("f", "Double.", [(7, 10)]),
        ("", "Two parts to it.", [(15, 16)]),
        ("", "", [(19, 19)]),
    ]
