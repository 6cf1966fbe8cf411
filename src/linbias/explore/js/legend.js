// What the colours of a matrix mean: grey below zero, the accent above.

import { element, setText } from "./dom.js";

export function scaleLegend() {
  const [low, middle, high] = [element("span"), element("span"), element("span")];
  const negative = element("i", { class: "negative" });
  const positive = element("i", { class: "positive" });
  return {
    element: element("span", { class: "legend", "aria-hidden": "true" }, low, negative, middle, positive, high),
    // With a power, the colour halfway stands for less than half.
    update({ low: least, high: most, power, text }) {
      setText(low, least < 0 ? text(least) : "0");
      setText(high, most > 0 ? text(most) : "0");
      setText(middle, least < 0 && most > 0 ? "0" : "");
      negative.hidden = middle.hidden = least === 0;
      positive.hidden = most === 0 && least < 0;
      high.title = power === 1 ? "" : `the colour halfway stands for ${text(most * 0.5 ** (1 / power))}`;
    },
  };
}
