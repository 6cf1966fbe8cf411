// The idea in one line of words: a slope, and what the last word looks at, as ink. The page opens with it, and the
// documentation's first page shows it too.

import { attend } from "./attention.js";
import { element, setText, uniqueId } from "./dom.js";
import { general, printed } from "./numbers.js";
import { vectors } from "./vectors.js";

const STORY_HEAD = 1; // the head of vectors.js whose vectors the words get
const STORY_SLOPES = Array.from({ length: 21 }, (_, step) => step / 20);
export const STORY_WORDS = "The cat sat on the mat and the dog ran home".split(" ");
export const STORY_SLOPE = 0.5;

// What the last word gives to every word, by slope.
function lastWordsWeights(words, example) {
  const { q, k, v } = vectors(words, STORY_HEAD + 1, example)[STORY_HEAD];
  return (slope) => attend({ q: [q.at(-1)], k, v, left: slope, right: Infinity }).weights;
}

// slopeStory({ example, onInput(slope) }) -> { element, update({ words, slope }), inWords() }
export function slopeStory({ example, onInput }) {
  const value = element("output", { class: "story-slope" });
  const range = element("input", {
    type: "range",
    id: uniqueId("slope"),
    min: 0,
    max: 1,
    step: 0.01,
    on: {
      input: () => {
        draw(Number(range.value));
        onInput(shown.slope);
      },
    },
  });
  value.htmlFor = range.id;
  const row = element("ol", { class: "ink" });
  const says = element("p", { class: "ink-says" });
  let shown = { words: [], slope: 0 };
  let weightsAt = null;
  let most = 1;

  function build(words) {
    weightsAt = lastWordsWeights(words, example);
    most = Math.max(...STORY_SLOPES.map((slope) => Math.max(...weightsAt(slope))));
    const plain = weightsAt(0);
    row.setAttribute("aria-label", `Weights of the word ${words.at(-1)}`);
    row.replaceChildren(
      ...words.map((word, s) =>
        element(
          "li",
          { class: s === words.length - 1 ? "ink-word ink-query" : "ink-word", style: { "--plain": plain[s] / most } },
          element("span", { class: "ink-bar", "aria-hidden": "true" }),
          element("bdi", {}, word),
          element("span", { class: "ink-number" }),
        ),
      ),
    );
  }

  function draw(slope) {
    shown.slope = slope;
    const { words } = shown;
    const weights = weightsAt(slope);
    const largest = Math.max(...weights);
    weights.forEach((weight, s) => {
      const word = row.children[s];
      word.style.setProperty("--share", weight / most);
      word.style.setProperty("--ink-share", Math.sqrt(weight / largest));
      setText(word.lastChild, printed(weight, 2));
    });
    const last = words.length - 1;
    const best = weights.indexOf(largest);
    const back = weights.reduce((sum, weight, s) => sum + weight * (last - s), 0);
    const where = best === last ? "itself" : `\u201c${words[best]}\u201d`;
    setText(value, printed(slope, 2));
    range.value = slope;
    range.setAttribute("aria-valuetext", `${general(slope)}: most weight on ${where}, ${printed(weights[best], 2)}`);
    setText(
      says,
      (slope === 0
        ? "Slope 0 is plain attention: content alone decides. "
        : `Each step back takes ${printed(slope, 2)} off a word\u2019s score; the thin lines are slope 0. `)
        + `\u201c${words[last]}\u201d looks ${back.toFixed(1)} words back on average, most at ${where}.`,
    );
  }

  return {
    element: element(
      "div",
      { class: "slope-story" },
      element(
        "div",
        { class: "story-control" },
        element("label", { for: range.id }, "slope"),
        value,
        range,
        element("span", { class: "story-end" }, "0: content alone"),
        element("span", { class: "story-end" }, "1: the nearest words"),
      ),
      row,
      says,
    ),
    update({ words, slope }) {
      const same = words.join(" ") === shown.words.join(" ");
      shown = { words, slope };
      if (!same) build(words);
      draw(slope);
    },
    inWords: () => says.textContent,
  };
}
