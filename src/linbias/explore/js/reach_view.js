// Near to far: which keys one query reads in each head, where the bound lets it stop, and what that leaves out.

import { lineChart } from "./chart.js";
import { choice, parseNumber, parseWhole, slider } from "./controls.js";
import { debounce, element } from "./dom.js";
import { LEFT, RIGHT, normals, numVisible, prepareQuery, visit, windowOf } from "./near_to_far.js";
import { general } from "./numbers.js";
import { slopes } from "./attention.js";
import { oneOf, readSaved, savedText, wholeUpTo } from "./saved.js";
import { grouped, scientific, slopeFraction } from "./scales.js";
import { strips } from "./strips.js";
import { dataTable } from "./table.js";

const HEAD_SIZE = 16;
const KEY_SCALE = HEAD_SIZE ** -0.5;
const LENGTHS = [256, 512, 1024, 2048, 4096];
const DTYPES = { "-53": "float64", "-24": "float32", "-13": "16 bits" }; // 2^-14 for float16, 2^-12 for bfloat16
const NO_TOLERANCE = -61; // the slider's last position: nothing may be left out
const NO_SLOPE = -11;
const QUIET_MS = 80; // after which the chart of all lengths follows a slider

const HEADS = [1, 2, 4, 8, 12, 16];
const BLOCKS = [8, 16, 32, 64];
const SAVED = {
  length: { is: oneOf(LENGTHS), start: 2048 },
  query: { is: wholeUpTo(LENGTHS.at(-1) - 1), start: null }, // null: the last
  heads: { is: oneOf(HEADS), start: 8 },
  tolerance: { is: (exponent) => NO_TOLERANCE <= exponent && exponent <= -2, start: -24 },
  block: { is: oneOf(BLOCKS), start: 16 },
  both: { is: oneOf([0, 1]), start: false },
  head: { is: wholeUpTo(HEADS.at(-1) - 1), start: 2 },
  slope: { is: (slope) => 0 <= slope && slope <= 2, start: null }, // null: that of the schedule
};

