// How far the heads of a model look: a table of layers and heads, each cell a button that chooses the head.

import { choice } from "./controls.js";
import { element } from "./dom.js";
import { slopeFraction } from "./scales.js";

const MEASURES = [
  { value: "mean", label: "mean distance", text: (tokens) => tokens.toFixed(1) },
  { value: "within", label: "holds 90%", text: String },
];

// reachTable({ model, onSelect(layer, head) }) -> { element, choose(layer, head) }
export function reachTable({ model, onSelect }) {
  let measure = MEASURES[0];
  const heads = Array.from({ length: model.num_heads }, (_, head) => head);
  const cells = model.reach.mean.map((row, layer) =>
    row.map((_, head) => element("button", { type: "button", class: "reach-cell", on: { click: () => onSelect(layer, head) } })),
  );
  const alone = heads.map(() => element("td"));
  const control = choice({
    label: "Distance, in tokens",
    options: MEASURES,
    value: measure.value,
    onChange(value) {
      measure = MEASURES.find((one) => one.value === value);
      write();
    },
  });
  const headOf = (head) => (model.slopes ? [`head ${head + 1}`, element("small", {}, slopeFraction(model.slopes[head]))] : `head ${head + 1}`);
  const table = element(
    "table",
    { class: "reach" },
    element("caption", { class: "unseen" }, "Reach of every head"),
    element("thead", {}, element("tr", {}, element("td", {}, model.slopes && element("small", {}, "slope")), heads.map((head) => element("th", { scope: "col" }, headOf(head))))),
    element(
      "tbody",
      {},
      cells.map((row, layer) =>
        element("tr", {}, element("th", { scope: "row" }, `layer ${layer + 1}`), row.map((button) => element("td", {}, button))),
      ),
      model.alone && element("tr", { class: "alone" }, element("th", { scope: "row" }, "bias alone"), alone),
    ),
  );

  function write() {
    const values = model.reach[measure.value];
    const farthest = Math.log1p(Math.max(...values.flat()));
    cells.forEach((row, layer) =>
      row.forEach((button, head) => {
        const tokens = values[layer][head];
        button.textContent = measure.text(tokens);
        button.setAttribute("aria-label", `Layer ${layer + 1}, head ${head + 1}: ${measure.label} ${measure.text(tokens)}`);
        button.style.setProperty("--share", `${Math.round((45 * Math.log1p(tokens)) / (farthest || 1))}%`);
      }),
    );
    if (model.alone) alone.forEach((cell, head) => (cell.textContent = measure.text(model.alone[measure.value][head])));
  }

  write();
  return {
    element: element(
      "div",
      {},
      control.element,
      element("div", { class: "scroll reach-box", role: "region", tabindex: "0", "aria-label": "Reach of every head" }, table),
    ),
    choose(layer, head) {
      cells.forEach((row, l) =>
        row.forEach((button, h) => button.setAttribute("aria-pressed", String(l === layer && h === head))),
      );
    },
  };
}
