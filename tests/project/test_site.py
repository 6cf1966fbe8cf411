"""The documentation site, built as `make docs` builds it, and walked through."""

import html
import importlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

import pytest
import typer
from sphinx.util.inventory import InventoryFile

import browser
from documents import DOCUMENTS, ROOT
from linbias import cli, compat

pytestmark = pytest.mark.processes

# What a browser fetches without being asked, and what it fetches at a click.
LOADED = dict.fromkeys(("audio", "embed", "iframe", "img", "script", "source"), "src")
LOADED |= {"link": "href", "object": "data"}


class Page(HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.ids, self.links, self.loaded = set(), set(), set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag in ("a", "area") and found.get("href"):
            self.links.add(found["href"])
        if found.get(LOADED.get(tag, "")):
            self.loaded.add(found[LOADED[tag]])
        self.loaded |= {part.split()[0] for part in (found.get("srcset") or "").split(",") if part}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "docs"]
    done = subprocess.run([*build, folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path.relative_to(site).as_posix(): Page(path) for path in sorted(site.rglob("*.html"))}


def target(page, link):
    """The file of the site, and the id in it, that a link of a page leads to."""
    parts = urlsplit(urljoin(f"/{page}", link))
    return unquote(parts.path).lstrip("/"), unquote(parts.fragment)


def is_elsewhere(link):
    return bool(urlsplit(link).scheme or link.startswith("//"))


def test_a_page_loads_nothing_from_elsewhere(site, pages):
    for name, page in pages.items():
        remote = {link for link in page.loaded if is_elsewhere(link) and link[:5] != "data:"}
        assert not remote, f"{name}: {remote}"
    for path in site.rglob("*.css"):
        named = re.findall(r"(?:url\(|@import)\s*[\"']?([^\"')\s]+)", path.read_text("utf-8"))
        assert not [link for link in named if is_elsewhere(link) and link[:5] != "data:"], path
    for path in (*site.rglob("*.js"), site / "explorer.html"):
        remote = r"import\(?\s*[\"']https?:|fetch\([\"']https?:"
        assert not re.search(remote, path.read_text("utf-8"))


def test_every_link_resolves(site, pages):
    for name, page in pages.items():
        for link in {*page.links, *page.loaded}:
            if is_elsewhere(link):
                continue
            path, part = target(name, link)
            assert (site / path).is_file(), f"{name}: {link}"
            if part and path in pages and pages[path].ids:
                # That of the explorer is a state of the page.
                assert path == "explorer.html" or part in pages[path].ids, f"{name}: {link}"


def test_every_page_can_be_reached(pages):
    reached, waiting = set(), ["index.html"]
    while waiting:
        name = waiting.pop()
        if name in pages and name not in reached:
            reached.add(name)
            links = {*pages[name].links, *pages[name].loaded}
            waiting += [target(name, link)[0] for link in links if not is_elsewhere(link)]
    # Which viewcode writes and links nowhere.
    assert set(pages) - reached == {"_modules/index.html"}


def documents(pages):
    """The pages of prose: not the explorer, the search, or listings of sources."""
    others = ("explorer.html", "search.html")
    return [name for name in pages if name not in others and name[0] != "_"]


def test_every_document_is_a_page(pages):
    docs = [path for path in DOCUMENTS if ROOT / "docs" in path.parents]
    html = (path.relative_to(ROOT / "docs").with_suffix(".html") for path in docs)
    written = {path.as_posix() for path in html}
    assert written - {"LOG.html"} == set(documents(pages))


def num_words(page):
    """Of the text, without navigation, code and tables."""
    text = re.search(r"<article.*?</article>", page.read_text(encoding="utf-8"), re.DOTALL)[0]
    text = re.sub(r"<(pre|table|svg|math)\b.*?</\1>", " ", text, flags=re.DOTALL)
    text = re.sub(r'<dt class="sig .*?</dt>', " ", text, flags=re.DOTALL)
    return len(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def test_the_site_stays_small(site, pages):
    words = {name: num_words(site / name) for name in documents(pages)}
    assert len(words) <= 27
    assert sum(words.values()) <= 31_000, words


PACKAGES = (
    "linbias",
    *(f"linbias.{x}" for x in "cpu torch jax models lm data explore".split()),
)


@pytest.fixture
def inventory(site):
    return InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data


def test_every_public_name_has_an_entry(inventory):
    python = [items for kind, items in inventory.items() if kind.startswith("py:")]
    entries = {name for items in python for name in items}
    modules = {name: importlib.import_module(name) for name in PACKAGES}
    public = {f"{name}.{n}" for name, of in modules.items() for n in getattr(of, "__all__", ())}
    assert not public - entries
    assert "linbias.torch.attention" in entries


def test_names_of_other_libraries_are_listed(site):
    page = (site / "reference" / "attention.html").read_text(encoding="utf-8")
    for module in dir(compat):
        if not module.startswith("_"):
            for name in importlib.import_module(f"linbias.compat.{module}").__all__:
                assert f">{name}<" in page, f"{module}.{name}"


# Results that the function which gives them shows, settings, and what needs a stored model.
WITHOUT_EXAMPLE = {
    *("linbias.Explanation", "linbias.torch.Visited", "linbias.data.Corpus"),
    *("linbias.lm.ExtrapolateSettings", "linbias.lm.generate", "linbias.models.convert"),
    *("linbias.models.unfuse", "linbias.models.load_tokenizer"),
}


def test_documented_names_are_few_and_shown_in_use(inventory):
    items = {**inventory["py:function"], **inventory["py:class"]}
    # And not under another name.
    names = [name for name, item in items.items() if item.uri.endswith(("$", f"#{name}"))]
    assert 40 < len(names) <= 68
    without = set()
    for name in names:
        module, _, own = name.rpartition(".")
        if ">>> " not in (getattr(importlib.import_module(module), own).__doc__ or ""):
            without.add(name)
    assert without <= WITHOUT_EXAMPLE


def test_every_command_is_explained(pages):
    waiting = [("linbias", typer.main.get_command(cli.app))]
    while waiting:
        words, command = waiting.pop()
        assert words.replace(" ", "-") in pages["reference/command-line.html"].ids
        inner = getattr(command, "commands", {})
        waiting += [(f"{words} {name}", command) for name, command in inner.items()]


def test_formulas_are_mathml(site):
    text = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.html"))
    assert "MathJax" not in text
    assert text.count("<math") > 50


def test_docstrings_become_what_sphinx_reads(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    conf = importlib.import_module("conf")
    text = """Give `slope`s a norm.

        a = |b| * c_

| name | is |
|------|----|
| `a`  | 1, |
|      | 2  |"""
    rule = "====== ==== "
    lines = ["Give `slope`\\ s a norm.", "", "::", "", "        a = |b| * c_", ""]
    lines += [rule, " name   is  ", rule, " `a`    1,  ", "        2   ", rule, ""]
    assert conf.plain_to_rst(text).split("\n") == lines


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_page_of_each_kind_breaks_no_rule_of_axe(chromium, site, theme):
    pytest.importorskip("axe_playwright_python", reason="pip install 'linbias[dev]'")
    tab = browser.open_tab(chromium, color_scheme=theme)
    for name in ("index", "ideas/definition", "reference/attention", "search"):
        tab.goto((site / f"{name}.html").as_uri())
        tab.set_viewport_size({"width": 1280, "height": 900})
        assert browser.violations(tab) == [], name
        tab.set_viewport_size({"width": 320, "height": 700})
        assert tab.evaluate("document.documentElement.scrollWidth") == 320, name
    tab.context.close()


def test_letters_in_pictures_can_be_read_on_a_phone(chromium, tmp_path):
    static, picture = (ROOT / "docs" / name for name in ("_static/linbias.css", "ideas/steps.svg"))
    size = min(map(float, re.findall(r"font(?:-size)?: ([\d.]+)px", picture.read_text("utf-8"))))
    page = tmp_path / "page.html"
    page.write_text(
        "<!DOCTYPE html><style>img { max-width: 100%; }</style>"  # as the theme has it
        f'<link rel="stylesheet" href="{static.as_uri()}">'
        f'<article><p><img src="{picture.as_uri()}"></p></article>'
    )
    tab = browser.open_tab(chromium, viewport={"width": 390, "height": 800})
    tab.goto(page.as_uri())
    shown = tab.locator("img").evaluate("image => image.width / image.naturalWidth")
    assert size * 4 / 3 * shown >= 9  # the picture counts in points
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    assert tab.locator("p").evaluate("box => box.scrollWidth > box.clientWidth")
    tab.context.close()


def test_pictures_follow_the_theme(chromium, site):
    tab = browser.open_tab(chromium)
    for name, picture in (("index", "extrapolation"), ("ideas/definition", "steps")):
        tab.goto((site / f"{name}.html").as_uri())
        shown = tab.locator(f"article img[src*='{picture}']").filter(visible=True)
        dark = f"{picture}{'-dark' * (name == 'index')}.svg"
        themes = (("light", f"{picture}.svg", False), ("dark", dark, name != "index"))
        for theme, source, turned in themes:
            tab.evaluate("theme => { document.body.dataset.theme = theme; }", theme)
            assert shown.count() == 1
            assert shown.get_attribute("src").endswith(f"/{source}")
            style = shown.evaluate("image => getComputedStyle(image).filter")
            assert ("invert" in style) == turned, (name, theme)
    tab.context.close()


def test_signatures_have_the_types_of_the_source(site):
    text = (site / "reference" / "attention.html").read_text(encoding="utf-8")
    start = text.index('id="linbias.torch.attention"')
    words = html.unescape(re.sub(r"<[^>]+>", "", text[start : text.index("</dt>", start)]))
    assert "slopes: Slopes | None = None" in words
    assert "unknown" not in words and "Tensor | tuple[Tensor, Tensor]" in words
