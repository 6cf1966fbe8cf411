// What a view shows as a text such as "length=512&head=2", for the page's address. What makes no sense there
// is ignored, as links are typed and cut.

import { debounce } from "./dom.js";

const asNumber = (text) => (text === "" ? NaN : Number(text));
const startOf = ({ start }, state) => (typeof start === "function" ? start(state) : start);

// The values of a text by rules { start, is, read, name }: a number, or true written as 1, where no `read` is
// given. `name` is that in the text; `start`, if a function, `is` and `read` get the values before it too.
export function readSaved(text, rules) {
  const given = new URLSearchParams(text);
  const state = {};
  for (const [key, rule] of Object.entries(rules)) {
    const { is, read = asNumber, name = key } = rule;
    const start = startOf(rule, state);
    const value = given.has(name) ? read(given.get(name), state) : null;
    if (value === null || !is(value, state)) state[key] = start;
    else state[key] = typeof start === "boolean" ? value === 1 : value;
  }
  return state;
}

// Only what differs from the start.
export function savedText(state, rules) {
  const parts = new URLSearchParams();
  for (const [key, rule] of Object.entries(rules)) {
    const text = written(state[key]);
    if (text !== written(startOf(rule, state))) parts.set(rule.name ?? key, text);
  }
  return parts.toString();
}

function written(value) {
  if (typeof value === "boolean") return String(Number(value));
  if (value === null || typeof value !== "object") return String(value);
  if (Array.isArray(value)) return value.join(" ");
  return Object.entries(value).map((pair) => pair.join(":")).join(" ");
}

// The state that `memory` has by these rules, and the way to change parts of it: they are made to fit by
// `tidy`, drawn, and kept. bind(name) is what a control of one part needs.
export function savedState(memory, rules, draw, tidy = (state) => state) {
  const state = tidy(readSaved(memory.read(), rules));
  const keep = debounce(() => memory.write(savedText(state, rules)));
  function change(parts) {
    Object.assign(state, tidy({ ...state, ...parts }));
    draw();
    keep();
  }
  const bind = (name) => ({ value: () => state[name], onInput: (value) => change({ [name]: value }) });
  return { state, change, bind };
}

export const oneOf = (values) => (value) => values.includes(value);
export const within = (low, high) => (value) => low <= value && value <= high;
export const wholeUpTo = (most) => (value) => Number.isInteger(value) && within(0, most)(value);
