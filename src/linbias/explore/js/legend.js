// What the colours of a matrix mean: grey below zero, the accent above. Values run evenly from end to end; where some lie
// below the lowest colour, the legend says so.

import { element, setText } from "./dom.js";

export function scaleLegend() {
  const [low, middle, high] = [element("span"), element("span"), element("span")];
  const negative = element("i", { class: "negative" });
  const positive = element("i", { class: "positive" });
  return {
    element: element("span", { class: "legend", "aria-hidden": "true" }, low, negative, middle, positive, high),
    update({ low: least, high: most, power, text, values, hidden }) {
      const beyond = values.some((value, i) => value < least && !hidden?.[i]);
      setText(low, least < 0 ? `${beyond ? "\u2264 " : ""}${text(least)}` : "0");
      setText(high, most > 0 ? text(most) : "0");
      setText(middle, least < 0 && most > 0 ? "0" : "");
      negative.hidden = middle.hidden = least === 0;
      positive.hidden = most === 0 && least < 0;
      const stops = [0, 0.25, 0.5, 0.75, 1].map(
        (share) => `color-mix(in srgb, var(--accent) ${100 * share}%, var(--surface)) ${100 * share ** (1 / power)}%`,
      );
      positive.style.backgroundImage = `linear-gradient(to right, ${stops.join(", ")})`;
    },
  };
}
