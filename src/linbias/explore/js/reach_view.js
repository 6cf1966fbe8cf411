// Near to far: which keys one query reads in each head, where it stops, and what that leaves out.

import { lineChart } from "./chart.js";
import { choice, parseNumber, slider, slopeSlider } from "./controls.js";
import { component, debounce, element, mount, note, onDraw, prose, section } from "./dom.js";
import { general, grouped, scientific, slopeFraction } from "./numbers.js";
import {
  BLOCKS, certificateChart, headReader, HEADS, headSlopesOf, keptInBounds, LENGTHS, NO_TOLERANCE,
  queryPosition, REACH_RULES, storyOf, toleranceOf, totalOf,
} from "./reach.js";
import { savedState } from "./saved.js";
import { strips } from "./strips.js";

export function mountReach(root, data, memory) {
  const readOf = headReader();
  const later = debounce(() => work.draw());
  function drawAll() {
    draw();
    later();
  }
  const { state, change, bind } = savedState(memory, REACH_RULES, drawAll, keptInBounds);
  let slopes = []; // of all heads
  let results = [];
  let shown = null; // the result of the chosen head

  const work = component(() => lineChart(workChart));

  function readAll(length, position) {
    const { both, block } = state;
    const options = { length, position, both, block, tolerance: toleranceOf(state) };
    return headSlopesOf(state).map((slope, head) => readOf({ head, slope, ...options }));
  }

  function headline() {
    const [read, visible] = ["read", "visible"].map((name) => totalOf(results, name));
    const heads = state.heads === 1 ? "one head" : `${state.heads} heads`;
    const keys = `${grouped(read)} of ${grouped(visible)} keys in ${heads}`;
    const share = `${(100 * read / visible).toFixed(read < 0.1 * visible ? 1 : 0)}%`;
    return [element("strong", share), " ", element("span", `of the work remains: this query reads ${keys}.`)];
  }

  function stripsShown() {
    const rows = results.map((result, head) => ({
      name: `Head ${head}`, slope: slopeFraction(slopes[head]), visit: result.visited,
      count: `${grouped(result.read)} of ${grouped(result.visible)}`,
      leftOut: scientific(result.visited.leftOut, 2),
    }));
    return { rows, block: state.block, selected: state.head };
  }

  function workChart() {
    const all = LENGTHS.map((length) => readAll(length, length - 1));
    const points = (name) => all.map((one, i) => ({ x: LENGTHS[i], y: totalOf(one, name) }));
    return {
      label: "Keys read by the last query, by length",
      x: {
        label: "tokens", low: 0, high: LENGTHS.at(-1), ticks: LENGTHS, format: grouped,
        at: (x) => `at ${grouped(x)} tokens`,
      },
      y: { label: "keys read, all heads", low: 0, format: grouped, tick: grouped },
      lines: [
        { key: "all", name: "every key", colour: "var(--negative)", points: points("visible") },
        { key: "read", name: "near to far", colour: "var(--accent)", main: true, points: points("read") },
      ],
    };
  }

  const draw = mount(root, () => {
    onDraw(() => {
      slopes = headSlopesOf(state);
      results = readAll(state.length, queryPosition(state));
      shown = results[state.head];
    });
    const slope = () => slopes[state.head];
    return [
      element("h2", "Near to far"),
      element("p.lede", prose`A key at distance d loses slope \u00d7 d. So a query reads its keys from the
        nearest outwards, block by block, and stops when a bound proves that all keys further away, together,
        hold no more of its attention than a tolerance.`),
      reachControls(state, change, bind),
      element("p.headline", headline),
      strips({ shownOf: stripsShown, onSelect: (head) => change({ head, slope: null }) }),
      note(prose`Each strip is the text as one head sees it, from the first key to the last. The stronger a
        key\u2019s colour, the more it weighs (on a logarithmic scale); the frame holds the blocks that are
        read, the triangle is the query. Random queries and keys of size 16.`),
      element("section",
        element("h3", () => `Head ${state.head}, slope ${slopeFraction(slope())}`),
        headSlopeControl(state, slope, change),
        element("p.story.long", () => storyOf(shown, slope(), toleranceOf(state))),
        lineChart(() => certificateChart(shown.visited, toleranceOf(state))),
      ),
      section("The longer the text, the smaller the share",
        note(prose`Keys that the last query of a text reads, in all heads, with the same tolerance and
          slopes.`),
        work.element,
      ),
    ];
  });
  work.draw();
}

// The default tolerances; of 16 bits 2^-14 for float16, 2^-12 for bfloat16.
const DTYPES = [[-53, "float64"], [-24, "float32"], [-13, "16 bits"]];

function reachControls(state, change, bind) {
  const choiceOf = (label, name, values, text = String) =>
    choice({ label, options: values.map((value) => ({ value, label: text(value) })), ...bind(name) });
  const last = () => state.length - 1;
  return element("div.controls",
    choiceOf("Length", "length", LENGTHS, grouped),
    choice({
      label: "Heads", options: HEADS, value: () => state.heads,
      onInput: (heads) => change({ heads, slope: null }),
    }),
    choiceOf("Keys of a block", "block", BLOCKS),
    choiceOf("Query sees", "both", [false, true], (both) => both ? "both sides" : "earlier keys"),
    slider({
      label: "Query at key", min: 0, max: last, value: () => queryPosition(state),
      onInput: (key) => change({ query: key === last() ? null : key }),
    }),
    slider({
      label: "Tolerance", min: NO_TOLERANCE, max: -2, ...bind("tolerance"),
      toText: toleranceText, parse: parseTolerance,
      marks: DTYPES.map(([exponent, label]) => ({ value: exponent, label })),
    }),
  );
}

function headSlopeControl(state, value, change) {
  const onInput = (slope) => change({ slope });
  const control = slopeSlider({
    label: "Slope of the head", most: 2, value, toText: slopeFraction, onInput,
  });
  const reset = { disabled: () => state.slope === null, on: { click: () => change({ slope: null }) } };
  return element("div.abreast", control, element("button", reset, "Reset slope"));
}

function toleranceText(exponent) {
  if (exponent === NO_TOLERANCE) return "0";
  return Number.isInteger(exponent) ? `2^${exponent}` : general(2 ** exponent);
}

function parseTolerance(text) {
  const power = /^\s*2\s*(?:\^|\*\*)\s*(-?\d+)\s*$/.exec(text);
  const tolerance = power ? 2 ** Number(power[1]) : parseNumber(text, 0, 0.25);
  if (tolerance > 0.25) throw new Error(`Must be at most 0.25, got ${text}`);
  return tolerance < 2 ** -60 ? NO_TOLERANCE : Math.log2(tolerance);
}
