// A strip of keys for each head: how much each weighs, a frame around what is read, and the query. Each is a
// button that chooses its head; arrow keys walk them.

import { paintCells, rampsOf } from "./colours.js";
import { component, element, onDraw, walked } from "./dom.js";

const FAINTEST = 1e-9; // the weight that is drawn as nothing: colours go by its logarithm
const MOST_COLUMNS = 1024;
const LEAST_BLOCK = 5; // pixels of a block between which and the next a line can be seen

// shownOf() gives { rows, block, selected }.
export function strips({ shownOf, onSelect }) {
  let shown = null;
  const radios = { role: "radiogroup", "aria-label": "Heads" };
  const made = component(() => element("div.strips", radios, () => shown.rows.map(stripRow)));
  const list = made.element;
  const ramps = rampsOf(list, [["--paper", "--accent"]], () => shown && paint());

  function stripRow({ name, slope, visit, count, leftOut }, head) {
    const { first, end, position, numKeys } = visit;
    const { block, selected } = shown;
    const isChosen = head === selected;
    const percent = (keys, all = numKeys) => `${(100 * keys) / Math.max(all, 1)}%`;
    const place = (from, to) => ({ "inset-inline-start": percent(from), width: percent(to - from) });
    const side = (read) => {
      const style = { width: percent(read, end - first), "--block": percent(block, read) };
      return element("i", { style });
    };
    const width = list.querySelector(".strip")?.clientWidth ?? 0;
    const isFine = (width * block) / numKeys < LEAST_BLOCK;
    return element("button.strip-row",
      {
        role: "radio", "aria-checked": isChosen, tabindex: isChosen ? 0 : -1,
        "aria-label": `${name}, slope ${slope}: ${count} keys read, ${leftOut} left out`,
        on: { click: () => choose(head), keydown: walk },
      },
      element("span.strip-name", name),
      element("span.strip-slope", slope),
      element("span.strip",
        element("canvas", { width: Math.min(numKeys, MOST_COLUMNS), height: 1, "aria-hidden": true }),
        element(`span.strip-frame${isFine ? ".fine" : ""}`, { style: place(first, end) },
          side(position - first), side(end - position - 1),
        ),
        element("span.strip-query", { style: { "inset-inline-start": percent(position + 0.5) } }),
      ),
      element("span.strip-count", count),
      element("span.strip-left", leftOut),
    );
  }

  function choose(head) {
    onSelect(head);
    list.children[head].focus();
  }

  function walk(event) {
    const to = walked(event, shown.selected, shown.rows.length - 1);
    if (to !== null) choose(to);
  }

  function paint() {
    const [steps] = ramps();
    shown.rows.forEach(({ visit: { numKeys, weights } }, head) => {
      const canvas = list.children[head].querySelector("canvas");
      const { width } = canvas;
      const keyOf = (column) => Math.floor((column * numKeys) / width);
      paintCells(canvas, width, 1, (column) => {
        const most = Math.max(...weights.subarray(keyOf(column), keyOf(column + 1)));
        return steps[Math.round(255 * Math.max(0, 1 - Math.log(most) / Math.log(FAINTEST)))];
      });
    });
  }

  onDraw(() => {
    shown = shownOf();
    made.draw();
    paint();
  });
  new ResizeObserver(() => shown && made.draw()).observe(list);

  const heads = ["", "slope", "keys", "keys read", "left out"];
  return element("div.strips-box",
    element("div.strip-row.strip-heads", { "aria-hidden": true },
      heads.map((text) => element("span", text)),
    ),
    list,
  );
}
