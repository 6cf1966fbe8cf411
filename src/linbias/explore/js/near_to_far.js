// Attention near to far for one query: linbias/near_to_far.py restated, with what each step knew.
//
// A query reads blocks of keys from the nearest outwards and leaves a side as soon as a bound proves that all the
// keys not yet read hold at most `tolerance` of its probability. The names are those of the Python module.


export const LEFT = 0;
export const RIGHT = 1;

// Random numbers that Python can make as well: a hash of their index (32-bit, "lowbias32"), whose four bytes added
// up are nearly normal. No step rounds but the last division.
function scramble(x) {
  x ^= x >>> 16;
  x = Math.imul(x, 0x7feb352d);
  x ^= x >>> 15;
  x = Math.imul(x, 0x846ca68b);
  return (x ^ (x >>> 16)) >>> 0;
}

// `count` numbers of mean 0 and variance 1, beginning with number `from` of a stream; streams are independent.
export function normals(stream, count, from = 0) {
  const start = Math.imul(stream + 1, 0x9e3779b9) + from;
  const numbers = new Float64Array(count);
  for (let i = 0; i < count; i++) {
    const bits = scramble((start + i) | 0);
    const bytes = (bits & 255) + ((bits >>> 8) & 255) + ((bits >>> 16) & 255) + (bits >>> 24);
    numbers[i] = (bytes - 510) / 147.8;
  }
  return numbers;
}

// log min(numKeys, 1 / (1 - exp(-slope))): at most the sum of exp(-slope * i) for i = 0 .. numKeys - 1.
const logGeometric = (slope, numKeys) => Math.min(Math.log(numKeys), -Math.log(-Math.expm1(-slope)));

// How far a head can matter, from its slope and the largest norms of queries and keys alone.
export function windowOf(slope, qNorm, kNorm, scale, tolerance, numKeys) {
  if (slope === Infinity) return 0;
  if (slope === 0) return Infinity;
  const nats = 2 * Math.abs(scale) * qNorm * kNorm + logGeometric(slope, numKeys) - Math.log(tolerance);
  return Math.max(nats / slope, 0);
}

// What of one query does not depend on slopes and tolerance.
//
//   query [size]   keys [numKeys * size]   position: the key at which the query stands
//
// Gives `dots`, the scores without bias; `largest`, for LEFT and RIGHT the score without bias that no key from key s
// outwards exceeds, q . k = q . c + q . (k - c) <= q . c + |q| |k - c| with c the mean key; and the largest norms.
export function prepareQuery({ query, keys, position, scale }) {
  const size = query.length;
  const numKeys = keys.length / size;
  const q = query.map((value) => value * scale);
  const center = new Float64Array(size);
  for (let i = 0; i < keys.length; i += size) for (let d = 0; d < size; d++) center[d] += keys[i + d];
  for (let d = 0; d < size; d++) center[d] /= numKeys;
  const [dots, radius] = [new Float64Array(numKeys), new Float64Array(numKeys)];
  let kNorm = 0;
  for (let s = 0; s < numKeys; s++) {
    let [apart, squares] = [0, 0];
    for (let d = 0; d < size; d++) {
      const k = keys[s * size + d];
      dots[s] += q[d] * k;
      squares += k * k;
      apart += (k - center[d]) ** 2;
    }
    radius[s] = Math.sqrt(apart);
    kNorm = Math.max(kNorm, Math.sqrt(squares));
  }
  const atCenter = q.reduce((total, value, d) => total + value * center[d], 0);
  const qNorm = Math.hypot(...q);
  const farthest = [runningMax(radius), runningMax(radius.toReversed()).toReversed()];
  const largest = farthest.map((norms) => norms.map((norm) => atCenter + qNorm * norm));
  return { position, numKeys, dots, largest, qNorm: qNorm / Math.abs(scale), kNorm, scale };
}

