// The weights of a trained model, what they say of heads and rows, and the view's sentences.

import { prose } from "./dom.js";
import { fixed, grouped, slopeFraction, wholePercent } from "./numbers.js";

// Weights of 16 bits, row after row, as linbias.explore.reading packs them. Keys that a causal query does not
// see are absent from its row, and -Infinity in the matrix.
export function unpackWeights({ weights, num_tokens: T, num_heads: numHeads, causal }) {
  const bytes = Uint8Array.from(atob(weights), (letter) => letter.charCodeAt(0));
  const packed = new Uint16Array(bytes.buffer);
  const startOf = (query) => (causal ? (query * (query + 1)) / 2 : query * T);

  function integers(layer, head, query) {
    const start = (layer * numHeads + head) * startOf(T);
    return packed.subarray(start + startOf(query), start + startOf(query + 1));
  }

  const row = (...at) => Float64Array.from(integers(...at), (integer) => integer / 65535);

  function matrix(layer, head) {
    const values = new Float64Array(T * T).fill(-Infinity);
    for (let t = 0; t < T; t += 1) values.set(row(layer, head, t), t * T);
    return values;
  }

  const small = (layer, head, side) => shrunk(T, side, (t) => integers(layer, head, t));
  return { row, matrix, small };
}

// A picture of a matrix whose rows `rowOf` gives: of a block of cells the largest.
export function shrunk(numRows, side, rowOf) {
  const values = new Float64Array(side * side);
  const pixelOf = (i) => Math.floor((i * side) / numRows);
  for (let t = 0; t < numRows; t += 1) {
    rowOf(t).forEach((value, s) => {
      const at = pixelOf(t) * side + pixelOf(s);
      values[at] = Math.max(values[at], value);
    });
  }
  return values;
}

// The mean distance of a row's weight, and the smallest distance within which `share` of it lies.
function reachOfRow(row, query, share = 0.9) {
  const byDistance = new Float64Array(row.length);
  row.forEach((weight, s) => (byDistance[Math.abs(query - s)] += weight));
  const total = row.reduce((a, b) => a + b);
  const mean = byDistance.reduce((sum, weight, distance) => sum + weight * distance, 0) / total;
  let [within, sum] = [0, byDistance[0]];
  while (sum < share * total && within < row.length - 1) sum += byDistance[++within];
  return { mean, within };
}

// What the bias alone would make of a query's row; a slope that is null hides its side.
export function rowOfBias(reading, head, query) {
  const { slopes, right_slopes: rightSlopes, causal, num_tokens: T } = reading;
  const parts = Float64Array.from({ length: causal ? query + 1 : T }, (_, s) => {
    const slope = (s > query ? (rightSlopes ?? slopes) : slopes)[head];
    return slope === null ? Number(s === query) : Math.exp(-slope * Math.abs(s - query));
  });
  const total = parts.reduce((a, b) => a + b, 0);
  return parts.map((part) => part / total);
}

// "1/8"; of heads whose sides differ "1/8 before, 1/4 after"; null without slopes.
export function slopeName({ slopes, right_slopes: rightSlopes }, head) {
  if (slopes === null) return null;
  if (rightSlopes === null) return shortSlope(slopes[head]);
  const sides = [[slopes[head], "before"], [rightSlopes[head], "after"]];
  const seen = sides.filter(([slope]) => slope !== null);
  return seen.map(([slope, side]) => `${shortSlope(slope)} ${side}`).join(", ");
}

function shortSlope(slope) {
  const fraction = slopeFraction(slope);
  return fraction.includes("/") ? fraction : String(Number(slope.toPrecision(2)));
}

// "Layer 0, head 3, slope 1/64"
export function headWords(reading, layer, head) {
  const slope = slopeName(reading, head);
  return `Layer ${layer}, head ${head}${slope === null ? "" : `, slope ${slope}`}`;
}

// The head that departs most from its bias; without biases the one that looks farthest.
export function openingHead({ departure, reach }) {
  const values = departure ?? reach;
  const all = values.flatMap((row, layer) => row.map((value, head) => ({ layer, head, value })));
  return all.reduce((best, one) => (one.value > best.value ? one : best));
}

// The name of that head, and what is said of it.
export function openingWords(reading) {
  const { layer, head, value } = openingHead(reading);
  const name = headWords(reading, layer, head).replace(/, (slope .*)/, " ($1)");
  const tokens = reading.reach[layer][head].toFixed(1);
  const back = `${tokens} tokens ${reading.causal ? "back" : "away"} on average`;
  if (reading.departure === null) {
    return [name, ` looks farthest: ${back}. There is no bias to compare it with.`];
  }
  const alone = reading.alone[head].toFixed(1);
  const departures = reading.departure.flat();
  const mean = departures.reduce((a, b) => a + b, 0) / departures.length;
  const rest = prose` departs most from its bias: ${wholePercent(value)} of its weight lies elsewhere than the
    bias alone would put it. It looks ${back}, by its bias alone it would look ${alone}. All heads depart by
    ${wholePercent(mean)} on average.`;
  return [name, rest];
}

export function storyOfRow(row, query, names, causal) {
  const { mean, within } = reachOfRow(row, query);
  const most = row.reduce((best, weight, s) => (weight > row[best] ? s : best), 0);
  const on = most === query ? "itself" : `${names[most]} (${placeOf(most, query)})`;
  return prose`Token ${names[query]} looks ${mean.toFixed(1)} tokens ${causal ? "back" : "away"} on average;
    90% of its weight lies within ${within}. Most is on ${on}: ${fixed(row[most])}.`;
}

export function placeOf(key, query) {
  if (key === query) return "itself";
  return key < query ? `${query - key} before` : `${key - query} after`;
}

// What becomes of losses past the training length, model by model; empty where none reads on.
export function lossWords(readings, labelOf, unit) {
  const trained = readings.filter(({ losses }) => losses.within !== null);
  const [reading, stopped] = [true, false].map((readsOn) =>
    trained.filter(({ losses }) => (losses.beyond !== null) === readsOn),
  );
  if (reading.length === 0) return "";
  const changes = reading.map((one, i) => {
    const [within, beyond] = [one.losses.within, one.losses.beyond].map((loss) => loss.toFixed(2));
    return `from ${within} to ${beyond}${i === 0 ? ` bits per ${unit}` : ""} with ${labelOf(one)}`;
  });
  const ends = stopped.map((one) => `; ${labelOf(one)} cannot read on`).join("");
  const tokens = grouped(reading[0].train_length);
  return `Past the ${tokens} tokens of training, the loss goes ${changes.join(", ")}${ends}.`;
}
