// A matrix as colours, one pixel per cell on a canvas that the browser enlarges, so that 64 x 64
// cost less than a millisecond. A screen reader meets a grid of rows: each says its largest
// number, the cell under the cursor is announced, and small matrices have numbers in cells.

import { onNewColours, paintCells, ramp, wantsLightText } from "./colours.js";
import { announcer, element, rove, setAll, setText } from "./dom.js";

export const MOST_NUMBERS = 10; // columns whose cells hold numbers
const MOST_LABELS = 24; // names that stand beside each other
const LEAST_WIDTH = 40; // pixels of a cell below which a number would be too small to read

// Grey below zero, the accent above; where values lie below the lowest colour, it says so.
function scaleLegend() {
  const [low, middle, high] = ["span", "span", "span"].map((kind) => element(kind));
  const [negative, positive] = [element("i.negative"), element("i.positive")];
  return {
    element: element("span.legend", { "aria-hidden": true },
      low, negative, middle, positive, high,
    ),
    update({ low: least, high: most, power, text, values, hidden }) {
      const beyond = values.some((value, i) => value < least && !hidden?.[i]);
      setText(low, least < 0 ? `${beyond ? "\u2264 " : ""}${text(least)}` : "0");
      setText(high, most > 0 ? text(most) : "0");
      setText(middle, least < 0 && most > 0 ? "0" : "");
      negative.hidden = middle.hidden = least === 0;
      positive.hidden = most === 0 && least < 0;
      const mixed = (share) => `color-mix(in srgb, var(--accent) ${100 * share}%, var(--surface))`;
      const stops = [0, 0.25, 0.5, 0.75, 1].map((x) => `${mixed(x)} ${100 * x ** (1 / power)}%`);
      positive.style.backgroundImage = `linear-gradient(to right, ${stops.join(", ")})`;
    },
  };
}

