"""One word, one sign and one unit for one thing (DESIGN section 3)."""

import re

import pytest

from documents import DOCUMENTS, ROOT

SOURCES = [
    path
    for folder in ("src", "evidence/runs", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".js", ".html", ".css")
]
# An attribute's former name, and names of tests and what failed.
ELSEWHERE = {"linbias/explain.py", "docs/LOG.md"}


@pytest.mark.parametrize(
    ("other", "ours"),
    [
        (r"penalty|penalties", "bias, which is added and at most 0"),
        (r"sequence in pieces|piece of a sequence|\ba piece each|\bInPieces\b", "shard"),
        (r"in shares\b|share of a sequence|own share\b|near_to_far\.window", "shard; reach"),
        (r"bits per token|bits/byte|\bBPB\b", "bits per byte"),
        (r"\bhead \d \(slope|(?<!-)\bslope 0\.(?:5|25|125)\b(?!\d)", "head 0, slope 1/2"),
    ],
)
def test_one_word_stands_for_one_thing(other, ours):
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in (*SOURCES, *DOCUMENTS)
        if "/".join(path.parts[-2:]) not in ELSEWHERE
        for match in re.finditer(other, path.read_text(encoding="utf-8"), re.IGNORECASE)
    ]
    assert not found, f"say {ours}"


def test_negative_numbers_of_tables_have_a_minus_sign():
    """Code keeps the hyphen."""
    rows = [
        f"{document.name}: {line}"
        for document in DOCUMENTS
        if document.name != "LOG.md"
        for line in document.read_text(encoding="utf-8").splitlines()
        if line.startswith("|") and re.search(r"[| (]-\d", re.sub(r"`[^`]*`", "", line))
    ]
    assert not rows
