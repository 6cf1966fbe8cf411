"""How fast is the explorer's page? A record in records/explore_speed.json.

    python runs/explore_speed.py

In Debian's Chromium without a GPU, 1280 x 900 pixels, and again with the processor slowed to a quarter (_slowed):

    first_view   from the start of the navigation until the first frame is drawn and the page takes input
    story        the first view's slope: from the slider's event until words and bars are drawn and laid out; what the page
                 itself does, without waiting for the screen's next refresh
    redraw       the same of "How" with 64 tokens: three matrices, the heads, and the row of one query
    where        the same of the slope over words at stamps
    frame        each, and the browser's own work on the frame: style, layout, painting
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
SLOWER = 4

# Runs before the page's own script: when was the first frame with the words' weights in it done?
FIRST_VIEW = """
globalThis.firstView = new Promise((done) => addEventListener("DOMContentLoaded", () =>
  requestAnimationFrame(() => {
    const after = new MessageChannel();
    after.port1.onmessage = () => done(document.querySelector(".ink-number") ? performance.now() : NaN);
    after.port2.postMessage(0);
  })));
"""
SLIDE = """async (moves) => {
  const slider = document.querySelector("[role=tabpanel]:not([hidden]) :is(.story-control, .how-slopes) input[type=range]");
  const positions = Math.round((slider.max - slider.min) / slider.step) + 1;
  const [redraw, frame] = [[], []];
  for (let i = 0; i < moves; i += 1) {
    await new Promise((done) => requestAnimationFrame(done));
    const start = performance.now();
    slider.value = ((i * 7) % positions) * slider.step;
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
        measured = {}
        for name, slower in (("", 1), ("_slowed", SLOWER)):
            loads = [first_view(chromium, path, slower) for _ in range(LOADS)]
            measured[f"first_view{name}"] = spread(loads)
            for view, state in (("story", {}), ("where", {"view": "where"})):
                times = slide(chromium, path, state, slower)
                measured[f"{view}{name}"] = spread(times["redraw"])
                measured[f"frame_{view}{name}"] = spread(times["frame"])
            for heads in (2, 16):
                state = {"view": "how", "heads": heads, "text": " ".join(WORDS)}
                times = slide(chromium, path, state, slower)
                measured |= {f"{of}_{heads}_heads{name}": spread(ms) for of, ms in times.items()}
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


def slowed_tab(chromium: Any, slower: int) -> Any:
    page = browser.open_tab(chromium)
    page.set_default_timeout(60_000)
    devtools = page.context.new_cdp_session(page)
    devtools.send("Emulation.setCPUThrottlingRate", {"rate": slower})
    return page


def first_view(chromium: Any, path: Path, slower: int) -> float:
    page = slowed_tab(chromium, slower)
    page.add_init_script(FIRST_VIEW)
    page.goto(path.as_uri())
    milliseconds = page.evaluate("() => firstView")
    page.context.close()
    return float(milliseconds)


def slide(chromium: Any, path: Path, state: dict[str, Any], slower: int) -> dict[str, list[float]]:
    page = slowed_tab(chromium, slower)
    page.goto(f"{path.as_uri()}#{urlencode(state)}")
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