// heatmap({ onSelect(row), onPoint(row, at) }) -> { element, update(shown), point(row, at) } with
// { label, rows, columns, values, hidden, text, exact, low, high, power, selected }. Cells that
// are hidden take no part; a power below 1 spreads small values over more colours.
export function heatmap({ onSelect, onPoint = null }) {
  const canvas = element("canvas", { "aria-hidden": true });
  const cursor = element("div.heat-cursor", { hidden: true, "aria-hidden": true });
  const columnHeads = element("div.heat-columns", { role: "row" });
  const rowBox = element("div.heat-rows", { role: "rowgroup" });
  const area = element("div.heat-area", canvas, rowBox, cursor);
  const grid = element("div.heat-grid", { role: "grid" }, columnHeads, area);
  const spoken = announcer();
  const readout = element("span.readout", { "aria-hidden": true });
  const legend = scaleLegend();
  const pointAt = onPoint ?? point;
  let shown = null;
  let names = "";
  let ramps = null;
  let column = -1; // of the keyboard's cursor; -1: on the row's name

  function build({ rows, columns }) {
    const withCells = columns.length <= MOST_NUMBERS;
    setAll(grid, {
      style: { "--rows": rows.length, "--columns": columns.length },
      "aria-rowcount": rows.length + 1, "aria-colcount": columns.length + 1,
    });
    grid.classList.toggle("dense", !withCells);
    const heads = columns.map((name, s) => heading("columnheader", name, s, columns.length));
    columnHeads.replaceChildren(...heads);
    rowBox.replaceChildren(
      ...rows.map((name, t) =>
        element("div.heat-row", { role: "row" },
          heading("rowheader", name, t, rows.length),
          withCells && columns.map(() => element("div.heat-cell", { role: "gridcell" })),
        ),
      ),
    );
    canvas.width = columns.length;
    canvas.height = rows.length;
    column = -1;
    measure();
  }

  function heading(role, name, i, count) {
    const skipped = i % Math.ceil(count / MOST_LABELS) === 0 ? "" : ".skipped";
    return element(`div.heat-name${skipped}`, { role, title: name }, element("bdi", name));
  }

  function measure() {
    grid.classList.toggle("narrow", canvas.clientWidth < LEAST_WIDTH * canvas.width);
  }

  function paint() {
    const { rows, columns, values, hidden } = shown;
    ramps = ["--accent", "--negative"].map((name) => ramp(grid, "--surface", name));
    // Where a cell is hidden, the hatching behind it shows.
    const shadeOf = (i) => (hidden?.[i] ? null : shade(values[i]));
    paintCells(canvas, columns.length, rows.length, shadeOf);
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
      const row = rowBox.children[Math.floor(i / columns.length)];
      const cell = row.children[1 + (i % columns.length)];
      setText(cell, text(value));
      const ground = wantsLightText(shade(value)) ? "on-dark" : "on-light";
      cell.className = `heat-cell ${hidden?.[i] ? "hidden-key" : ground}`;
    });
  }

  function markRows() {
    const { rows, columns, values, text, exact = text, selected } = shown;
    rove([...rowBox.children], selected, "aria-selected");
    rows.forEach((name, t) => {
      const row = values.slice(t * columns.length, (t + 1) * columns.length);
      const best = row.reduce((most, value, s) => (value > row[most] ? s : most), 0);
      rowBox.children[t].ariaLabel = `${name}: largest ${exact(row[best])} at ${columns[best]}`;
    });
  }

  // Puts the cursor on a cell, or takes it away (at < 0), and gives the cell in words.
  function point(row, at) {
    const { rows, columns, values, text, exact = text } = shown;
    cursor.hidden = at < 0;
    for (const line of rowBox.children) line.classList.remove("pointed");
    if (at >= 0) rowBox.children[row].classList.add("pointed");
    setAll(cursor, { style: { "--row": row, "--at": at } });
    const number = at < 0 ? "" : exact(values[row * columns.length + at]);
    setText(readout, at < 0 ? "" : `${rows[row]} \u2192 ${columns[at]}  ${number}`);
    return at < 0 ? rows[row] : `${rows[row]} to ${columns[at]}: ${number}`;
  }

  function cellAt({ clientX, clientY }) {
    const { left, top, width, height } = canvas.getBoundingClientRect();
    const row = Math.floor(((clientY - top) / height) * canvas.height);
    const at = Math.floor(((clientX - left) / width) * canvas.width);
    return [Math.min(Math.max(row, 0), canvas.height - 1), Math.min(at, canvas.width - 1)];
  }

  function select(row) {
    if (row !== shown.selected) onSelect(row);
    rowBox.children[row].focus({ preventScroll: true });
  }

  function walk(event) {
    const { rows, columns, selected } = shown;
    const last = rows.length - 1;
    const down = { ArrowDown: 1, ArrowUp: -1, Home: -last, End: last }[event.key];
    const along = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (down === undefined && along === undefined) return;
    event.preventDefault();
    if (down) select(Math.min(Math.max(selected + down, 0), last));
    if (along) column = Math.min(Math.max(column + along, -1), columns.length - 1);
    pointAt(shown.selected, column);
    if (along) spoken.say(point(shown.selected, column));
  }

  const leave = () => pointAt(shown.selected, -1);
  area.addEventListener("click", (event) => select(cellAt(event)[0]));
  area.addEventListener("pointermove", (event) => pointAt(...cellAt(event)));
  area.addEventListener("pointerleave", leave);
  area.addEventListener("focusout", leave);
  grid.addEventListener("keydown", walk);
  onNewColours(grid, () => shown && paint());
  new ResizeObserver(measure).observe(area);

  return {
    point,
    element: element("div.heatmap",
      grid, element("p.under", legend.element, readout), spoken.element,
    ),
    update(next) {
      const before = shown;
      shown = next;
      const wanted = JSON.stringify([next.rows, next.columns]);
      const rebuilt = wanted !== names;
      if (rebuilt) build(next);
      names = wanted;
      grid.ariaLabel = next.label;
      const differs = (...parts) => rebuilt || parts.some((part) => before[part] !== next[part]);
      if (differs("values", "hidden", "low", "high", "power")) paint();
      if (differs("values", "selected")) markRows();
      legend.update(next);
    },
  };
}
