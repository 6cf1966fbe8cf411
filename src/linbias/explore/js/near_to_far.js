// Attention near to far for one query, linbias/near_to_far.py restated: it reads blocks of keys from the
// nearest outwards and leaves a side as soon as a bound proves that all keys beyond hold at most `tolerance`
// of its probability.

export const LEFT = 0;
export const RIGHT = 1;

// A hash ("lowbias32") of an index, which Python can make as well.
function scramble(x) {
  x ^= x >>> 16;
  x = Math.imul(x, 0x7feb352d);
  x ^= x >>> 15;
  x = Math.imul(x, 0x846ca68b);
  return (x ^ (x >>> 16)) >>> 0;
}

// Numbers of mean 0 and variance 1 of an independent stream from an index on: the bytes of a hash added up
// are nearly normal.
export function normals(stream, count, from = 0) {
  const start = Math.imul(stream + 1, 0x9e3779b9) + from;
  return Float64Array.from({ length: count }, (_, i) => {
    const bits = scramble((start + i) | 0);
    const bytes = (bits & 255) + ((bits >>> 8) & 255) + ((bits >>> 16) & 255) + (bits >>> 24);
    return (bytes - 510) / 147.8;
  });
}

// The log of at least the sum of exp(-slope * i) over i below numKeys.
const logGeometric = (slope, numKeys) => Math.min(Math.log(numKeys), -Math.log(-Math.expm1(-slope)));

// How far a head can matter, from its slope and the largest norms of a query and its keys alone.
export function windowOf(slope, { qNorm, kNorm, numKeys }, tolerance) {
  const nats = 2 * qNorm * kNorm + logGeometric(slope, numKeys) - Math.log(tolerance);
  return Math.max(nats / slope, 0);
}

// What of one query, [size] and scaled, does not depend on slopes: scores without bias, and for both sides
// what none from key s outwards exceeds, by the mean key c:
//   q . k = q . c + q . (k - c) <= q . c + |q| |k - c|
export function prepareQuery({ query, keys, position }) {
  const size = query.length;
  const numKeys = keys.length / size;
  const center = query.map(() => 0);
  keys.forEach((value, i) => (center[i % size] += value / numKeys));
  const [dots, radius] = [1, 2].map(() => new Float64Array(numKeys));
  let kNorm = 0;
  for (let s = 0; s < numKeys; s += 1) {
    let [apart, squares] = [0, 0];
    for (let d = 0; d < size; d += 1) {
      const k = keys[s * size + d];
      dots[s] += query[d] * k;
      squares += k * k;
      apart += (k - center[d]) ** 2;
    }
    radius[s] = Math.sqrt(apart);
    kNorm = Math.max(kNorm, Math.sqrt(squares));
  }
  const atCenter = query.reduce((total, value, d) => total + value * center[d], 0);
  const qNorm = Math.hypot(...query);
  const most = (norms) => running(Math.max, norms);
  const farthest = [most(radius), most(radius.toReversed()).toReversed()];
  const largest = farthest.map((norms) => norms.map((norm) => atCenter + qNorm * norm));
  return { position, numKeys, dots, largest, qNorm, kNorm };
}

// What the values up to each one come to, from positive numbers.
function running(combine, values) {
  let all = 0;
  return values.map((value) => (all = combine(all, value)));
}

// The blocks [side, first, end] beyond the query's own key, near to far, both sides in turn.
function* blocksOutwards(position, numKeys, size) {
  let [left, right] = [position, position + 1];
  while (left > 0 || right < numKeys) {
    const [first, end] = [Math.max(0, left - size), Math.min(numKeys, right + size)];
    if (left > 0) yield [LEFT, first, left];
    if (right < numKeys) yield [RIGHT, right, end];
    [left, right] = [first, end];
  }
}

// One query near to far; an infinite slope hides its side. Gives the keys read, first .. end - 1; for each
// block the bound on it and all beyond (log), whether it is the `stop` and not read, and the share that is
// there; the `share` that a side may leave out; why each side ended; the weights and their sums `before`
// (keys 0 .. s) and `after`; and what was never read.
export function visit(prepared, { slopes, tolerance, block }) {
  const { position, numKeys, dots, largest } = prepared;
  const scores = dots.map((dot, s) => {
    const slope = slopes[s < position ? LEFT : RIGHT];
    return s === position ? dot : dot - slope * Math.abs(position - s);
  });
  const most = scores.reduce((a, b) => Math.max(a, b));
  const parts = scores.map((score) => Math.exp(score - most));
  const total = parts.reduce((a, b) => a + b);
  const weights = parts.map((part) => part / total);
  const sum = (a, b) => a + b;
  const before = running(sum, weights); // of keys 0 .. s, the smallest first
  const after = running(sum, weights.toReversed()).toReversed();
  const open = slopes.map((slope) => slope !== Infinity);
  const numSides = open[LEFT] && open[RIGHT] ? 2 : 1;
  const share = tolerance / numSides;
  const ended = open.map((isOpen) => (isOpen ? "keys" : "hidden"));
  const steps = [];
  let known = parts[position]; // of the keys read
  let [first, end] = [position, position + 1];
  for (const [side, from, to] of blocksOutwards(position, numKeys, block)) {
    if (!open[side]) continue;
    const nearest = side === LEFT ? to - 1 : from;
    const numLeft = side === LEFT ? to : numKeys - from;
    const slope = slopes[side];
    const highest = largest[side][nearest] - slope * Math.abs(position - nearest);
    const bound = highest + logGeometric(slope, numLeft) - most - Math.log(known);
    const stop = slope > 0 && bound <= Math.log(share);
    const outside = (side === LEFT ? before : after)[nearest];
    steps.push({ side, first: from, end: to, bound, stop, outside });
    if (stop) {
      open[side] = false;
      ended[side] = "bound";
      continue;
    }
    known += parts.subarray(from, to).reduce(sum, 0);
    [first, end] = [Math.min(first, from), Math.max(end, to)];
  }
  const leftOut = (before[first - 1] ?? 0) + (after[end] ?? 0);
  return { position, numKeys, first, end, steps, ended, share, weights, before, after, leftOut };
}

// How many keys a query may see.
export function numVisible({ position, numKeys }, slopes) {
  const [left, right] = slopes.map((slope) => slope !== Infinity);
  return 1 + (left ? position : 0) + (right ? numKeys - 1 - position : 0);
}
