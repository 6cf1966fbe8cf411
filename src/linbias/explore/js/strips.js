// A strip of keys for each head: how much each weighs, how exactly it is computed, a frame around
// what is read, and the query. Each is a button that chooses its head; arrow keys walk them.

import { onNewColours, paintCells, ramp } from "./colours.js";
import { element, rove, setAll, setText, walked } from "./dom.js";

const FAINTEST = 1e-9; // the weight that is drawn as nothing: colours go by its logarithm
const MOST_COLUMNS = 1024;
const LEAST_BLOCK = 5; // pixels of a block between which and the next a line can be seen

export function strips({ onSelect }) {
  const list = element("div.strips", { role: "radiogroup", "aria-label": "Heads" });
  const heads = ["", "slope", "keys", "keys read", "left out"];
  let shown = null;

  function build(rows) {
    const buttons = rows.map((_, head) => {
      const on = { click: () => choose(head), keydown: walk };
      const strip = element("span.strip",
        element("canvas", { height: 1, "aria-hidden": true }),
        element("span.strip-bands"),
        element("span.strip-frame", element("i"), element("i")),
        element("span.strip-query"),
      );
      const [name, slope, read, left] = ["name", "slope", "count", "left"].map((part) =>
        element(`span.strip-${part}`),
      );
      return element("button.strip-row", { role: "radio", on }, name, slope, strip, read, left);
    });
    list.replaceChildren(...buttons);
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
    const steps = ramp(list, "--paper", "--accent");
    shown.rows.forEach(({ visit: { numKeys, weights } }, head) => {
      const canvas = list.children[head].querySelector("canvas");
      const width = Math.min(numKeys, MOST_COLUMNS);
      const keyOf = (column) => Math.floor((column * numKeys) / width);
      paintCells(canvas, width, 1, (column) => {
        const most = Math.max(...weights.subarray(keyOf(column), keyOf(column + 1)));
        return steps[Math.round(255 * Math.max(0, 1 - Math.log(most) / Math.log(FAINTEST)))];
      });
    });
  }

  function place() {
    const { rows, block, selected } = shown;
    rove([...list.children], selected, "aria-checked");
    rows.forEach(({ name, slope, visit, count, leftOut, bands }, head) => {
      const { first, end, position, numKeys } = visit;
      const words = `${name}, slope ${slope}: ${count} keys read, ${leftOut} left out`;
      list.children[head].ariaLabel = words;
      const [nameBox, slopeBox, strip, countBox, leftBox] = list.children[head].children;
      const boxes = [[nameBox, name], [slopeBox, slope], [countBox, count], [leftBox, leftOut]];
      for (const [box, text] of boxes) setText(box, text);
      const [, bandBox, frame, query] = strip.children;
      const percent = (keys) => `${(100 * keys) / numKeys}%`;
      const keys = end - first;
      setAll(frame, { style: { "inset-inline-start": percent(first), width: percent(keys) } });
      frame.classList.toggle("fine", (strip.clientWidth * block) / numKeys < LEAST_BLOCK);
      [position - first, end - position - 1].forEach((read, side) => {
        const [width, each] = [(100 * read) / keys, (100 * block) / Math.max(read, 1)];
        setAll(frame.children[side], { style: { width: `${width}%`, "--block": `${each}%` } });
      });
      bandBox.replaceChildren(...bands.map(({ first: from, end: to, terms, words: title }) => {
        const place = { "inset-inline-start": percent(from), width: percent(to - from) };
        return element("i.terms", { title, style: { ...place, "--terms": terms } });
      }));
      setAll(query, { style: { "inset-inline-start": percent(position + 0.5) } });
    });
  }

  onNewColours(list, () => shown && paint());
  new ResizeObserver(() => shown && place()).observe(list);

  return {
    element: element("div.strips-box",
      element("div.strip-row.strip-heads", { "aria-hidden": true },
        heads.map((text) => element("span", text)),
      ),
      list,
    ),
    update(next) {
      if (shown?.rows.length !== next.rows.length) build(next.rows);
      shown = next;
      paint();
      place();
    },
  };
}
