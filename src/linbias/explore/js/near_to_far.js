// Attention near to far for one query: linbias/near_to_far.py restated, with what each step knew.
//
// A query reads blocks of keys from the nearest outwards and leaves a side as soon as a bound proves that all the
// keys not yet read hold at most `tolerance` of its probability. The names are those of the Python module.

export const LEFT = 0;
export const RIGHT = 1;

// Random numbers that Python can make as well: a hash of their index (32-bit, "lowbias32"), whose four bytes added
// up are nearly normal. No step rounds but the last division.
function hash(x) {
  x ^= x >>> 16;
  x = Math.imul(x, 0x7feb352d);
  x ^= x >>> 15;
  x = Math.imul(x, 0x846ca68b);
  return (x ^ (x >>> 16)) >>> 0;
}

// `count` numbers of mean 0 and variance 1; different streams are independent.
export function normals(stream, count) {
  const start = Math.imul(stream + 1, 0x9e3779b9);
  const numbers = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    const bits = hash((start + i) | 0);
    const sum = (bits & 255) + ((bits >>> 8) & 255) + ((bits >>> 16) & 255) + (bits >>> 24);
    numbers[i] = (sum - 510) / 147.8;
  }
  return numbers;
}

// Queries and keys of `numHeads` heads, each [length * size]; a longer sequence begins with the shorter one.
export function randomHeads(numHeads, length, size) {
  return Array.from({ length: numHeads }, (_, head) => ({
    q: normals(2 * head, length * size),
    k: normals(2 * head + 1, length * size),
  }));
}

// log min(numKeys, 1 / (1 - exp(-slope))): at most the sum of exp(-slope * i) for i = 0 .. numKeys - 1.
export function logGeometric(slope, numKeys) {
  return Math.min(Math.log(numKeys), -Math.log(-Math.expm1(-slope)));
}

// How far a head can matter, from its slope and the largest norms of queries and keys alone.
export function windowOf(slope, qNorm, kNorm, scale, tolerance, numKeys) {
  if (slope === Infinity) return 0;
  if (slope === 0) return Infinity;
  const nats = 2 * Math.abs(scale) * qNorm * kNorm + logGeometric(slope, numKeys) - Math.log(tolerance);
  return Math.max(nats / slope, 0);
}

// The length of each row of [n * size].
export function norms(x, size) {
  const found = new Float64Array(x.length / size);
  for (let row = 0; row < found.length; row++) {
    let squares = 0;
    for (let i = row * size; i < (row + 1) * size; i++) squares += x[i] * x[i];
    found[row] = Math.sqrt(squares);
  }
  return found;
}

// The score without bias that no key from key s outwards exceeds, for LEFT and RIGHT:
// q . k = q . c + q . (k - c) <= q . c + |q| |k - c| with c the mean key.
function largestScores(q, k, size) {
  const numKeys = k.length / size;
  const center = new Float64Array(size);
  for (let i = 0; i < k.length; i++) center[i % size] += k[i];
  for (let d = 0; d < size; d++) center[d] /= numKeys;
  const radius = norms(k.map((value, i) => value - center[i % size]), size);
  let atCenter = 0;
  for (let d = 0; d < size; d++) atCenter += q[d] * center[d];
  const qNorm = norms(q, size)[0];
  const toLeft = new Float64Array(numKeys);
  const toRight = new Float64Array(numKeys);
  for (let s = 0, largest = 0; s < numKeys; s++) {
    largest = Math.max(largest, radius[s]);
    toLeft[s] = atCenter + qNorm * largest;
  }
  for (let s = numKeys - 1, largest = 0; s >= 0; s--) {
    largest = Math.max(largest, radius[s]);
    toRight[s] = atCenter + qNorm * largest;
  }
  return [toLeft, toRight];
}

// The blocks (side, first, end) beyond the query's own key, near to far, both sides in turn.
function* blocksOutwards(position, numKeys, size) {
  let left = position;
  let right = position + 1;
  while (left > 0 || right < numKeys) {
    if (left > 0) {
      yield [LEFT, Math.max(0, left - size), left];
      left = Math.max(0, left - size);
    }
    if (right < numKeys) {
      yield [RIGHT, right, Math.min(numKeys, right + size)];
      right = Math.min(numKeys, right + size);
    }
  }
}

// One query near to far.
//
//   query      [size], not scaled           keys       [numKeys * size]
//   position   of the query, a key's index  slopes     [left, right]; Infinity hides a side, 0 never stops
//   tolerance  in [0, 1), 0 reads all       block      keys of a block
//
// Gives the keys read, first .. end - 1; the steps {side, first, end, bound, read, outside}: the bound on the share
// of the step's keys and all beyond them (log), and the share that they really hold; for each side why it ended
// ("bound", "keys": there are no more, "hidden"); and leftOut, the probability that was never read.
export function visit({ query, keys, position, scale, slopes, tolerance, block }) {
  const size = query.length;
  const numKeys = keys.length / size;
  const q = query.map((value) => value * scale);
  const scores = new Float64Array(numKeys);
  for (let s = 0; s < numKeys; s++) {
    const distance = position - s;
    const slope = distance > 0 ? slopes[LEFT] : slopes[RIGHT];
    let dot = 0;
    for (let d = 0; d < size; d++) dot += q[d] * keys[s * size + d];
    scores[s] = distance === 0 ? dot : dot - slope * Math.abs(distance);
  }
  const weights = softmax(scores);
  const largest = largestScores(q, keys, size);
  const open = slopes.map((slope) => slope !== Infinity);
  const share = open[LEFT] && open[RIGHT] ? tolerance / 2 : tolerance;
  const ended = open.map((isOpen) => (isOpen ? "keys" : "hidden"));
  const steps = [];
  let rowMax = scores[position];
  let rowSum = 1;
  let first = position;
  let end = position + 1;
  for (const [side, from, to] of blocksOutwards(position, numKeys, block)) {
    if (!open[side]) continue;
    const nearest = side === LEFT ? to - 1 : from;
    const numLeft = side === LEFT ? to : numKeys - from;
    const slope = slopes[side];
    const tail = largest[side][nearest] - slope * Math.abs(position - nearest) + logGeometric(slope, numLeft);
    const bound = tail - rowMax - Math.log(rowSum);
    const stop = slope > 0 && share > 0 && bound <= Math.log(share);
    const outside = side === LEFT ? sum(weights, 0, to) : sum(weights, from, numKeys);
    steps.push({ side, first: from, end: to, bound, read: !stop, outside });
    if (stop) {
      open[side] = false;
      ended[side] = "bound";
      continue;
    }
    const newMax = Math.max(rowMax, ...scores.subarray(from, to));
    rowSum *= Math.exp(rowMax - newMax);
    rowMax = newMax;
    for (let s = from; s < to; s++) rowSum += Math.exp(scores[s] - rowMax);
    first = Math.min(first, from);
    end = Math.max(end, to);
  }
  const leftOut = sum(weights, 0, first) + sum(weights, end, numKeys);
  return { first, end, steps, ended, share, leftOut, weights };
}

function softmax(scores) {
  const largest = scores.reduce((a, b) => Math.max(a, b), -Infinity);
  const weights = scores.map((score) => Math.exp(score - largest));
  const total = sum(weights, 0, weights.length);
  return weights.map((weight) => weight / total);
}

function sum(values, first, end) {
  let total = 0;
  for (let i = first; i < end; i++) total += values[i];
  return total;
}
