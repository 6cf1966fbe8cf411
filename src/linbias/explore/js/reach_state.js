// What the view of near to far shows, and which of it a link may say.

import { slopes } from "./attention.js";
import { oneOf, readSaved, wholeUpTo } from "./saved.js";

export const LENGTHS = [256, 512, 1024, 2048, 4096];
export const HEADS = [1, 2, 4, 8, 12, 16];
export const BLOCKS = [8, 16, 32, 64];
export const NO_TOLERANCE = -61; // the slider's first position: nothing may be left out

export const REACH_RULES = {
  length: { is: oneOf(LENGTHS), start: 2048 },
  query: { is: wholeUpTo(LENGTHS.at(-1) - 1), start: null }, // null: the last
  heads: { is: oneOf(HEADS), start: 8 },
  tolerance: { is: (exponent) => NO_TOLERANCE <= exponent && exponent <= -2, start: -24 }, // of 2
  block: { is: oneOf(BLOCKS), start: 16 },
  both: { is: oneOf([0, 1]), start: false },
  head: { is: wholeUpTo(HEADS.at(-1) - 1), start: 2 },
  slope: { is: (slope) => 0 <= slope && slope <= 2, start: null }, // of the chosen head; null: that of the schedule
};

export function startOfReach(text) {
  return keptInBounds(readSaved(text, REACH_RULES));
}

// Another length keeps the query where it is, if there is such a key; another number of heads the head likewise.
export function changedReach(state, changes) {
  const slope = "heads" in changes || "head" in changes ? { slope: null } : {};
  return keptInBounds({ ...state, ...slope, ...changes });
}

function keptInBounds(state) {
  const query = state.query >= state.length - 1 ? null : state.query;
  return { ...state, query, head: Math.min(state.head, state.heads - 1) };
}

export function queryPosition(state) {
  return state.query ?? state.length - 1;
}

export function toleranceOf(state) {
  return state.tolerance === NO_TOLERANCE ? 0 : 2 ** state.tolerance;
}

export function headSlopesOf(state) {
  const all = slopes(state.heads, "paper");
  return all.map((slope, head) => (head === state.head && state.slope !== null ? state.slope : slope));
}
