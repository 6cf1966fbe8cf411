// Attention with linear biases in float64, as linbias.definition has it, and q, k and v for any text, as
// linbias.explore.vectors makes them. Pure functions of plain arrays.

import { SLOPES } from "./slopes.js";

export const VARIANTS = ["causal", "symmetric", "directional", "asymmetric"];

// linbias.slopes(numHeads, schedule), bit for bit: powers computed here could differ in the last.
export const slopes = (numHeads, schedule) => [...SLOPES[schedule][numHeads - 1]];

// Slopes to the left and to the right: an infinite one hides its side. Of a directional encoder's heads half
// look each way, each with the slopes of half as many heads.
export function sides(variant, numHeads, schedule) {
  const all = slopes(numHeads, schedule);
  if (variant === "causal") return { left: all, right: all.map(() => Infinity) };
  if (variant !== "directional") return { left: all, right: [...all] };
  const half = slopes(numHeads / 2, schedule);
  const none = half.map(() => Infinity);
  return { left: [...half, ...none], right: [...none, ...half] };
}

// Every step of one head: q, k, v have a row for each token; keys stand at the positions. Matrices are [T *
// S], row by row; output is [T * E].
export function attend({ q, k, v, left, right, positions = k.map((_, s) => s) }) {
  const [T, S, E] = [q.length, k.length, v[0].length];
  const scale = 1 / Math.sqrt(q[0].length);
  const matrices = Array.from({ length: 5 }, () => new Float64Array(T * S));
  const [raw, scaled, bias, scores, weights] = matrices;
  const output = new Float64Array(T * E);
  const lse = new Float64Array(T);
  for (let t = 0; t < T; t += 1) {
    const row = t * S;
    const p = t + S - T; // the last query stands at the last key
    let highest = -Infinity;
    for (let s = 0; s < S; s += 1) {
      raw[row + s] = q[t].reduce((sum, x, i) => sum + x * k[s][i], 0);
      scaled[row + s] = scale * raw[row + s];
      const slope = s <= p ? left : right;
      bias[row + s] = s === p ? 0 : biasAt(slope, Math.abs(positions[p] - positions[s]));
      scores[row + s] = scaled[row + s] + bias[row + s];
      highest = Math.max(highest, scores[row + s]);
    }
    let sum = 0;
    for (let s = 0; s < S; s += 1) sum += weights[row + s] = Math.exp(scores[row + s] - highest);
    for (let s = 0; s < S; s += 1) {
      weights[row + s] /= sum;
      for (let e = 0; e < E; e += 1) output[t * E + e] += weights[row + s] * v[s][e];
    }
    lse[t] = highest + Math.log(sum);
  }
  return { T, S, E, raw, scaled, bias, scores, weights, output, lse };
}

// 0 - 0 is 0, and -0 would be printed as such.
const biasAt = (slope, distance) => slope === Infinity ? -Infinity : 0 - slope * distance;

const SIZE = 2; // of a head

// q, k and v of each head: the chapter's where it gives them, else made from the token itself.
export function vectors(tokens, numHeads, example) {
  const rows = (role, head) =>
    tokens.map((token) => {
      const row = example[role][example.tokens.indexOf(token)];
      if (row && head * SIZE < row.length) return row.slice(head * SIZE, (head + 1) * SIZE);
      return [0, 1].map((i) => ((hash(`${role}${head}.${i} ${token}`) % 5) - 1) / 2);
    });
  return Array.from({ length: numHeads }, (_, head) => ({
    q: rows("q", head), k: rows("k", head), v: rows("v", head),
  }));
}

export const areChapters = (tokens, numHeads, example) =>
  numHeads <= 2 && tokens.every((token) => example.tokens.includes(token));

// FNV-1a of the text in UTF-8, its bits mixed once more.
function hash(text) {
  let state = 0x811c9dc5;
  for (const byte of new TextEncoder().encode(text)) state = Math.imul(state ^ byte, 0x01000193);
  state = Math.imul(state ^ (state >>> 16), 0x85ebca6b);
  return (state ^ (state >>> 13)) >>> 0;
}
