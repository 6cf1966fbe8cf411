// The idea in one line of words: a slope, and what the last word looks at, as ink. The page opens
// with it, and the documentation's first page shows it too.

import { attend, vectors } from "./attention.js";
import { element, setAll, setText, uniqueId } from "./dom.js";
import { general, printed } from "./numbers.js";

export const STORY_HEAD = 1; // the head of `vectors` whose vectors the words get
const STORY_SLOPES = Array.from({ length: 21 }, (_, step) => step / 20);
export const STORY_WORDS = "The cat sat on the mat and the dog ran home".split(" ");
export const STORY_SLOPE = 0.5;

// A word under a bar, which a thin line crosses that it is compared with, and above a number.
export function inkWord(tag, word, isQuery) {
  return element(isQuery ? `${tag}.ink-word.ink-query` : `${tag}.ink-word`,
    element("span.ink-bar", { "aria-hidden": true }), word, element("span.ink-number"),
  );
}

// How dark each weight is drawn, from 0 to 1: the largest is darkest.
export function inkShares(weights) {
  const largest = Math.max(...weights);
  return Array.from(weights, (weight) => Math.sqrt(weight / largest));
}

// Writes weights into words; `most` is that of the tallest bar, `plain` are those of thin lines.
export function drawInk(words, { weights, plain, most }) {
  inkShares(weights).forEach((ink, s) => {
    const [share, thin] = [weights[s] / most, plain[s] / most];
    setAll(words[s], { style: { "--share": share, "--plain": thin, "--ink-share": ink } });
    setText(words[s].lastChild, printed(weights[s], 2));
  });
}

// A slider with a large number over it, of whose parts its owner makes an element.
export function storySlider(name, attributes) {
  const id = uniqueId("story");
  const range = element("input.story-range", { type: "range", id, ...attributes });
  const value = element("output.story-slope", { for: id });
  return { range, value, label: element("label", { for: id }, name) };
}

// Of slopes from 0 to 1, with what its two ends mean; words: what the slope leads to.
export function slopeOfStory({ ends, onInput }) {
  const { range, value, label } = storySlider("slope", {
    min: 0, max: 1, step: 0.01, on: { input: () => onInput(Number(range.value)) },
  });
  const says = ends.map((end) => element("span.story-end", end));
  return {
    element: element("div.story-control", label, value, range, says),
    set(slope, words) {
      setText(value, printed(slope, 2));
      range.value = slope;
      range.setAttribute("aria-valuetext", `${general(slope)}: ${words}`);
    },
  };
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

// slopeStory({ example, onInput(slope) }) -> { element, update({ words, slope }), inWords() }
export function slopeStory({ example, onInput }) {
  const slider = slopeOfStory({
    ends: ["0: content alone", "1: the nearest words"],
    onInput(slope) {
      draw(slope);
      onInput(slope);
    },
  });
  const row = element("ol.ink");
  const says = element("p.ink-says");
  let shown = { words: [], slope: 0 };
  let weightsAt = null;
  let plain = [];
  let most = 1;

  function build(words) {
    weightsAt = lastWordsWeights(words, example);
    most = Math.max(...STORY_SLOPES.flatMap((slope) => [...weightsAt(slope)]));
    plain = weightsAt(0);
    const last = words.length - 1;
    row.setAttribute("aria-label", `Weights of the word ${words[last]}`);
    const inked = (word, s) => inkWord("li", element("bdi", word), s === last);
    row.replaceChildren(...words.map(inked));
  }

  function draw(slope) {
    shown.slope = slope;
    const weights = weightsAt(slope);
    drawInk([...row.children], { weights, plain, most });
    const { back, on, inWords } = gaze(shown.words, weights);
    slider.set(slope, inWords);
    const what =
      slope === 0
        ? "Slope 0 is plain attention: content alone decides."
        : `Each step back takes ${printed(slope, 2)} off a word\u2019s score; ` +
          "the thin lines are slope 0.";
    const last = shown.words.at(-1);
    setText(
      says,
      `${what} \u201c${last}\u201d looks ${back.toFixed(1)} words back on average, most at ${on}.`,
    );
  }

  return {
    element: element("div.slope-story", slider.element, row, says),
    update({ words, slope }) {
      const same = words.join(" ") === shown.words.join(" ");
      shown = { words, slope };
      if (!same) build(words);
      draw(slope);
    },
    inWords: () => says.textContent,
  };
}
