// Order that is not counted, on a line: words at time stamps, and words that forget.

import { copyButton } from "./controls.js";
import { announcer, element, note, onDraw, prose, setAll, svgElement, walked } from "./dom.js";
import { general, grouped, printed, roundTicks, spread } from "./numbers.js";
import {
  gaze, inkOf, inkWord, lastWordsWeights, slopeOfStory, STORY_HEAD, STORY_WORDS,
} from "./slope_story.js";

export const MOST_PLACE = STORY_WORDS.length + 1;
export const SPOKEN = [0, 0.8, 1.7, 2.5, 3.2, 4, 8.2, 9, 9.8, 10.8, 12]; // with a pause
const COUNTED = STORY_WORDS.map((_, s) => s);
const FAR = 1000; // how far away a word that forgets puts what came before
const TALLEST = 0.35; // the weight of the tallest bar, unless one is larger

const isCounted = ({ places, gates }) => gates.length === 0 && places.every((place, s) => place === s);

// How many words up to this one have forgotten what came before.
const numForgotten = ({ gates }, s) => gates.filter((gate) => gate <= s).length;

const positionsOf = (state) => state.places.map((place, s) => place + FAR * numForgotten(state, s));

// The line of words of state.slope, places and gates.
export function stampsStory({ example, state, change, bind }) {
  const weightsAt = lastWordsWeights(STORY_WORDS, example);
  const spoken = announcer();
  let ink = null; // weights, plain ones of words that are counted, and the tallest bar
  let seen = null;
  onDraw(() => {
    const positions = positionsOf(state);
    const [weights, plain] = [weightsAt(state.slope, positions), weightsAt(state.slope)];
    seen = gaze(STORY_WORDS, weights, positions);
    ink = { weights, plain, most: Math.max(TALLEST, seen.most, ...plain) };
  });

  function onForget(word) {
    const others = state.gates.filter((gate) => gate !== word);
    const gates = others.length < state.gates.length ? others : [...others, word];
    change({ gates: gates.sort((a, b) => a - b) });
    spoken.say(says());
  }

  const onMove = (word, place) => change({ places: state.places.with(word, place) });
  const count = () => change({ places: COUNTED, gates: [] });
  const reset = { disabled: () => isCounted(state), on: { click: count } };
  const says = () => prose`\u201c${STORY_WORDS.at(-1)}\u201d looks ${printed(seen.back, 1)} back on average,
    most at ${seen.on}. ${remark(state, ink.weights)}`;
  return element("section.stamps",
    element("div.pair",
      element("h3", "On a line: time"),
      element("div.abreast",
        element("button", reset, "Reset to 0, 1, 2 \u2026"),
        copyButton("code", () => stampsInPython(state)),
      ),
    ),
    element("p.lede", prose`Words can stand at the seconds in which they were spoken. Drag a stamp along the
      ruler; click a word, and it forgets what came before.`),
    slopeOfStory({
      ends: ["0: places do not matter", "1: the nearest words"], ...bind("slope"),
      words: () => seen.inWords,
    }),
    ruler({ state, inkNow: () => ink, onMove, onForget }),
    element("p.ink-says", says),
    note(prose`Forget gates are stamps too: with gates f, words stand at the sums of \u2212log f, and the
      slope is 1.`),
    spoken.element,
  );
}

// What is to be seen besides.
function remark({ slope, places, gates }, weights) {
  if (gates.length > 0) {
    const gate = gates.at(-1);
    const kept = weights.slice(0, gate).reduce((a, b) => a + b, 0);
    return prose`\u201c${STORY_WORDS[gate]}\u201d forgets: what came before stands ${grouped(FAR)} further
      off, and keeps ${printed(kept)} of the weight.`;
  }
  if (slope === 0) return "At slope 0 it does not matter where words stand.";
  if (isCounted({ places, gates })) return "The words are counted, as in a text.";
  return "The thin lines: the weights if words were counted 0,\u00a01,\u00a02\u00a0\u2026";
}

