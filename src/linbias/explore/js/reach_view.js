// Near to far: which keys one query reads in each head, where it stops, and what that leaves out.

import { lineChart } from "./chart.js";
import { choice, parseNumber, parseWhole, slider } from "./controls.js";
import { debounce, element, note, section } from "./dom.js";
import { general, grouped, scientific, slopeFraction, wholePercent } from "./numbers.js";
import {
  BLOCKS, certificateChart, changedReach, headReader, HEADS, headSlopesOf, LENGTHS, NO_TOLERANCE,
  PRODUCTS, queryPosition, REACH_RULES, startOfReach, stepRows, storyOf, toleranceOf, totalOf,
} from "./reach.js";
import { savedText } from "./saved.js";
import { strips } from "./strips.js";
import { dataTable } from "./table.js";

export function mountReach(root, data, memory) {
  const readOf = headReader();
  let state = startOfReach(memory.read());
  let results = [];
  const controls = reachControls(state, change);
  const slopeControl = headSlopeControl(change);
  const [share, sum, title] = ["strong", "span", "h3"].map((name) => element(name));
  const story = element("p.story.long");
  const rows = strips({ onSelect: (head) => change({ head }) });
  const certificate = lineChart();
  const trace = dataTable({ caption: "Block by block, near to far", corner: "keys" });
  const steps = element("details", { on: { toggle: drawTrace } },
    element("summary", "Every step of this head"), trace.element,
  );
  const work = lineChart();
  const later = debounce(() => {
    drawWork();
    memory.write(savedText(state, REACH_RULES));
  });

  root.append(
    element("h2", "Near to far"),
    element("p.lede",
      "A key at distance d loses slope \u00d7 d. So a query reads its keys from the nearest " +
        "outwards, block by block, and stops when a bound proves that all keys further away, " +
        "together, hold no more of its attention than a tolerance.",
    ),
    controls.element,
    element("p.headline", share, " ", sum),
    rows.element,
    note(
      "Each strip is the text as one head sees it, from the first key to the last. The stronger " +
        "a key\u2019s colour, the more it weighs (on a logarithmic scale); the frame holds the " +
        "blocks that are read, the triangle is the query. Random queries and keys of size 16.",
    ),
    element("p.note.terms-legend",
      "In grey, how many of the three bfloat16 terms of each number a block needs:",
      ["all", "two", "one"].map((word, i) =>
        element("span", element("i.terms", { style: { "--terms": 3 - i } }), word),
      ),
    ),
    element("section", title, slopeControl.element, story, certificate.element, steps),
    section("The longer the text, the smaller the share",
      note(
        "Keys that the last query of a text reads, in all heads, with the same tolerance and " +
          "slopes.",
      ),
      work.element,
    ),
  );

  function change(changes) {
    state = changedReach(state, changes);
    draw();
    later();
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
    const keys = `${grouped(read)} of ${grouped(visible)} keys in ${heads}`;
    share.textContent = `${(100 * read / visible).toFixed(read < 0.1 * visible ? 1 : 0)}%`;
    const products = totalOf(results, "products") / (PRODUCTS[3] * read);
    sum.textContent = `of the work remains: this query reads ${keys}. Computed as exactly as ` +
      `they matter, these take ${wholePercent(products)} of the products of full precision.`;
    rows.update({
      rows: results.map((result, head) => ({
        name: `Head ${head}`, slope: slopeFraction(all[head]), visit: result.visited,
        count: `${grouped(result.read)} of ${grouped(result.visible)}`,
        bands: result.bands, leftOut: scientific(result.visited.leftOut, 2),
      })),
      block: state.block, selected: state.head,
    });
    controls.update(state);
    slopeControl.update(all[state.head], state.slope !== null);
    drawHead(results[state.head], all[state.head]);
  }

  function drawHead(result, slope) {
    title.textContent = `Head ${state.head}, slope ${slopeFraction(slope)}`;
    story.textContent = storyOf(result, slope, toleranceOf(state));
    certificate.update(certificateChart(result.visited, toleranceOf(state)));
    drawTrace();
  }

  function drawTrace() {
    if (!steps.open) return;
    const { visited } = results[state.head];
    const stop = visited.steps.findIndex((step) => step.terms === 0);
    trace.update(["at most", "limit", "really there", "computed"], stepRows(visited), stop);
  }

  function drawWork() {
    const all = LENGTHS.map((length) => readAll(length, length - 1));
    const points = (name) => all.map((one, i) => ({ x: LENGTHS[i], y: totalOf(one, name) }));
    work.update({
      label: "Keys read by the last query, by length",
      x: {
        label: "tokens", low: 0, high: LENGTHS.at(-1), ticks: LENGTHS, format: grouped,
        at: (x) => `at ${grouped(x)} tokens`,
      },
      y: { label: "keys read, all heads", low: 0, format: grouped, tick: grouped },
      lines: [
        { key: "all", name: "every key", colour: "var(--negative)", points: points("visible") },
        {
          key: "read", name: "near to far", colour: "var(--accent)", main: true,
          points: points("read"),
        },
      ],
    });
  }

  draw();
  drawWork();
}

