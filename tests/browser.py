"""Pages in Debian's Chromium, driven by Playwright, with nothing to download and nothing left to the network."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
            yield browser
        finally:
            browser.close()


class Visits:
    """The pages of one test: each in a fresh context, with all it asked for and complained about."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.contexts: list[Any] = []
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def __call__(self, path: Path, state: str = "", **options: Any) -> Any:
        """Open a file in a window of 1280 x 900 pixels; `state` is what follows the # of its address."""
        size = {"width": 1280, "height": 900}
        context = self.browser.new_context(**{"viewport": size, **options})
        self.contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(5000)
        address = path.resolve().as_uri()
        page.on("console", lambda message: self.complaints.append(message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self._note(request.url, address))
        page.goto(f"{address}#{state}" if state else address)
        return page

    def _note(self, url: str, address: str) -> None:
        if url.split("#")[0] != address and not url.startswith("data:"):
            self.requests.append(url)

    def close(self) -> None:
        for context in self.contexts:
            context.close()
        assert self.complaints == [], "the console is not empty"
        assert self.requests == [], "the page asks for other files"
