// A matrix as colours, one pixel per cell on a canvas that the browser enlarges, so that 64 x 64 cost less
// than a millisecond. A screen reader meets a grid of rows: each says its largest number, the cell under the
// cursor is announced, and small matrices have numbers in cells.

import { paintCells, rampsOf, wantsLightText } from "./colours.js";
import { announcer, component, element, keyed, onDraw, roving, walked } from "./dom.js";

export const MOST_NUMBERS = 10; // columns whose cells hold numbers
const MOST_LABELS = 24; // names that stand beside each other
const LEAST_WIDTH = 40; // pixels of a cell below which a number would be too small to read

// Grey below zero, the accent above; where values lie below the lowest colour, it says so.
function scaleLegend({ low, high, power, text }, beyond) {
  const mixed = (share) => `color-mix(in srgb, var(--accent) ${100 * share}%, var(--surface))`;
  const stops = [0, 0.25, 0.5, 0.75, 1].map((x) => `${mixed(x)} ${100 * x ** (1 / power)}%`);
  const style = { "background-image": `linear-gradient(to right, ${stops.join(", ")})` };
  return [
    element("span", low < 0 ? `${beyond ? "\u2264 " : ""}${text(low)}` : "0"),
    element("i.negative", { hidden: low === 0 }),
    element("span", { hidden: low === 0 }, low < 0 && high > 0 && "0"),
    element("i.positive", { hidden: high === 0 && low < 0, style }),
    element("span", high > 0 ? text(high) : "0"),
  ];
}

