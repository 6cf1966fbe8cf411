// What it is good for: lines of loss that draw themselves as one moves the length past that of training.
//
// The slider is the chart's own axis: its thumb stands under the ends of the lines.

import { element, setAll, setText, svgElement, uniqueId } from "./dom.js";
import { decimalsOf, grouped, roundTicks, scaleOf, spread, ticksWithRoom } from "./scales.js";

const STORY_MARGIN = { top: 30, bottom: 8, left: 34 };
const THUMB = 22; // pixels, as style.css has it
const LINE_HEIGHT = 16; // of the names at the lines' ends
const PER_OCTAVE = 32; // positions of the slider between a length and its double

// The values of a line up to a length: the last one measured, and where the line stands between two.
function upTo(points, length) {
  const measured = points.filter(({ x, y }) => x <= length && y !== null);
  const [last, next] = [measured.at(-1), points.find(({ x, y }) => x > length && y !== null)];
  if (!last) return null;
  if (!next) return { last, x: Math.min(length, last.x), y: last.y };
  const share = Math.log(length / last.x) / Math.log(next.x / last.x);
  return { last, x: length, y: last.y + share * (next.y - last.y) };
}

// lengthStory({ group, methods, onInput(length) }) -> { element, update(length), lengths }; group: of a run, as results.py
// gives it.
export function lengthStory({ group, methods, onInput }) {
  const lengths = group.test_lengths;
  const [shortest, longest] = [lengths[0], lengths.at(-1)];
  const lines = group.lines
    .map((line) => ({ ...line, ...methods[line.method], points: line.lengths }))
    .filter(({ points }) => points.some(({ y }) => y !== null))
    .sort((a, b) => Number(a.main) - Number(b.main));
  const drawing = svgElement("svg", { class: "length-drawing", "aria-hidden": "true" });
  const box = element("div", { class: "length-box" }, drawing);
  const clip = uniqueId("clip");
  const name = uniqueId("length");
  const range = element("input", {
    type: "range", class: "story-range", id: name, min: 0,
    max: Math.round(PER_OCTAVE * Math.log2(longest / shortest)), step: 1,
    on: { input: () => take(shortest * 2 ** (Number(range.value) / PER_OCTAVE)), keydown: walk },
  });
  const value = element("output", { class: "story-slope", for: name });
  const says = element("p", { class: "ink-says length-says" });
  const ticks = element("div", { class: "length-ticks", "aria-hidden": "true" });
  let length = group.train_length;
  let plot = null;

  // By keys from one measured length to the next.
  function walk(event) {
    const to = {
      ArrowRight: lengths.find((one) => one > length) ?? longest,
      ArrowLeft: lengths.findLast((one) => one < length) ?? shortest,
      Home: shortest,
      End: longest,
    };
    to.ArrowUp = to.PageUp = to.ArrowRight;
    to.ArrowDown = to.PageDown = to.ArrowLeft;
    if (to[event.key] === undefined) return;
    event.preventDefault();
    take(to[event.key]);
  }

  function take(to) {
    length = lengths.find((one) => Math.abs(Math.log2(to / one)) < 0.5 / PER_OCTAVE) ?? to;
    move();
    onInput(Math.round(length));
  }

  function layOut() {
    const { width, height } = box.getBoundingClientRect();
    if (width === 0) return;
    const { top, bottom, left } = STORY_MARGIN;
    const right = Math.max(7, ...lines.map(({ label }) => label.length)) * 6.6 + 52;
    const losses = lines.flatMap(({ points }) => points.map(({ y }) => y).filter((y) => y !== null));
    const [low, high] = [Math.min(...losses), Math.max(...losses)];
    const room = 0.06 * (high - low || 1);
    plot = {
      ...{ top, bottom: height - bottom, left, right: width - right },
      x: scaleOf({ low: shortest, high: longest, from: left, to: width - right, log: true }),
      y: scaleOf({ low: low - 2.5 * room, high: high + room, from: height - bottom, to: top }),
    };
    const { x, y } = plot;
    const grid = roundTicks(low, high, height / 60);
    const decimals = decimalsOf((grid[1] ?? 1) - grid[0]);
    const pathOf = ({ points }) =>
      points.filter((point) => point.y !== null).map((point, i) => `${i ? "L" : "M"}${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}`).join("");
    const paint = ({ colour }) => ({ "--line-colour": colour });
    const drawn = (line) => svgElement("path", { class: line.main ? "drawn main" : "drawn", style: paint(line), d: pathOf(line) });
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.replaceChildren(
      svgElement("defs", {}, svgElement("clipPath", { id: clip }, svgElement("rect", { x: 0, y: 0, width: 0, height }))),
      svgElement("text", { x: 0, y: 9 }, "bits per byte, lower is better"),
      ...grid.flatMap((loss) => [
        svgElement("line", { class: "grid", x1: left, x2: plot.right, y1: y(loss), y2: y(loss) }),
        svgElement("text", { x: left - 6, y: y(loss), dy: "0.32em", "text-anchor": "end" }, loss.toFixed(decimals)),
      ]),
      svgElement("line", { class: "trained", x1: x(group.train_length), x2: x(group.train_length), y1: top, y2: plot.bottom }),
      svgElement("text", { x: x(group.train_length) + 6, y: top + 14 }, "training length"),
      svgElement("g", { class: "to-come" }, lines.map(drawn)),
      svgElement("g", { "clip-path": `url(#${clip})` }, lines.map(drawn)),
      ...lines.filter(({ limit }) => limit !== null).map((line) => svgElement("path", { class: "ending", style: paint(line), d: ending(line) })),
      svgElement("line", { class: "cursor" }),
      svgElement("g", { class: "tips" }, lines.map((line) => tip(line, paint(line)))),
    );
    nameLines();
    ticks.replaceChildren(
      ...ticksWithRoom(lengths, x, 40).map((one) => element("span", { style: { left: `${x(one)}px` } }, grouped(one))),
    );
    setAll(range, { style: { "margin-left": `${left - THUMB / 2}px`, width: `${plot.right - left + THUMB}px` } });
    move();
  }

  const endOf = ({ points }) => points.findLast(({ y }) => y !== null);

  // Where a table of positions has no more rows, its line leaves the chart through the top.
  function ending(line) {
    const end = endOf(line);
    return `M${plot.x(end.x)} ${plot.y(end.y)}V${plot.top - 12}`;
  }

  function tip({ main }, style) {
    return svgElement("g", { class: main ? "tip main" : "tip", style }, svgElement("circle", { r: main ? 5 : 4 }), svgElement("text", { dy: "0.34em" }));
  }

  // A name stands where its line will end, so that none is in the way while all lines are still close together.
  function nameLines() {
    const { x, y, top, bottom, right } = plot;
    const wanted = lines.filter(({ limit }) => limit === null).map((line) => y(endOf(line).y));
    const placed = spread(wanted, wanted.map(() => LINE_HEIGHT), top - LINE_HEIGHT / 2, bottom + LINE_HEIGHT / 2);
    drawing.querySelectorAll(".tip text").forEach((text, i) => {
      const ended = lines[i].limit !== null;
      setAll(text, ended ? { x: x(endOf(lines[i]).x) + 8, y: top - 10 } : { x: right + 11, y: placed.shift() });
    });
  }

  function move() {
    range.value = Math.round(PER_OCTAVE * Math.log2(length / shortest));
    const measured = lengths.findLast((one) => one <= length) ?? shortest;
    const words = lengthInWords(lines, group.train_length, measured);
    setText(value, `${grouped(Math.round(length))} tokens`);
    setText(says, words);
    range.setAttribute("aria-valuetext", words);
    if (plot === null) return;
    const across = plot.x(length);
    drawing.querySelector(`#${clip} rect`).setAttribute("width", across);
    const ground = plot.bottom + STORY_MARGIN.bottom;
    setAll(drawing.querySelector(".cursor"), { x1: across, x2: across, y1: plot.top, y2: ground });
    const ends = lines.map(({ points }) => upTo(points, length));
    lines.forEach(({ label, limit }, i) => {
      const [dot, text] = drawing.querySelectorAll(".tip")[i].children;
      const end = ends[i];
      setAll(dot, { cx: plot.x(end?.x ?? shortest), cy: plot.y(end?.y ?? 0) });
      const ended = limit === null ? "" : `: its table ends here, at ${grouped(limit)}`;
      setText(text, end ? `${label} ${end.last.y.toFixed(3)}${ended}` : "");
    });
  }

  new ResizeObserver(layOut).observe(box);
  return {
    lengths,
    element: element("div", { class: "length-story" },
      element("div", { class: "story-control" }, element("label", { for: name }, "length of the text"), value),
      says,
      box,
      range,
      ticks,
    ),
    update(to) {
      length = to;
      move();
    },
  };
}

// What has become of every method at a length that was measured, the linear biases first and then by what was lost.
function lengthInWords(lines, trained, length) {
  if (length <= trained) return `At ${grouped(length)} tokens, the length of training. Move on: what if a text is longer?`;
  const changes = lines.map((line) => {
    const [before, now] = [trained, length].map((wanted) => line.points.find(({ x }) => x === wanted)?.y ?? null);
    return { ...line, ended: line.limit !== null && length > line.limit, share: before === null || now === null ? null : now / before - 1 };
  });
  const going = changes.filter(({ ended, share }) => !ended && share !== null);
  going.sort((a, b) => Number(b.main) - Number(a.main) || a.share - b.share);
  const ends = changes.filter(({ ended }) => ended).map(({ label }) => `; ${label}: no rows left`);
  return (
    `At ${grouped(length)} tokens, ${grouped(length / trained)} times the training length, the loss has changed by: `
    + `${going.map(({ label, share }) => `${label} ${signedPercent(share)}`).join(", ")}${ends.join("")}.`
  );
}

export function signedPercent(share) {
  const text = `${(100 * Math.abs(share)).toFixed(1)}%`;
  if (text === "0.0%") return text;
  return `${share < 0 ? "\u2212" : "+"}${text}`;
}
