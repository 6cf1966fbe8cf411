// All heads of a model, layers x heads: a picture of each one's weights above a number.

import { paintWeights, rampsOf } from "./colours.js";
import { component, element, onDraw, roving, walked } from "./dom.js";
import { headWords, rowOfBias, shrunk, slopeName } from "./model_words.js";
import { wholePercent } from "./numbers.js";
import { revealWithin } from "./token_text.js";

const MOST_PIXELS = 48; // of a picture's side

// The chosen one is state.layer, state.head.
export function headsGrid({ reading, weights, state, onSelect }) {
  const { num_layers: numLayers, num_heads: numHeads, num_tokens: T, slopes } = reading;
  const side = Math.min(T, MOST_PIXELS);
  // Of a model without biases how far each head looks, in tokens.
  const { departure, reach } = reading;
  const [measure, numbers] = departure ? ["departure", departure] : ["mean distance", reach];
  const heads = Array.from({ length: numHeads }, (_, head) => head);
  const pictures = []; // { canvas, values }

  function picture(values) {
    const canvas = element("canvas", { "aria-hidden": true });
    pictures.push({ canvas, values });
    return canvas;
  }

  function headButton(layer, head) {
    const value = numbers[layer][head];
    const number = departure ? wholePercent(value) : value.toFixed(1);
    const words = headWords(reading, layer, head);
    const attributes = {
      role: "radio", ...roving(() => layer === state.layer && head === state.head),
      "aria-label": `${words}: ${measure} ${number}`,
      on: { click: () => select(layer, head), keydown: walk },
    };
    return element("button.head-cell", attributes,
      picture(weights.small(layer, head, side)), element("span", number),
    );
  }

  const aloneCell = (head) =>
    element("span.head-cell.alone",
      picture(shrunk(T, side, (query) => rowOfBias(reading, head, query))), element("span"),
    );

  const name = (text, kind = "span.head-name") => element(kind, { "aria-hidden": true }, text);
  const made = component(() => {
    const rows = Array.from({ length: numLayers }, (_, layer) => [
      name(`layer ${layer}`, "span.head-name.row"),
      ...heads.map((head) => headButton(layer, head)),
    ]);
    const grid = element("div.head-grid", { style: { "--heads": numHeads } },
      name(slopes ? "slope" : "head"),
      heads.map((head) => name(slopeName(reading, head) ?? String(head))),
      rows.flat(),
      slopes && [element("span.head-name.row", "bias alone"), ...heads.map(aloneCell)],
    );
    const radios = { role: "radiogroup", "aria-label": "Heads" };
    return element("div.heads-of-model", element("div.scroll.head-box", radios, grid));
  });
  const box = made.element.lastChild;
  const buttonAt = (layer, head) => box.querySelectorAll("button")[layer * numHeads + head];

  function select(layer, head) {
    onSelect(layer, head);
    buttonAt(layer, head).focus({ preventScroll: true });
  }

  // Left and right go from head to head, up and down from layer to layer.
  function walk(event) {
    if (["ArrowUp", "ArrowDown"].includes(event.key)) {
      select(walked(event, state.layer, numLayers - 1), state.head);
    } else if (["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) {
      select(state.layer, walked(event, state.head, numHeads - 1));
    }
  }

  function paint() {
    const [colours] = ramps();
    for (const { canvas, values } of pictures) paintWeights(canvas, side, values, colours);
  }

  const reveal = () => revealWithin(box, buttonAt(state.layer, state.head));
  const ramps = rampsOf(box, [["--surface", "--accent"]], () => {
    paint();
    reveal();
  });
  onDraw(made.draw);
  onDraw(reveal);
  return made.element;
}
