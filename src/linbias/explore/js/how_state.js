// A tour of the view in steps: each is a state of it, and a sentence on what to look at.

import { attend, sides, VARIANTS } from "./attention.js";
import { parseNumber } from "./controls.js";
import { slopeFraction } from "./scales.js";
import { readTokens } from "./tokens.js";
import { vectors } from "./vectors.js";

export const STEPS = [
  {
    id: "sum", label: "Scores plus bias",
    says: "Every cell of the first matrix gets the bias of its place in the second, which is lower the further a key stands from the query. "
      + "Softmax makes weights of each row of sums.",
    state: {},
  },
  {
    id: "plain", label: "Slope 0 is plain attention",
    says: "With slope 0 the bias is 0 everywhere: the weights follow q \u00b7 k alone, however far apart two words stand. Move the slope up from here.",
    state: { left: { 0: 0 } },
  },
  {
    id: "row", label: "One word\u2019s row",
    says: "The query of \u201con\u201d is all zeros, so all its scores are 0 and the bias alone decides: most weight on itself, less with every step away.",
    state: { row: 3 },
  },
  {
    id: "future", label: "Hide the future",
    says: "A language model may not read ahead: keys after the query are hidden (hatched), and each row shares its weight among the words so far.",
    state: { variant: "causal", row: 4 },
  },
  {
    id: "heads", label: "A steep and a flat head",
    says: "Eight heads with the paper\u2019s slopes, from 1/2 to 1/256. Choose among the small pictures: head 0 sees the nearest words, head 7 nearly all alike.",
    state: { numHeads: 8, schedule: "paper", variant: "causal", words: 8, row: 7 },
  },
];

// What the view of one head's arithmetic shows, as a plain object, and as the text behind # that brings it back.

// The book chapter's example: symmetric, two heads with slopes 1/2 and 1/4; or a step of the tour.
export function stateOfStep(id, example) {
  const { words, ...changes } = (STEPS.find((step) => step.id === id) ?? STEPS[0]).state;
  return {
    step: id,
    tokens: words ? example.words.slice(0, words) : example.tokens,
    variant: "symmetric",
    schedule: "halving",
    numHeads: 2,
    head: 0,
    row: 1,
    left: {}, // slopes set by hand, by head
    right: {},
    ...changes,
  };
}

// The slopes of all heads: the schedule's, where none was set by hand.
export function slopesOf({ variant, numHeads, schedule, left, right }) {
  const base = sides(variant, numHeads, schedule);
  // What a model would learn is unknown: start with a right side four times as flat.
  if (variant === "asymmetric") base.right = base.left.map((slope) => slope / 4);
  const apply = (slopes, own) =>
    slopes.map((slope, h) => (slope === Infinity ? slope : (own[h] ?? slope)));
  return { left: apply(base.left, left), right: apply(base.right, variant === "asymmetric" ? right : left) };
}

// The sides on which a head sees keys, with their slopes.
export function openSides({ variant }, slopes, head) {
  const [left, right] = [slopes.left[head], slopes.right[head]];
  if (variant === "symmetric") return [{ side: "both", slope: left }];
  return [{ side: "left", slope: left }, { side: "right", slope: right }].filter(({ slope }) => slope !== Infinity);
}

// compute(state) -> every head's vectors and steps, with the bias and without. What a change leaves as it was is
// not computed again: a slope changes one head.
export function headComputer(example) {
  let text = "";
  let heads = [];
  const flat = (slope) => (slope === Infinity ? slope : 0); // a side that is hidden stays hidden
  return (state) => {
    const wanted = JSON.stringify([state.tokens, state.numHeads]);
    if (wanted !== text) heads = vectors(state.tokens, state.numHeads, example);
    text = wanted;
    const slopes = slopesOf(state);
    heads = heads.map((head, h) => {
      const [left, right] = [slopes.left[h], slopes.right[h]];
      if (head.left === left && head.right === right) return head;
      const { q, k, v } = head;
      const same = head.without && flat(head.left) === flat(left) && flat(head.right) === flat(right);
      const without = same ? head.without : attend({ q, k, v, left: flat(left), right: flat(right) });
      const steps = attend({ q, k, v, left, right });
      // Of the same numbers the same arrays, so that whoever has drawn them need not do it again.
      const { raw, scaled } = head.with ?? steps;
      return { q, k, v, left, right, with: { ...steps, raw, scaled }, without };
    });
    return heads;
  };
}

export function slopeText({ left, right }) {
  if (left === right || right === Infinity) return `slope ${slopeFraction(left)}`;
  return left === Infinity ? `slope ${slopeFraction(right)}` : `slopes ${slopeFraction(left)}, ${slopeFraction(right)}`;
}

// State as "head=2&left=0:0.1", only what differs from its step, or from the first.
export function stateText(state, example) {
  const start = stateOfStep(state.step ?? STEPS[0].id, example);
  const parts = new URLSearchParams();
  const put = (name, value, usual) => value !== usual && parts.set(name, value);
  const listed = (own) => Object.entries(own).map(([h, slope]) => `${h}:${slope}`).join(" ");
  put("step", start.step, STEPS[0].id);
  put("text", state.tokens.join(" "), start.tokens.join(" "));
  for (const name of ["variant", "schedule"]) put(name, state[name], start[name]);
  put("heads", state.numHeads, start.numHeads);
  put("head", state.head, start.head);
  put("row", state.row, start.row);
  for (const name of ["left", "right"]) put(name, listed(state[name]), listed(start[name]));
  return parts.toString();
}

// The reverse; what makes no sense is left at the start.
export function readState(text, example) {
  const parts = new URLSearchParams(text);
  const known = STEPS.some(({ id }) => id === parts.get("step"));
  const state = stateOfStep(known ? parts.get("step") : STEPS[0].id, example);
  const oneOf = (name, values) => {
    if (values.includes(parts.get(name))) state[name] = parts.get(name);
  };
  const number = (name, min, max) => {
    const found = Number(parts.get(name) || NaN);
    return Number.isInteger(found) && found >= min && found <= max ? found : null;
  };
  try {
    if (parts.has("text")) state.tokens = readTokens(parts.get("text"), example).tokens;
  } catch {
    // an empty text
  }
  oneOf("variant", VARIANTS);
  oneOf("schedule", example.schedules);
  state.numHeads = number("heads", 1, example.max_heads) ?? state.numHeads;
  if (state.variant === "directional") state.numHeads += state.numHeads % 2;
  state.head = number("head", 0, state.numHeads - 1) ?? Math.min(state.head, state.numHeads - 1);
  state.row = number("row", 0, state.tokens.length - 1) ?? Math.min(state.row, state.tokens.length - 1);
  for (const side of ["left", "right"]) {
    for (const [, head, slope] of (parts.get(side) ?? "").matchAll(/(\d+):(\S+)/g)) {
      if (Number(head) >= state.numHeads) continue;
      try {
        state[side] = { ...state[side], [Number(head)]: parseNumber(slope, 0, 1000) };
      } catch {
        // no slope
      }
    }
  }
  // What a step says holds for each of its heads and rows, and for nothing else.
  const step = stateOfStep(state.step, example);
  const { head, row } = step;
  if (stateText({ ...state, head, row }, example) !== stateText(step, example)) state.step = null;
  return state;
}
