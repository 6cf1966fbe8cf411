"""What Python puts into the page: the chapter's example, the README's run, looks of methods."""

import json
from importlib import resources
from typing import Any

from linbias.example import TOKENS, K, Q, V
from linbias.explore.bundle import MOST_HEADS
from linbias.methods import METHODS
from linbias.schedules import SCHEDULES

_MAX_TOKENS = 64

# The character of a head by what a key at distance 10 loses, in the words of the book chapter.
CHARACTERS = (
    (4.0, "Ultra-local"),
    (2.0, "Local"),
    (1.0, "Medium-range"),
    (0.1, "Broad"),
    (0.0, "Near-global"),
)


# A text to make the example longer: the ten words of the chapter's fifth exercise, and more.
WORDS = (
    "The cat sat on mat and the dog ran home while rain fell over the small town and every lamp "
    "along the road went out one by one until only the window of the old library still glowed "
    "where somebody read aloud from a book about distance and memory and how far a word can reach "
    "back for what came before it was said"
).split()[:_MAX_TOKENS]


def methods() -> dict[str, dict[str, Any]]:
    """How charts show each position method; the line of a `main` one stands out."""
    return {
        name: {
            "label": method.label,
            "colour": f"light-dark({method.colour}, {method.dark})",
            "main": method.linear,
        }
        for name, method in METHODS.items()
    }


def results() -> dict[str, Any]:
    """The run that the README shows, in the form of `linbias.lm.read_results`.

    It travels with the package as results.json, which evidence/runs/update_readme.py writes, so
    that the page needs neither PyTorch nor a run.
    """
    text = resources.files("linbias.explore").joinpath("results.json").read_text(encoding="utf-8")
    return {"runs": [json.loads(text)]}


def example() -> dict[str, Any]:
    """What the page starts with: five tokens, and q, k, v with two heads side by side in a row."""
    return {
        "tokens": TOKENS,
        "q": Q,
        "k": K,
        "v": V,
        "words": WORDS,
        "schedules": SCHEDULES,
        "characters": CHARACTERS,
        "max_tokens": _MAX_TOKENS,
        "max_heads": MOST_HEADS,
    }


def links(docs: str | None = None) -> dict[str, str]:
    """The addresses behind "The paper" and, if it is given, "Documentation"."""
    paper = {"paper": "https://arxiv.org/abs/2108.12409"}
    return {**paper, "docs": docs} if docs else paper
