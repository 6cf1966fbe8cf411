// A matrix as colours: rows to click and to walk with the arrow keys, numbers in the cells where they fit.
//
// The colours are one pixel per cell on a canvas that the browser enlarges, so that 64 x 64 cells cost less than
// a millisecond. What a screen reader meets is a grid of rows: each says its largest number, the cursor's cell is
// announced, and small matrices have their numbers in cells.

import { colour, onThemeChange, ramp, wantsLightText } from "./colours.js";
import { announcer, element, setText } from "./dom.js";

const MOST_NUMBERS = 10; // columns of numbers that still fit
const MOST_LABELS = 32;

// heatmap({ onSelect(row) }) -> { element, update({ label, rows, columns, values, text, low, high, selected }) }
// values: [rows * columns], -Infinity where hidden; text(value) -> as printed; low <= 0 <= high: the colours' range.
export function heatmap({ onSelect }) {
  const canvas = element("canvas", { "aria-hidden": "true" });
  const columnHeads = element("div", { class: "heat-columns", role: "row" });
  const rowBox = element("div", { class: "heat-rows", role: "rowgroup" });
  const area = element("div", { class: "heat-area" }, canvas, rowBox);
  const pointed = announcer();
  const readout = element("p", { class: "readout", "aria-hidden": "true" });
  const grid = element("div", { class: "heat-grid", role: "grid" }, columnHeads, area);
  let shown = null;
  let shape = "";
  let column = -1; // of the cursor; -1: on the row's name

  function build({ rows, columns }) {
    const withNumbers = columns.length <= MOST_NUMBERS;
    const everyColumn = Math.ceil(columns.length / MOST_LABELS);
    const everyRow = Math.ceil(rows.length / MOST_LABELS);
    grid.style.setProperty("--rows", rows.length);
    grid.style.setProperty("--columns", columns.length);
    grid.classList.toggle("dense", !withNumbers);
    grid.setAttribute("aria-rowcount", rows.length + 1);
    grid.setAttribute("aria-colcount", columns.length + 1);
    columnHeads.replaceChildren(
      ...columns.map((name, s) =>
        element(
          "div",
          { class: "heat-name", role: "columnheader", title: name },
          element("bdi", {}, s % everyColumn === 0 ? name : ""),
        ),
      ),
    );
    rowBox.replaceChildren(
      ...rows.map((name, t) =>
        element(
          "div",
          { class: "heat-row", role: "row", "data-row": t },
          element(
            "div",
            { class: "heat-name", role: "rowheader", title: name },
            element("bdi", {}, t % everyRow === 0 ? name : ""),
          ),
          withNumbers ? columns.map(() => element("div", { role: "gridcell", class: "heat-cell" })) : [],
        ),
      ),
    );
    canvas.width = columns.length;
    canvas.height = rows.length;
  }

  function paint() {
    const { rows, columns, values, low, high } = shown;
    const surface = colour(grid, "--surface");
    const above = ramp(surface, colour(grid, "--accent"));
    const below = ramp(surface, colour(grid, "--negative"));
    const context = canvas.getContext("2d");
    const image = context.createImageData(columns.length, rows.length);
    values.forEach((value, i) => {
      if (value === -Infinity) return; // transparent: the hatching behind shows
      image.data.set(shade(value), 4 * i);
      image.data[4 * i + 3] = 255;
    });
    context.putImageData(image, 0, 0);
    if (columns.length <= MOST_NUMBERS) writeNumbers(shade);

    function shade(value) {
      const share = value < 0 ? (low === 0 ? 0 : value / low) : high === 0 ? 0 : value / high;
      return (value < 0 ? below : above)[Math.round(255 * Math.min(1, share))];
    }
  }

  function writeNumbers(shade) {
    const { columns, values, text } = shown;
    values.forEach((value, i) => {
      const cell = rowBox.children[Math.floor(i / columns.length)].children[1 + (i % columns.length)];
      setText(cell, text(value));
      const hidden = value === -Infinity;
      const light = !hidden && wantsLightText(shade(value));
      cell.classList.toggle("on-dark", light);
      cell.classList.toggle("on-light", !hidden && !light);
      cell.classList.toggle("hidden-key", hidden);
    });
  }

  function markRow() {
    const { rows, columns, values, text, selected } = shown;
    [...rowBox.children].forEach((row, t) => {
      row.setAttribute("aria-selected", String(t === selected));
      row.tabIndex = t === selected ? 0 : -1;
      const own = values.slice(t * columns.length, (t + 1) * columns.length);
      const largest = own.reduce((best, value, s) => (value > own[best] ? s : best), 0);
      row.setAttribute("aria-label", `${rows[t]}: largest ${text(own[largest])} at ${columns[largest]}`);
    });
  }

  function cellAt(event) {
    const { rows, columns } = shown;
    const box = canvas.getBoundingClientRect();
    const row = Math.floor(((event.clientY - box.top) / box.height) * rows.length);
    const at = Math.floor(((event.clientX - box.left) / box.width) * columns.length);
    return { row: Math.min(Math.max(row, 0), rows.length - 1), at: at < columns.length ? at : -1 };
  }

  function point(row, at) {
    const { rows, columns, values, text } = shown;
    const number = at < 0 ? "" : text(values[row * columns.length + at]);
    setText(readout, at < 0 ? "" : `${rows[row]} \u2192 ${columns[at]}  ${number}`);
    return at < 0 ? rows[row] : `${rows[row]} to ${columns[at]}: ${number}`;
  }

  function select(row) {
    if (row === shown.selected) return;
    onSelect(row);
    rowBox.children[shown.selected].focus({ preventScroll: true });
  }

  area.addEventListener("click", (event) => select(cellAt(event).row));
  area.addEventListener("pointermove", (event) => {
    const { row, at } = cellAt(event);
    point(row, at);
  });
  area.addEventListener("pointerleave", () => setText(readout, ""));
  grid.addEventListener("keydown", (event) => {
    const { rows, columns, selected } = shown;
    const move = { ArrowDown: 1, ArrowUp: -1, Home: -rows.length, End: rows.length }[event.key];
    const across = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (move === undefined && across === undefined) return;
    event.preventDefault();
    if (move !== undefined) select(Math.min(Math.max(selected + move, 0), rows.length - 1));
    else {
      column = Math.min(Math.max(column + across, -1), columns.length - 1);
      pointed.say(point(selected, column));
    }
  });
  onThemeChange(() => shown && paint());

  return {
    element: element("div", { class: "heatmap" }, grid, readout, pointed.element),
    update(next) {
      shown = next;
      const wanted = JSON.stringify([next.rows, next.columns]);
      if (wanted !== shape) build(next);
      shape = wanted;
      grid.setAttribute("aria-label", next.label);
      paint();
      markRow();
    },
  };
}
