"""The documentation site: `make docs` writes it to build/site, static files for any host.

Nothing is fetched while it is built or read: formulas are MathML, fonts are the system's.

To add a page: a file in docs/, in a `toctree` of index.md, wrapped at 120 columns; the site has at
most 26 pages and 30,000 words, so look first which page the text belongs to. Its Python blocks
follow each other and run in the tests, with what they print in a block of text after them; links
must resolve, and commands and names exist (tests/project/test_docs.py,
tests/project/test_site.py). A public name needs no page: reference/ takes `__all__` of each
package.
"""

import ast
import inspect
import logging
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util.logging import getLogger

sys.path.insert(0, str(Path(__file__).parent))
# It says at length which frameworks it found.
logging.getLogger("datasets").setLevel(logging.WARNING)

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
exclude_patterns = ["LOG.md"]  # for those who work on the code: read where they lie

# Markdown
myst_enable_extensions = ["deflist", "dollarmath", "attrs_inline", "colon_fence"]
myst_heading_anchors = 4

# The reference: what a docstring says, in its order
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # _as_written adds them
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
    app.connect("autodoc-process-signature", _as_written)
    app.connect("build-finished", _write_explorer)
    app.connect("doctree-read", _add_dark_twins)
    app.connect("build-finished", _mend_pages)


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


def _add_dark_twins(app: Sphinx, document: nodes.document) -> None:
    """Show chart-dark.svg on dark pages where it lies beside chart.svg."""
    for image in list(document.findall(nodes.image)):
        path = Path(image["uri"])
        twin = path.with_stem(f"{path.stem}-dark")
        if (Path(app.srcdir) / twin).is_file():
            dark = image.deepcopy()
            dark["uri"], dark["candidates"] = twin.as_posix(), {"*": twin.as_posix()}
            image["classes"].append("only-light")
            dark["classes"].append("only-dark")
            image.parent.insert(image.parent.index(image) + 1, dark)
            app.env.images.add_file(app.env.docname, twin.as_posix())


def _process_docstring(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    lines[:] = plain_to_rst("\n".join(lines)).split("\n")


def plain_to_rst(text: str) -> str:
    """Write a docstring as reStructuredText: indented blocks are literal, tables have bars."""
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


def _as_written(
    app: Sphinx,
    what: str,
    name: str,
    thing: Any,
    options: object,
    signature: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """Name types as the source does, and leave out a parameter that collects names to refuse."""
    if what not in ("function", "method"):
        return signature, returned
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing)))).body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    if arguments.kwarg and arguments.kwarg.arg == "unknown":
        arguments.kwarg = None
    if what == "method":
        del arguments.args[0]
    types = function.returns and ast.unparse(function.returns).replace("npt.", "").strip("'")
    return f"({ast.unparse(arguments).replace('npt.', '')})", types


# What Sphinx and the theme write, and what readers need who do not see the page or use no mouse.
MENDED = (
    ('<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
    ('<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="All pages">'),
    ('<aside class="toc-drawer">', '<aside class="toc-drawer" aria-label="This page">'),
    ("<pre>", '<pre tabindex="0">'),  # it scrolls, as tables do in a narrow window
    ('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
    ('\n<div id="search-results"></div>', '<h1>Search</h1><div id="search-results"></div>'),
)


def _mend_pages(app: Sphinx, error: Exception | None) -> None:
    for path in Path(app.outdir).rglob("*.html"):
        text = mended = path.read_text(encoding="utf-8")
        for found, wanted in MENDED:
            mended = mended.replace(found, wanted)
        # The parameters of a signature are no list of definitions.
        mended = re.sub(r"<dl>\s*(<dd>.*?)</dl>", _parameters, mended, flags=re.DOTALL)
        if mended != text:
            path.write_text(mended, encoding="utf-8")


def _parameters(signature: re.Match[str]) -> str:
    lines = signature[1].replace("<dd>", "<div>").replace("</dd>", "</div>")
    return f'<div class="sig-params">{lines}</div>'


def _write_explorer(app: Sphinx, error: Exception | None) -> None:
    """Write the explorer, which explore.md frames, and its slope, which index.md shows."""
    if error is None:
        folder = Path(app.outdir)
        page = explore.page(docs="index.html")
        (folder / "explorer.html").write_text(page, encoding="utf-8")
        (folder / "_static" / "slope.js").write_text(explore.slope_card("slope"), encoding="utf-8")