function runningMax(values) {
  let most = -Infinity;
  return values.map((value) => (most = Math.max(most, value)));
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
//   slopes     [left, right]; Infinity hides a side, 0 never stops
//   tolerance  in [0, 1), 0 reads all
//   block      keys of a block
//
// Gives the keys read, first .. end - 1; the steps { side, first, end, bound, read, outside }: the bound on the share
// of the step's keys and all beyond them (log), and the share that they really hold; for each side why it ended
// ("bound", "keys": there are no more, "hidden"); `share`, the tolerance of a side; the weights of all keys and
// their sums `before` (of keys 0 .. s) and `after` (of keys s and beyond); and `leftOut`, what was never read.
export function visit(prepared, { slopes, tolerance, block }) {
  const { position, numKeys, dots, largest } = prepared;
  const scores = new Float64Array(numKeys); // the query's own key has a bias of 0, even where a slope is infinite
  for (let s = 0; s < position; s++) scores[s] = dots[s] - slopes[LEFT] * (position - s);
  scores[position] = dots[position];
  for (let s = position + 1; s < numKeys; s++) scores[s] = dots[s] - slopes[RIGHT] * (s - position);
  const weights = softmax(scores);
  const before = runningSum(weights); // of keys 0 .. s, the smallest first
  const after = runningSum(weights.toReversed()).toReversed();
  const open = slopes.map((slope) => slope !== Infinity);
  const share = open[LEFT] && open[RIGHT] ? tolerance / 2 : tolerance;
  const ended = open.map((isOpen) => (isOpen ? "keys" : "hidden"));
  const steps = [];
  let rowMax = scores[position];
  let rowSum = 1;
  let [first, end] = [position, position + 1];
  for (const [side, from, to] of blocksOutwards(position, numKeys, block)) {
    if (!open[side]) continue;
    const nearest = side === LEFT ? to - 1 : from;
    const numLeft = side === LEFT ? to : numKeys - from;
    const slope = slopes[side];
    const tail = largest[side][nearest] - slope * Math.abs(position - nearest) + logGeometric(slope, numLeft);
    const bound = tail - rowMax - Math.log(rowSum);
    const stop = slope > 0 && share > 0 && bound <= Math.log(share);
    steps.push({ side, first: from, end: to, bound, read: !stop, outside: side === LEFT ? before[nearest] : after[nearest] });
    if (stop) {
      open[side] = false;
      ended[side] = "bound";
      continue;
    }
    let newMax = rowMax;
    for (let s = from; s < to; s++) newMax = Math.max(newMax, scores[s]);
    rowSum *= Math.exp(rowMax - newMax);
    for (let s = from; s < to; s++) rowSum += Math.exp(scores[s] - newMax);
    rowMax = newMax;
    first = Math.min(first, from);
    end = Math.max(end, to);
  }
  const leftOut = (before[first - 1] ?? 0) + (after[end] ?? 0);
  return { position, numKeys, first, end, steps, ended, share, weights, before, after, leftOut };
}

// How many keys a query may see.
export function numVisible({ position, numKeys }, slopes) {
  return 1 + (slopes[LEFT] === Infinity ? 0 : position) + (slopes[RIGHT] === Infinity ? 0 : numKeys - 1 - position);
}

function softmax(scores) {
  let [most, total] = [-Infinity, 0];
  for (let s = 0; s < scores.length; s++) most = Math.max(most, scores[s]);
  const weights = new Float64Array(scores.length);
  for (let s = 0; s < scores.length; s++) {
    weights[s] = scores[s] === -Infinity ? 0 : Math.exp(scores[s] - most);
    total += weights[s];
  }
  for (let s = 0; s < scores.length; s++) weights[s] /= total;
  return weights;
}

function runningSum(values) {
  const sums = new Float64Array(values.length);
  let total = 0;
  for (let i = 0; i < values.length; i++) sums[i] = total += values[i];
  return sums;
}
