// The controls of near to far, over a state that reach_state.js describes.

import { choice, parseNumber, parseWhole, slider } from "./controls.js";
import { element } from "./dom.js";
import { general } from "./numbers.js";
import { BLOCKS, HEADS, LENGTHS, NO_TOLERANCE, queryPosition } from "./reach_state.js";
import { grouped, slopeFraction } from "./scales.js";

const DTYPES = { "-53": "float64", "-24": "float32", "-13": "16 bits" }; // 2^-14 for float16, 2^-12 for bfloat16
const NO_SLOPE = -11; // the slider's first position

// -> { element, update(state) }: of the text and the certificate. change({ name: value, ... }) is told of changes.
export function reachControls(state, change) {
  let length = state.length;
  const choiceOf = (label, name, values, text = String) =>
    choice({
      label,
      options: values.map((value) => ({ value, label: text(value) })),
      value: state[name],
      onChange: (value) => change({ [name]: value }),
    }).element;
  const query = slider({
    label: "Query at key",
    min: 0,
    max: length - 1,
    value: queryPosition(state),
    onInput: (key) => change({ query: key === length - 1 ? null : key }),
    parse: (text) => parseWhole(text, 0, length - 1),
  });
  return {
    element: element(
      "div",
      { class: "controls" },
      choiceOf("Length", "length", LENGTHS, grouped),
      choiceOf("Heads", "heads", HEADS),
      choiceOf("Keys of a block", "block", BLOCKS),
      choiceOf("Query sees", "both", [false, true], (both) => (both ? "both sides" : "earlier keys")),
      query.element,
      toleranceControl(state.tolerance, (tolerance) => change({ tolerance })).element,
    ),
    update(now) {
      length = now.length;
      query.setMax(length - 1);
      query.set(queryPosition(now));
    },
  };
}

// -> { element, update(slope, isOwn) }: the slope of the chosen head, and the way back to that of the schedule.
export function headSlopeControl(change) {
  const control = slider({
    label: "Slope of the head",
    min: NO_SLOPE,
    max: 1,
    step: 0.25,
    value: 0,
    toText: slopeFraction,
    toValue: (place) => (place === NO_SLOPE ? 0 : 2 ** place),
    toPosition: (slope) => (slope === 0 ? NO_SLOPE : Math.log2(slope)),
    parse: (text) => parseNumber(text, 0, 2),
    marks: [0, 1 / 256, 1 / 16, 1].map((slope) => ({ value: slope, label: slopeFraction(slope) })),
    onInput: (slope) => change({ slope }),
  });
  const reset = element("button", { type: "button", on: { click: () => change({ slope: null }) } }, "Reset slope");
  return {
    element: element("div", { class: "abreast" }, control.element, reset),
    update(slope, isOwn) {
      control.set(slope);
      reset.disabled = !isOwn;
    },
  };
}

// A slider over powers of two, with the default of each dtype marked.
function toleranceControl(value, onInput) {
  return slider({
    label: "Tolerance",
    min: NO_TOLERANCE,
    max: -2,
    value,
    toText: toleranceText,
    parse(text) {
      const power = /^\s*2\s*(?:\^|\*\*)\s*(-?\d+)\s*$/.exec(text);
      const value = power ? 2 ** Number(power[1]) : parseNumber(text, 0, 0.25);
      if (value > 0.25) throw new Error(`Must be at most 0.25, got ${text}`);
      return value < 2 ** -60 ? NO_TOLERANCE : Math.log2(value);
    },
    marks: [...Object.entries(DTYPES)].map(([exponent, name]) => ({ value: Number(exponent), label: name })),
    onInput,
  });
}

function toleranceText(exponent) {
  if (exponent === NO_TOLERANCE) return "0";
  return Number.isInteger(exponent) ? `2^${exponent}` : general(2 ** exponent);
}
