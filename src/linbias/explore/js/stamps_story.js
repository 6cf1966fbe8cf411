// Order that is not counted, on a line: words at time stamps, and words that forget what came before.

import { copyButton } from "./controls.js";
import { announcer, element, note, setAll, setText, svgElement, walked } from "./dom.js";
import { drawInk, inkShares, inkWord, slopeOfStory } from "./ink.js";
import { general, printed } from "./numbers.js";
import { grouped, roundTicks, spread } from "./scales.js";
import { lastWordsWeights, STORY_HEAD, STORY_WORDS } from "./slope_story.js";

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
    words: STORY_WORDS, length: MOST_PLACE, far: FAR,
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
    element: element("section", { class: "stamps" },
      element("div", { class: "pair" },
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

// A ruler under a line of words. Each word has a knob at its place there, to be dragged or moved by arrow keys, never past its
// neighbours; the words themselves stand as near to their knobs as they find room, joined to them by lines of their ink.
// A word is a button: pressed, it forgets what came before, and the ruler is broken there. In narrow windows the ruler
// stands upright.

const TENTHS = 10; // of a unit: what a knob's step is
const BREAK = 1.5; // units that a break takes on the ruler
const WIDEST_WORD = 62; // pixels on average; where words do not fit side by side, the ruler is set upright
const UPRIGHT_ROW = 40; // pixels of the upright ruler for each word
const ENDS = { upright: 14, level: 34 }; // pixels beyond the ruler's two ends

// ruler({ words, length, far, onMove(word, place), onForget(word) }) -> { element, update({ places, gates, weights, plain, most }) }
// places: from 0 to `length`, never falling. gates: the words that forget; what came before them lies `far` away.
function ruler({ words, length, far, onMove, onForget }) {
  const last = words.length - 1;
  const names = words.map((word) => element("bdi", {}, word));
  const buttons = words.map((word, s) =>
    element("button", { type: "button", class: "forget", "aria-label": `\u201c${word}\u201d forgets what came before`, on: { click: () => onForget(s) } }, names[s]),
  );
  const labels = words.map((_, s) => inkWord("div", s > 0 ? buttons[s] : names[s], s === last)); // the first word has nothing to forget
  const knobs = words.map((word, s) =>
    element("span", {
      class: "knob", role: "slider", tabindex: 0, "aria-label": `stamp of \u201c${word}\u201d`,
      on: { pointerdown: (event) => hold(event, s), pointermove: drag, keydown: (event) => step(event, s) },
    }),
  );
  const lines = words.map(() => svgElement("path", { class: "ruler-line" }));
  const axis = svgElement("g");
  const drawing = svgElement("svg", { class: "ruler-drawing", "aria-hidden": "true" }, axis, lines);
  const items = words.map((_, s) => element("li", {}, labels[s], knobs[s]));
  const box = element("div", { class: "ruler" }, drawing, element("ol", { "aria-label": `Weights of the word ${words[last]}` }, items));
  let shown = null;
  let plot = null; // pixels, once the ruler has a width
  let held = null; // { s, from, moved }: the knob under the pointer, how far off its middle, and whether it went anywhere

  const numBreaks = (s) => shown.gates.filter((gate) => gate <= s).length;
  const bounds = (s) => [shown.places[s - 1] ?? 0, shown.places[s + 1] ?? length];
  const pixels = (place, breaks) => plot.end + plot.unit * (place + BREAK * breaks);
  const along = (event) => (plot.upright ? event.clientY - box.getBoundingClientRect().top : event.clientX - box.getBoundingClientRect().left);

  function hold(event, s) {
    knobs[s].setPointerCapture(event.pointerId);
    held = { s, from: along(event) - pixels(shown.places[s], numBreaks(s)), moved: false };
  }

  function drag(event) {
    if (!held || !event.target.hasPointerCapture(event.pointerId)) return;
    let { s } = held;
    const { places } = shown;
    const to = (along(event) - held.from - plot.end) / plot.unit - BREAK * numBreaks(s);
    // Of several knobs at one place the outermost is taken, which alone can move.
    const outwards = Math.sign(to - places[s]);
    while (!held.moved && outwards && places[s + outwards] === places[s]) s += outwards;
    held.s = s;
    move(s, Math.round(to * TENTHS) / TENTHS);
  }

  function move(s, to) {
    const [low, high] = bounds(s);
    const place = Math.min(Math.max(to, low), high);
    if (place === shown.places[s]) return;
    if (held) held.moved = true;
    onMove(s, place);
  }

  function step(event, s) {
    const [low, high] = bounds(s).map((place) => Math.round(place * TENTHS));
    const pages = { PageUp: TENTHS, PageDown: -TENTHS }[event.key];
    const here = Math.round(shown.places[s] * TENTHS);
    if (pages) event.preventDefault();
    const to = pages ? here - low + pages : walked(event, here - low, high - low, { down: plot.upright ? 1 : -1 });
    if (to !== null) move(s, (to + low) / TENTHS);
  }

  function layOut() {
    const { width } = box.getBoundingClientRect();
    if (width === 0) return;
    const upright = width < WIDEST_WORD * words.length;
    box.classList.toggle("upright", upright);
    const tall = upright ? UPRIGHT_ROW * words.length : labels[0].offsetHeight;
    const edge = upright ? labels[0].offsetLeft : tall;
    plot = {
      ...{ upright, edge, end: upright ? ENDS.upright : ENDS.level, size: upright ? tall : width, tall: upright ? tall : tall + 78 },
      ...{ width, base: upright ? edge - 40 : tall + 44, sizes: labels.map((label) => label.getBoundingClientRect()[upright ? "height" : "width"]) },
    };
    box.style.setProperty("height", `${plot.tall}px`);
    drawing.setAttribute("viewBox", `0 0 ${width} ${plot.tall}`);
    place();
  }

  const point = (at, across) => (plot.upright ? `${across} ${at.toFixed(1)}` : `${at.toFixed(1)} ${across}`);

  // Knobs, words and the ruler, by where the stamps are.
  function place() {
    const { places, gates } = shown;
    const { base, edge, end, size, upright } = plot;
    plot.unit = (size - 2 * end) / (length + BREAK * gates.length);
    const at = places.map((to, s) => pixels(to, numBreaks(s)));
    const middles = spread(at, plot.sizes, 0, size);
    const bend = (base + edge) / 2;
    items.forEach((item, s) => {
      setAll(item, { style: { "--at": `${at[s]}px`, "--label": `${middles[s]}px` } });
      lines[s].setAttribute("d", `M${point(middles[s], edge)}C${point(middles[s], bend)} ${point(at[s], bend)} ${point(at[s], base)}`);
    });
    box.style.setProperty("--base", `${base}px`);
    const breaks = gates.map((gate, i) => (pixels(places[gate - 1], i) + pixels(places[gate], i + 1)) / 2);
    const middle = gates.map((gate) => (places[gate - 1] + places[gate]) / 2);
    const ends = [end, ...breaks.flatMap((x) => [x - 3, x + 3]), size - end];
    const tick = (value) => {
      const passed = middle.filter((x) => x < value).length;
      const x = pixels(value, passed);
      const where = upright ? { x: base - 12, y: x, dy: "0.32em", "text-anchor": "end" } : { x, y: base + 26, "text-anchor": "middle" };
      return [
        svgElement("path", { d: `M${point(x, base)}L${point(x, base + (upright ? -5 : 5))}` }),
        svgElement("text", where, grouped(value + far * passed)),
      ];
    };
    const bars = Array.from({ length: ends.length / 2 }, (_, i) => `M${point(ends[2 * i], base)}L${point(ends[2 * i + 1], base)}`);
    const slashes = breaks.flatMap((x) => [-3, 3].map((side) => `M${point(x + side - 3, base + 7)}L${point(x + side + 3, base - 7)}`));
    const ticks = roundTicks(0, length, (plot.unit * length) / (upright ? 28 : 50 + 16 * Math.sign(gates.length)));
    axis.replaceChildren(svgElement("path", { d: bars.join("") }), ...ticks.flatMap(tick), svgElement("path", { class: "ruler-break", d: slashes.join("") }));
  }

  function ink() {
    const { places, gates, weights } = shown;
    drawInk(labels, shown);
    inkShares(weights).forEach((share, s) => {
      const [low, high] = bounds(s);
      const behind = far * numBreaks(s);
      for (const node of [items[s], lines[s]]) node.style.setProperty("--ink-share", share);
      setAll(knobs[s], {
        "aria-valuemin": low, "aria-valuemax": high, "aria-valuenow": places[s],
        "aria-valuetext": `${general(places[s] + behind)}: weight ${printed(weights[s], 2)}`,
      });
      buttons[s].setAttribute("aria-pressed", String(gates.includes(s)));
    });
  }

  new ResizeObserver(layOut).observe(box);
  return {
    element: box,
    update(next) {
      const moved = next.places !== shown?.places || next.gates !== shown?.gates;
      shown = next;
      if (plot && moved) place();
      ink();
    },
  };
}
