// A slider with a large number over it, and what its two ends mean.

import { element, setText, uniqueId } from "./dom.js";
import { general, printed } from "./numbers.js";

// Of slopes from 0 to 1: slopeOfStory({ ends, onInput(slope) }) -> { element, set(slope, words) }; words: what it leads to.
export function slopeOfStory({ ends, onInput }) {
  const range = element("input", {
    type: "range",
    class: "story-range",
    id: uniqueId("slope"),
    min: 0,
    max: 1,
    step: 0.01,
    on: { input: () => onInput(Number(range.value)) },
  });
  const value = element("output", { class: "story-slope", for: range.id });
  return {
    element: element(
      "div",
      { class: "story-control" },
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
