"""The directive `explorer`: the page that `linbias explore` opens, as a file of the site and in a frame of the page."""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from linbias import explore

_FILE = "explorer.html"


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("explorer", Explorer)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


class Explorer(SphinxDirective):
    def run(self) -> list[nodes.Node]:
        page = "../" * self.env.docname.count("/") + _FILE
        return [
            nodes.raw(
                "",
                f'<p class="explorer-link"><a href="{page}">Open it in a window of its own</a></p>'
                f'<iframe class="explorer" src="{page}" title="Explorer" loading="lazy"></iframe>',
                format="html",
            )
        ]


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        (Path(app.outdir) / _FILE).write_text(explore.page(), encoding="utf-8")