// The default tolerances; of 16 bits 2^-14 for float16, 2^-12 for bfloat16.
const DTYPES = [[-53, "float64"], [-24, "float32"], [-13, "16 bits"]];
const NO_SLOPE = -11; // the slider's first position

function reachControls(state, change) {
  let length = state.length;
  const choiceOf = (label, name, values, text = String) =>
    choice({
      label, options: values.map((value) => ({ value, label: text(value) })),
      value: state[name], onChange: (value) => change({ [name]: value }),
    }).element;
  const query = slider({
    label: "Query at key", min: 0, max: length - 1, value: queryPosition(state),
    onInput: (key) => change({ query: key === length - 1 ? null : key }),
    parse: (text) => parseWhole(text, 0, length - 1),
  });
  return {
    element: element("div.controls",
      choiceOf("Length", "length", LENGTHS, grouped),
      choiceOf("Heads", "heads", HEADS),
      choiceOf("Keys of a block", "block", BLOCKS),
      choiceOf("Query sees", "both", [false, true], (both) =>
        both ? "both sides" : "earlier keys",
      ),
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

function headSlopeControl(change) {
  const control = slider({
    label: "Slope of the head", min: NO_SLOPE, max: 1, step: 0.25, value: 0, toText: slopeFraction,
    toValue: (position) => (position === NO_SLOPE ? 0 : 2 ** position),
    toPosition: (slope) => (slope === 0 ? NO_SLOPE : Math.log2(slope)),
    parse: (text) => parseNumber(text, 0, 2),
    marks: [0, 1 / 256, 1 / 16, 1].map((slope) => ({ value: slope, label: slopeFraction(slope) })),
    onInput: (slope) => change({ slope }),
  });
  const clear = () => change({ slope: null });
  const reset = element("button", { on: { click: clear } }, "Reset slope");
  return {
    element: element("div.abreast", control.element, reset),
    update(slope, isOwn) {
      control.set(slope);
      reset.disabled = !isOwn;
    },
  };
}

function toleranceControl(value, onInput) {
  return slider({
    label: "Tolerance", min: NO_TOLERANCE, max: -2, value, onInput,
    toText(exponent) {
      if (exponent === NO_TOLERANCE) return "0";
      return Number.isInteger(exponent) ? `2^${exponent}` : general(2 ** exponent);
    },
    parse(text) {
      const power = /^\s*2\s*(?:\^|\*\*)\s*(-?\d+)\s*$/.exec(text);
      const tolerance = power ? 2 ** Number(power[1]) : parseNumber(text, 0, 0.25);
      if (tolerance > 0.25) throw new Error(`Must be at most 0.25, got ${text}`);
      return tolerance < 2 ** -60 ? NO_TOLERANCE : Math.log2(tolerance);
    },
    marks: DTYPES.map(([exponent, label]) => ({ value: exponent, label })),
  });
}
