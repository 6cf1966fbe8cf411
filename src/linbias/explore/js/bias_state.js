// What the bias explorer shows, as a plain object, and as the text behind # that brings it back.

import { attend, mean, sides, VARIANTS } from "./attention.js";
import { parseNumber } from "./controls.js";
import { MOST_NUMBERS } from "./heatmap.js";
import { general } from "./numbers.js";
import { vectors } from "./vectors.js";

export const QUANTITIES = [
  { value: "raw", label: "q \u00b7 k", name: "q \u00b7 k" },
  { value: "scaled", label: "scaled", name: "Scaled q \u00b7 k" },
  { value: "bias", label: "bias", name: "Bias" },
  { value: "biased", label: "scores", name: "Scores" },
  { value: "weight", label: "weights", name: "Weights" },
];
export const MEAN = "mean";
const LONGEST_TOKEN = 32;

// The chapter's example: symmetric, two heads with slopes 1/2 and 1/4, and its first query.
export function startState(example) {
  return {
    tokens: example.tokens,
    variant: "symmetric",
    schedule: "halving",
    numHeads: 2,
    head: 0,
    quantity: "weight",
    row: 0,
    compare: false,
    together: false,
    left: {}, // slopes set by hand, by head
    right: {},
  };
}

// A text as tokens, and what had to be cut.
export function readTokens(text, example) {
  const words = text.split(/\s+/u).filter(Boolean);
  if (words.length === 0) throw new Error("Needs at least one token.");
  const tokens = words.slice(0, example.max_tokens).map((word) => [...word].slice(0, LONGEST_TOKEN).join(""));
  const notes = [];
  if (words.length > tokens.length) {
    notes.push(`Cut to the first ${tokens.length} of ${words.length} tokens.`);
  }
  if (tokens.some((token, i) => token !== words[i])) {
    notes.push(`Tokens longer than ${LONGEST_TOKEN} characters are cut.`);
  }
  return { tokens, note: notes.join(" ") };
}

// The slopes of all heads: the schedule's, where none was set by hand.
export function slopesOf({ variant, numHeads, schedule, left, right }) {
  const base = sides(variant, numHeads, schedule);
  // What a model would learn is unknown: start with a right side four times as flat.
  if (variant === "asymmetric") base.right = base.left.map((slope) => slope / 4);
  const apply = (slopes, own) =>
    slopes.map((slope, h) => (slope === Infinity ? slope : (own[h] ?? slope)));
  return {
    left: apply(base.left, left),
    right: apply(base.right, variant === "asymmetric" ? right : left),
  };
}

// The sides on which a head sees keys, with their slopes.
export function openSides({ variant }, slopes, head) {
  const [left, right] = [slopes.left[head], slopes.right[head]];
  if (variant === "symmetric") return [{ side: "both", slope: left }];
  return [
    { side: "left", slope: left },
    { side: "right", slope: right },
  ].filter(({ slope }) => slope !== Infinity);
}

// compute(state) -> every head's vectors and steps, with the bias and without. What a change leaves as it was is
// not computed again: a slope changes one head, or all.
export function headComputer(example) {
  let text = "";
  let heads = [];
  const flat = (slope) => (slope === Infinity ? slope : 0); // a side that is hidden stays hidden
  return (state) => {
    const wanted = JSON.stringify([state.tokens, state.numHeads]);
    if (wanted !== text) heads = vectors(state.tokens, state.numHeads, example);
    text = wanted;
    const { left, right } = slopesOf(state);
    heads = heads.map((head, h) => {
      if (head.left === left[h] && head.right === right[h]) return head;
      const { q, k, v } = head;
      return {
        q,
        k,
        v,
        left: left[h],
        right: right[h],
        with: attend({ q, k, v, left: left[h], right: right[h] }),
        without: attend({ q, k, v, left: flat(left[h]), right: flat(right[h]) }),
      };
    });
    return heads;
  };
}

// The matrix to show, [T * S]: of one head, or the mean of all heads' weights.
export function matrixOf(heads, { head, quantity }, kind) {
  if (head === MEAN) return mean(heads.map((one) => one[kind].weight));
  return heads[head][kind][quantity];
}

// Among many keys most weights are small: their square roots spread them over more colours.
export function powerOf(quantity, tokens) {
  return quantity === "weight" && tokens.length > MOST_NUMBERS ? 0.5 : 1;
}

export function slopeText({ left, right }) {
  if (left === right || right === Infinity) return `slope ${general(left)}`;
  return left === Infinity ? `slope ${general(right)}` : `slopes ${general(left)}, ${general(right)}`;
}

// State as "head=2&left=0:0.1", only what differs from the start.
export function stateText(state, example) {
  const start = startState(example);
  const parts = new URLSearchParams();
  const put = (name, value, usual) => value !== usual && parts.set(name, value);
  put("text", state.tokens.join(" "), start.tokens.join(" "));
  for (const name of ["variant", "schedule", "quantity"]) put(name, state[name], start[name]);
  put("heads", state.numHeads, start.numHeads);
  put("head", state.head === MEAN ? MEAN : state.head + 1, 1);
  put("row", state.row + 1, 1);
  for (const name of ["compare", "together"]) put(name, state[name], false);
  for (const name of ["left", "right"]) {
    put(name, Object.entries(state[name]).map(([h, slope]) => `${Number(h) + 1}:${slope}`).join(" "), "");
  }
  return parts.toString();
}

// The reverse; what makes no sense is left at the start.
export function readState(text, example) {
  const parts = new URLSearchParams(text);
  const state = startState(example);
  const oneOf = (name, values, key = name) => {
    if (values.includes(parts.get(name))) state[key] = parts.get(name);
  };
  const number = (name, min, max) => {
    const found = Number(parts.get(name) ?? NaN);
    return Number.isInteger(found) && found >= min && found <= max ? found : null;
  };
  try {
    if (parts.has("text")) state.tokens = readTokens(parts.get("text"), example).tokens;
  } catch {
    // an empty text
  }
  oneOf("variant", VARIANTS);
  oneOf("schedule", example.schedules);
  oneOf("quantity", QUANTITIES.map(({ value }) => value));
  state.numHeads = number("heads", 1, example.max_heads) ?? state.numHeads;
  if (state.variant === "directional") state.numHeads += state.numHeads % 2;
  state.head = parts.get("head") === MEAN ? MEAN : (number("head", 1, state.numHeads) ?? 1) - 1;
  state.row = (number("row", 1, state.tokens.length) ?? 1) - 1;
  state.compare = parts.get("compare") === "true";
  state.together = parts.get("together") === "true";
  for (const side of ["left", "right"]) {
    for (const [, head, slope] of (parts.get(side) ?? "").matchAll(/(\d+):(\S+)/g)) {
      if (Number(head) < 1 || Number(head) > state.numHeads) continue;
      try {
        state[side][Number(head) - 1] = parseNumber(slope, 0, 1000);
      } catch {
        // no slope
      }
    }
  }
  if (state.head === MEAN) state.quantity = "weight";
  return state;
}
