// The attention weights of a trained model as linbias.explore.reading packs them: 16 bits each, row after row.


// -> { row(layer, head, query), matrix(layer, head), small(layer, head, side) }; keys that a causal query does not see are
// absent from its row, and -Infinity in the matrix. `small` is a picture of `side` x `side`, whose values have a scale of their own.
export function unpackWeights({ weights, num_tokens: T, num_heads: numHeads, causal }) {
  const bytes = Uint8Array.from(atob(weights), (letter) => letter.charCodeAt(0));
  const packed = Uint16Array.from({ length: bytes.length / 2 }, (_, i) => bytes[2 * i] + 256 * bytes[2 * i + 1]);
  const size = causal ? (T * (T + 1)) / 2 : T * T;
  const startOf = (query) => (causal ? (query * (query + 1)) / 2 : query * T);
  const lengthOf = (query) => (causal ? query + 1 : T);

  function integers(layer, head, query) {
    const start = (layer * numHeads + head) * size + startOf(query);
    return packed.subarray(start, start + lengthOf(query));
  }

  const row = (layer, head, query) => Float64Array.from(integers(layer, head, query), (integer) => integer / 65535);

  function matrix(layer, head) {
    const values = new Float64Array(T * T).fill(-Infinity);
    for (let t = 0; t < T; t++) values.set(row(layer, head, t), t * T);
    return values;
  }

  return { row, matrix, small: (layer, head, side) => shrunk(T, side, (query) => integers(layer, head, query)) };
}

// A picture of `side` x `side` of a matrix whose rows `rowOf` gives: of each block of cells the largest.
export function shrunk(numRows, side, rowOf) {
  const values = new Float64Array(side * side);
  const places = Uint16Array.from({ length: numRows }, (_, i) => Math.floor((i * side) / numRows));
  for (let t = 0; t < numRows; t++) {
    const [start, row] = [places[t] * side, rowOf(t)];
    for (let s = 0; s < row.length; s++) {
      const at = start + places[s];
      if (row[s] > values[at]) values[at] = row[s];
    }
  }
  return values;
}

// Of one row: the mean distance of its weight, and the smallest distance within which `share` of it lies.
export function reachOfRow(row, query, share = 0.9) {
  const byDistance = new Float64Array(row.length);
  let [total, mean] = [0, 0];
  row.forEach((weight, s) => {
    byDistance[Math.abs(query - s)] += weight;
    total += weight;
    mean += weight * Math.abs(query - s);
  });
  let [within, sum] = [0, byDistance[0]];
  while (sum < share * total && within < row.length - 1) sum += byDistance[++within];
  return { mean: mean / total, within };
}

// The weights that a query would give if all its keys were alike, so that the bias alone decided. A slope that is null
// hides its side; where `right` is undefined, both sides have one slope.
export function weightsOfBias({ left, right = left }, query, numKeys) {
  const weightAt = (slope, distance) => (slope === null ? Number(distance === 0) : Math.exp(-slope * distance));
  const parts = Float64Array.from({ length: numKeys }, (_, s) => (s > query ? weightAt(right, s - query) : weightAt(left, query - s)));
  const total = parts.reduce((a, b) => a + b, 0);
  return parts.map((part) => part / total);
}
