// The controls of one head's arithmetic. Each hands its change to `change(parts)`, which makes the next state.

import { VARIANTS } from "./attention.js";
import { choice, parseWhole, slider } from "./controls.js";
import { element, setText } from "./dom.js";
import { headPicker } from "./head_picker.js";
import { slopesOf, slopeText } from "./how_state.js";
import { slopeSlider } from "./slope_slider.js";
import { textControls } from "./text_controls.js";

const VARIANT_NOTES = {
  causal: "Keys after the query are hidden: language models.",
  symmetric: "The same slope on both sides: encoders, and the book\u2019s example.",
  directional: "Half the heads look left, half look right, each with the slopes of half as many.",
  asymmetric: "A slope for each side, as a model may learn them. Here the right one starts at a quarter.",
};

// howControls({ example, change }) -> { head, slope, more, update(state, heads) }: groups of elements.
export function howControls({ example, change }) {
  const picker = headPicker({ onChange: (head) => change(() => ({ head })) });
  const left = slopeSlider("Slope", (slope) => change((state) => withSlope(state, "left", slope)));
  const right = slopeSlider("Slope to the right", (slope) => change((state) => withSlope(state, "right", slope)));
  const reset = element(
    "button",
    { type: "button", on: { click: () => change(() => ({ left: {}, right: {} })) } },
    "Reset slopes",
  );
  const variant = choice({
    label: "Sides",
    options: VARIANTS.map((value) => ({ value, label: value })),
    value: "symmetric",
    onChange: (value) =>
      change((state) => ({
        ...fresh,
        variant: value,
        numHeads: even(value, state.numHeads),
        // A first query that sees itself alone has nothing to show.
        row: value === "causal" && state.row === 0 ? state.tokens.length - 1 : state.row,
      })),
  });
  const variantNote = element("p", { class: "note" });
  const schedule = choice({
    label: "Slope schedule",
    options: example.schedules.map((value) => ({ value, label: value })),
    value: "halving",
    onChange: (value) => change(() => ({ ...fresh, schedule: value })),
  });
  const numHeads = slider({
    label: "Number of heads",
    min: 1,
    max: example.max_heads,
    value: 2,
    parse: (text) => parseWhole(text, 1, example.max_heads),
    onInput: (count) =>
      change((state) => ({
        ...fresh,
        numHeads: even(state.variant, count),
        head: Math.min(state.head, count - 1),
      })),
  });
  const text = textControls(example, change);
  return {
    head: picker.element,
    slope: [left.element, right.element],
    more: [
      text.element,
      element(
        "div",
        { class: "more-controls" },
        element("div", {}, variant.element, variantNote),
        schedule.element,
        element("div", {}, numHeads.element, reset),
      ),
    ],
    update(state, heads) {
      text.update(state);
      picker.update({
        matrices: heads.map((head) => head.with.weights),
        slopes: heads.map(slopeText),
        size: state.tokens.length,
        chosen: state.head,
      });
      showSlopes(state, slopesOf(state));
      reset.disabled = Object.keys(state.left).length + Object.keys(state.right).length === 0;
      variant.set(state.variant);
      setText(variantNote, VARIANT_NOTES[state.variant]);
      schedule.set(state.schedule);
      numHeads.set(state.numHeads);
    },
  };

  function showSlopes({ variant: sides, head }, slopes) {
    const looksRight = slopes.left[head] === Infinity;
    left.setLabel(looksRight ? "Slope to the right" : sides === "asymmetric" ? "Slope to the left" : "Slope");
    left.set((looksRight ? slopes.right : slopes.left)[head]);
    right.element.hidden = sides !== "asymmetric";
    right.set(slopes.right[head]);
  }
}

// What a new set of slopes makes void.
const fresh = { left: {}, right: {} };

// A slope of the chosen head, set by hand.
function withSlope(state, side, slope) {
  return { [side]: { ...state[side], [state.head]: slope } };
}

// A directional encoder has as many heads that look left as right.
function even(variant, count) {
  return variant === "directional" ? count + (count % 2) : count;
}
