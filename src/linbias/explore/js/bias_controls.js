// The controls of the bias explorer. Each hands its change to `change(parts)`, which makes the next state.

import { VARIANTS } from "./attention.js";
import { MEAN, powerOf, QUANTITIES, slopesOf, slopeText } from "./bias_state.js";
import { choice, parseNumber, parseWhole, slider, toggle } from "./controls.js";
import { element, setText } from "./dom.js";
import { headPicker } from "./head_picker.js";
import { general } from "./numbers.js";
import { textControls } from "./text_controls.js";

const MOST_SLOPE = 1000;
// The slider's positions: 0, then from 2^-10 to 2^1 in steps of an eighth of a power of two.
const EIGHTHS = 11 * 8 + 1;
const ONE_HEADS = QUANTITIES.map(({ value }) => value).filter((value) => value !== "weight"); // a mean has weights only
const VARIANT_NOTES = {
  causal: "Keys after the query are hidden: language models.",
  symmetric: "The same slope on both sides: encoders, and the book's example.",
  directional: "Half the heads look left, half look right, each with the slopes of half as many.",
  asymmetric: "A slope for each side, as a model may learn them. Here the right one starts at a quarter.",
};

function slopeAt(position) {
  return position === 0 ? 0 : 2 ** ((position - 1) / 8 - 10);
}

function positionOf(slope) {
  if (slope === 0) return 0;
  return Math.min(Math.max(Math.round((Math.log2(slope) + 10) * 8) + 1, 1), EIGHTHS);
}

function slopeSlider(label, onInput) {
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

// biasControls({ example, change }) -> { text, head, side, picture, update(state, heads, means) }: groups of elements.
export function biasControls({ example, change }) {
  const picker = headPicker({
    mean: MEAN,
    onChange: (head) => change((state) => ({ head, quantity: head === MEAN ? "weight" : state.quantity })),
  });
  const left = slopeSlider("Slope", (slope) => change((state) => withSlope(state, "left", slope)));
  const right = slopeSlider("Slope to the right", (slope) => change((state) => withSlope(state, "right", slope)));
  const together = toggle({
    label: "One slope for all heads",
    value: false,
    onChange: (on) => change((state) => ({ together: on, ...(on ? copied(state) : {}) })),
  });
  const reset = element(
    "button",
    { type: "button", on: { click: () => change(() => ({ left: {}, right: {}, together: false })) } },
    "Back to the schedule",
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
        head: state.head === MEAN ? MEAN : Math.min(state.head, count - 1),
      })),
  });
  const quantity = choice({
    label: "Show",
    options: QUANTITIES,
    value: "weight",
    onChange: (value) => change(() => ({ quantity: value })),
  });
  const compare = toggle({
    label: "Without bias beside it",
    value: false,
    onChange: (on) => change(() => ({ compare: on })),
  });
  const text = textControls(example, change);
  return {
    text: text.element,
    head: [picker.element, left.element, right.element, element("div", { class: "pair" }, together.element, reset)],
    side: [variant.element, variantNote, schedule.element, numHeads.element],
    picture: [quantity.element, compare.element],
    update(state, heads, means) {
      text.update(state);
      const slopes = slopesOf(state);
      picker.update({
        matrices: [...heads.map((head) => head.with.weight), means],
        slopes: heads.map(slopeText),
        size: state.tokens.length,
        power: powerOf("weight", state.tokens),
        chosen: state.head,
      });
      showSlopes(state, slopes);
      together.set(state.together);
      reset.disabled = Object.keys(state.left).length + Object.keys(state.right).length === 0;
      variant.set(state.variant);
      setText(variantNote, VARIANT_NOTES[state.variant]);
      schedule.set(state.schedule);
      numHeads.set(state.numHeads);
      quantity.set(state.quantity);
      quantity.setDisabled(state.head === MEAN ? ONE_HEADS : []);
      compare.set(state.compare);
    },
  };

  // The slider shows the chosen head's slope; of the mean there is one only where all heads share it.
  function showSlopes({ variant, head, together: shared }, slopes) {
    const of = head === MEAN ? 0 : head;
    const looksRight = slopes.left[of] === Infinity;
    const known = head !== MEAN || shared;
    left.setLabel(looksRight ? "Slope to the right" : variant === "asymmetric" ? "Slope to the left" : "Slope");
    left.set((looksRight ? slopes.right : slopes.left)[of]);
    left.element.hidden = !known;
    right.element.hidden = !known || variant !== "asymmetric";
    right.set(slopes.right[of]);
  }
}

// What a new set of slopes makes void.
const fresh = { left: {}, right: {}, together: false };

// A slope set by hand, of the chosen head or of all.
function withSlope(state, side, slope) {
  const heads = state.together ? Array.from({ length: state.numHeads }, (_, h) => h) : [state.head];
  return { [side]: { ...state[side], ...Object.fromEntries(heads.map((h) => [h, slope])) } };
}

// The chosen head's slopes, for all heads.
function copied(state) {
  const { left, right } = slopesOf(state);
  const from = state.head === MEAN ? 0 : state.head;
  const own = left[from] === Infinity ? right[from] : left[from];
  const all = { ...state, together: true };
  const sides = withSlope(all, "left", own);
  return state.variant === "asymmetric" ? { ...sides, ...withSlope(all, "right", right[from]) } : sides;
}

// A directional encoder has as many heads that look left as right.
function even(variant, count) {
  return variant === "directional" ? count + (count % 2) : count;
}
