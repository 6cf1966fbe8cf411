// A strip of keys for each head: how much each key weighs, a frame around the blocks that are read, and the query.
// Each strip is a button that chooses its head; together they are one stop of the tab key, walked by arrows.

import { onThemeChange, paintCells, ramp } from "./colours.js";
import { element, setText, walked } from "./dom.js";

const FAINTEST = 1e-9; // the weight that is drawn as nothing: colours go by its logarithm
const MOST_COLUMNS = 1024;
const LEAST_BLOCK = 5; // pixels of a block between which and the next a line can be seen

// strips({ label, onSelect(head) }) -> { element, update({ rows, block, selected }) }
// rows: [{ name, slope, visit, count, leftOut }], visit as near_to_far.js gives it, the others as printed.
export function strips({ label, onSelect }) {
  const list = element("div", { class: "strips", role: "radiogroup", "aria-label": label });
  const heads = ["", "slope", "keys", "keys read", "left out"].map((text) => element("span", {}, text));
  let shown = null;

  function build(rows) {
    list.replaceChildren(
      ...rows.map((_, head) =>
        element(
          "button",
          { type: "button", class: "strip-row", role: "radio", on: { click: () => choose(head), keydown: walk } },
          element("span", { class: "strip-name" }),
          element("span", { class: "strip-slope" }),
          element(
            "span",
            { class: "strip" },
            element("canvas", { height: 1, "aria-hidden": "true" }),
            element("span", { class: "strip-frame" }, element("i"), element("i")),
            element("span", { class: "strip-query" }),
          ),
          element("span", { class: "strip-count" }),
          element("span", { class: "strip-left" }),
        ),
      ),
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
    const steps = ramp(list, "--paper", "--accent");
    shown.rows.forEach(({ visit }, head) => {
      const canvas = list.children[head].querySelector("canvas");
      const width = Math.min(visit.numKeys, MOST_COLUMNS);
      let s = 0;
      paintCells(canvas, width, 1, (column) => {
        const end = Math.floor(((column + 1) * visit.numKeys) / width);
        let most = 0;
        for (; s < end; s++) most = Math.max(most, visit.weights[s]);
        return steps[Math.round(255 * Math.max(0, 1 - Math.log(most) / Math.log(FAINTEST)))];
      });
    });
  }

  function place() {
    const { rows, block, selected } = shown;
    rows.forEach(({ name, slope, visit, count, leftOut }, head) => {
      const row = list.children[head];
      const [nameBox, slopeBox, strip, countBox, leftBox] = row.children;
      row.setAttribute("aria-checked", String(head === selected));
      row.tabIndex = head === selected ? 0 : -1;
      row.setAttribute("aria-label", `${name}, slope ${slope}: ${count} keys read, ${leftOut} left out`);
      setText(nameBox, name);
      setText(slopeBox, slope);
      setText(countBox, count);
      setText(leftBox, leftOut);
      const [, frame, query] = strip.children;
      const percent = (keys) => `${(100 * keys) / visit.numKeys}%`;
      frame.style.setProperty("inset-inline-start", percent(visit.first));
      frame.style.setProperty("width", percent(visit.end - visit.first));
      const keys = visit.end - visit.first;
      frame.classList.toggle("fine", (strip.clientWidth * block) / visit.numKeys < LEAST_BLOCK);
      [visit.position - visit.first, visit.end - visit.position - 1].forEach((read, side) => {
        frame.children[side].style.setProperty("width", `${(100 * read) / keys}%`);
        frame.children[side].style.setProperty("--block", `${(100 * block) / Math.max(read, 1)}%`);
      });
      query.style.setProperty("inset-inline-start", percent(visit.position + 0.5));
    });
  }

  onThemeChange(() => shown && paint());
  new ResizeObserver(() => shown && place()).observe(list);

  return {
    element: element(
      "div",
      { class: "strips-box" },
      element("div", { class: "strip-row strip-heads", "aria-hidden": "true" }, heads),
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
