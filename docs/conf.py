"""The documentation site: `make docs` writes it to build/site, static files for any host.

Nothing is fetched, while it is built or while it is read: formulas are MathML, fonts are the system's.
"""

import logging
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

sys.path.insert(0, str(Path(__file__).parent))
logging.getLogger("datasets").setLevel(
    logging.WARNING
)  # it says at length which frameworks it found

import linbias  # noqa: E402
from linbias import explore  # noqa: E402

project = "linbias"
author = "the authors of linbias"
version = release = linbias.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx.ext.githubpages",  # a file that tells one host to serve _static
    "commands",
]
exclude_patterns = ["LOG.md", "mutants.md"]  # for those who work on the code: read where they lie

# Markdown
myst_enable_extensions = ["deflist", "dollarmath", "attrs_inline", "colon_fence"]
myst_heading_anchors = 4

# The reference: what a docstring says, in its order
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say dtype, shape and meaning
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 72
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_custom_sections = [(name, "params_style") for name in ("Attributes", "Raises")]
default_role = "py:obj"  # a name in backticks is a link where it has an entry, and code elsewhere
highlight_language = "text"
smartquotes = False  # a quote of code stays one

# The pages
html_theme = "furo"
html_title = "linbias"
html_math_renderer = "mathml"
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "gruvbox-dark"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["linbias.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_domain_indices = False
html_use_index = False


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (_visit_math, None), (_visit_math, None))
    app.connect("autodoc-process-docstring", _process_docstring, priority=400)  # napoleon: 500
    app.connect("autodoc-process-docstring", _with_colons, priority=600)
    app.connect("autodoc-process-signature", _without_unknown)
    app.connect("build-finished", _write_explorer)


def _visit_math(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """Formulas as MathML: a browser draws them without a script, a font or a network."""
    block = isinstance(node, nodes.math_block)
    try:
        markup = tex2mathml(node.astext().strip(), as_block=block)
    except MathError as error:
        getLogger(__name__).warning("formula %r: %s", node.astext(), error, location=node)
        raise nodes.SkipNode from error
    translator.body.append(f'<div class="formula">{markup}</div>' if block else markup)
    raise nodes.SkipNode


def _process_docstring(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    lines[:] = plain_to_rst("\n".join(lines)).split("\n")


def plain_to_rst(text: str) -> str:
    """A docstring as it is written here, as reStructuredText: an indented block is literal, a table has bars."""
    sections = "Args|Returns|Raises|Example|Attributes|Yields"
    text = re.sub(rf"(?m)^( *)(?!(?:{sections}):$)(\S.*)\n\n(?=\1    )", r"\1\2\n\n\1::\n\n", text)
    text = re.sub(r"(?m)^( *\|.*\n)( *\|-.*\n)((?: *\|.*(?:\n|$))+)", _simple_table, text)
    return re.sub(r"(`[^`\n]+`)(?=\w)", r"\1\\ ", text)  # `name`s


def _simple_table(table: re.Match[str]) -> str:
    parts = (re.sub(r"(?m)^( *)\|", r"\1", part) for part in table.groups())
    head, rule, body = (part.replace("|", " ") for part in parts)
    rule = rule.replace("-", "=")
    return rule + head + rule + body.rstrip("\n") + "\n" + rule


def _with_colons(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """`name: meaning` as in the source, where napoleon has written two hyphens."""
    lines[:] = [
        re.sub(r"^((?::\w+:)?\W*\*\*.+?\*\*|:returns: .+?) -- ", r"\1: ", line) for line in lines
    ]


def _without_unknown(
    app: Sphinx, what: str, name: str, thing: object, options: object, signature: str | None, returned: str | None
) -> tuple[str | None, str | None]:  # fmt: skip
    """Leave out the parameter that only collects names to refuse."""
    return signature and signature.replace(", **unknown", ""), returned


def _write_explorer(app: Sphinx, error: Exception | None) -> None:
    """What `linbias explore` opens, which explore.md shows in a frame, and its slope, which index.md shows."""
    if error is None:
        folder = Path(app.outdir)
        page = explore.page(docs="index.html")
        (folder / "explorer.html").write_text(page, encoding="utf-8")
        (folder / "_static" / "slope.js").write_text(explore.slope_card("slope"), encoding="utf-8")
