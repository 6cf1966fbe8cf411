// Near to far: which keys one query reads in each head, where the bound lets it stop, and what that leaves out.

import { lineChart } from "./chart.js";
import { debounce, element, note, section } from "./dom.js";
import { headSlopeControl, reachControls } from "./reach_controls.js";
import { certificateChart, stepRows, storyOf } from "./reach_head.js";
import { headReader, totalOf } from "./reach_reader.js";
import { changedReach, headSlopesOf, LENGTHS, queryPosition, REACH_RULES, startOfReach, toleranceOf } from "./reach_state.js";
import { savedText } from "./saved.js";
import { grouped, scientific, slopeFraction } from "./scales.js";
import { strips } from "./strips.js";
import { dataTable } from "./table.js";

const QUIET_MS = 80; // after which the chart of all lengths follows a slider

export function mountReach(root, data, memory) {
  const readOf = headReader(LENGTHS.at(-1));
  let state = startOfReach(memory.read());
  let results = [];
  const controls = reachControls(state, change);
  const slopeControl = headSlopeControl(change);
  const [share, sum, title, story] = [
    element("strong"),
    element("span"),
    element("h3"),
    element("p", { class: "story long" }),
  ];
  const rows = strips({ label: "Heads", onSelect: (head) => change({ head }) });
  const certificate = lineChart();
  const trace = dataTable({ caption: "Block by block, near to far", corner: "keys" });
  const steps = element(
    "details",
    { on: { toggle: () => drawTrace() } },
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
    element(
      "p",
      { class: "lede" },
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
    section(
      "The longer the text, the smaller the share",
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
        name: `Head ${head}`,
        slope: slopeFraction(all[head]),
        visit: result.found,
        count: `${grouped(result.read)} of ${grouped(result.visible)}`,
        leftOut: scientific(result.found.leftOut, 2),
      })),
      block: state.block,
      selected: state.head,
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

function percent(share) {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
}
