"""The page as one file: the frame of page.html around its style, script and data."""

import base64
import hashlib
import json
from importlib import resources
from string import Template
from typing import Any

from linbias.explore import data
from linbias.explore.bundle import bundle, style


def html(content: dict[str, Any], static: str, title: str = "linbias explore") -> str:
    """Write the page of what `content_of` gives, and of HTML for readers without scripts."""
    script = f'"use strict";\n(() => {{\n{bundle("start.js")}}})();\n'
    template = resources.files("linbias.explore").joinpath("page.html").read_text("utf-8")
    return Template(template).substitute(
        title=title,
        style=style(),
        static=static,
        script=script,
        # The page may run this script and no other, and can load nothing.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        data=to_json(content),
    )


def content_of(
    results: dict[str, Any],
    model: dict[str, Any] | None = None,
    docs: str | None = None,
    start: str = "why",
) -> dict[str, Any]:
    """What the page's views show, and which of them it opens with."""
    return {
        "example": data.example(),
        "links": data.links(docs),
        "methods": data.methods(),
        "results": results,
        "model": model,
        "start": start,
    }


def to_json(value: Any) -> str:
    """JSON that stands inside a script element whatever its strings hold."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
