// The choice of a head: a small picture of each head's weights, and one of their mean.

import { onThemeChange, paintCells, ramp } from "./colours.js";
import { element, setText, uniqueId } from "./dom.js";
import { headName } from "./numbers.js";

// headPicker({ mean, onChange(head) }) -> { element, update({ matrices, slopes, size, power, chosen }) }
// matrices: the weights of each head, and last their mean; slopes: a text for each head.
export function headPicker({ mean, onChange }) {
  const box = element("div", { class: "heads" });
  const name = uniqueId("head");
  let items = [];
  let shown = null;
  let colours = null;

  function build(numHeads) {
    items = Array.from({ length: numHeads + 1 }, (_, h) => {
      const head = h < numHeads ? h : mean;
      const canvas = element("canvas", { "aria-hidden": "true" });
      const words = element("span", { class: "unseen" });
      const input = element("input", { type: "radio", name, value: head, on: { change: () => onChange(head) } });
      const label = element("span", { "aria-hidden": "true" }, h < numHeads ? String(h + 1) : "mean");
      const whole = element("label", { class: "option" }, input, canvas, label, words);
      return { head, canvas, words, input, element: whole };
    });
    box.replaceChildren(...items.map((item) => item.element));
  }

  function paint({ canvas }, matrix) {
    const { size, power } = shown;
    colours ??= ramp(box, "--surface", "--accent");
    const high = matrix.reduce((a, b) => Math.max(a, b), 0);
    paintCells(canvas, size, size, (i) => colours[Math.round(255 * (matrix[i] / high) ** power)]);
  }

  function draw(changed) {
    const { matrices, slopes, chosen } = shown;
    items.forEach((item, h) => {
      if (changed(h)) paint(item, matrices[h]);
      item.input.checked = item.head === chosen;
      setText(item.words, h < slopes.length ? `${headName(h)}, ${slopes[h]}` : "Mean of all heads");
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
      if (rebuilt) build(next.matrices.length - 1);
      draw((h) => rebuilt || before.matrices[h] !== next.matrices[h]);
    },
  };
}
