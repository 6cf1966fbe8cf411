// The idea in one line of words: a slope, and what the last word looks at, as ink. The page opens with it, and the
// documentation's first page shows it too.

import { attend } from "./attention.js";
import { element, setText } from "./dom.js";
import { drawInk, inkWord, slopeOfStory } from "./ink.js";
import { printed } from "./numbers.js";
import { vectors } from "./vectors.js";

export const STORY_HEAD = 1; // the head of vectors.js whose vectors the words get
const STORY_SLOPES = Array.from({ length: 21 }, (_, step) => step / 20);
export const STORY_WORDS = "The cat sat on the mat and the dog ran home".split(" ");
export const STORY_SLOPE = 0.5;

// What the last word gives to every word, by slope and by where the words stand.
export function lastWordsWeights(words, example) {
  const { q, k, v } = vectors(words, STORY_HEAD + 1, example)[STORY_HEAD];
  return (slope, positions) => attend({ q: [q.at(-1)], k, v, left: slope, right: Infinity, positions }).weights;
}

// slopeStory({ example, onInput(slope) }) -> { element, update({ words, slope }), inWords() }
export function slopeStory({ example, onInput }) {
  const slider = slopeOfStory({
    ends: ["0: content alone", "1: the nearest words"],
    onInput(slope) {
      draw(slope);
      onInput(slope);
    },
  });
  const row = element("ol", { class: "ink" });
  const says = element("p", { class: "ink-says" });
  let shown = { words: [], slope: 0 };
  let weightsAt = null;
  let plain = [];
  let most = 1;

  function build(words) {
    weightsAt = lastWordsWeights(words, example);
    most = Math.max(...STORY_SLOPES.map((slope) => Math.max(...weightsAt(slope))));
    plain = weightsAt(0);
    row.setAttribute("aria-label", `Weights of the word ${words.at(-1)}`);
    row.replaceChildren(...words.map((word, s) => inkWord("li", element("bdi", {}, word), s === words.length - 1)));
  }

  function draw(slope) {
    shown.slope = slope;
    const { words } = shown;
    const weights = weightsAt(slope);
    drawInk([...row.children], { weights, plain, most });
    const last = words.length - 1;
    const best = weights.indexOf(Math.max(...weights));
    const back = weights.reduce((sum, weight, s) => sum + weight * (last - s), 0);
    const where = best === last ? "itself" : `\u201c${words[best]}\u201d`;
    slider.set(slope, `most weight on ${where}, ${printed(weights[best], 2)}`);
    setText(
      says,
      (slope === 0
        ? "Slope 0 is plain attention: content alone decides. "
        : `Each step back takes ${printed(slope, 2)} off a word\u2019s score; the thin lines are slope 0. `)
        + `\u201c${words[last]}\u201d looks ${back.toFixed(1)} words back on average, most at ${where}.`,
    );
  }

  return {
    element: element("div", { class: "slope-story" }, slider.element, row, says),
    update({ words, slope }) {
      const same = words.join(" ") === shown.words.join(" ");
      shown = { words, slope };
      if (!same) build(words);
      draw(slope);
    },
    inWords: () => says.textContent,
  };
}
