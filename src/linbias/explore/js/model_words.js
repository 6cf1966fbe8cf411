// What the view of a trained model says in sentences, and how it names heads.

import { fixed } from "./numbers.js";
import { grouped, slopeFraction } from "./scales.js";
import { reachOfRow } from "./weights.js";

// "1/8"; of heads whose two sides differ "1/8 before, 1/4 after", and "1/8 after" where one is hidden; null without slopes.
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

// The head on which the view opens: the one that departs most from its bias, and without biases the one that looks farthest.
export function openingHead({ departure, reach }) {
  const values = departure ?? reach.mean;
  const flat = values.flatMap((row, layer) => row.map((value, head) => ({ layer, head, value })));
  return flat.reduce((best, one) => (one.value > best.value ? one : best));
}

export function openingWords(reading) {
  const { layer, head, value } = openingHead(reading);
  const slope = slopeName(reading, head);
  const name = `Layer ${layer}, head ${head}${slope === null ? "" : ` (slope ${slope})`}`;
  const tokens = (distances) => distances[layer][head].toFixed(1);
  const back = `${tokens(reading.reach.mean)} tokens ${reading.causal ? "back" : "away"} on average`;
  if (reading.departure === null) return { name, rest: ` looks farthest: ${back}. There is no bias to compare it with.` };
  const bias = reading.alone.mean[head].toFixed(1);
  const mean = reading.departure.flat().reduce((a, b) => a + b, 0) / (reading.num_layers * reading.num_heads);
  return {
    name,
    rest:
      ` departs most from its bias: ${wholePercent(value)} of its weight lies elsewhere than the bias alone would put it. It looks ${back}, ` +
      `by its bias alone it would look ${bias}. All heads depart by ${wholePercent(mean)} on average.`,
  };
}

export function storyOfRow(row, query, names, causal) {
  const { mean, within } = reachOfRow(row, query);
  const most = row.reduce((best, weight, s) => (weight > row[best] ? s : best), 0);
  const on = most === query ? "itself" : `${names[most]} (${placeOf(most, query)})`;
  return (
    `Token ${names[query]} looks ${mean.toFixed(1)} tokens ${causal ? "back" : "away"} on average; ` +
    `90% of its weight lies within ${within}. Most is on ${on}: ${fixed(row[most])}.`
  );
}

export function placeOf(key, query) {
  if (key === query) return "itself";
  return key < query ? `${query - key} before` : `${key - query} after`;
}

// What becomes of the losses beyond the training length, model by model; empty where none reads on.
export function lossWords(readings, labelOf, unit) {
  const trained = readings.filter(({ losses }) => losses.within !== null);
  const reading = trained.filter(({ losses }) => losses.beyond !== null);
  if (reading.length === 0) return "";
  const changes = reading.map((one, i) => {
    const { within, beyond } = one.losses;
    return `from ${within.toFixed(2)} to ${beyond.toFixed(2)}${i === 0 ? ` bits per ${unit}` : ""} with ${labelOf(one)}`;
  });
  const stopped = trained.filter(({ losses }) => losses.beyond === null).map((one) => `; ${labelOf(one)} cannot read on`);
  return `Past the ${grouped(reading[0].train_length)} tokens of training, the loss goes ${changes.join(", ")}${stopped.join("")}.`;
}

export const wholePercent = (share) => `${(100 * share).toFixed(0)}%`;
