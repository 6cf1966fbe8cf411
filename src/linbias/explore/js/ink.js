// A word as its weight inks it: a bar, the word itself, and the number. The thin line across the bar is what it is compared with.

import { element, setText } from "./dom.js";
import { printed } from "./numbers.js";

export function inkWord(tag, word, isQuery) {
  return element(
    tag,
    { class: isQuery ? "ink-word ink-query" : "ink-word" },
    element("span", { class: "ink-bar", "aria-hidden": "true" }),
    word,
    element("span", { class: "ink-number" }),
  );
}

// How dark each weight is drawn, from 0 to 1: the largest is darkest.
export function inkShares(weights) {
  const largest = Math.max(...weights);
  return Array.from(weights, (weight) => Math.sqrt(weight / largest));
}

// Writes weights into the words; `most` is the weight of the tallest bar, `plain` the weights of the thin lines.
export function drawInk(words, { weights, plain, most }) {
  inkShares(weights).forEach((share, s) => {
    const { style, lastChild } = words[s];
    style.setProperty("--share", weights[s] / most);
    style.setProperty("--plain", plain[s] / most);
    style.setProperty("--ink-share", share);
    setText(lastChild, printed(weights[s], 2));
  });
}
