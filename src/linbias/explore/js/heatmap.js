// What the colours of a matrix mean: grey below zero, the accent above. Values run evenly from end to end; where some lie
// below the lowest colour, the legend says so.

import { onThemeChange, paintCells, ramp, wantsLightText } from "./colours.js";
import { announcer, element, setAll, setText } from "./dom.js";

function scaleLegend() {
  const [low, middle, high] = [element("span"), element("span"), element("span")];
  const negative = element("i", { class: "negative" });
  const positive = element("i", { class: "positive" });
  return {
    element: element("span", { class: "legend", "aria-hidden": "true" }, low, negative, middle, positive, high),
    update({ low: least, high: most, power, text, values, hidden }) {
      const beyond = values.some((value, i) => value < least && !hidden?.[i]);
      setText(low, least < 0 ? `${beyond ? "\u2264 " : ""}${text(least)}` : "0");
      setText(high, most > 0 ? text(most) : "0");
      setText(middle, least < 0 && most > 0 ? "0" : "");
      negative.hidden = middle.hidden = least === 0;
      positive.hidden = most === 0 && least < 0;
      const stops = [0, 0.25, 0.5, 0.75, 1].map(
        (share) => `color-mix(in srgb, var(--accent) ${100 * share}%, var(--surface)) ${100 * share ** (1 / power)}%`,
      );
      positive.style.backgroundImage = `linear-gradient(to right, ${stops.join(", ")})`;
    },
  };
}

// A matrix as colours: rows to click and to walk with the arrow keys, numbers in the cells where they fit.
//
// The colours are one pixel per cell on a canvas that the browser enlarges, so that 64 x 64 cells cost less than a
// millisecond. What a screen reader meets is a grid of rows: each says its largest number, the cell under the cursor
// is announced, and small matrices have their numbers in cells.

export const MOST_NUMBERS = 10; // columns whose cells hold numbers
const MOST_LABELS = 24; // names that stand beside each other
const LEAST_WIDTH = 40; // pixels of a cell below which a number would be too small to read

