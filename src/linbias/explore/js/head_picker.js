// The choice of a head: a small picture of each head's weights over its number and slope.

import { onThemeChange, paintCells, ramp } from "./colours.js";
import { element, setText, uniqueId } from "./dom.js";

// headPicker({ onChange(head) }) -> { element, update({ matrices, slopes, size, chosen }) }
// matrices: the weights of each head; slopes: a text for each, such as "slope 1/2".
export function headPicker({ onChange }) {
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

  function paint({ canvas }, matrix) {
    const { size } = shown;
    colours ??= ramp(box, "--surface", "--accent");
    const high = matrix.reduce((a, b) => Math.max(a, b), 0);
    paintCells(canvas, size, size, (i) => colours[Math.round(255 * Math.sqrt(matrix[i] / high))]);
  }

  function draw(changed) {
    const { matrices, slopes, chosen } = shown;
    items.forEach((item, h) => {
      if (changed(h)) paint(item, matrices[h]);
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
