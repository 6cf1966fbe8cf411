// Where: order that is not counted, as time on a line and as places in a plane.

import { debounce, element } from "./dom.js";
import { METRICS, NUM_POINTS, planeStory } from "./plane_story.js";
import { wholeUpTo } from "./saved.js";
import { MOST_PLACE, SPOKEN, stampsStory } from "./stamps_story.js";

const START = {
  line: { slope: 0.5, places: SPOKEN, gates: [] },
  plane: { slope: 0.5, metric: METRICS[0], query: 24 },
};

export function mountWhere(root, { example }, memory) {
  let state = readWhere(memory.read());
  const later = debounce(() => memory.write(whereText(state)), 60);
  const change = (part, story) => (changes) => {
    state = { ...state, [part]: { ...state[part], ...changes } };
    story().update(state[part]);
    later();
  };
  const line = stampsStory({ example, onChange: change("line", () => line) });
  const plane = planeStory({ onChange: change("plane", () => plane) });
  root.append(
    element("h2", {}, "Where things stand"),
    element("p", { class: "lede" }, "A linear bias asks how far apart two tokens are. Nothing says that distance must be counted in tokens."),
    line.element,
    plane.element,
  );
  line.update(state.line);
  plane.update(state.plane);
}

// Of each value the name that it has in the address, how it is written there, and how it is read: null if it makes no sense.
const list = (text) => text.split(" ").filter(Boolean).map(Number);
const slope = (text) => (text !== "" && 0 <= Number(text) && Number(text) <= 1 ? Number(text) : null);
const WRITTEN = [
  { part: "line", name: "slope", as: "slope", read: slope },
  { part: "line", name: "places", as: "x", read: (text) => (arePlaces(list(text)) ? list(text) : null) },
  { part: "line", name: "gates", as: "gates", read: (text) => (areGates(list(text)) ? list(text) : null) },
  { part: "plane", name: "slope", as: "plane", read: slope },
  { part: "plane", name: "metric", as: "metric", read: (text) => (METRICS.includes(text) ? text : null) },
  { part: "plane", name: "query", as: "query", read: (text) => (text !== "" && wholeUpTo(NUM_POINTS)(Number(text)) ? Number(text) : null) },
];

const rises = (numbers, apart) => numbers.every((x, i) => i === 0 || x - numbers[i - 1] >= apart);
const arePlaces = (x) => x.length === SPOKEN.length && rises(x, 0) && x[0] >= 0 && x.at(-1) <= MOST_PLACE;
const areGates = (gates) => rises(gates, 1) && gates.every((gate) => gate > 0 && wholeUpTo(SPOKEN.length - 1)(gate));

// Only what differs from the start.
function whereText(state) {
  const parts = new URLSearchParams();
  const text = (value) => [value].flat().join(" ");
  for (const { part, name, as } of WRITTEN) {
    if (text(state[part][name]) !== text(START[part][name])) parts.set(as, text(state[part][name]));
  }
  return parts.toString();
}

// What makes no sense is left at the start.
function readWhere(text) {
  const parts = new URLSearchParams(text);
  const state = { line: { ...START.line }, plane: { ...START.plane } };
  for (const { part, name, as, read } of WRITTEN) {
    if (parts.has(as)) state[part][name] = read(parts.get(as)) ?? state[part][name];
  }
  return state;
}
