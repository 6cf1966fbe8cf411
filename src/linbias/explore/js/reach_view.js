// Near to far: which keys one query reads in each head, where the bound lets it stop, and what that leaves out.

import { lineChart } from "./chart.js";
import { onThemeChange, paintCells, ramp } from "./colours.js";
import { choice, parseNumber, parseWhole, slider } from "./controls.js";
import { debounce, element, note, section, setAll, setText, walked } from "./dom.js";
import { general } from "./numbers.js";
import {
  BLOCKS, certificateChart, changedReach, headReader, HEADS, headSlopesOf, LENGTHS, NO_TOLERANCE, queryPosition,
  REACH_RULES, startOfReach, stepRows, storyOf, toleranceOf, totalOf,
} from "./reach.js";
import { savedText } from "./saved.js";
import { grouped, scientific, slopeFraction } from "./scales.js";
import { dataTable } from "./table.js";

const QUIET_MS = 80; // after which the chart of all lengths follows a slider

export function mountReach(root, data, memory) {
  const readOf = headReader(LENGTHS.at(-1));
  let state = startOfReach(memory.read());
  let results = [];
  const controls = reachControls(state, change);
  const slopeControl = headSlopeControl(change);
  const [share, sum, title] = ["strong", "span", "h3"].map((name) => element(name));
  const story = element("p", { class: "story long" });
  const rows = strips({ label: "Heads", onSelect: (head) => change({ head }) });
  const certificate = lineChart();
  const trace = dataTable({ caption: "Block by block, near to far", corner: "keys" });
  const steps = element("details", { on: { toggle: () => drawTrace() } },
    element("summary", {}, "Every step of this head"),
    trace.element,
  );
  const work = lineChart();
  const later = debounce(() => {
    work.update(workChart(workByLength()));
    memory.write(savedText(state, REACH_RULES));
  }, QUIET_MS);

  root.append(
    element("h2", {}, "Near to far"),
    element("p", { class: "lede" },
      "A key at distance d loses slope \u00d7 d. So a query reads its keys from the nearest outwards, block by block, and stops " +
        "when a bound proves that all keys further away, together, hold no more of its attention than a tolerance.",
    ),
    controls.element,
    element("p", { class: "headline" }, share, " ", sum),
    rows.element,
    note(
      "Each strip is the text as one head sees it, from the first key to the last. The stronger a key\u2019s colour, the more it weighs (on " +
        "a logarithmic scale); the frame holds the blocks that are read, the triangle is the query. Random queries and keys of size 16.",
    ),
    element("section", {}, title, slopeControl.element, story, certificate.element, steps),
    section("The longer the text, the smaller the share",
      note("Keys that the last query of a text reads, in all heads, with the same tolerance and slopes."),
      work.element,
    ),
  );

  function change(changes) {
    state = changedReach(state, changes);
    draw();
  }

  function readAll(length, position) {
    const { both, block } = state;
    const options = { length, position, both, block, tolerance: toleranceOf(state) };
    return headSlopesOf(state).map((slope, head) => readOf({ head, slope, ...options }));
  }

  function draw() {
    const all = headSlopesOf(state);
    results = readAll(state.length, queryPosition(state));
    const [read, visible] = ["read", "visible"].map((name) => totalOf(results, name));
    const heads = state.heads === 1 ? "one head" : `${state.heads} heads`;
    share.textContent = percent(read / visible);
    sum.textContent = `of the work remains: this query reads ${grouped(read)} of ${grouped(visible)} keys in ${heads}.`;
    rows.update({
      rows: results.map((result, head) => ({
        name: `Head ${head}`, slope: slopeFraction(all[head]), visit: result.found,
        count: `${grouped(result.read)} of ${grouped(result.visible)}`,
        leftOut: scientific(result.found.leftOut, 2),
      })),
      block: state.block, selected: state.head,
    });
    controls.update(state);
    slopeControl.update(all[state.head], state.slope !== null);
    drawHead(results[state.head], all[state.head]);
    later();
  }

  function drawHead(result, slope) {
    title.textContent = `Head ${state.head}, slope ${slopeFraction(slope)}`;
    story.textContent = storyOf(result, slope, toleranceOf(state));
    certificate.update(certificateChart(result.found, toleranceOf(state)));
    drawTrace();
  }

  function drawTrace() {
    if (!steps.open) return;
    const { found } = results[state.head];
    const stop = found.steps.findIndex((step) => !step.read);
    trace.update(["at most", "tolerance", "really there", "block"], stepRows(found), stop);
  }

  function workByLength() {
    return LENGTHS.map((length) => {
      const all = readAll(length, length - 1);
      return { length, read: totalOf(all, "read"), visible: totalOf(all, "visible") };
    });
  }

  draw();
  work.update(workChart(workByLength()));
}

function workChart(points) {
  const of = (name) => points.map((point) => ({ x: point.length, y: point[name] }));
  return {
    label: "Keys read by the last query, by length",
    x: { label: "tokens", low: 0, high: LENGTHS.at(-1), ticks: LENGTHS, format: grouped, at: (x) => `at ${grouped(x)} tokens` },
    y: { label: "keys read, all heads", low: 0, format: grouped, tick: grouped },
    lines: [
      { key: "all", name: "every key", colour: "var(--negative)", points: of("visible") },
      { key: "read", name: "near to far", colour: "var(--accent)", main: true, points: of("read") },
    ],
  };
}

