// A word as its weight inks it: a bar, the word itself, and the number. The thin line across the bar is what it is compared with.

import { element, setAll, setText, uniqueId } from "./dom.js";
import { general, printed } from "./numbers.js";

export function inkWord(tag, word, isQuery) {
  return element(tag, { class: isQuery ? "ink-word ink-query" : "ink-word" },
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
    setAll(words[s], { style: { "--share": weights[s] / most, "--plain": plain[s] / most, "--ink-share": share } });
    setText(words[s].lastChild, printed(weights[s], 2));
  });
}

// A slider with a large number over it, and what its two ends mean.

// Of slopes from 0 to 1: slopeOfStory({ ends, onInput(slope) }) -> { element, set(slope, words) }; words: what it leads to.
export function slopeOfStory({ ends, onInput }) {
  const range = element("input", {
    type: "range", class: "story-range", id: uniqueId("slope"), min: 0, max: 1, step: 0.01,
    on: { input: () => onInput(Number(range.value)) },
  });
  const value = element("output", { class: "story-slope", for: range.id });
  return {
    element: element("div", { class: "story-control" },
      element("label", { for: range.id }, "slope"),
      value,
      range,
      ends.map((end) => element("span", { class: "story-end" }, end)),
    ),
    set(slope, words) {
      setText(value, printed(slope, 2));
      range.value = slope;
      range.setAttribute("aria-valuetext", `${general(slope)}: ${words}`);
    },
  };
}