// heatmap({ onSelect(row), onPoint(row, at) }) -> { element, update({ label, rows, columns, values, text, ... selected }), point }
// values: [rows * columns]; text(value) -> as printed in a cell, exact(value) -> elsewhere; low <= 0 <= high: the colours'
// range; power: below 1 it spreads small values over more colours; hidden: [rows * columns] or null, cells that take no part.
// point(row, at) puts the cursor on a cell; whoever gives onPoint does that for all pictures that belong together.
export function heatmap({ onSelect, onPoint = null }) {
  const canvas = element("canvas", { "aria-hidden": "true" });
  const cursor = element("div", { class: "heat-cursor", hidden: true, "aria-hidden": "true" });
  const columnHeads = element("div", { class: "heat-columns", role: "row" });
  const rowBox = element("div", { class: "heat-rows", role: "rowgroup" });
  const area = element("div", { class: "heat-area" }, canvas, rowBox, cursor);
  const grid = element("div", { class: "heat-grid", role: "grid" }, columnHeads, area);
  const spoken = announcer();
  const readout = element("span", { class: "readout", "aria-hidden": "true" });
  const legend = scaleLegend();
  const pointAt = onPoint ?? point;
  let shown = null;
  let names = "";
  let ramps = null;
  let column = -1; // of the keyboard's cursor; -1: on the row's name

  function build({ rows, columns }) {
    const withCells = columns.length <= MOST_NUMBERS;
    setAll(grid, { style: { "--rows": rows.length, "--columns": columns.length } });
    grid.classList.toggle("dense", !withCells);
    grid.ariaRowCount = rows.length + 1;
    grid.ariaColCount = columns.length + 1;
    columnHeads.replaceChildren(...columns.map((name, s) => heading("columnheader", name, s, columns.length)));
    rowBox.replaceChildren(
      ...rows.map((name, t) =>
        element("div", { class: "heat-row", role: "row" },
          heading("rowheader", name, t, rows.length),
          withCells ? columns.map(() => element("div", { role: "gridcell", class: "heat-cell" })) : [],
        ),
      ),
    );
    canvas.width = columns.length;
    canvas.height = rows.length;
    column = -1;
    measure();
  }

  function heading(role, name, i, count) {
    const skipped = i % Math.ceil(count / MOST_LABELS) === 0 ? "" : "skipped";
    return element("div", { class: `heat-name ${skipped}`, role, title: name }, element("bdi", {}, name));
  }

  function measure() {
    grid.classList.toggle("narrow", canvas.clientWidth < LEAST_WIDTH * canvas.width);
  }

  function paint() {
    const { rows, columns, values, hidden } = shown;
    ramps ??= ["--accent", "--negative"].map((name) => ramp(grid, "--surface", name));
    // Where a cell is hidden, the hatching behind it shows.
    paintCells(canvas, columns.length, rows.length, (i) => (hidden?.[i] ? null : shade(values[i])));
    if (columns.length <= MOST_NUMBERS) writeNumbers();
  }

  function shade(value) {
    const [above, below] = ramps;
    const end = value < 0 ? shown.low : shown.high;
    const share = end === 0 ? 0 : Math.min(1, value / end) ** shown.power;
    return (value < 0 ? below : above)[Math.round(255 * share)];
  }

  function writeNumbers() {
    const { columns, values, text, hidden } = shown;
    values.forEach((value, i) => {
      const cell = rowBox.children[Math.floor(i / columns.length)].children[1 + (i % columns.length)];
      setText(cell, text(value));
      const ground = wantsLightText(shade(value)) ? "on-dark" : "on-light";
      cell.className = `heat-cell ${hidden?.[i] ? "hidden-key" : ground}`;
    });
  }

  function markRows() {
    const { rows, columns, values, text, exact = text, selected } = shown;
    [...rowBox.children].forEach((row, t) => {
      const start = t * columns.length;
      let best = 0;
      for (let s = 1; s < columns.length; s += 1) if (values[start + s] > values[start + best]) best = s;
      row.ariaSelected = String(t === selected);
      row.tabIndex = t === selected ? 0 : -1;
      row.ariaLabel = `${rows[t]}: largest ${exact(values[start + best])} at ${columns[best]}`;
    });
  }

  // Puts the cursor on a cell, or takes it away, and gives the cell in words.
  function point(row, at) {
    const { rows, columns, values, text, exact = text } = shown;
    cursor.hidden = at < 0;
    [...rowBox.children].forEach((line, t) => line.classList.toggle("pointed", at >= 0 && t === row));
    const number = at < 0 ? "" : exact(values[row * columns.length + at]);
    setText(readout, at < 0 ? "" : `${rows[row]} \u2192 ${columns[at]}  ${number}`);
    setAll(cursor, { style: { "--row": row, "--at": at } });
    return at < 0 ? rows[row] : `${rows[row]} to ${columns[at]}: ${number}`;
  }

  function cellAt(event) {
    const box = canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * canvas.height);
    const at = Math.floor(((event.clientX - box.left) / box.width) * canvas.width);
    return { row: Math.min(Math.max(row, 0), canvas.height - 1), at: Math.min(at, canvas.width - 1) };
  }

  function select(row) {
    if (row !== shown.selected) onSelect(row);
    rowBox.children[row].focus({ preventScroll: true });
  }

  area.addEventListener("click", (event) => select(cellAt(event).row));
  area.addEventListener("pointermove", (event) => {
    const { row, at } = cellAt(event);
    pointAt(row, at);
  });
  area.addEventListener("pointerleave", () => pointAt(shown.selected, -1));
  area.addEventListener("focusout", () => pointAt(shown.selected, -1));
  grid.addEventListener("keydown", (event) => {
    const { rows, columns, selected } = shown;
    const down = { ArrowDown: 1, ArrowUp: -1, Home: -rows.length, End: rows.length }[event.key];
    const along = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (down === undefined && along === undefined) return;
    event.preventDefault();
    if (down !== undefined) select(Math.min(Math.max(selected + down, 0), rows.length - 1));
    else column = Math.min(Math.max(column + along, -1), columns.length - 1);
    pointAt(shown.selected, column);
    if (along !== undefined) spoken.say(point(shown.selected, column));
  });
  onThemeChange(() => {
    ramps = null;
    if (shown) paint();
  });
  new ResizeObserver(measure).observe(area);

  return {
    point,
    element: element("div", { class: "heatmap" },
      grid,
      element("p", { class: "under" }, legend.element, readout),
      spoken.element,
    ),
    update(next) {
      const before = shown;
      shown = next;
      const wanted = JSON.stringify([next.rows, next.columns]);
      const rebuilt = wanted !== names;
      if (rebuilt) build(next);
      names = wanted;
      grid.ariaLabel = next.label;
      const differs = (...names) => rebuilt || names.some((name) => before[name] !== next[name]);
      if (differs("values", "hidden", "low", "high", "power")) paint();
      if (differs("values", "selected")) markRows();
      legend.update(next);
    },
  };
}