const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;

// The controls of near to far, over a state that reach.js describes.

const DTYPES = { "-53": "float64", "-24": "float32", "-13": "16 bits" }; // 2^-14 for float16, 2^-12 for bfloat16
const NO_SLOPE = -11; // the slider's first position

// -> { element, update(state) }: of the text and the certificate. change({ name: value, ... }) is told of changes.
function reachControls(state, change) {
  let length = state.length;
  const choiceOf = (label, name, values, text = String) =>
    choice({
      label,
      options: values.map((value) => ({ value, label: text(value) })),
      value: state[name], onChange: (value) => change({ [name]: value }),
    }).element;
  const query = slider({
    label: "Query at key", min: 0, max: length - 1, value: queryPosition(state),
    onInput: (key) => change({ query: key === length - 1 ? null : key }),
    parse: (text) => parseWhole(text, 0, length - 1),
  });
  return {
    element: element("div", { class: "controls" },
      choiceOf("Length", "length", LENGTHS, grouped),
      choiceOf("Heads", "heads", HEADS),
      choiceOf("Keys of a block", "block", BLOCKS),
      choiceOf("Query sees", "both", [false, true], (both) => (both ? "both sides" : "earlier keys")),
      query.element,
      toleranceControl(state.tolerance, (tolerance) => change({ tolerance })).element,
    ),
    update(now) {
      length = now.length;
      query.setMax(length - 1);
      query.set(queryPosition(now));
    },
  };
}

// -> { element, update(slope, isOwn) }: the slope of the chosen head, and the way back to that of the schedule.
function headSlopeControl(change) {
  const control = slider({
    label: "Slope of the head", min: NO_SLOPE, max: 1, step: 0.25, value: 0, toText: slopeFraction,
    toValue: (place) => (place === NO_SLOPE ? 0 : 2 ** place),
    toPosition: (slope) => (slope === 0 ? NO_SLOPE : Math.log2(slope)),
    parse: (text) => parseNumber(text, 0, 2),
    marks: [0, 1 / 256, 1 / 16, 1].map((slope) => ({ value: slope, label: slopeFraction(slope) })),
    onInput: (slope) => change({ slope }),
  });
  const reset = element("button", { type: "button", on: { click: () => change({ slope: null }) } }, "Reset slope");
  return {
    element: element("div", { class: "abreast" }, control.element, reset),
    update(slope, isOwn) {
      control.set(slope);
      reset.disabled = !isOwn;
    },
  };
}

// A slider over powers of two, with the default of each dtype marked.
function toleranceControl(value, onInput) {
  return slider({
    label: "Tolerance", min: NO_TOLERANCE, max: -2, value, toText: toleranceText,
    parse(text) {
      const power = /^\s*2\s*(?:\^|\*\*)\s*(-?\d+)\s*$/.exec(text);
      const value = power ? 2 ** Number(power[1]) : parseNumber(text, 0, 0.25);
      if (value > 0.25) throw new Error(`Must be at most 0.25, got ${text}`);
      return value < 2 ** -60 ? NO_TOLERANCE : Math.log2(value);
    },
    marks: [...Object.entries(DTYPES)].map(([exponent, name]) => ({ value: Number(exponent), label: name })),
    onInput,
  });
}

function toleranceText(exponent) {
  if (exponent === NO_TOLERANCE) return "0";
  return Number.isInteger(exponent) ? `2^${exponent}` : general(2 ** exponent);
}

// A strip of keys for each head: how much each key weighs, a frame around the blocks that are read, and the query.
// Each strip is a button that chooses its head; together they are one stop of the tab key, walked by arrows.

const FAINTEST = 1e-9; // the weight that is drawn as nothing: colours go by its logarithm
const MOST_COLUMNS = 1024;
const LEAST_BLOCK = 5; // pixels of a block between which and the next a line can be seen

// strips({ label, onSelect(head) }) -> { element, update({ rows, block, selected }) }
// rows: [{ name, slope, visit, count, leftOut }], visit as near_to_far.js gives it, the others as printed.
function strips({ label, onSelect }) {
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
          element("span", { class: "strip" },
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
      setAll(row, {
        "aria-checked": String(head === selected), tabindex: head === selected ? 0 : -1,
        "aria-label": `${name}, slope ${slope}: ${count} keys read, ${leftOut} left out`,
      });
      const boxes = [[nameBox, name], [slopeBox, slope], [countBox, count], [leftBox, leftOut]];
      for (const [box, text] of boxes) setText(box, text);
      const [, frame, query] = strip.children;
      const percent = (keys) => `${(100 * keys) / visit.numKeys}%`;
      const keys = visit.end - visit.first;
      setAll(frame, { style: { "inset-inline-start": percent(visit.first), width: percent(keys) } });
      frame.classList.toggle("fine", (strip.clientWidth * block) / visit.numKeys < LEAST_BLOCK);
      [visit.position - visit.first, visit.end - visit.position - 1].forEach((read, side) => {
        const [width, each] = [(100 * read) / keys, (100 * block) / Math.max(read, 1)];
        setAll(frame.children[side], { style: { width: `${width}%`, "--block": `${each}%` } });
      });
      query.style.setProperty("inset-inline-start", percent(visit.position + 0.5));
    });
  }

  onThemeChange(() => shown && paint());
  new ResizeObserver(() => shown && place()).observe(list);

  return {
    element: element("div", { class: "strips-box" },
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
