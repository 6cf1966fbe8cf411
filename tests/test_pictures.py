"""The pictures of docs/ideas are those that the library's numbers give."""

import importlib
import sys

import pytest

from documents import ROOT

sys.path.insert(0, str(ROOT / "docs"))
try:
    pictures = importlib.import_module("pictures")
finally:
    sys.path.pop(0)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_current(name):
    """`python docs/pictures.py` draws them."""
    drawn = pictures.PICTURES[name]().svg()
    assert drawn == (pictures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")


def test_every_picture_is_used_and_says_what_it_shows():
    pages = "".join(page.read_text(encoding="utf-8") for page in pictures.FOLDER.glob("*.md"))
    for name in pictures.PICTURES:
        assert f"]({name}.svg)" in pages
        assert pictures.PICTURES[name]().says
    assert {path.stem for path in pictures.FOLDER.glob("*.svg")} == set(pictures.PICTURES)
