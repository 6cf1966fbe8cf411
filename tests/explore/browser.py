"""Pages in Debian's Chromium, driven by Playwright, with nothing to download and nothing left to
the network.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WINDOW = {"width": 1280, "height": 900}
FLAGS = [
    "--no-sandbox",  # containers lack what the sandbox needs
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]


def executable() -> str | None:
    return shutil.which("chromium")


def why_not() -> str | None:
    """Why no page can be opened here, or None."""
    if find_spec("playwright") is None:
        return "playwright is not installed: pip install 'linbias[dev]'"
    if executable() is None:
        return "there is no browser: apt-get install chromium"
    return None


@contextmanager
def started() -> Iterator[Any]:
    """A browser with a profile of its own, which is deleted at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=FLAGS)
        try:
            open_tab(browser)  # which tests share
            yield browser
        finally:
            browser.close()


def open_tab(browser: Any, **options: Any) -> Any:
    """A tab with a context of its own."""
    page = browser.new_context(**{"viewport": WINDOW, **options}).new_page()
    page.set_default_timeout(5000)
    return page


def violations(page: Any) -> list[str]:
    """Which rules of accessibility a page breaks, and where, by axe-core."""
    script = resources.files("axe_playwright_python").joinpath("axe.min.js")
    page.evaluate(script.read_text(encoding="utf-8"))
    found = page.evaluate("async () => (await axe.run()).violations")
    return [
        f"{rule['id']} at {' '.join(node['target'])}: {node['failureSummary']}"
        for rule in found
        for node in rule["nodes"]
    ]


class Visits:
    """The pages of one test, with all that they asked for and complained about.

    Pages whose only option is the size of their window share one tab, since to start one takes
    longer than most tests.
    """

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.shared = browser.contexts[0].pages[0]
        self.opened: list[Any] = []
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def __call__(self, path: Path, state: str = "", **options: Any) -> Any:
        """Open a file; `state` is what follows the # of its address."""
        viewport = options.pop("viewport", WINDOW)
        page = open_tab(self.browser, **options) if options else self.shared
        page.goto("about:blank")  # from one state to another the file would not be loaded again
        page.set_viewport_size(viewport)
        if page not in self.opened:
            page.on("console", self._hear)
            page.on("pageerror", self._hear)
            page.on("request", self._note)
            self.opened.append(page)
        address = path.resolve().as_uri()
        page.goto(f"{address}#{state}" if state else address)
        return page

    def _hear(self, message: Any) -> None:
        self.complaints.append(getattr(message, "text", str(message)))

    def _note(self, request: Any) -> None:
        if request.resource_type != "document" and not request.url.startswith("data:"):
            self.requests.append(request.url)

    def close(self) -> None:
        for page in self.opened:
            page.remove_listener("console", self._hear)
            page.remove_listener("pageerror", self._hear)
            page.remove_listener("request", self._note)
            if page is not self.shared:
                page.context.close()
        assert self.complaints == [], "the console is not empty"
        assert self.requests == [], "the page asks for other files"
