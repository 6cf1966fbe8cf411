// A slider of slopes: 0, then powers of two from 2^-10 to 2^1 in steps of an eighth of a power, and any number by typing.

import { parseNumber, slider } from "./controls.js";
import { general } from "./numbers.js";

const MOST_SLOPE = 1000;
const EIGHTHS = 11 * 8 + 1;

function slopeAt(position) {
  return position === 0 ? 0 : 2 ** ((position - 1) / 8 - 10);
}

function positionOf(slope) {
  if (slope === 0) return 0;
  return Math.min(Math.max(Math.round((Math.log2(slope) + 10) * 8) + 1, 1), EIGHTHS);
}

export function slopeSlider(label, onInput) {
  return slider({
    label,
    min: 0,
    max: EIGHTHS,
    value: 0,
    onInput,
    toText: general,
    toValue: slopeAt,
    toPosition: positionOf,
    parse: (text) => parseNumber(text, 0, MOST_SLOPE),
    marks: [
      { value: 0, label: "0" },
      ...[-8, -6, -4, -2].map((n) => ({ value: 2 ** n, label: `1/${2 ** -n}` })),
      { value: 1, label: "1" },
    ],
  });
}
