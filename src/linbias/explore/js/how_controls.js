// The controls of the view "How": a head and its slopes, and what else can be changed.

import { areChapters, VARIANTS } from "./attention.js";
import { onNewColours, paintWeights, ramp } from "./colours.js";
import { choice, parseNumber, parseWhole, slider, textField } from "./controls.js";
import { element, note, setText, uniqueId } from "./dom.js";
import { evenHeads, slopesOf, slopeText } from "./how_state.js";
import { general } from "./numbers.js";

// Positions of a slider of slopes: 0, then powers of two from 2^-10 to 2 in steps of an eighth.
const EIGHTHS = 11 * 8 + 1;

const slopeAt = (position) => position === 0 ? 0 : 2 ** ((position - 1) / 8 - 10);

function positionOf(slope) {
  if (slope === 0) return 0;
  return Math.min(Math.max(Math.round((Math.log2(slope) + 10) * 8) + 1, 1), EIGHTHS);
}

function slopeSlider(label, onInput) {
  const fractions = [256, 64, 16, 4].map((n) => ({ value: 1 / n, label: `1/${n}` }));
  return slider({
    label, min: 0, max: EIGHTHS, value: 0, onInput,
    toText: general, toValue: slopeAt, toPosition: positionOf,
    parse: (text) => parseNumber(text, 0, 1000),
    marks: [{ value: 0, label: "0" }, ...fractions, { value: 1, label: "1" }],
  });
}

// The choice of a head: a small picture of each head's weights over its number and slope.
function headPicker({ onChange }) {
  const box = element("div.heads");
  const name = uniqueId("head");
  let items = [];
  let shown = null;

  function build(numHeads) {
    items = Array.from({ length: numHeads }, (_, head) => {
      const canvas = element("canvas", { "aria-hidden": true });
      const slope = element("small");
      const input = element("input", {
        type: "radio", name, value: head, on: { change: () => onChange(head) },
      });
      const words = element("span", `head ${head}`, slope);
      return { canvas, slope, input, label: element("label.option", input, canvas, words) };
    });
    box.replaceChildren(...items.map(({ label }) => label));
  }

  function draw(changed) {
    const colours = ramp(box, "--surface", "--accent");
    items.forEach(({ canvas, slope, input }, h) => {
      const head = shown.heads[h];
      if (changed(h)) paintWeights(canvas, shown.size, head.with.weights, colours);
      input.checked = h === shown.chosen;
      setText(slope, slopeText(head));
      input.ariaLabel = `Head ${h}, ${slopeText(head)}`;
    });
  }

  onNewColours(box, () => shown && draw(() => true));

  return {
    element: element("fieldset.control", element("legend.label", "Head"), box),
    update(heads, size, chosen) {
      const before = shown;
      shown = { heads, size, chosen };
      const rebuilt = items.length !== heads.length;
      if (rebuilt) build(heads.length);
      draw((h) => rebuilt || before.heads[h] !== heads[h]);
    },
  };
}

function textControls(example, change) {
  const origin = note();
  const text = textField({
    id: "text", example, label: `Text, up to ${example.max_tokens} tokens`,
    onTokens(tokens) {
      known = tokens;
      change({ tokens });
    },
  });
  let known = example.tokens; // the longest text so far: what the slider took away, it gives back
  const length = slider({
    label: "Tokens", min: 1, max: example.max_tokens, value: example.tokens.length,
    parse: (words) => parseWhole(words, 1, example.max_tokens),
    onInput(count) {
      const more = example.words.slice(known.length); // words of a story
      change({ tokens: [...known, ...more].slice(0, count) });
    },
  });

  return {
    element: element("div.text", text.element, length.element, origin),
    update({ tokens, numHeads }) {
      const isPart = tokens.every((token, i) => token === known[i]);
      if (!isPart) known = tokens;
      if (text.field.getRootNode().activeElement !== text.field) {
        text.field.value = tokens.join(" ");
        text.field.ariaInvalid = null;
      }
      length.set(tokens.length);
      setText(
        origin,
        areChapters(tokens, numHeads, example)
          ? "q, k and v are those of the book chapter: two heads of two numbers each."
          : "The book chapter has q, k and v for two heads of its own five tokens. The others " +
            "are made from the token's letters, always the same: linbias.explore.vectors in " +
            "Python.",
      );
    },
  };
}

const VARIANT_NOTES = {
  causal: "Keys after the query are hidden: language models.",
  symmetric: "The same slope on both sides: encoders, and the book\u2019s example.",
  directional: "Half the heads look left, half look right, each with the slopes of half as many.",
  asymmetric:
    "A slope for each side, as a model may learn them. Here the right one starts at a quarter.",
};

// What a new set of slopes makes void.
const fresh = { left: {}, right: {} };

export function howControls({ example, change }) {
  let shown = null;
  const picker = headPicker({ onChange: (head) => change({ head }) });
  const set = (side, slope) => change({ [side]: { ...shown[side], [shown.head]: slope } });
  const left = slopeSlider("Slope", (slope) => set("left", slope));
  const right = slopeSlider("Slope to the right", (slope) => set("right", slope));
  const reset = element("button", { on: { click: () => change(fresh) } }, "Reset slopes");
  const variant = choice({
    label: "Sides", options: VARIANTS, value: "symmetric",
    onChange(value) {
      const { tokens, numHeads, row } = shown;
      // A first query that sees itself alone has nothing to show.
      const seen = value === "causal" && row === 0 ? tokens.length - 1 : row;
      change({ ...fresh, variant: value, numHeads: evenHeads(value, numHeads), row: seen });
    },
  });
  const variantNote = note();
  const schedule = choice({
    label: "Slope schedule", options: example.schedules, value: "halving",
    onChange: (value) => change({ ...fresh, schedule: value }),
  });
  const numHeads = slider({
    label: "Number of heads", min: 1, max: example.max_heads, value: 2,
    parse: (text) => parseWhole(text, 1, example.max_heads),
    onInput(count) {
      const head = Math.min(shown.head, count - 1);
      change({ ...fresh, numHeads: evenHeads(shown.variant, count), head });
    },
  });
  const text = textControls(example, change);

  function showSlopes({ variant: kind, head }, slopes) {
    const looksRight = slopes.left[head] === Infinity;
    const isAsymmetric = kind === "asymmetric";
    const end = looksRight ? " to the right" : isAsymmetric ? " to the left" : "";
    left.setLabel(`Slope${end}`);
    left.set((looksRight ? slopes.right : slopes.left)[head]);
    right.element.hidden = !isAsymmetric;
    right.set(slopes.right[head]);
  }

  return {
    head: picker.element,
    slope: [left.element, right.element],
    more: [
      text.element,
      element("div.more-controls",
        element("div", variant.element, variantNote),
        schedule.element,
        element("div", numHeads.element, reset),
      ),
    ],
    update(state, heads) {
      shown = state;
      text.update(state);
      picker.update(heads, state.tokens.length, state.head);
      showSlopes(state, slopesOf(state));
      reset.disabled = [state.left, state.right].every((own) => Object.keys(own).length === 0);
      variant.set(state.variant);
      setText(variantNote, VARIANT_NOTES[state.variant]);
      schedule.set(state.schedule);
      numHeads.set(state.numHeads);
    },
  };
}
