"""Links from the documentation into the repository, which the site shows itself.

A page links to `../src/linbias/near_to_far.py` or `../DESIGN.md` by its place in the repository, so that the link works where
the Markdown is read. Here it becomes a link to the page that holds that document, or to a page with the file's source.
Entries of the reference link to the line where a name is defined.
"""

import importlib
import inspect
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Documents outside docs/ that are a page.
PAGES = {
    "README.md": "start",
    "DESIGN.md": "design",
    "CONTRIBUTING.md": "contributing",
    "CHANGELOG.md": "changelog",
}
_FOLDER = "source"


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_transform(_LinksIntoTheRepository)
    app.connect("env-purge-doc", lambda app, env, docname: _shown(env).pop(docname, None))
    app.connect("html-collect-pages", _source_pages)
    app.setup_extension("sphinx.ext.linkcode")
    app.config.linkcode_resolve = lambda domain, info: _definition(app, domain, info)
    return {"parallel_read_safe": False, "parallel_write_safe": True}


def _shown(env: Any) -> dict[str, set[Path]]:
    """The files that need a page, by the document that links to them."""
    if not hasattr(env, "linbias_sources"):
        env.linbias_sources = {}
    return env.linbias_sources


def _page(path: Path) -> str:
    return f"{_FOLDER}/{path.relative_to(ROOT).as_posix()}"


class _LinksIntoTheRepository(SphinxTransform):
    default_priority = 5

    def apply(self, **options: Any) -> None:
        for node in [*self.document.findall(addnodes.download_reference)]:
            self._point(node)
        for node in [*self.document.findall(addnodes.pending_xref)]:
            if node.get("reftype") == "myst" and node.get("refdomain") != "doc":
                self._point(node)

    def _point(self, node: nodes.Element) -> None:
        target, _, anchor = node["reftarget"].partition("#")
        path = self._find(target, node)
        if path is None:
            return  # Sphinx says so
        inside = path.relative_to(ROOT).as_posix()
        page = PAGES.get(inside)
        if page is None and path.suffix == ".md" and DOCS in path.parents:
            page = path.relative_to(DOCS).with_suffix("").as_posix()
        if page is not None:
            new: nodes.Element = addnodes.pending_xref(
                refdomain="doc",
                reftype="myst",
                reftarget=page,
                reftargetid=anchor or None,
                refdoc=self.env.docname,
                refexplicit=True,
            )
        else:
            _shown(self.env).setdefault(self.env.docname, set()).add(path)
            uri = self.app.builder.get_relative_uri(self.env.docname, _page(path))
            new = nodes.reference(refuri=uri, internal=True)
        content = nodes.inline("", "", *(child.deepcopy() for child in node.children))
        content.source, content.line = node.source, node.line
        new += content
        new.source, new.line = node.source, node.line
        node.replace_self(new)

    def _find(self, target: str, node: nodes.Element) -> Path | None:
        """The file of the repository; in text that another page includes, as seen from the file that it comes from."""
        origin = Path(node.source) if node.source else DOCS
        for folder in (origin.parent, (DOCS / self.env.docname).parent, ROOT):
            path = (folder / target).resolve()
            if target and path.exists() and ROOT in path.parents:
                return path
        return None


def _definition(app: Sphinx, domain: str, info: dict[str, str]) -> str | None:
    if domain != "py" or not info["module"]:
        return None
    thing: Any = importlib.import_module(info["module"])
    for name in info["fullname"].split("."):
        thing = inspect.getattr_static(thing, name, None)
    if isinstance(thing, property):
        thing = thing.fget
    if isinstance(thing, staticmethod | classmethod):
        thing = thing.__func__
    try:
        path = Path(inspect.getsourcefile(inspect.unwrap(thing)) or "")
        line = inspect.getsourcelines(inspect.unwrap(thing))[1]
    except (TypeError, OSError):  # a field or a constant
        return None
    if ROOT not in path.parents:
        return None
    _shown(app.env).setdefault(app.env.docname, set()).add(path)
    uri = app.builder.get_relative_uri(app.env.docname, _page(path))
    return f"{uri}#L-{line}"


def _source_pages(app: Sphinx) -> Any:
    """A page for each file that something links to, with an anchor on every line; folders list what they hold."""
    files = set().union(*_shown(app.env).values())
    for path in sorted(files):
        title = path.relative_to(ROOT).as_posix()
        if path.is_dir():
            names = [f"<li><code>{child.name}</code></li>" for child in sorted(path.iterdir())]
            body = f"<ul>{''.join(names)}</ul>"
        else:
            body = f'<div class="source">{_highlighted(app, path)}</div>'
        head = f"<h1><code>{title}</code></h1>"
        yield _page(path), {"title": title, "body": head + body}, "page.html"


def _highlighted(app: Sphinx, path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    try:
        language = get_lexer_for_filename(path.name).aliases[0]
    except ClassNotFound:
        language = "text"
    highlighter = app.builder.highlighter  # type: ignore[attr-defined]
    return highlighter.highlight_block(
        text, language, force=True, linenos="inline", lineanchors="L", anchorlinenos=True
    )
