// What the colours of a matrix mean: grey below zero, the accent above.

import { element, setText } from "./dom.js";

export function scaleLegend() {
  const [low, high] = [element("span"), element("span")];
  const negative = element("i", { class: "negative" });
  const positive = element("i", { class: "positive" });
  return {
    element: element("span", { class: "legend", "aria-hidden": "true" }, low, negative, positive, high),
    update({ low: least, high: most, text }) {
      setText(low, least < 0 ? text(least) : "0");
      setText(high, most > 0 ? text(most) : "0");
      negative.hidden = least === 0 && most > 0;
      positive.hidden = most === 0 && least < 0;
    },
  };
}
