"""How fast is the explorer's page? A record in records/explore_speed.json.

    python runs/explore_speed.py

In Debian's Chromium without a GPU, 1280 x 900 pixels:

    first_view   from the start of the navigation until the first frame is drawn and the page takes input
    redraw       64 tokens: from the slider's event until matrix, heads and bars are drawn and laid out; what the page
                 itself does, without waiting for the screen's next refresh
    frame        redraw, and the browser's own work on the frame: style, layout, painting
"""

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import browser  # noqa: E402
from linbias import _machine, explore  # noqa: E402
from linbias.explore.data import WORDS  # noqa: E402

RECORD = ROOT / "records" / "explore_speed.json"
LOADS, MOVES = 20, 200

# Runs before the page's own script: when was the first frame with a matrix in it done?
FIRST_VIEW = """
globalThis.firstView = new Promise((done) => addEventListener("DOMContentLoaded", () =>
  requestAnimationFrame(() => {
    const after = new MessageChannel();
    after.port1.onmessage = () => done(document.querySelector("canvas") ? performance.now() : NaN);
    after.port2.postMessage(0);
  })));
"""
SLIDE = """async (moves) => {
  const slider = [...document.querySelectorAll("input[type=range]")].find((range) => range.max === "89");
  const [redraw, frame] = [[], []];
  for (let i = 0; i < moves; i += 1) {
    await new Promise((done) => requestAnimationFrame(done));
    const start = performance.now();
    slider.value = (i * 7) % 90;
    slider.dispatchEvent(new Event("input"));
    document.body.getBoundingClientRect(); // asks for the layout now
    redraw.push(performance.now() - start);
    await new Promise((done) => {
      const after = new MessageChannel();
      after.port1.onmessage = done;
      after.port2.postMessage(0);
    });
    frame.push(performance.now() - start);
  }
  return { redraw, frame };
}"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, browser.started() as chromium:
        path = Path(folder) / "explore.html"
        path.write_text(explore.page(), encoding="utf-8")
        measured = {"first_view": spread([first_view(chromium, path) for _ in range(LOADS)])}
        for heads in (2, 16):
            times = slide(chromium, path, heads)
            measured |= {f"{name}_{heads}_heads": spread(ms) for name, ms in times.items()}
        record = {
            "milliseconds": measured,
            "machine": _machine.processor(),
            "cores": _machine.num_cores(),
            "load": round(os.getloadavg()[0], 1),  # processes that wanted a core meanwhile
            "browser": f"Chromium {chromium.version}",
            "date": _machine.now(),
            "command": "python runs/explore_speed.py",
        }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(RECORD.read_text())


def first_view(chromium: Any, path: Path) -> float:
    page = browser.open_tab(chromium)
    page.add_init_script(FIRST_VIEW)
    page.goto(path.as_uri())
    milliseconds = page.evaluate("() => firstView")
    page.context.close()
    return float(milliseconds)


def slide(chromium: Any, path: Path, heads: int) -> dict[str, list[float]]:
    page = browser.open_tab(chromium)
    page.goto(f"{path.as_uri()}#{urlencode({'heads': heads, 'text': ' '.join(WORDS)})}")
    times: dict[str, list[float]] = page.evaluate(SLIDE, MOVES)
    page.context.close()
    return times


def spread(milliseconds: list[float]) -> dict[str, float | int]:
    p20, p50, p80 = (statistics.quantiles(milliseconds, n=10)[i] for i in (1, 4, 7))
    return {
        "p20": round(p20, 2),
        "p50": round(p50, 2),
        "p80": round(p80, 2),
        "repeats": len(milliseconds),
    }


if __name__ == "__main__":
    main()
