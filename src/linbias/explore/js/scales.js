// From numbers to places on an axis, and numbers as charts and sentences show them.

import { general } from "./numbers.js";

// scaleOf({ low, high, from, to, log }): a function from numbers to pixels.
export function scaleOf({ low, high, from, to, log = false }) {
  const start = log ? Math.log(low) : low;
  const width = (log ? Math.log(high) : high) - start || 1;
  return (value) => from + (((log ? Math.log(value) : value) - start) / width) * (to - from);
}

// About `count` round numbers (1, 2 or 5 times a power of ten apart) within low .. high.
export function roundTicks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step + 0); // -0 would show its sign
  return ticks;
}

// About `count` powers of `base` within low .. high, evenly spaced.
export function powerTicks(low, high, base, count) {
  const first = Math.ceil(Math.log(low) / Math.log(base) - 1e-9);
  const last = Math.floor(Math.log(high) / Math.log(base) + 1e-9);
  const every = Math.max(1, Math.ceil((last - first) / Math.max(1, count)));
  const ticks = [];
  for (let exponent = last; exponent >= first; exponent -= every) ticks.unshift(base ** exponent);
  return ticks;
}

// The ticks that leave each other `room` pixels, the last one first.
export function ticksWithRoom(ticks, place, room) {
  const kept = [];
  for (const tick of [...ticks].reverse()) {
    if (kept.length === 0 || Math.abs(place(kept[0]) - place(tick)) >= room) kept.unshift(tick);
  }
  return kept;
}

// Middles for labels of these sizes between `from` and `to`, in the order of their wishes and as near to them as may be without
// one covering another: labels that would touch share the mean of what they want.
export function spread(wanted, sizes, from, to) {
  const order = wanted.map((_, i) => i).sort((a, b) => wanted[a] - wanted[b]);
  const groups = [];
  let before = 0; // the sizes of the labels so far
  for (const i of order) {
    let group = { sum: wanted[i] - sizes[i] / 2 - before, labels: [i] };
    before += sizes[i];
    while (groups.length && groups.at(-1).sum / groups.at(-1).labels.length > group.sum / group.labels.length) {
      const { sum, labels } = groups.pop();
      group = { sum: sum + group.sum, labels: [...labels, ...group.labels] };
    }
    groups.push(group);
  }
  const placed = [];
  let edge = 0;
  for (const { sum, labels } of groups) {
    const start = Math.max(from, Math.min(sum / labels.length, to - before));
    for (const i of labels) {
      placed[i] = start + edge + sizes[i] / 2;
      edge += sizes[i];
    }
  }
  return placed;
}

// How many decimals tell numbers `step` apart.
export const decimalsOf = (step) => Math.max(0, Math.min(6, -Math.floor(Math.log10(step) + 1e-9)));

// 2048 -> "2,048", whatever the reader's language: the page is written in one.
export const grouped = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 2 });

// -24 as raised figures.
export function superscript(exponent) {
  const figures = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079";
  return [...String(exponent)].map((sign) => (sign === "-" ? "\u207b" : figures[Number(sign)])).join("");
}

// 0.0000012 as 1.20 x 10 to the -6; numbers from 0.001 on as they are.
export function scientific(value, digits = 3) {
  if (value === 0) return "0";
  if (value >= 1e-3 && value < 1e4) return value.toPrecision(digits);
  const [figures, exponent] = value.toExponential(digits - 1).split("e");
  return `${figures}\u00a0\u00d7\u00a010${superscript(Number(exponent))}`;
}

// A slope as a fraction where it is one, 1/256, or in four digits.
export function slopeFraction(slope) {
  const inverse = 1 / slope;
  return slope > 0 && slope < 1 && Math.abs(inverse - Math.round(inverse)) < 1e-9 ? `1/${Math.round(inverse)}` : general(Number(slope.toPrecision(4)));
}
