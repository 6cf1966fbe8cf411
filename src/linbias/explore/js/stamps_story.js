// Order that is not counted, on a line: words at time stamps.

import { element, note, onDraw, prose, setAll, svgElement, walked } from "./dom.js";
import { general, grouped, printed, roundTicks, spread } from "./numbers.js";
import { gaze, inkOf, inkWord, lastWordsWeights, slopeOfStory, STORY_WORDS } from "./slope_story.js";

export const MOST_PLACE = STORY_WORDS.length + 1;
export const SPOKEN = [0, 0.8, 1.7, 2.5, 3.2, 4, 8.2, 9, 9.8, 10.8, 12]; // with a pause
const COUNTED = STORY_WORDS.map((_, s) => s);
const TALLEST = 0.35; // the weight of the tallest bar, unless one is larger

const isCounted = ({ places }) => places.every((place, s) => place === s);

// The line of words of state.slope and places.
export function stampsStory({ example, state, change, bind }) {
  const weightsAt = lastWordsWeights(STORY_WORDS, example);
  let ink = null; // weights, plain ones of words that are counted, and the tallest bar
  let seen = null;
  onDraw(() => {
    const [weights, plain] = [weightsAt(state.slope, state.places), weightsAt(state.slope)];
    seen = gaze(STORY_WORDS, weights, state.places);
    ink = { weights, plain, most: Math.max(TALLEST, seen.most, ...plain) };
  });

  const reset = { disabled: () => isCounted(state), on: { click: () => change({ places: COUNTED }) } };
  const says = () => prose`\u201c${STORY_WORDS.at(-1)}\u201d looks ${printed(seen.back, 1)} back on average,
    most at ${seen.on}. ${remark(state)}`;
  return element("section.stamps",
    element("div.pair",
      element("h3", "On a line: time"),
      element("button", reset, "Reset to 0, 1, 2 \u2026"),
    ),
    element("p.lede", prose`Words can stand at the seconds in which they were spoken. Drag a stamp along the
      ruler.`),
    slopeOfStory({
      ends: ["0: places do not matter", "1: the nearest words"], ...bind("slope"),
      words: () => seen.inWords,
    }),
    ruler({ state, inkNow: () => ink, onMove: (s, to) => change({ places: state.places.with(s, to) }) }),
    element("p.ink-says", says),
    note(prose`Forget gates are stamps too: with gates f, words stand at the sums of \u2212log f, and the
      slope is 1.`),
  );
}

// What is to be seen besides.
function remark({ slope, places }) {
  if (slope === 0) return "At slope 0 it does not matter where words stand.";
  if (isCounted({ places })) return "The words are counted, as in a text.";
  return "The thin lines: the weights if words were counted 0,\u00a01,\u00a02\u00a0\u2026";
}

// A ruler under the words. Each has a knob there, to be dragged or moved by keys, never past its neighbours,
// and stands as near to it as it finds room. In narrow windows the ruler stands upright.

const TENTHS = 10; // of a unit: what a knob's step is
const WIDEST_WORD = 62; // pixels on average, below which the ruler is set upright
const UPRIGHT_ROW = 40; // pixels of the upright ruler for each word
const ENDS = { upright: 14, level: 34 }; // pixels beyond the ruler's two ends

// Of the state, places: from 0 to MOST_PLACE, never falling.
function ruler({ state, inkNow, onMove }) {
  const last = STORY_WORDS.length - 1;
  let ink = []; // of each word
  let plot = null; // pixels, once the ruler has a width
  let held = null; // { s, from, moved }: the knob under the pointer, how far off its middle it is

  function item(word, s) {
    const quoted = `\u201c${word}\u201d`;
    const look = { style: () => ink[s].style, number: () => ink[s].number };
    const label = inkWord("div", element("bdi", word), s === last, look);
    const inked = { style: () => ({ "--ink-share": ink[s].style["--ink-share"] }) };
    const knob = element("span.knob", {
      role: "slider", tabindex: 0, "aria-label": `stamp of ${quoted}`,
      "aria-valuemin": () => bounds(s)[0], "aria-valuemax": () => bounds(s)[1],
      "aria-valuenow": () => state.places[s],
      "aria-valuetext": () => `${general(state.places[s])}: weight ${ink[s].number}`,
      on: { pointerdown: (event) => hold(event, s), pointermove: drag, keydown: (event) => step(event, s) },
    });
    const line = svgElement("path.ruler-line", inked);
    return { label, knob, line, item: element("li", inked, label, knob) };
  }

  onDraw(() => (ink = inkOf(inkNow())));
  const items = STORY_WORDS.map(item);
  const axis = svgElement("g");
  const drawing = svgElement("svg.ruler-drawing", { "aria-hidden": true }, axis, items.map((one) => one.line));
  const listed = { "aria-label": `Weights of the word ${STORY_WORDS[last]}` };
  const box = element("div.ruler",
    drawing, element("ol", listed, items.map(({ item: one }) => one)),
  );

  const bounds = (s) => [state.places[s - 1] ?? 0, state.places[s + 1] ?? MOST_PLACE];
  const pixels = (place) => plot.end + plot.unit * place;

  function along({ clientX, clientY }) {
    const { left, top } = box.getBoundingClientRect();
    return plot.upright ? clientY - top : clientX - left;
  }

  function hold(event, s) {
    items[s].knob.setPointerCapture(event.pointerId);
    const from = along(event) - pixels(state.places[s]);
    held = { s, from, moved: false };
  }

  function drag(event) {
    if (!held || !event.target.hasPointerCapture(event.pointerId)) return;
    let { s } = held;
    const { places } = state;
    const to = (along(event) - held.from - plot.end) / plot.unit;
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
    const { base, edge, end, size, upright } = plot;
    plot.unit = (size - 2 * end) / MOST_PLACE;
    const at = state.places.map(pixels);
    const middles = spread(at, plot.sizes, 0, size);
    const bend = (base + edge) / 2;
    items.forEach(({ item, line }, s) => {
      setAll(item, { style: { "--at": `${at[s]}px`, "--label": `${middles[s]}px` } });
      const curve = [point(middles[s], bend), point(at[s], bend), point(at[s], base)];
      line.setAttribute("d", `M${point(middles[s], edge)}C${curve.join(" ")}`);
    });
    const room = upright ? 28 : 50; // pixels for a tick
    axis.replaceChildren(
      svgElement("path", { d: stroke(end, base, size - end, base) }),
      ...roundTicks(0, MOST_PLACE, (plot.unit * MOST_PLACE) / room).flatMap(tick),
    );
  }

  function tick(value) {
    const { base, upright } = plot;
    const x = pixels(value);
    const where = upright
      ? { x: base - 12, y: x, dy: "0.32em", "text-anchor": "end" }
      : { x, y: base + 26, "text-anchor": "middle" };
    return [
      svgElement("path", { d: stroke(x, base, x, base + (upright ? -5 : 5)) }),
      svgElement("text", where, grouped(value)),
    ];
  }

  onDraw(() => plot && place());
  new ResizeObserver(layOut).observe(box);
  return box;
}
