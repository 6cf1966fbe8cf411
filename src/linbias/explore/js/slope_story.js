// The idea in one line of words: a slope, and what the last word looks at, as ink. The page opens with it,
// and the documentation's first page shows it too.

import { attend, vectors } from "./attention.js";
import { element, mount, onDraw, prose, uniqueId } from "./dom.js";
import { general, printed } from "./numbers.js";

const STORY_HEAD = 1; // the head of `vectors` whose vectors the words get
const STORY_SLOPES = Array.from({ length: 21 }, (_, step) => step / 20);
export const STORY_WORDS = "The cat sat on the mat and the dog ran home".split(" ");
export const STORY_SLOPE = 0.5;

// The story alone, in a page that is not the explorer.
export function startCard(root, example, style) {
  const state = { words: STORY_WORDS, slope: STORY_SLOPE };
  root.replaceChildren(element("style", style));
  const draw = mount(root, () => [slopeStory({ example, state, onInput }).element]);
  function onInput(slope) {
    state.slope = slope;
    draw();
  }
}

// A word under a bar, which a thin line crosses that it is compared with, and above a number.
export const inkWord = (tag, word, isQuery, { style, number }) =>
  element(isQuery ? `${tag}.ink-word.ink-query` : `${tag}.ink-word`, { style },
    element("span.ink-bar", { "aria-hidden": true }), word, element("span.ink-number", number),
  );

// How dark each weight is drawn, from 0 to 1: the largest is darkest.
export function inkShares(weights) {
  const largest = Math.max(...weights);
  return Array.from(weights, (weight) => Math.sqrt(weight / largest));
}

// Each word's ink: `most` is the weight of the tallest bar, `plain` are those of thin lines.
export const inkOf = ({ weights, plain, most }) =>
  inkShares(weights).map((ink, s) => ({
    style: { "--share": weights[s] / most, "--plain": plain[s] / most, "--ink-share": ink },
    number: printed(weights[s], 2),
  }));

// A slider under a large number, of whose parts its owner makes an element.
export function storySlider(name, attributes, text) {
  const id = uniqueId("story");
  const range = element("input.story-range", { type: "range", id, ...attributes });
  return [element("label", { for: id }, name), element("output.story-slope", { for: id }, text), range];
}

// Of slopes from 0 to 1, with what its two ends mean; words(): what the slope leads to.
export function slopeOfStory({ ends, value, words, onInput }) {
  const attributes = {
    min: 0, max: 1, step: 0.01, value, on: { input: ({ target }) => onInput(Number(target.value)) },
    "aria-valuetext": () => `${general(value())}: ${words()}`,
  };
  return element("div.story-control",
    storySlider("slope", attributes, () => printed(value(), 2)),
    ends.map((end) => element("span.story-end", end)),
  );
}

// What the last word gives to every word, by slope and by where the words stand.
export function lastWordsWeights(words, example) {
  const { q, k, v } = vectors(words, STORY_HEAD + 1, example)[STORY_HEAD];
  const sides = (slope) => ({ left: slope, right: Infinity });
  return (slope, positions) => attend({ q: [q.at(-1)], k, v, ...sides(slope), positions }).weights;
}

// Where the last word looks: its largest weight, on what, and how far back on average.
export function gaze(words, weights, positions = words.map((_, s) => s)) {
  const most = Math.max(...weights);
  const best = weights.indexOf(most);
  const back = weights.reduce((sum, x, s) => sum + x * (positions.at(-1) - positions[s]), 0);
  const on = best === words.length - 1 ? "itself" : `\u201c${words[best]}\u201d`;
  return { most, back, on, inWords: `most weight on ${on}, ${printed(most, 2)}` };
}

// The story of state.words at state.slope: { element, inWords() }.
export function slopeStory({ example, state, onInput }) {
  let known = {}; // what does not depend on the slope: words, weightsAt, plain, most
  let weights = [];
  onDraw(() => {
    const { words, slope } = state;
    if (words !== known.words) {
      const weightsAt = lastWordsWeights(words, example);
      const most = Math.max(...STORY_SLOPES.flatMap((other) => [...weightsAt(other)]));
      known = { words, weightsAt, plain: weightsAt(0), most };
    }
    weights = known.weightsAt(slope);
  });
  const seen = () => gaze(state.words, weights);

  function inWords() {
    const { words, slope } = state;
    const { back, on } = seen();
    const what =
      slope === 0
        ? "Slope 0 is plain attention: content alone decides."
        : prose`Each step back takes ${printed(slope, 2)} off a word\u2019s score; the thin lines are slope
          0.`;
    return prose`${what} \u201c${words.at(-1)}\u201d looks ${back.toFixed(1)} words back on average, most at
      ${on}.`;
  }

  const inked = (ink, s) => inkWord("li", element("bdi", state.words[s]), s === weights.length - 1, ink);
  const label = () => `Weights of the word ${state.words.at(-1)}`;
  return {
    inWords,
    element: element("div.slope-story",
      slopeOfStory({
        ends: ["0: content alone", "1: the nearest words"], value: () => state.slope,
        words: () => seen().inWords, onInput,
      }),
      element("ol.ink", { "aria-label": label }, () => inkOf({ ...known, weights }).map(inked)),
      element("p.ink-says", inWords),
    ),
  };
}
