// The controls of the view "How": a head and its slopes, and what else can be changed.

import { areChapters, VARIANTS } from "./attention.js";
import { paintWeights, rampsOf } from "./colours.js";
import { choice, slider, slopeSlider, textField } from "./controls.js";
import { element, keyed, note, onDraw, prose, uniqueId } from "./dom.js";
import { evenHeads, slopesOf, slopeText } from "./how_state.js";

// The choice of a head: a small picture of each head's weights over its number and slope.
function headPicker({ state, headsOf, onChange }) {
  const name = uniqueId("head");
  let painted = []; // the heads whose pictures stand there

  function option(_, h) {
    const slope = () => slopeText(headsOf()[h]);
    const input = {
      type: "radio", name, value: h, checked: () => h === state.head,
      "aria-label": () => `Head ${h}, ${slope()}`, on: { change: () => onChange(h) },
    };
    return element("label.option",
      element("input", input),
      element("canvas", { "aria-hidden": true }),
      element("span", `head ${h}`, element("small", slope)),
    );
  }

  const box = element("div.heads", keyed(() => headsOf().length, () => headsOf().map(option)));
  const ramps = rampsOf(box, [["--surface", "--accent"]], () => paint([]));

  function paint(before) {
    const [colours] = ramps();
    painted = headsOf();
    painted.forEach((head, h) => {
      if (head === before[h]) return;
      const canvas = box.children[h].querySelector("canvas");
      paintWeights(canvas, head.with.T, head.with.weights, colours);
    });
  }

  onDraw(() => paint(painted));
  return element("fieldset.control", element("legend.label", "Head"), box);
}

function textControls({ example, state, change }) {
  let known = example.tokens; // the longest text so far: what the slider took away, it gives back
  onDraw(() => {
    if (!state.tokens.every((token, i) => token === known[i])) known = state.tokens;
  });
  const text = textField({
    id: "text", example, label: `Text, up to ${example.max_tokens} tokens`,
    value: () => state.tokens,
    onTokens(tokens) {
      known = tokens;
      change({ tokens });
    },
  });
  const length = slider({
    label: "Tokens", min: 1, max: example.max_tokens, value: () => state.tokens.length,
    onInput(count) {
      const more = example.words.slice(known.length); // words of a story
      change({ tokens: [...known, ...more].slice(0, count) });
    },
  });
  const origin = note(() =>
    areChapters(state.tokens, state.numHeads, example)
      ? "q, k and v are those of the book chapter: two heads of two numbers each."
      : prose`The book chapter has q, k and v for two heads of its own five tokens. The others are made from
        the token's letters, always the same: linbias.explore.vectors in Python.`,
  );
  return element("div.text", text, length, origin);
}

const VARIANT_NOTES = {
  causal: "Keys after the query are hidden: language models.",
  symmetric: "The same slope on both sides: encoders, and the book\u2019s example.",
  directional: "Half the heads look left, half look right, each with the slopes of half as many.",
  asymmetric: prose`A slope for each side, as a model may learn them. Here the right one starts at a
    quarter.`,
};

// What a new set of slopes makes void.
const fresh = { left: {}, right: {} };

export function howControls({ example, change, state, headsOf }) {
  const picker = headPicker({ state, headsOf, onChange: (head) => change({ head }) });
  const of = (side) => slopesOf(state)[side][state.head];
  const set = (side) => (slope) => change({ [side]: { ...state[side], [state.head]: slope } });
  const isAsymmetric = () => state.variant === "asymmetric";
  const looksRight = () => of("left") === Infinity;
  const label = () => `Slope${looksRight() ? " to the right" : isAsymmetric() ? " to the left" : ""}`;
  const control = (name, value, onInput) => slopeSlider({ label: name, most: 1000, value, onInput });
  const left = control(label, () => of(looksRight() ? "right" : "left"), set("left"));
  const right = control("Slope to the right", () => of("right"), set("right"));
  onDraw(() => (right.hidden = !isAsymmetric()));
  const isReset = () => [state.left, state.right].every((own) => Object.keys(own).length === 0);
  const reset = element("button", { disabled: isReset, on: { click: () => change(fresh) } },
    "Reset slopes",
  );
  const variant = choice({
    label: "Sides", options: VARIANTS, value: () => state.variant,
    onInput(value) {
      const { tokens, numHeads, row } = state;
      // A first query that sees itself alone has nothing to show.
      const seen = value === "causal" && row === 0 ? tokens.length - 1 : row;
      change({ ...fresh, variant: value, numHeads: evenHeads(value, numHeads), row: seen });
    },
  });
  const schedule = choice({
    label: "Slope schedule", options: example.schedules, value: () => state.schedule,
    onInput: (value) => change({ ...fresh, schedule: value }),
  });
  const numHeads = slider({
    label: "Number of heads", min: 1, max: example.max_heads, value: () => state.numHeads,
    onInput(count) {
      const head = Math.min(state.head, count - 1);
      change({ ...fresh, numHeads: evenHeads(state.variant, count), head });
    },
  });
  return {
    head: picker,
    slope: [left, right],
    more: [
      textControls({ example, state, change }),
      element("div.more-controls",
        element("div", variant, note(() => VARIANT_NOTES[state.variant])),
        schedule,
        element("div", numHeads, reset),
      ),
    ],
  };
}
