// Attention with linear biases in float64, as linbias.definition has it. Pure functions of plain arrays.

import { SLOPES } from "./slopes.js";

export const VARIANTS = ["causal", "symmetric", "directional", "asymmetric"];

// The slope of every head: linbias.slopes(numHeads, schedule), for up to 16 heads. The numbers are Python's, bit for
// bit: powers computed here could differ in the last one.
export const slopes = (numHeads, schedule) => [...SLOPES[schedule][numHeads - 1]];

// Slopes to the left and to the right: an infinite one hides its side. Of a directional encoder's heads, the
// first half looks left and the second half right, each with the slopes of half as many heads.
export function sides(variant, numHeads, schedule) {
  const all = slopes(numHeads, schedule);
  const hidden = all.map(() => Infinity);
  if (variant === "causal") return { left: all, right: hidden };
  if (variant !== "directional") return { left: all, right: [...all] };
  const half = slopes(numHeads / 2, schedule);
  const none = half.map(() => Infinity);
  return { left: [...half, ...none], right: [...none, ...half] };
}

// What the query at key p gives to the score of key s, that far away. A hidden key may stand where the query does.
function biasAt(p, s, distance, left, right) {
  const slope = s <= p ? left : right;
  if (s === p) return 0;
  return slope === Infinity ? -Infinity : 0 - slope * distance; // 0 - 0 is 0, and -0 would be printed as such
}

// Every step of one head. q, k, v: rows of numbers, a row for each token; left, right: the head's slopes; positions: where
// the keys stand, by default at 0, 1, 2 ... Matrices are [T * S], row by row; output is [T * E].
export function attend({ q, k, v, left, right, positions = k.map((_, s) => s), scale = 1 / Math.sqrt(q[0].length) }) {
  const T = q.length;
  const S = k.length;
  const E = v[0].length;
  const [raw, scaled, bias, scores, weights] = Array.from({ length: 5 }, () => new Float64Array(T * S));
  const output = new Float64Array(T * E);
  const lse = new Float64Array(T);
  for (let t = 0; t < T; t += 1) {
    const row = t * S;
    const p = t + S - T; // the last query stands at the last key
    let highest = -Infinity;
    for (let s = 0; s < S; s += 1) {
      raw[row + s] = dot(q[t], k[s]);
      scaled[row + s] = scale * raw[row + s];
      bias[row + s] = biasAt(p, s, Math.abs(positions[p] - positions[s]), left, right);
      scores[row + s] = scaled[row + s] + bias[row + s];
      highest = Math.max(highest, scores[row + s]);
    }
    const pivot = highest === -Infinity ? 0 : highest; // a row that sees no key gets weights of exactly 0
    let sum = 0;
    for (let s = 0; s < S; s += 1) {
      weights[row + s] = Math.exp(scores[row + s] - pivot);
      sum += weights[row + s];
    }
    for (let s = 0; s < S; s += 1) {
      weights[row + s] /= sum || 1;
      for (let e = 0; e < E; e += 1) output[t * E + e] += weights[row + s] * v[s][e];
    }
    lse[t] = pivot + Math.log(sum);
  }
  return { T, S, E, raw, scaled, bias, scores, weights, output, lse };
}

function dot(a, b) {
  let sum = 0;
  for (let i = 0; i < a.length; i += 1) sum += a[i] * b[i];
  return sum;
}

// The mean of several matrices of one size.
export function mean(matrices) {
  return matrices[0].map((_, i) => {
    let sum = 0;
    for (const matrix of matrices) sum += matrix[i];
    return sum / matrices.length;
  });
}
