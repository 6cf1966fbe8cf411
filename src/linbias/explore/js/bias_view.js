// The bias explorer.

import { attend, sides } from "./attention.js";
import { heatmap } from "./heatmap.js";
import { fixed } from "./numbers.js";

export function mountBias(root, data) {
  const { tokens, q, k, v } = data.example;
  const { left, right } = sides("symmetric", 2, "halving");
  const part = (rows) => rows.map((row) => row.slice(0, 2));
  const steps = attend({ q: part(q), k: part(k), v: part(v), left: left[0], right: right[0] });
  let selected = 0;
  const picture = heatmap({
    onSelect(row) {
      selected = row;
      draw();
    },
  });
  root.append(picture.element);
  function draw() {
    const high = steps.weight.reduce((a, b) => Math.max(a, b));
    picture.update({
      label: "Weights of head 1", rows: tokens, columns: tokens, values: steps.weight, text: fixed,
      low: 0, high, selected,
    });
  }
  draw();
}
