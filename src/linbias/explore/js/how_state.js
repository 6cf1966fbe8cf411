// What the view "How" shows: the steps of a tour, its state, and the numbers that follow from it.

import { attend, sides, VARIANTS, vectors } from "./attention.js";
import { parseNumber, tokensOrNull } from "./controls.js";
import { prose } from "./dom.js";
import { slopeFraction } from "./numbers.js";
import { oneOf, readSaved, savedText, wholeUpTo } from "./saved.js";

// Each step is a state of the view, and a sentence on what to look at.
export const STEPS = [
  {
    id: "sum", label: "Scores plus bias",
    says: prose`Every cell of the first matrix gets the bias of its place in the second, which is lower the
      further a key stands from the query. Softmax makes weights of each row of sums.`,
    state: {},
  },
  {
    id: "plain", label: "Slope 0 is plain attention",
    says: prose`With slope 0 the bias is 0 everywhere: the weights follow q \u00b7 k alone, however far apart
      two words stand. Move the slope up from here.`,
    state: { left: { 0: 0 } },
  },
  {
    id: "row", label: "One word\u2019s row",
    says: prose`The query of \u201con\u201d is all zeros, so all its scores are 0 and the bias alone decides:
      most weight on itself, less with every step away.`,
    state: { row: 3 },
  },
  {
    id: "future", label: "Hide the future",
    says: prose`A language model may not read ahead: keys after the query are hidden (hatched), and each row
      shares its weight among the words so far.`,
    state: { variant: "causal", row: 4 },
  },
  {
    id: "heads", label: "A steep and a flat head",
    says: prose`Eight heads with the paper\u2019s slopes, from 1/2 to 1/256. Choose among the small pictures:
      head 0 sees the nearest words, head 7 nearly all alike.`,
    state: { numHeads: 8, schedule: "paper", variant: "causal", words: 8, row: 7 },
  },
];

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

// The rules of saved.js; all but the step begin as the step has them.
function rulesOf(example) {
  const always = () => true;
  const upTo = (most) => (value, state) => wholeUpTo(most(state))(value);
  const rules = {
    step: { start: STEPS[0].id, is: oneOf(STEPS.map(({ id }) => id)), read: String },
    tokens: { name: "text", is: always, read: (text) => tokensOrNull(text, example) },
    variant: { is: oneOf(VARIANTS), read: String },
    schedule: { is: oneOf(example.schedules), read: String },
    numHeads: { name: "heads", is: (n) => n >= 1 && wholeUpTo(example.max_heads)(n) },
    head: { is: upTo(({ numHeads }) => numHeads - 1) },
    row: { is: upTo(({ tokens }) => tokens.length - 1) },
    left: { is: always, read: readSlopes },
    right: { is: always, read: readSlopes },
  };
  for (const [name, rule] of Object.entries(rules)) {
    rule.start ??= ({ step }) => stateOfStep(step, example)[name];
  }
  return rules;
}

// "0:0.1 2:1/8" as slopes by head, of what is a slope and of a head.
function readSlopes(text, { numHeads }) {
  const own = {};
  for (const [, head, slope] of text.matchAll(/(\d+):(\S+)/g)) {
    try {
      if (Number(head) < numHeads) own[Number(head)] = parseNumber(slope, 0, 1000);
    } catch {
      // no slope
    }
  }
  return own;
}

// State as "head=2&left=0:0.1", only what differs from its step, or from the first.
export const stateText = (state, example) =>
  savedText({ ...state, step: state.step ?? STEPS[0].id }, rulesOf(example));

export function readState(text, example) {
  const state = readSaved(text, rulesOf(example));
  state.numHeads = evenHeads(state.variant, state.numHeads);
  state.row = Math.min(state.row, state.tokens.length - 1);
  // What a step says holds for each of its heads and rows, and for nothing else.
  const start = stateOfStep(state.step, example);
  const { head, row } = start;
  if (stateText({ ...state, head, row }, example) !== stateText(start, example)) state.step = null;
  return state;
}

// A directional encoder has as many heads that look left as right.
export const evenHeads = (variant, count) => variant === "directional" ? count + (count % 2) : count;

// The slopes of all heads: the schedule's, where none was set by hand.
export function slopesOf({ variant, numHeads, schedule, left, right }) {
  const base = sides(variant, numHeads, schedule);
  // What a model would learn is unknown: start with a right side four times as flat.
  if (variant === "asymmetric") base.right = base.left.map((slope) => slope / 4);
  const apply = (slopes, own) => slopes.map((slope, h) => (slope === Infinity ? slope : (own[h] ?? slope)));
  const ownRight = variant === "asymmetric" ? right : left;
  return { left: apply(base.left, left), right: apply(base.right, ownRight) };
}

// The sides on which a head sees keys, with their slopes.
export function openSides({ variant }, slopes, head) {
  const [left, right] = [slopes.left[head], slopes.right[head]];
  if (variant === "symmetric") return [{ side: "both", slope: left }];
  const both = [{ side: "left", slope: left }, { side: "right", slope: right }];
  return both.filter(({ slope }) => slope !== Infinity);
}

// What a change leaves as it was is not computed again: a slope changes one head.
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
      const without = attend({ q, k, v, left: flat(left), right: flat(right) });
      return { q, k, v, left, right, with: attend({ q, k, v, left, right }), without };
    });
    return heads;
  };
}

export function slopeText({ left, right }) {
  const [first, second] = [left, right].map(slopeFraction);
  if (left === right || right === Infinity) return `slope ${first}`;
  return left === Infinity ? `slope ${second}` : `slopes ${first}, ${second}`;
}
