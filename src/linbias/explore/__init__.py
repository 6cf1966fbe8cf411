"""The explorer: attention with linear biases as a page to touch, in one file that needs no network.

data.py      what Python puts into the page as JSON: the chapter's example
bundle.py    the modules of js/ as one script
page.html    the frame; style.css its look, light and dark
js/          page.js starts it; *_view.js are its views; the rest is what they share
"""

import base64
import hashlib
import json
from importlib import resources
from string import Template
from typing import Any

from linbias.explore import data
from linbias.explore.bundle import bundle
from linbias.explore.vectors import vectors

__all__ = ["page", "vectors"]


def page(results: dict[str, Any] | None = None, model: dict[str, Any] | None = None) -> str:
    """Write the explorer as one HTML file: text, data, style and script, with nothing left to load.

    Args:
        results: What the comparison of methods shows; None leaves that view out.
        model: What the view of a trained model shows; None leaves that view out.

    Returns:
        The page, below 1 MB without a model.

    Raises:
        ValueError: results or model holds a number that JSON cannot say: inf or nan.

    Example:
        >>> page()[:15]
        '<!DOCTYPE html>'
    """
    script = f'"use strict";\n(() => {{\n{bundle("page.js")}}})();\n'
    template = _read("page.html")
    return Template(template).substitute(
        style=_read("style.css"),
        script=script,
        # The page may run this script and no other, and can load nothing.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=to_json({"example": data.example(), "results": results, "model": model}),
    )


def to_json(value: Any) -> str:
    """JSON that stands inside a script element whatever its strings hold."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _read(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
