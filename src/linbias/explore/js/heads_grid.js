// All heads of a model: layers x heads, a small picture of each head's weights above a number, one of them chosen.

import { onThemeChange, paintWeights, ramp } from "./colours.js";
import { choice } from "./controls.js";
import { element, setText, walked } from "./dom.js";
import { headWords, slopeName, wholePercent } from "./model_words.js";
import { revealWithin } from "./token_text.js";
import { shrunk, weightsOfBias } from "./weights.js";

const MOST_PIXELS = 48; // of a picture's side
const MEASURES = [
  { value: "departure", label: "departure", text: wholePercent, of: ({ departure }) => departure },
  { value: "mean", label: "mean distance", text: (tokens) => tokens.toFixed(1), of: ({ reach }) => reach.mean },
  { value: "within", label: "holds 90%", text: String, of: ({ reach }) => reach.within },
];

// headsGrid({ reading, weights, onSelect(layer, head) }) -> { element, choose(layer, head) }
export function headsGrid({ reading, weights, onSelect }) {
  const { num_layers: numLayers, num_heads: numHeads, num_tokens: T } = reading;
  const side = Math.min(T, MOST_PIXELS);
  const measures = MEASURES.filter(({ of }) => of(reading) !== null);
  let measure = measures[0];
  let chosen = { layer: 0, head: 0 };
  const heads = Array.from({ length: numHeads }, (_, head) => head);
  const cell = (values) => ({ values, canvas: element("canvas", { "aria-hidden": "true" }), number: element("span") });
  const cells = Array.from({ length: numLayers }, (_, layer) => heads.map((head) => cell(weights.small(layer, head, side))));
  const buttons = cells.map((row, layer) =>
    row.map(({ canvas, number }, head) =>
      element(
        "button",
        { type: "button", class: "head-cell", role: "radio", on: { click: () => select(layer, head), keydown: walk } },
        canvas,
        number,
      ),
    ),
  );
  const alone = reading.slopes && heads.map((head) => cell(shrunk(T, side, (query) => rowOfBias(reading, head, query))));
  const grid = element("div", { class: "head-grid", style: { "--heads": numHeads } },
    element("span", { class: "head-name", "aria-hidden": "true" }, reading.slopes ? "slope" : "head"),
    heads.map((head) => element("span", { class: "head-name", "aria-hidden": "true" }, slopeName(reading, head) ?? String(head))),
    buttons.map((row, layer) => [element("span", { class: "head-name row", "aria-hidden": "true" }, `layer ${layer}`), row]).flat(2),
    alone && [
      element("span", { class: "head-name row" }, "bias alone"),
      ...alone.map(({ canvas, number }) => element("span", { class: "head-cell alone" }, canvas, number)),
    ],
  );
  const box = element("div", { class: "scroll head-box", role: "radiogroup", "aria-label": "Heads" }, grid);
  const control = choice({
    label: "Below each picture", options: measures, value: measure.value,
    onChange(value) {
      measure = measures.find((one) => one.value === value);
      write();
    },
  });

  function select(layer, head) {
    onSelect(layer, head);
    buttons[layer][head].focus({ preventScroll: true });
  }

  // Left and right go from head to head, up and down from layer to layer.
  function walk(event) {
    const along = { ArrowLeft: 1, ArrowRight: 1, Home: 1, End: 1 }[event.key];
    if (along) select(chosen.layer, walked(event, chosen.head, numHeads - 1));
    else if (event.key.startsWith("Arrow")) select(walked(event, chosen.layer, numLayers - 1), chosen.head);
  }

  function paint() {
    const colours = ramp(grid, "--surface", "--accent");
    for (const { values, canvas } of [...cells.flat(), ...(alone ?? [])]) paintWeights(canvas, side, values, colours);
  }

  function write() {
    const values = measure.of(reading);
    cells.forEach((row, layer) =>
      row.forEach(({ number }, head) => {
        const words = measure.text(values[layer][head]);
        setText(number, words);
        buttons[layer][head].setAttribute("aria-label", `${headWords(reading, layer, head)}: ${measure.label} ${words}`);
      }),
    );
    alone?.forEach(({ number }, head) => setText(number, measure.value in reading.alone ? measure.text(reading.alone[measure.value][head]) : ""));
  }

  const reveal = () => revealWithin(box, buttons[chosen.layer][chosen.head]);

  onThemeChange(paint);
  new ResizeObserver(reveal).observe(box);
  write();
  return {
    element: element("div", { class: "heads-of-model" }, measures.length > 1 && control.element, box),
    paint, // once it stands in the page, whose colours it takes
    choose(layer, head) {
      chosen = { layer, head };
      buttons.forEach((row, l) =>
        row.forEach((button, h) => {
          const here = l === layer && h === head;
          button.setAttribute("aria-checked", String(here));
          button.tabIndex = here ? 0 : -1;
        }),
      );
      reveal();
    },
  };
}

// What the bias alone would make of a query's row.
export function rowOfBias({ slopes, right_slopes: rightSlopes, causal, num_tokens: T }, head, query) {
  return weightsOfBias({ left: slopes[head], right: rightSlopes?.[head] }, query, causal ? query + 1 : T);
}
