"""Spans of documents: where each passage lies in a text, and which tokens it holds."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, pairwise
from operator import index
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from linbias.models.embedding.documents import Document

Span = tuple[int, int]  # first and one past the last
Spans = str | int | Callable[[str], Iterable[Span]] | Sequence[Iterable[Span]]

# Full stops, and what may close a quotation behind them. Behind a single letter or digit a stop
# belongs to it ("J. S. Bach", "1. First"). The + that never give back keep the search linear.
_SENTENCE_END = re.compile(
    r"""(?<![.!?\u2026\u061f\u06d4\u0964\u0965])
        (?:(?<!\b\w)\.|[!?\u2026\u061f\u06d4\u0964\u0965])
        [.!?\u2026\u061f\u06d4\u0964\u0965]*+ ["'\u2019\u201d\u00bb)\]]*+ (?P<space>\s++) (?=\S)
      | [\u3002\uff01\uff1f\uff61]++ ["'\u2019\u201d\u300d\u300f\uff09)]*+ \s*+
      | \n[^\S\n]*+\n\s*+""",
    re.VERBOSE,
)


class Passages(NamedTuple):
    """Spans of a document, in characters of its text and in its tokens."""

    spans: tuple[Span, ...]
    tokens: tuple[Span, ...]


def read_spans(spans: Spans, documents: Sequence[Document], pooling: str) -> Spans:
    """Checks what can be checked before there are tokens; pairs become lists."""
    if pooling != "mean":
        raise ValueError(f"embed: pooling must be 'mean' with spans, got {pooling!r}")
    ways = "'sentences' or a number of tokens (in Python also a function, or pairs per document)"
    if isinstance(spans, str):
        if spans != "sentences":
            raise ValueError(f"embed: spans must be {ways}, got {spans!r}")
    elif isinstance(spans, int) and not isinstance(spans, bool):
        if spans < 1:
            raise ValueError(f"embed: spans must be at least 1 token, got {spans}")
    elif isinstance(spans, Sequence):
        if len(spans) != len(documents):
            got = f"got those of {len(spans):,}"
            raise ValueError(f"embed: spans must be of all {len(documents):,} documents, {got}")
        given = zip(spans, documents, strict=True)
        return [_checked(pairs, document, (0, len(document.text))) for pairs, document in given]
    elif not callable(spans):
        raise TypeError(f"embed: spans must be {ways}, got {spans!r}")
    return spans


def settings_of(spans: Spans | None, passages: Sequence[Passages]) -> dict[str, Any]:
    """What tells two runs apart: how documents are split, and a digest of where."""
    if spans is None:
        return {"spans": None, "span_offsets": None}
    way = spans
    if not isinstance(spans, str | int):
        way = "pairs" if isinstance(spans, list) else "function"
    digest = hashlib.sha256()
    for passage in passages:
        digest.update(json.dumps(passage).encode())
    return {"spans": way, "span_offsets": digest.hexdigest()[:16]}


def find_passages(
    spans: Spans, number: int, document: Document, offsets: ArrayLike, *, is_shortened: bool
) -> Passages:
    """The passages of a document of this number.

    offsets [T, 2] are the characters of each token, none those of a special token.
    """
    offsets = np.asarray(offsets)
    places = np.flatnonzero(offsets[:, 0] < offsets[:, 1])
    starts, ends = offsets[places].T
    read = (0, len(document.text))
    if is_shortened and len(places):
        read = (int(starts[0]), int(ends[-1]))
    is_given = isinstance(spans, list)
    if isinstance(spans, list):
        found = _checked(spans[number], document, read)
    else:
        found = _split(spans, document, read, starts)
    first = np.searchsorted(ends, [begin for begin, _ in found], side="right")
    last = np.searchsorted(starts, [end for _, end in found], side="left") - 1
    holds = first <= last
    if not holds.any() or (is_given and not holds.all()):
        got = found[int(np.argmin(holds))] if found else "none"
        raise ValueError(f"embed: spans must hold a token, got {got} of document {document.id!r}")
    tokens = zip(places[first[holds]].tolist(), (places[last[holds]] + 1).tolist(), strict=True)
    return Passages(tuple(compress(found, holds)), tuple(tokens))


def _split(spans: Any, document: Document, read: Span, starts: Any) -> list[Span]:
    """What a way to split makes of the characters of a document that are read."""
    begin, end = read
    if isinstance(spans, int):
        # Where a character is several tokens, some of these hold none.
        return list(pairwise([*starts[::spans].tolist(), end]))
    text = document.text[begin:end]
    pairs = sentences(text) if spans == "sentences" else spans(text)
    return [(a + begin, b + begin) for a, b in _checked(pairs, document, (0, len(text)))]


def sentences(text: str) -> Iterator[Span]:
    """The sentences of a text, without the white space around them.

    A sentence ends at . ! ? before white space, unless a small letter follows, at those of other
    scripts, and before an empty line.
    """
    begin = 0
    for end in _SENTENCE_END.finditer(text):
        space = end["space"]
        if not (space and space.count("\n") < 2 and text[end.end()].islower()):
            yield from _trimmed(text, begin, end.end())
            begin = end.end()
    yield from _trimmed(text, begin, len(text))


def _trimmed(text: str, begin: int, end: int) -> Iterator[Span]:
    part = text[begin:end].rstrip()
    words = part.lstrip()
    if words:
        yield begin + len(part) - len(words), begin + len(part)


def _checked(pairs: Any, document: Document, read: Span) -> list[Span]:
    """Spans as pairs of int, which lie within the characters that are read."""
    of = f"of document {document.id!r}"
    if not isinstance(pairs, Iterable):
        kind = type(pairs).__name__
        raise TypeError(f"embed: spans must be pairs for each document, got a {kind} {of}")
    spans = []
    for pair in pairs:
        try:
            begin, end = map(index, pair)
        except (TypeError, ValueError) as error:
            rule = "pairs (begin, end) of integers"
            raise TypeError(f"embed: spans must be {rule}, got {pair!r} {of}") from error
        if not read[0] <= begin < end <= read[1]:
            rule = f"{read[0]} <= begin < end <= {read[1]}, the characters that are read"
            raise ValueError(f"embed: spans must have {rule}, got {begin, end} {of}")
        spans.append((begin, end))
    if not spans:
        raise ValueError(f"embed: spans must be at least one, got none {of}")
    return spans
