"""The pictures of docs/ideas are those that the library's numbers give."""

import base64
import importlib
import io
import re
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from documents import ROOT

sys.path.insert(0, str(ROOT / "docs"))
try:
    pictures = importlib.import_module("pictures")
    moving = importlib.import_module("moving")
finally:
    sys.path.pop(0)


def content(path):
    """Words, numbers and colors of cells: what another version of Matplotlib leaves as it is."""
    text = path.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    images = re.findall(r"data:image/png;base64,([^\"]+)", text)
    cells = [imread(io.BytesIO(base64.b64decode(image))) for image in images]
    return re.findall(r"<text [^>]*>([^<]*)</text>", text), cells


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_current(name, tmp_path):
    """`python docs/pictures.py` draws them."""
    pictures.write(name, tmp_path / "drawn.svg")
    words, cells = content(tmp_path / "drawn.svg")
    kept_words, kept_cells = content(pictures.FOLDER / f"{name}.svg")
    assert len(words) > 3 and words == kept_words
    for drawn, kept in zip(cells, kept_cells, strict=True):
        np.testing.assert_allclose(drawn, kept, atol=0.01)


def test_the_moving_picture_is_current_and_small():
    """`python docs/moving.py` draws it."""
    kept = moving.FILE.read_text(encoding="utf-8")
    numbers = r"-?\d+\.\d+"
    assert re.sub(numbers, "#", kept) == re.sub(numbers, "#", moving.picture())
    drawn = [[float(n) for n in re.findall(numbers, text)] for text in (kept, moving.picture())]
    np.testing.assert_allclose(*drawn, atol=0.002)
    assert len(kept) < 100_000 and "<script" not in kept


def test_every_picture_is_used_and_says_what_it_shows():
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    for name in pictures.PICTURES:
        assert re.search(rf"!\[[^\]]{{10,}}\]\((?:ideas/)?{name}\.svg\)", pages)
    assert {path.stem for path in pictures.FOLDER.glob("*.svg")} == set(pictures.PICTURES)
