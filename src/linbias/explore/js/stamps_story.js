// Order that is not counted, on a line: words at time stamps, and words that forget what came before.

import { copyButton } from "./copy.js";
import { announcer, element, note, setText } from "./dom.js";
import { printed } from "./numbers.js";
import { ruler } from "./ruler.js";
import { grouped } from "./scales.js";
import { lastWordsWeights, STORY_HEAD, STORY_WORDS } from "./slope_story.js";
import { slopeOfStory } from "./story_slider.js";

export const MOST_PLACE = STORY_WORDS.length + 1;
export const SPOKEN = [0, 0.8, 1.7, 2.5, 3.2, 4, 8.2, 9, 9.8, 10.8, 12]; // with a pause
const COUNTED = STORY_WORDS.map((_, s) => s);
const FAR = 1000; // how far away a word that forgets puts what came before
const TALLEST = 0.35; // the weight of the tallest bar, unless one is larger

const isCounted = ({ places, gates }) => gates.length === 0 && places.every((place, s) => place === s);

// Where the words stand once some of them have forgotten what came before.
function positionsOf({ places, gates }) {
  return places.map((place, s) => place + FAR * gates.filter((gate) => gate <= s).length);
}

// stampsStory({ example, onChange(parts) }) -> { element, update({ slope, places, gates }) }
export function stampsStory({ example, onChange }) {
  const weightsAt = lastWordsWeights(STORY_WORDS, example);
  const last = STORY_WORDS.length - 1;
  let shown = null;
  const slider = slopeOfStory({ ends: ["0: places do not matter", "1: the nearest words"], onInput: (slope) => onChange({ slope }) });
  const line = ruler({
    words: STORY_WORDS,
    length: MOST_PLACE,
    far: FAR,
    onMove: (word, place) => onChange({ places: shown.places.with(word, place) }),
    onForget(word) {
      const gates = shown.gates.includes(word) ? shown.gates.filter((gate) => gate !== word) : [...shown.gates, word];
      onChange({ gates: gates.sort((a, b) => a - b) });
      spoken.say(says.textContent);
    },
  });
  const says = element("p", { class: "ink-says" });
  const spoken = announcer();
  const reset = element("button", { type: "button", on: { click: () => onChange({ places: COUNTED, gates: [] }) } }, "Reset to 0, 1, 2 \u2026");

  return {
    element: element(
      "section",
      { class: "stamps" },
      element(
        "div",
        { class: "pair" },
        element("h3", {}, "On a line: time"),
        element("div", { class: "abreast" }, reset, copyButton({ label: "Copy code", says: "Code copied", text: () => stampsInPython(shown) })),
      ),
      element("p", { class: "lede" }, "Words can stand at the seconds in which they were spoken. Drag a stamp along the ruler; click a word, and it forgets what came before."),
      slider.element,
      line.element,
      says,
      note("Forget gates are stamps too: with gates f, words stand at the sums of \u2212log f, and the slope is 1."),
      spoken.element,
    ),
    update(next) {
      shown = next;
      const { slope, places, gates } = next;
      const positions = positionsOf(next);
      const [weights, plain] = [weightsAt(slope, positions), weightsAt(slope)];
      const largest = Math.max(...weights);
      const best = weights.indexOf(largest);
      const back = weights.reduce((sum, weight, s) => sum + weight * (positions[last] - positions[s]), 0);
      const where = best === last ? "itself" : `\u201c${STORY_WORDS[best]}\u201d`;
      line.update({ places, gates, weights, plain, most: Math.max(TALLEST, largest, ...plain) });
      slider.set(slope, `most weight on ${where}, ${printed(largest, 2)}`);
      setText(says, `\u201c${STORY_WORDS[last]}\u201d looks ${printed(back, 1)} back on average, most at ${where}. ${remark(next, weights)}`);
      reset.disabled = isCounted(next);
    },
  };
}

// What is to be seen besides.
function remark({ slope, places, gates }, weights) {
  if (gates.length > 0) {
    const gate = gates.at(-1);
    const kept = weights.slice(0, gate).reduce((a, b) => a + b, 0);
    return `\u201c${STORY_WORDS[gate]}\u201d forgets: what came before stands ${grouped(FAR)} further off, and keeps ${printed(kept)} of the weight.`;
  }
  if (slope === 0) return "At slope 0 it does not matter where words stand.";
  if (isCounted({ places, gates })) return "The words are counted, as in a text.";
  return "The thin lines: the weights if words were counted 0,\u00a01,\u00a02\u00a0\u2026";
}

// The same numbers in Python.
function stampsInPython(shown) {
  return [
    "import linbias",
    "from linbias import explore",
    "",
    `tokens = ${JSON.stringify(STORY_WORDS)}`,
    `q, k, v = (rows[${STORY_HEAD}:] for rows in explore.vectors(tokens, num_heads=${STORY_HEAD + 1}))`,
    `positions = [${positionsOf(shown).join(", ")}]`,
    `print(linbias.attention(q, k, v, [${shown.slope}], positions=positions)[0, -1])  # what the last word makes of it`,
    `print(linbias.attention_weights(q, k, [${shown.slope}], positions=positions)[0, -1].round(2))`,
  ].join("\n");
}
