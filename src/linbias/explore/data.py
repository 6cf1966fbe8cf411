"""What Python puts into the page: the book chapter's example, links, and rules that page and terminal share."""

from importlib import metadata
from typing import Any

from linbias.example import TOKENS, K, Q, V
from linbias.explore.bundle import MOST_HEADS
from linbias.methods import METHODS
from linbias.schedules import SCHEDULES

MAX_TOKENS = 64
MAX_HEADS = MOST_HEADS

# The character of a head by what a key at distance 10 loses, in the words of the book chapter.
CHARACTERS = (
    (4.0, "Ultra-local"),
    (2.0, "Local"),
    (1.0, "Medium-range"),
    (0.1, "Broad"),
    (0.0, "Near-global"),
)


def character(lost: float) -> str:
    """The character of a head whose keys at distance 10 lose this much.

    Example:
        >>> [character(10 / 2**h) for h in (1, 2, 3, 4, 8)]
        ['Ultra-local', 'Local', 'Medium-range', 'Broad', 'Near-global']
    """
    return next(name for least, name in CHARACTERS if lost >= least)


# A text to make the example longer: the ten words of the chapter's fifth exercise, and more.
WORDS = (
    "The cat sat on mat and the dog ran home while rain fell over the small town and every lamp along "
    "the road went out one by one until only the window of the old library still glowed where somebody "
    "read aloud from a book about distance and memory and how far a word can reach back for what came "
    "before it was said"
).split()[:MAX_TOKENS]


def methods() -> dict[str, dict[str, Any]]:
    """How charts show each position method: its name, its colour, and whether its line stands out."""
    return {
        name: {
            "label": method.label,
            "colour": f"light-dark({method.colour}, {method.dark})",
            "main": method.linear,
        }
        for name, method in METHODS.items()
    }


def example() -> dict[str, Any]:
    """What the page starts with: five tokens, and two heads of q, k and v side by side in each row."""
    return {
        "tokens": TOKENS,
        "q": Q,
        "k": K,
        "v": V,
        "words": WORDS,
        "schedules": SCHEDULES,
        "characters": CHARACTERS,
        "max_tokens": MAX_TOKENS,
        "max_heads": MAX_HEADS,
    }


# Where the page leads to: the paper, and what the package's own metadata name.
_PAPER = "https://arxiv.org/abs/2108.12409"
_URLS = {
    "docs": "documentation",
    "code": "source",
}  # as the labels of a project's addresses are written


def links(docs: str | None = None) -> dict[str, str]:
    """The addresses behind "The paper", "Documentation" and "Code", those that are known.

    Args:
        docs: Address of the documentation, where the page stands in it.
    """
    urls = dict(
        line.split(", ", 1) for line in metadata.metadata("linbias").get_all("Project-URL") or []
    )
    known = {label.lower(): url for label, url in urls.items()}
    found = {"docs": docs} if docs else {}
    found = {name: known[label] for name, label in _URLS.items() if label in known} | found
    return {"paper": _PAPER, **found}
