// All heads of a model, layers x heads: a picture of each one's weights above a number.

import { onNewColours, paintWeights, ramp } from "./colours.js";
import { choice } from "./controls.js";
import { element, rove, setText, walked } from "./dom.js";
import { headWords, rowOfBias, shrunk, slopeName } from "./model_words.js";
import { wholePercent } from "./numbers.js";
import { revealWithin } from "./token_text.js";

const MOST_PIXELS = 48; // of a picture's side
const MEASURES = [
  { value: "departure", label: "departure", text: wholePercent, of: (one) => one.departure },
  {
    value: "mean", label: "mean distance", text: (tokens) => tokens.toFixed(1),
    of: ({ reach }) => reach.mean,
  },
  { value: "within", label: "holds 90%", text: String, of: ({ reach }) => reach.within },
];

export function headsGrid({ reading, weights, onSelect }) {
  const { num_layers: numLayers, num_heads: numHeads, num_tokens: T, slopes } = reading;
  const side = Math.min(T, MOST_PIXELS);
  const measures = MEASURES.filter(({ of }) => of(reading) !== null);
  let measure = measures[0];
  let chosen = { layer: 0, head: 0 };
  const heads = Array.from({ length: numHeads }, (_, head) => head);
  const cell = (values) => ({
    values, canvas: element("canvas", { "aria-hidden": true }), number: element("span"),
  });
  const cells = Array.from({ length: numLayers }, (_, layer) =>
    heads.map((head) => cell(weights.small(layer, head, side))),
  );
  const buttons = cells.map((row, layer) =>
    row.map(({ canvas, number }, head) => {
      const on = { click: () => select(layer, head), keydown: walk };
      return element("button.head-cell", { role: "radio", on }, canvas, number);
    }),
  );
  const alone = (slopes ? heads : []).map((head) =>
    cell(shrunk(T, side, (query) => rowOfBias(reading, head, query))),
  );
  const name = (text, kind = "span.head-name") => element(kind, { "aria-hidden": true }, text);
  const rows = buttons.map((row, l) => [name(`layer ${l}`, "span.head-name.row"), ...row]);
  const grid = element("div.head-grid", { style: { "--heads": numHeads } },
    name(slopes ? "slope" : "head"),
    heads.map((head) => name(slopeName(reading, head) ?? String(head))),
    rows.flat(),
    slopes && element("span.head-name.row", "bias alone"),
    alone.map(({ canvas, number }) => element("span.head-cell.alone", canvas, number)),
  );
  const box = element("div.scroll.head-box", { role: "radiogroup", "aria-label": "Heads" }, grid);
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
    if (["ArrowUp", "ArrowDown"].includes(event.key)) {
      select(walked(event, chosen.layer, numLayers - 1), chosen.head);
    } else if (["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) {
      select(chosen.layer, walked(event, chosen.head, numHeads - 1));
    }
  }

  function paint() {
    const colours = ramp(grid, "--surface", "--accent");
    for (const { values, canvas } of [...cells.flat(), ...alone]) {
      paintWeights(canvas, side, values, colours);
    }
  }

  function write() {
    const values = measure.of(reading);
    cells.forEach((row, layer) =>
      row.forEach(({ number }, head) => {
        const text = measure.text(values[layer][head]);
        setText(number, text);
        const words = headWords(reading, layer, head);
        buttons[layer][head].ariaLabel = `${words}: ${measure.label} ${text}`;
      }),
    );
    const ofBias = reading.alone?.[measure.value];
    alone.forEach(({ number }, head) => setText(number, ofBias ? measure.text(ofBias[head]) : ""));
  }

  const reveal = () => revealWithin(box, buttons[chosen.layer][chosen.head]);

  onNewColours(grid, paint);
  new ResizeObserver(reveal).observe(box);
  write();
  return {
    element: element("div.heads-of-model", measures.length > 1 && control.element, box),
    choose(layer, head) {
      chosen = { layer, head };
      rove(buttons.flat(), layer * numHeads + head, "aria-checked");
      reveal();
    },
  };
}
