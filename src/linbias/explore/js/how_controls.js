// A slider of slopes: 0, then powers of two from 2^-10 to 2^1 in steps of an eighth of a power, and any number by typing.

import { VARIANTS } from "./attention.js";
import { onThemeChange, paintWeights, ramp } from "./colours.js";
import { choice, parseNumber, parseWhole, slider } from "./controls.js";
import { element, setText, uniqueId } from "./dom.js";
import { slopesOf, slopeText } from "./how_state.js";
import { general } from "./numbers.js";
import { textField } from "./tokens.js";
import { areChapters } from "./vectors.js";

const MOST_SLOPE = 1000;
const EIGHTHS = 11 * 8 + 1;

const slopeAt = (position) => position === 0 ? 0 : 2 ** ((position - 1) / 8 - 10);

function positionOf(slope) {
  if (slope === 0) return 0;
  return Math.min(Math.max(Math.round((Math.log2(slope) + 10) * 8) + 1, 1), EIGHTHS);
}

function slopeSlider(label, onInput) {
  return slider({
    label, min: 0, max: EIGHTHS, value: 0, onInput, toText: general, toValue: slopeAt, toPosition: positionOf,
    parse: (text) => parseNumber(text, 0, MOST_SLOPE),
    marks: [
      { value: 0, label: "0" },
      ...[-8, -6, -4, -2].map((n) => ({ value: 2 ** n, label: `1/${2 ** -n}` })),
      { value: 1, label: "1" },
    ],
  });
}

// The choice of a head: a small picture of each head's weights over its number and slope.

// headPicker({ onChange(head) }) -> { element, update({ matrices, slopes, size, chosen }) }
// matrices: the weights of each head; slopes: a text for each, such as "slope 1/2".
function headPicker({ onChange }) {
  const box = element("div", { class: "heads" });
  const name = uniqueId("head");
  let items = [];
  let shown = null;
  let colours = null;

  function build(numHeads) {
    items = Array.from({ length: numHeads }, (_, head) => {
      const canvas = element("canvas", { "aria-hidden": "true" });
      const slope = element("small");
      const input = element("input", { type: "radio", name, value: head, on: { change: () => onChange(head) } });
      const whole = element("label", { class: "option" }, input, canvas, element("span", {}, `head ${head}`, slope));
      return { canvas, slope, input, element: whole };
    });
    box.replaceChildren(...items.map((item) => item.element));
  }

  function draw(changed) {
    const { matrices, slopes, size, chosen } = shown;
    colours ??= ramp(box, "--surface", "--accent");
    items.forEach((item, h) => {
      if (changed(h)) paintWeights(item.canvas, size, matrices[h], colours);
      item.input.checked = h === chosen;
      setText(item.slope, slopes[h]);
      item.input.ariaLabel = `Head ${h}, ${slopes[h]}`;
    });
  }

  onThemeChange(() => {
    colours = null;
    if (shown) draw(() => true);
  });

  return {
    element: element("fieldset", { class: "control" }, element("legend", { class: "label" }, "Head"), box),
    update(next) {
      const before = shown;
      shown = next;
      const rebuilt = items.length !== next.matrices.length;
      if (rebuilt) build(next.matrices.length);
      draw((h) => rebuilt || before.matrices[h] !== next.matrices[h]);
    },
  };
}

// The text and its length: tokens are what stands between spaces.

function textControls(example, change) {
  const origin = element("p", { class: "note" });
  const { field, message } = textField("text", example, (tokens) => {
    known = tokens;
    change(() => ({ tokens }));
  });
  let known = example.tokens; // the longest text so far: what the slider took away, it gives back
  const length = slider({
    label: "Tokens", min: 1, max: example.max_tokens, value: example.tokens.length,
    parse: (text) => parseWhole(text, 1, example.max_tokens),
    onInput: (count) => change(() => ({ tokens: resized(known, count, example.words) })),
  });

  return {
    element: element("div", { class: "text" },
      element("div", { class: "control" },
        element("label", { class: "label", for: field.id }, `Text, up to ${example.max_tokens} tokens`),
        field,
        message,
      ),
      length.element,
      origin,
    ),
    update({ tokens, numHeads }) {
      if (tokens.length > known.length || tokens.some((token, i) => token !== known[i])) known = tokens;
      if (document.activeElement !== field && field.getRootNode().activeElement !== field) {
        field.value = tokens.join(" ");
        field.ariaInvalid = null;
      }
      length.set(tokens.length);
      setText(
        origin,
        areChapters(tokens, numHeads, example)
          ? "q, k and v are those of the book chapter: two heads of two numbers each."
          : "The book chapter has q, k and v for two heads of its own five tokens. The others are made from the "
            + "token's letters, always the same: linbias.explore.vectors in Python.",
      );
    },
  };
}

// The first `count` tokens, or all and then words of a story.
function resized(tokens, count, words) {
  const more = words.slice(tokens.length);
  return [...tokens, ...more].slice(0, count);
}

// The controls of one head's arithmetic. Each hands its change to `change(parts)`, which makes the next state.

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
  const reset = element("button", { type: "button", on: { click: () => change(() => ({ left: {}, right: {} })) } },
    "Reset slopes",
  );
  const variant = choice({
    label: "Sides", options: VARIANTS.map((value) => ({ value, label: value })), value: "symmetric",
    onChange: (value) =>
      change((state) => ({
        ...fresh, variant: value, numHeads: even(value, state.numHeads),
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
    label: "Number of heads", min: 1, max: example.max_heads, value: 2,
    parse: (text) => parseWhole(text, 1, example.max_heads),
    onInput: (count) =>
      change((state) => ({ ...fresh, numHeads: even(state.variant, count), head: Math.min(state.head, count - 1) })),
  });
  const text = textControls(example, change);
  return {
    head: picker.element,
    slope: [left.element, right.element],
    more: [
      text.element,
      element("div", { class: "more-controls" },
        element("div", {}, variant.element, variantNote),
        schedule.element,
        element("div", {}, numHeads.element, reset),
      ),
    ],
    update(state, heads) {
      text.update(state);
      picker.update({
        matrices: heads.map((head) => head.with.weights), slopes: heads.map(slopeText),
        size: state.tokens.length, chosen: state.head,
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
const withSlope = (state, side, slope) => ({ [side]: { ...state[side], [state.head]: slope } });

// A directional encoder has as many heads that look left as right.
const even = (variant, count) => variant === "directional" ? count + (count % 2) : count;