export function mountReach(root, data, memory) {
  const state = readSaved(memory.read(), SAVED);
  state.head = Math.min(state.head, state.heads - 1);
  if (state.query >= state.length - 1) state.query = null;
  const streams = new Map();
  const prepared = new Map();
  let results = [];

  const queryControl = slider({
    label: "Query at key",
    min: 0,
    max: state.length - 1,
    value: position(),
    onInput: (query) => change({ query: query === state.length - 1 ? null : query }),
    parse: (text) => parseWhole(text, 0, state.length - 1),
  });
  const slopeControl = slider({
    label: "Slope of the head",
    min: NO_SLOPE,
    max: 1,
    step: 0.25,
    value: 0.125,
    toText: slopeFraction,
    toValue: (place) => (place === NO_SLOPE ? 0 : 2 ** place),
    toPosition: (slope) => (slope === 0 ? NO_SLOPE : Math.log2(slope)),
    parse: (text) => parseNumber(text, 0, 2),
    marks: [0, 1 / 256, 1 / 16, 1].map((slope) => ({ value: slope, label: slopeFraction(slope) })),
    onInput: (slope) => change({ slope }),
  });
  const reset = element("button", { type: "button", on: { click: () => change({ slope: null }) } }, "Slope of the schedule");
  const controls = element(
    "div",
    { class: "controls" },
    choiceOf("Length", "length", LENGTHS, grouped),
    choiceOf("Heads", "heads", HEADS),
    choiceOf("Keys of a block", "block", BLOCKS),
    choiceOf("Query sees", "both", [false, true], (both) => (both ? "both sides" : "earlier keys")),
    queryControl.element,
    toleranceControl(state.tolerance, (exponent) => change({ tolerance: exponent })).element,
  );
  const share = element("strong");
  const sum = element("span");
  const rows = strips({ label: "Heads", onSelect: (head) => change({ head, slope: null }) });
  const title = element("h3");
  const story = element("p", { class: "story long" });
  const certificate = lineChart();
  const trace = dataTable({ caption: "Block by block, near to far", corner: "keys" });
  const steps = element(
    "details",
    { on: { toggle: () => drawTrace() } },
    element("summary", {}, "Every step of this head"),
    element("div", { class: "trace" }, trace.element),
  );
  const work = lineChart();
  const later = debounce(() => {
    drawWork();
    memory.write(savedText(state, SAVED));
  }, QUIET_MS);

  root.append(
    element("h2", {}, "Near to far"),
    element(
      "p",
      { class: "lede" },
      "A key at distance d loses slope \u00d7 d. So a query reads its keys from the nearest outwards, block by block, and stops " +
        "when a bound proves that all keys further away, together, hold no more of its attention than a tolerance.",
    ),
    controls,
    element("p", { class: "headline" }, share, " ", sum),
    rows.element,
    element(
      "p",
      { class: "note" },
      "Each strip is the text as one head sees it, from the first key to the last. The stronger a key\u2019s colour, the more it weighs (on " +
        "a logarithmic scale); the frame holds the blocks that are read, the triangle is the query. Random queries and keys of size 16.",
    ),
    element(
      "section",
      {},
      title,
      element("div", { class: "abreast" }, slopeControl.element, reset),
      story,
      certificate.element,
      steps,
    ),
    element(
      "section",
      {},
      element("h3", {}, "The longer the text, the smaller the share"),
      element("p", { class: "note" }, "Keys that the last query of a text reads, in all heads, with the same tolerance and slopes."),
      work.element,
    ),
  );

  function choiceOf(label, name, values, text = String) {
    return choice({
      label,
      options: values.map((value) => ({ value, label: text(value) })),
      value: state[name],
      onChange: (value) => change({ [name]: value }),
    }).element;
  }

  // Another length keeps the query where it is, if there is such a key; another number of heads the head likewise.
  function change(changes) {
    Object.assign(state, changes);
    if ("heads" in changes) Object.assign(state, { head: Math.min(state.head, state.heads - 1), slope: null });
    if (state.query >= state.length - 1) state.query = null;
    if ("length" in changes) {
      queryControl.setMax(state.length - 1);
      queryControl.set(position());
    }
    draw();
  }

  function position() {
    return state.query ?? state.length - 1;
  }

  function headSlopes() {
    const all = slopes(state.heads, "paper");
    if (state.slope !== null) all[state.head] = state.slope;
    return all;
  }

  function draw() {
    const all = headSlopes();
    results = all.map((slope, head) => readBy(head, slope, state.length, position()));
    const seen = results.reduce((total, { visible }) => total + visible, 0);
    const read = results.reduce((total, { found }) => total + found.end - found.first, 0);
    share.textContent = percent(read / seen);
    sum.textContent = `of the work remains: this query reads ${grouped(read)} of ${grouped(seen)} keys in ${
      state.heads === 1 ? "one head" : `${state.heads} heads`
    }.`;
    rows.update({
      rows: results.map(({ found, visible }, head) => ({
        name: `Head ${head + 1}`,
        slope: slopeFraction(all[head]),
        visit: found,
        count: `${grouped(found.end - found.first)} of ${grouped(visible)}`,
        leftOut: scientific(found.leftOut, 2),
      })),
      block: state.block,
      selected: state.head,
    });
    slopeControl.set(all[state.head]);
    reset.disabled = state.slope === null;
    drawHead(results[state.head], all[state.head]);
    later();
  }

  function drawHead(result, slope) {
    const { found } = result;
    title.textContent = `Head ${state.head + 1}, slope ${slopeFraction(slope)}`;
    story.textContent = storyOf(result, slope, tolerance());
    certificate.update(certificateChart(found, tolerance()));
    drawTrace();
  }

  function drawTrace() {
    if (!steps.open) return;
    const { found } = results[state.head];
    trace.update(
      ["bound", "tolerance", "really there", ""],
      found.steps.map((step) => ({
        head: `${grouped(step.first)} \u2013 ${grouped(step.end - 1)}`,
        cells: [
          scientific(Math.exp(step.bound), 4),
          scientific(found.share, 4),
          scientific(step.outside, 4),
          step.read ? "read" : "stop",
        ],
      })),
    );
  }

  function drawWork() {
    const all = headSlopes();
    const points = LENGTHS.map((length) => {
      const every = all.map((slope, head) => readBy(head, slope, length, length - 1));
      const total = (number) => every.reduce((sum, one) => sum + number(one), 0);
      return { length, read: total(({ found }) => found.end - found.first), seen: total(({ visible }) => visible) };
    });
    work.update({
      label: "Keys read by the last query, by length",
      x: { label: "tokens", low: 0, high: 4096, ticks: LENGTHS, format: grouped, at: (x) => `at ${grouped(x)} tokens` },
      y: { label: "keys read, all heads", low: 0, format: grouped, tick: grouped },
      lines: [
        { key: "all", name: "every key", colour: "--negative", points: points.map(({ length, seen }) => ({ x: length, y: seen })) },
        { key: "read", name: "near to far", colour: "--accent", main: true, points: points.map(({ length, read }) => ({ x: length, y: read })) },
      ],
    });
  }

  function readBy(head, slope, length, position) {
    const query = queryOf(head, length, position);
    const sides = [slope, state.both ? slope : Infinity];
    const found = visit(query, { slopes: sides, tolerance: tolerance(), block: state.block });
    return { query, found, visible: numVisible(query, sides) };
  }

  // What does not change with tolerance and slopes is kept: of the last queries for good, of the others the newest.
  function queryOf(head, length, position) {
    const isLast = position === length - 1;
    const key = `${head} ${isLast ? length : "chosen"}`;
    const kept = prepared.get(key);
    if (kept?.numKeys === length && kept.position === position) return kept;
    if (!streams.has(head)) streams.set(head, normals(2 * head + 1, LENGTHS.at(-1) * HEAD_SIZE));
    const made = prepareQuery({
      query: normals(2 * head, HEAD_SIZE, position * HEAD_SIZE),
      keys: streams.get(head).subarray(0, length * HEAD_SIZE),
      position,
      scale: KEY_SCALE,
    });
    prepared.set(key, made);
    return made;
  }

  function tolerance() {
    return state.tolerance === NO_TOLERANCE ? 0 : 2 ** state.tolerance;
  }

  draw();
  drawWork();
}