// The same numbers in Python.
const stampsInPython = (state) => `\
import linbias
from linbias import explore

tokens = ${JSON.stringify(STORY_WORDS)}
q, k, v = (rows[${STORY_HEAD}:] for rows in explore.vectors(tokens, num_heads=${STORY_HEAD + 1}))
positions = [${positionsOf(state).join(", ")}]
# What the last word makes of it, and the weights.
print(linbias.attention(q, k, v, [${state.slope}], positions=positions)[0, -1])
print(linbias.attention_weights(q, k, [${state.slope}], positions=positions)[0, -1].round(2))`;

// A ruler under the words. Each has a knob there, to be dragged or moved by keys, never past its neighbours,
// and stands as near to it as it finds room. A word is a button: pressed, it forgets what came before, and
// the ruler is broken there. In narrow windows the ruler stands upright.

const TENTHS = 10; // of a unit: what a knob's step is
const BREAK = 1.5; // units that a break takes on the ruler
const WIDEST_WORD = 62; // pixels on average, below which the ruler is set upright
const UPRIGHT_ROW = 40; // pixels of the upright ruler for each word
const ENDS = { upright: 14, level: 34 }; // pixels beyond the ruler's two ends

// Of the state, places: from 0 to MOST_PLACE, never falling; gates: the words that forget.
function ruler({ state, inkNow, onMove, onForget }) {
  const last = STORY_WORDS.length - 1;
  let ink = []; // of each word
  let plot = null; // pixels, once the ruler has a width
  let held = null; // { s, from, moved }: the knob under the pointer, how far off its middle it is

  function item(word, s) {
    const quoted = `\u201c${word}\u201d`;
    const name = element("bdi", word);
    const forget = {
      "aria-label": `${quoted} forgets what came before`, on: { click: () => onForget(s) },
      "aria-pressed": () => state.gates.includes(s),
    };
    // The first word has nothing to forget.
    const button = s > 0 && element("button.forget", forget, name);
    const look = { style: () => ink[s].style, number: () => ink[s].number };
    const label = inkWord("div", button || name, s === last, look);
    const inked = { style: () => ({ "--ink-share": ink[s].style["--ink-share"] }) };
    const knob = element("span.knob", {
      role: "slider", tabindex: 0, "aria-label": `stamp of ${quoted}`,
      "aria-valuemin": () => bounds(s)[0], "aria-valuemax": () => bounds(s)[1],
      "aria-valuenow": () => state.places[s],
      "aria-valuetext": () => `${general(positionsOf(state)[s])}: weight ${ink[s].number}`,
      on: { pointerdown: (event) => hold(event, s), pointermove: drag, keydown: (event) => step(event, s) },
    });
    const line = svgElement("path.ruler-line", inked);
    return { label, knob, line, item: element("li", inked, label, knob) };
  }

  onDraw(() => (ink = inkOf(inkNow())));
  const items = STORY_WORDS.map(item);
  const axis = svgElement("g");
  const lines = items.map(({ line }) => line);
  const drawing = svgElement("svg.ruler-drawing", { "aria-hidden": true }, axis, lines);
  const listed = { "aria-label": `Weights of the word ${STORY_WORDS[last]}` };
  const box = element("div.ruler",
    drawing, element("ol", listed, items.map(({ item: one }) => one)),
  );

  const bounds = (s) => [state.places[s - 1] ?? 0, state.places[s + 1] ?? MOST_PLACE];
  const pixels = (place, breaks) => plot.end + plot.unit * (place + BREAK * breaks);

  function along({ clientX, clientY }) {
    const { left, top } = box.getBoundingClientRect();
    return plot.upright ? clientY - top : clientX - left;
  }

  function hold(event, s) {
    items[s].knob.setPointerCapture(event.pointerId);
    const from = along(event) - pixels(state.places[s], numForgotten(state, s));
    held = { s, from, moved: false };
  }

  function drag(event) {
    if (!held || !event.target.hasPointerCapture(event.pointerId)) return;
    let { s } = held;
    const { places } = state;
    const to = (along(event) - held.from - plot.end) / plot.unit - BREAK * numForgotten(state, s);
    // Of several knobs at one place the outermost is taken, which alone can move.
    const outwards = Math.sign(to - places[s]);
    while (!held.moved && outwards && places[s + outwards] === places[s]) s += outwards;
    held.s = s;
    move(s, Math.round(to * TENTHS) / TENTHS);
  }

  function move(s, to) {
    const [low, high] = bounds(s);
    const place = Math.min(Math.max(to, low), high);
    if (place === state.places[s]) return;
    if (held) held.moved = true;
    onMove(s, place);
  }

  function step(event, s) {
    const [low, high] = bounds(s).map((place) => Math.round(place * TENTHS));
    const here = Math.round(state.places[s] * TENTHS) - low;
    const to = walked(event, here, high - low, { down: plot.upright ? 1 : -1, page: -TENTHS });
    if (to !== null) move(s, (to + low) / TENTHS);
  }

  function layOut() {
    const { width } = box.getBoundingClientRect();
    if (width === 0) return;
    const upright = width < WIDEST_WORD * STORY_WORDS.length;
    box.classList.toggle("upright", upright);
    const { offsetHeight, offsetLeft } = items[0].label;
    const side = upright ? "height" : "width";
    const tall = upright ? UPRIGHT_ROW * STORY_WORDS.length : offsetHeight + 78;
    plot = {
      ...{ upright, end: upright ? ENDS.upright : ENDS.level, size: upright ? tall : width },
      edge: upright ? offsetLeft : offsetHeight, // where words end and lines begin
      base: upright ? offsetLeft - 40 : offsetHeight + 44, // where the ruler lies
      sizes: items.map(({ label }) => label.getBoundingClientRect()[side]),
    };
    setAll(box, { style: { height: `${tall}px`, "--base": `${plot.base}px` } });
    drawing.setAttribute("viewBox", `0 0 ${width} ${tall}`);
    place();
  }

  const point = (at, across) => plot.upright ? `${across} ${at.toFixed(1)}` : `${at.toFixed(1)} ${across}`;
  const stroke = (at, across, to, toAcross) => `M${point(at, across)}L${point(to, toAcross)}`;

  // Knobs, words and the ruler, by where the stamps are.
  function place() {
    const { places, gates } = state;
    const { base, edge, end, size, upright } = plot;
    plot.unit = (size - 2 * end) / (MOST_PLACE + BREAK * gates.length);
    const at = places.map((to, s) => pixels(to, numForgotten(state, s)));
    const middles = spread(at, plot.sizes, 0, size);
    const bend = (base + edge) / 2;
    items.forEach(({ item, line }, s) => {
      setAll(item, { style: { "--at": `${at[s]}px`, "--label": `${middles[s]}px` } });
      const curve = [point(middles[s], bend), point(at[s], bend), point(at[s], base)];
      line.setAttribute("d", `M${point(middles[s], edge)}C${curve.join(" ")}`);
    });
    const breaks = gates.map((gate) => (at[gate - 1] + at[gate]) / 2);
    const starts = [end, ...breaks.map((x) => x + 3)];
    const ends = [...breaks.map((x) => x - 3), size - end];
    const bars = starts.map((from, i) => stroke(from, base, ends[i], base));
    const slash = (x) => stroke(x - 3, base + 7, x + 3, base - 7);
    const slashes = breaks.flatMap((x) => [slash(x - 3), slash(x + 3)]);
    const room = upright ? 28 : 50 + 16 * Math.sign(gates.length); // pixels for a tick
    axis.replaceChildren(
      svgElement("path", { d: bars.join("") }),
      ...roundTicks(0, MOST_PLACE, (plot.unit * MOST_PLACE) / room).flatMap(tick),
      svgElement("path.ruler-break", { d: slashes.join("") }),
    );
  }

  function tick(value) {
    const { places, gates } = state;
    const { base, upright } = plot;
    const passed = gates.filter((gate) => (places[gate - 1] + places[gate]) / 2 < value).length;
    const x = pixels(value, passed);
    const where = upright
      ? { x: base - 12, y: x, dy: "0.32em", "text-anchor": "end" }
      : { x, y: base + 26, "text-anchor": "middle" };
    return [
      svgElement("path", { d: stroke(x, base, x, base + (upright ? -5 : 5)) }),
      svgElement("text", where, grouped(value + FAR * passed)),
    ];
  }

  onDraw(() => plot && place());
  new ResizeObserver(layOut).observe(box);
  return box;
}
