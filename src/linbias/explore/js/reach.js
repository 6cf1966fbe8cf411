// What the view of near to far shows, what of it a link may say, and one head's reading.

import { slopes } from "./attention.js";
import { prose } from "./dom.js";
import { LEFT, normals, numVisible, prepareQuery, visit, windowOf } from "./near_to_far.js";
import { grouped, scientific } from "./numbers.js";
import { oneOf, wholeUpTo, within } from "./saved.js";

export const LENGTHS = [256, 512, 1024, 2048, 4096];
export const HEADS = [1, 2, 4, 8, 12, 16];
export const BLOCKS = [8, 16, 32, 64];
export const NO_TOLERANCE = -61; // the slider's first position: nothing may be left out

export const REACH_RULES = {
  length: { is: oneOf(LENGTHS), start: 2048 },
  query: { is: wholeUpTo(LENGTHS.at(-1) - 1), start: null }, // null: the last
  heads: { is: oneOf(HEADS), start: 8 },
  tolerance: { is: within(NO_TOLERANCE, -2), start: -24 }, // of 2
  block: { is: oneOf(BLOCKS), start: 16 },
  both: { is: oneOf([0, 1]), start: false },
  head: { is: wholeUpTo(HEADS.at(-1) - 1), start: 2 },
  slope: { is: within(0, 2), start: null }, // of the chosen head; null: that of the schedule
};

// Another length keeps the query where it is, if there is such a key; other heads likewise.
export function keptInBounds(state) {
  const query = state.query >= state.length - 1 ? null : state.query;
  return { ...state, query, head: Math.min(state.head, state.heads - 1) };
}

export const queryPosition = (state) => state.query ?? state.length - 1;

export const toleranceOf = (state) => state.tolerance === NO_TOLERANCE ? 0 : 2 ** state.tolerance;

export function headSlopesOf(state) {
  const all = slopes(state.heads, "paper");
  return all.with(state.head, state.slope ?? all[state.head]);
}

// Random queries and keys, and what a query of them reads near to far.

const HEAD_SIZE = 16;

// What near to far reads of one query. What does not change with tolerance and slopes is kept: of the last
// queries of texts for good, of others the newest.
export function headReader() {
  const streams = new Map();
  const prepared = new Map();

  function queryOf(head, length, position) {
    const key = `${head} ${position === length - 1 ? length : "chosen"}`;
    const kept = prepared.get(key);
    if (kept?.numKeys === length && kept.position === position) return kept;
    if (!streams.has(head)) streams.set(head, normals(2 * head + 1, LENGTHS.at(-1) * HEAD_SIZE));
    const keys = streams.get(head).subarray(0, length * HEAD_SIZE);
    const query = normals(2 * head, HEAD_SIZE, position * HEAD_SIZE);
    const scaled = query.map((value) => value * HEAD_SIZE ** -0.5);
    const made = prepareQuery({ query: scaled, keys, position });
    prepared.set(key, made);
    return made;
  }

  return ({ head, slope, length, position, both, tolerance, block }) => {
    const query = queryOf(head, length, position);
    const sides = [slope, both ? slope : Infinity];
    const visited = visit(query, { slopes: sides, tolerance, block });
    const read = visited.end - visited.first;
    return { query, visited, read, visible: numVisible(query, sides) };
  };
}

export const totalOf = (results, name) => results.reduce((total, one) => total + one[name], 0);

const stopsOf = ({ steps }) => steps.filter((step) => step.stop);

export function storyOf({ visited, query }, slope, tolerance) {
  const { ended, leftOut, share } = visited;
  const stops = stopsOf(visited);
  if (stops.length === 0 && slope === 0) {
    return "Without a slope no key is too far to matter: it reads everything.";
  }
  if (stops.length === 0 && tolerance === 0) {
    return "With a tolerance of 0 nothing may be left out: it reads everything.";
  }
  const reach = grouped(Math.ceil(windowOf(slope, query, share)));
  const known = prose` From its slope and the largest norms alone, before any key is read, it is known that
    keys ${reach} or more away cannot matter.`;
  if (stops.length === 0) {
    return prose`It comes to the last key before the bound falls below the tolerance: it reads
      everything.${known}`;
  }
  const where = stops.map(({ side, first, end }) =>
    side === LEFT ? `before key ${grouped(end)}` : `from key ${grouped(first)} on`,
  );
  const bounds = stops.map((step) => scientific(atMost(step))).join(" and ");
  const isOneSided = ended.includes("hidden");
  const each = isOneSided ? "the tolerance" : "half the tolerance, a side\u2019s part,";
  return prose`It stops ${where.join(" and ")}: there, all that is left holds at most ${bounds}, and ${each}
    is ${scientific(share)}. What it never reads really holds ${scientific(leftOut)}.${known}`;
}

// The bound before each block and what is really there, by key, as far from the query as pays.
export function certificateChart(visited, tolerance) {
  const { position, numKeys, first, end, steps, share, before, after, ended } = visited;
  const beyond = (span) => Math.ceil(0.6 * span) + 8;
  const [isLeft, isRight] = ended.map((why) => why !== "hidden");
  const low = isLeft ? Math.max(0, first - beyond(position - first)) : position;
  const high = isRight ? Math.min(numKeys - 1, end + beyond(end - position)) : position;
  const floor = (tolerance > 0 ? share : 1e-12) * 1e-6;
  const nearest = (step) => (step.side === LEFT ? step.end - 1 : step.first);
  const there = steps.map((step) => ({ x: nearest(step), y: step.outside }));
  const block = Math.max(1, ...steps.map((step) => step.end - step.first));
  for (const { side, first: from, end: to } of stopsOf(visited)) {
    // What lies beyond the stop, where no bound was needed.
    const [start, sums, way] = side === LEFT ? [from - 1, before, -block] : [to, after, block];
    for (let s = start; low <= s && s <= high; s += way) there.push({ x: s, y: sums[s] });
  }
  const line = (points) =>
    [...points, { x: position, y: null }]
      .sort((a, b) => a.x - b.x)
      .map(({ x, y }) => ({ x, y: y === null || y < floor ? null : y }));
  const middle = low < position && position < high ? position : undefined;
  const stops = stopsOf(visited).map(nearest);
  return {
    label: "The bound on all keys further away, and what they really hold",
    x: {
      label: "key", low, high: Math.max(high, low + 1), format: (x) => grouped(Math.round(x)),
      at: (x) => `key ${grouped(x)} and all beyond`,
    },
    y: {
      label: "share of the query\u2019s attention", log: true,
      low: tolerance > 0 ? share / 100 : 1e-12, high: 1, format: (y) => scientific(y),
    },
    lines: [
      {
        key: "bound", name: "at most", colour: "var(--accent)", main: true,
        points: line(steps.map((step) => ({ x: nearest(step), y: atMost(step) }))),
      },
      { key: "there", name: "really", colour: "var(--negative)", points: line(there) },
    ],
    marks: [
      ...(tolerance > 0 ? [{ y: share, text: "tolerance", middle }] : []),
      ...stops.map((x) => ({ x, text: "stops" })),
    ],
    start: stops[0],
  };
}

// A share is at most 1; near the query, where little has been read yet, the bound says less.
const atMost = (step) => Math.min(1, Math.exp(step.bound));