// A slider over powers of two, with the default of each dtype marked.
function toleranceControl(value, onInput) {
  return slider({
    label: "Tolerance",
    min: NO_TOLERANCE,
    max: -2,
    value,
    toText: toleranceText,
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

function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
}

// Why the head read what it read, in words.
function storyOf({ found, query }, slope, tolerance) {
  const { steps, ended, leftOut, share } = found;
  const stops = steps.filter((step) => !step.read);
  const known =
    slope > 0 && tolerance > 0
      ? ` From its slope and the largest norms alone, before any key is read, it is known that keys ${grouped(
          Math.ceil(windowOf(slope, query.qNorm, query.kNorm, query.scale, share, query.numKeys)),
        )} or more away cannot matter.`
      : "";
  if (stops.length > 0) {
    const places = stops.map((step) =>
      step.side === LEFT ? `before key ${grouped(step.end)}` : `from key ${grouped(step.first)} on`,
    );
    const bounds = stops.map((step) => scientific(Math.exp(step.bound), 3)).join(" and ");
    const each = ended[LEFT] === "hidden" || ended[RIGHT] === "hidden" ? "the tolerance" : "half the tolerance, a side's part,";
    return (
      `It stops ${places.join(" and ")}: there, all that is left holds at most ${bounds}, and ${each} is ` +
      `${scientific(share, 3)}. What it never reads really holds ${scientific(leftOut, 3)}.${known}`
    );
  }
  if (slope === 0) return "Without a slope no key is too far to matter: it reads everything.";
  if (tolerance === 0) return "With a tolerance of 0 nothing may be left out: it reads everything.";
  return `It comes to the last key before the bound falls below the tolerance: it reads everything.${known}`;
}

// The bound before each block and what is really there, by key, as far around the query as it pays to look.
function certificateChart(found, tolerance) {
  const { position, numKeys, first, end, steps, share, before, after } = found;
  const beyond = (span) => Math.ceil(0.6 * span) + 8;
  const low = found.ended[LEFT] === "hidden" ? position : Math.max(0, first - beyond(position - first));
  const high = found.ended[RIGHT] === "hidden" ? position : Math.min(numKeys - 1, end + beyond(end - position));
  const floor = (tolerance > 0 ? share : 1e-12) * 1e-6;
  const nearest = (step) => (step.side === LEFT ? step.end - 1 : step.first);
  const there = steps.map((step) => ({ x: nearest(step), y: step.outside }));
  const block = Math.max(1, ...steps.map((step) => step.end - step.first));
  for (const { side, read, first: from, end: to } of steps) {
    if (read) continue; // what lies beyond the stop, where no bound was needed
    if (side === LEFT) for (let s = from - 1; s >= low; s -= block) there.push({ x: s, y: before[s] });
    else for (let s = to; s <= high; s += block) there.push({ x: s, y: after[s] });
  }
  const line = (points) =>
    [...points, { x: position, y: null }]
      .sort((a, b) => a.x - b.x)
      .map(({ x, y }) => ({ x, y: y === null || y < floor ? null : y }));
  return {
    label: "The bound on all keys further away, and what they really hold",
    x: {
      label: "key",
      low,
      high: Math.max(high, low + 1),
      format: (x) => grouped(Math.round(x)),
      at: (x) => `key ${grouped(x)} and all beyond`,
    },
    y: {
      label: "share of the query\u2019s attention",
      log: true,
      low: tolerance > 0 ? share / 100 : 1e-12,
      high: 1,
      format: (y) => scientific(y, 3),
    },
    lines: [
      {
        key: "bound",
        name: "at most",
        colour: "--accent",
        main: true,
        points: line(steps.map((step) => ({ x: nearest(step), y: Math.exp(step.bound) }))),
      },
      { key: "there", name: "really", colour: "--negative", points: line(there) },
    ],
    marks: [
      ...(tolerance > 0 ? [{ y: share, text: "tolerance", middle: low < position && position < high ? position : undefined }] : []),
      ...steps.filter((step) => !step.read).map((step) => ({ x: nearest(step), text: "stops" })),
    ],
    start: steps.find((step) => !step.read) && nearest(steps.find((step) => !step.read)),
  };
}
