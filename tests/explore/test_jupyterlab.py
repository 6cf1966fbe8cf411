"""The explorer in a real JupyterLab, whose shortcuts must not hear what is typed in it.

JupyterLab is large, and no other test needs it: `pip install jupyterlab` adds it for these.
"""

import json
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from base64 import b64decode
from contextlib import closing
from time import monotonic, sleep

import pytest

import browser
from explorer_page import Explorer
from linbias.explore.static import picture

pytest.importorskip("jupyterlab", reason="pip install jupyterlab, with anywidget")
pytest.importorskip("anywidget")
pytestmark = pytest.mark.processes

CELLS = ["from linbias import explore\nexplore.widget(state='view=how')", "1 + 1", "2 + 2"]


def write_notebook(path, sources):
    cells = [
        {
            "cell_type": "code",
            "id": f"cell-{i}",
            "source": source,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        for i, source in enumerate(sources)
    ]
    kernel = {"name": "python3", "display_name": "Python", "language": "python"}
    metadata = {"kernelspec": kernel}
    path.write_text(
        json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5})
    )


def free_port():
    with closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab that serves an empty folder, and the folder."""
    folder, own = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("jupyter")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    places = {f"JUPYTER_{name}_DIR": str(own / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
        *(f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token="),
        *(
            f"--ServerApp.root_dir={folder}",
            "--LabApp.news_url=None",
            "--LabApp.collaborative=False",
        ),
    ]
    with open(own / "log.txt", "w+") as log:
        server = subprocess.Popen(command, env={**os.environ, **places}, stdout=log, stderr=log)
        try:
            deadline = monotonic() + 300
            while True:
                try:
                    urllib.request.urlopen(f"{address}/api", timeout=5).close()
                    break
                except (urllib.error.URLError, ConnectionError):
                    log.seek(0)
                    assert server.poll() is None and monotonic() < deadline, log.read()
                    sleep(0.2)
            yield address, folder
        finally:
            server.terminate()
            server.wait(timeout=30)


@pytest.fixture
def run_first_cell(chromium, lab):
    """Open a notebook of these cells, run the first one, and fail if anything was thrown."""
    address, folder = lab
    pages, thrown = [], []

    def run(sources):
        name = f"{len(list(folder.iterdir()))}.ipynb"
        write_notebook(folder / name, sources)
        pages.append(browser.open_tab(chromium, viewport={"width": 1280, "height": 1400}))
        pages[-1].set_default_timeout(60_000)
        pages[-1].on("pageerror", lambda error: thrown.append(error.stack))
        pages[-1].goto(f"{address}/lab/tree/{name}?reset")
        pages[-1].get_by_text("| Idle").wait_for()  # the kernel
        pages[-1].locator(".jp-CodeCell .cm-content").first.click()
        pages[-1].keyboard.press("Control+Enter")
        return pages[-1]

    yield run
    for page in pages:
        page.context.close()
    assert thrown == []


def test_what_is_typed_in_the_widget_is_no_shortcut(run_first_cell):
    notebook = run_first_cell(CELLS)
    notebook.get_by_role("grid", name="weights").first.wait_for()
    cells = notebook.locator(".jp-Notebook .jp-CodeCell")
    assert cells.count() == len(CELLS)
    shown = Explorer(notebook)
    # "a" adds a cell above, "dd" deletes the cell, and "x" cuts it, wherever JupyterLab hears
    # them.
    notebook.get_by_role("grid").first.get_by_role("row").nth(2).click()
    notebook.keyboard.type("addx")
    assert cells.count() == len(CELLS)
    for words in ("h2", ".step-says", ".heat-columns .heat-name"):
        notebook.locator(f".explore {words}").first.click()
        notebook.keyboard.type("addx")
        assert cells.count() == len(CELLS), words
    shown.fold("More to change: words, sides, slopes, heads")
    text = notebook.get_by_role("textbox", name="Text")
    text.click()
    text.press("End")
    notebook.keyboard.type(" addx")
    assert text.input_value().endswith(" addx")
    assert shown.cells()[-1][0] == "addx"
    assert cells.count() == len(CELLS)
    # Outside of it they work as ever.
    notebook.locator(".jp-CodeCell .jp-InputPrompt").last.click()
    notebook.keyboard.type("dd")
    notebook.wait_for_function(
        "n => document.querySelectorAll('.jp-Notebook .jp-CodeCell').length === n",
        arg=len(CELLS) - 1,
    )


WIDGET = "from linbias import explore\nexplore.widget(state='view=how&head=1')"
NEXT_FRAME = "() => new Promise(requestAnimationFrame)"
SHADES = """pictures => pictures.map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(data).size;
})"""


def test_a_cell_that_is_run_twenty_times_draws_no_black_picture(run_first_cell):
    notebook = run_first_cell([WIDGET])
    prompt = notebook.locator(".jp-CodeCell .jp-InputPrompt").first
    pictures = notebook.locator(".explore canvas")
    for times in range(1, 21):
        notebook.wait_for_function(
            "([prompt, text]) => prompt.textContent === text",
            arg=[prompt.element_handle(), f"[{times}]:"],
        )
        pictures.nth(4).wait_for()
        for _ in range(2):
            notebook.evaluate(NEXT_FRAME)
        # Black and opaque are two numbers, and what was never painted is one.
        shades = pictures.evaluate_all(SHADES)
        assert len(shades) == 5 and min(shades) > 2, f"run {times}: {shades}"
        notebook.locator(".jp-CodeCell .cm-content").first.click()
        notebook.keyboard.press("Shift+Enter")


def test_a_page_made_of_a_notebook_shows_a_picture_for_the_widget(tmp_path):
    write_notebook(tmp_path / "explorer.ipynb", CELLS)
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--execute", "explorer.ipynb"]
    done = subprocess.run(
        [*command, "--ExecutePreprocessor.store_widget_state=False"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    shown = (tmp_path / "explorer.html").read_text(encoding="utf-8")
    shown_picture = re.search(r'src="data:image/svg\+xml;base64,([^"]+)"', shown)[1]
    assert b64decode(shown_picture).decode() == picture()