// heatmap({ shownOf, onSelect(row), onPoint(row, at) }) -> { element, point(row, at) }; shownOf() gives {
// label, rows, columns, values, hidden, text, exact, low, high, power, selected }. Cells that are hidden take
// no part; a power below 1 spreads small values over more colours.
export function heatmap({ shownOf, onSelect, onPoint = null }) {
  const pointAt = onPoint ?? point;
  const canvas = element("canvas", { "aria-hidden": true });
  const spoken = announcer();
  let shown = null;
  let names = "";
  let largest = []; // of each row: in which column its largest number is
  let beyond = false; // whether a number is below the lowest colour
  let width = 0; // of the canvas, in pixels
  let pointed = null; // { row, at } of the cell under the pointer
  let column = -1; // of the keyboard's cursor; -1: on the row's name

  const isDense = () => shown.columns.length > MOST_NUMBERS;

  function gridClass() {
    const isNarrow = width < LEAST_WIDTH * shown.columns.length;
    return `heat-grid${isDense() ? " dense" : ""}${isNarrow ? " narrow" : ""}`;
  }

  function heading(role, name, i, names) {
    const skipped = i % Math.ceil(names.length / MOST_LABELS) === 0 ? "" : ".skipped";
    return element(`div.heat-name${skipped}`, { role, title: name }, element("bdi", name));
  }

  // The row and column of a cell in words, and its number.
  function inWords(t, s) {
    const { rows, columns, values, text, exact = text } = shown;
    return [rows[t], columns[s], exact(values[t * columns.length + s])];
  }

  function rowOf(name, t, rows) {
    function label() {
      const [, at, number] = inWords(t, largest[t]);
      return `${name}: largest ${number} at ${at}`;
    }
    const attributes = {
      role: "row", class: () => (pointed?.row === t ? "heat-row pointed" : "heat-row"),
      ...roving(() => t === shown.selected, "aria-selected"), "aria-label": label,
    };
    const { columns } = shown;
    return element("div", attributes,
      heading("rowheader", name, t, rows),
      !isDense() && columns.map((_, s) => cellOf(t * columns.length + s)),
    );
  }

  function cellOf(i) {
    function look() {
      const ground = wantsLightText(shade(shown.values[i])) ? "on-dark" : "on-light";
      return `heat-cell ${shown.hidden?.[i] ? "hidden-key" : ground}`;
    }
    return element("div", { role: "gridcell", class: look }, () => shown.text(shown.values[i]));
  }

  function shade(value) {
    const [above, below] = ramps();
    const end = value < 0 ? shown.low : shown.high;
    const share = end === 0 ? 0 : Math.min(1, value / end) ** shown.power;
    return (value < 0 ? below : above)[Math.round(255 * share)];
  }

  function readout() {
    if (pointed === null) return "";
    const [row, at, number] = inWords(pointed.row, pointed.at);
    return `${row} \u2192 ${at}  ${number}`;
  }

  const map = component(() => {
    const sizes = () => ({ "--rows": shown.rows.length, "--columns": shown.columns.length });
    const grid = {
      role: "grid", class: gridClass, style: sizes, "aria-label": () => shown.label,
      "aria-rowcount": () => shown.rows.length + 1, "aria-colcount": () => shown.columns.length + 1,
      on: { keydown: walk },
    };
    const cursor = {
      "aria-hidden": true, hidden: () => pointed === null,
      style: () => ({ "--row": pointed?.row ?? 0, "--at": pointed?.at ?? 0 }),
    };
    const listeners = {
      click: (event) => select(cellAt(event)[0]), pointermove: (event) => pointAt(...cellAt(event)),
      pointerleave: leave, focusout: leave,
    };
    const heads = () => shown.columns.map((...name) => heading("columnheader", ...name));
    const rows = () => shown.rows.map(rowOf);
    return element("div.heatmap",
      element("div.heat-grid", grid,
        element("div.heat-columns", { role: "row" }, keyed(() => names, heads)),
        element("div.heat-area", { on: listeners },
          canvas,
          element("div.heat-rows", { role: "rowgroup" }, keyed(() => names, rows)),
          element("div.heat-cursor", cursor),
        ),
      ),
      element("p.under",
        element("span.legend", { "aria-hidden": true }, () => scaleLegend(shown, beyond)),
        element("span.readout", { "aria-hidden": true }, readout),
      ),
      spoken.element,
    );
  });

  const pairs = [["--surface", "--accent"], ["--surface", "--negative"]];
  const ramps = rampsOf(canvas.parentNode, pairs, () => {
    width = canvas.clientWidth;
    if (shown === null) return;
    paint();
    map.draw();
  });

  function paint() {
    const { rows, columns, values, hidden } = shown;
    // Where a cell is hidden, the hatching behind it shows.
    const shadeOf = (i) => (hidden?.[i] ? null : shade(values[i]));
    paintCells(canvas, columns.length, rows.length, shadeOf);
  }

  function survey() {
    const { rows, columns, values, hidden, low } = shown;
    largest = rows.map((_, t) => {
      const row = values.slice(t * columns.length, (t + 1) * columns.length);
      return row.reduce((best, value, s) => (value > row[best] ? s : best), 0);
    });
    beyond = values.some((value, i) => value < low && !hidden?.[i]);
  }

  // Puts the cursor on a cell, or takes it away (at < 0).
  function point(row, at) {
    if (row === pointed?.row && at === pointed.at) return;
    pointed = at < 0 ? null : { row, at };
    map.draw();
  }

  function cellAt({ clientX, clientY }) {
    const { left, top, width: across, height } = canvas.getBoundingClientRect();
    const row = Math.floor(((clientY - top) / height) * canvas.height);
    const at = Math.floor(((clientX - left) / across) * canvas.width);
    return [Math.min(Math.max(row, 0), canvas.height - 1), Math.min(at, canvas.width - 1)];
  }

  function leave() {
    pointAt(shown.selected, -1);
  }

  function select(row) {
    if (row !== shown.selected) onSelect(row);
    map.element.querySelectorAll(".heat-row")[row].focus({ preventScroll: true });
  }

  function walk(event) {
    const along = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const to = walked(event, shown.selected, shown.rows.length - 1);
    if (to === null) return;
    if (along) column = Math.min(Math.max(column + along, -1), shown.columns.length - 1);
    else select(to);
    pointAt(shown.selected, column);
    if (!along) return;
    if (pointed === null) return spoken.say(shown.rows[shown.selected]);
    const [row, at, number] = inWords(pointed.row, pointed.at);
    spoken.say(`${row} to ${at}: ${number}`);
  }

  onDraw(() => {
    const before = shown;
    shown = shownOf();
    const wanted = JSON.stringify([shown.rows, shown.columns]);
    const isRenamed = wanted !== names;
    if (isRenamed) [pointed, column] = [null, -1];
    names = wanted;
    const parts = ["values", "hidden", "low", "high", "power"];
    if (isRenamed || parts.some((part) => before?.[part] !== shown[part])) {
      survey();
      paint();
    }
    map.draw();
  });
  return { element: map.element, point };
}
