// What it is good for: lines of loss that draw themselves as one moves the length past that of
// training. The slider is the chart's own axis: its thumb stands under the ends of the lines.

import {
  horizontalLine, mainLast, paintOf, pathOf, svgText, verticalLine,
} from "./chart.js";
import { element, setAll, setText, svgElement, uniqueId } from "./dom.js";
import {
  decimalsOf, grouped, roundTicks, scaleOf, signedPercent, spread, ticksWithRoom,
} from "./numbers.js";
import { storySlider } from "./slope_story.js";

const STORY_MARGIN = { top: 30, bottom: 8, left: 34 };
const THUMB = 22; // pixels, as style.css has it
const LINE_HEIGHT = 16; // of the names at the lines' ends
const PER_OCTAVE = 32; // positions of the slider between a length and its double

export function lengthStory({ group, methods, onInput }) {
  const lengths = group.test_lengths;
  const [shortest, longest] = [lengths[0], lengths.at(-1)];
  const pointsOf = (line) => line.lengths.filter(({ y }) => y !== null);
  const lines = mainLast(
    group.lines
      .map((line) => ({ ...line, ...methods[line.method], points: pointsOf(line) }))
      .filter(({ points }) => points.length > 0),
  );
  const isCut = ({ limit }) => limit !== null;
  const drawing = svgElement("svg.length-drawing", { "aria-hidden": true });
  const box = element("div.length-box", drawing);
  const clip = uniqueId("clip");
  const { range, value, label } = storySlider("length of the text", {
    min: 0, max: Math.round(PER_OCTAVE * Math.log2(longest / shortest)), step: 1,
    on: { input: () => take(shortest * 2 ** (Number(range.value) / PER_OCTAVE)), keydown: walk },
  });
  const says = element("p.ink-says.length-says");
  const ticks = element("div.length-ticks", { "aria-hidden": true });
  let length = group.train_length;
  let plot = null;

  // By keys from one measured length to the next.
  function walk(event) {
    const up = lengths.find((one) => one > length) ?? longest;
    const down = lengths.findLast((one) => one < length) ?? shortest;
    const to = {
      ArrowRight: up, ArrowUp: up, PageUp: up, End: longest,
      ArrowLeft: down, ArrowDown: down, PageDown: down, Home: shortest,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    take(to);
  }

  function take(to) {
    length = lengths.find((one) => Math.abs(Math.log2(to / one)) < 0.5 / PER_OCTAVE) ?? to;
    move();
    onInput(Math.round(length));
  }

  function layOut() {
    const { width, height } = box.getBoundingClientRect();
    if (width === 0) return;
    const { top, left } = STORY_MARGIN;
    const [bottom, names] = [height - STORY_MARGIN.bottom, lines.map((line) => line.label.length)];
    const right = width - Math.max(7, ...names) * 6.6 - 52;
    const losses = lines.flatMap(({ points }) => points.map(({ y }) => y));
    const [low, high] = [Math.min(...losses), Math.max(...losses)];
    const room = 0.06 * (high - low || 1);
    const x = scaleOf({ low: shortest, high: longest, from: left, to: right, log: true });
    const y = scaleOf({ low: low - 2.5 * room, high: high + room, from: bottom, to: top });
    plot = { top, bottom, left, right, x, y };
    const grid = roundTicks(low, high, height / 60);
    const decimals = decimalsOf(grid);
    const trained = x(group.train_length);
    const drawn = lines.map((line) => ({ style: paintOf(line), d: pathOf(line.points, plot) }));
    const paths = () =>
      drawn.map((one, i) => svgElement(lines[i].main ? "path.drawn.main" : "path.drawn", one));
    const covered = svgElement("rect", { x: 0, y: 0, width: 0, height });
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.replaceChildren(
      svgElement("defs", svgElement("clipPath", { id: clip }, covered)),
      svgText(0, 9, null, "bits per byte, lower is better"),
      svgElement("g.grid", grid.map((loss) => horizontalLine(y(loss), plot))),
      ...grid.map((loss) =>
        svgText(left - 6, y(loss), "end", loss.toFixed(decimals), { dy: "0.32em" }),
      ),
      svgElement("g.trained", verticalLine(trained, plot)),
      svgText(trained + 6, top + 14, null, "training length"),
      svgElement("g.to-come", paths()),
      svgElement("g", { "clip-path": `url(#${clip})` }, paths()),
      ...lines.filter(isCut).map((line) =>
        svgElement("path.ending", { style: paintOf(line), d: ending(line) }),
      ),
      svgElement("g.cursor"),
      svgElement("g.tips", lines.map(tip)),
    );
    nameLines();
    ticks.replaceChildren(
      ...ticksWithRoom(lengths, x, 40).map((one) =>
        element("span", { style: { left: `${x(one)}px` } }, grouped(one)),
      ),
    );
    setAll(range, {
      style: { "margin-left": `${left - THUMB / 2}px`, width: `${right - left + THUMB}px` },
    });
    move();
  }

  // Where a table of positions has no more rows, its line leaves the chart through the top.
  function ending({ points }) {
    const end = points.at(-1);
    return `M${plot.x(end.x)} ${plot.y(end.y)}V${plot.top - 12}`;
  }

  function tip(line) {
    return svgElement(line.main ? "g.tip.main" : "g.tip", { style: paintOf(line) },
      svgElement("circle", { r: line.main ? 5 : 4 }), svgElement("text", { dy: "0.34em" }),
    );
  }

  // A name stands where its line will end, so that none is in the way while all lines are close.
  function nameLines() {
    const { x, y, top, bottom, right } = plot;
    const wanted = lines.filter((line) => !isCut(line)).map(({ points }) => y(points.at(-1).y));
    const [from, to] = [top - LINE_HEIGHT / 2, bottom + LINE_HEIGHT / 2];
    const middles = spread(wanted, wanted.map(() => LINE_HEIGHT), from, to);
    drawing.querySelectorAll(".tip text").forEach((text, i) => {
      const cut = { x: x(lines[i].points.at(-1).x) + 8, y: top - 10 };
      setAll(text, isCut(lines[i]) ? cut : { x: right + 11, y: middles.shift() });
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
    const ground = { ...plot, bottom: plot.bottom + STORY_MARGIN.bottom };
    drawing.querySelector(".cursor").replaceChildren(verticalLine(across, ground));
    drawing.querySelectorAll(".tip").forEach(({ children: [dot, text] }, i) => {
      const { label: name, limit, points } = lines[i];
      const end = upTo(points, length);
      setAll(dot, { cx: plot.x(end?.x ?? shortest), cy: plot.y(end?.y ?? 0) });
      const ended = limit === null ? "" : `: its table ends here, at ${grouped(limit)}`;
      setText(text, end ? `${name} ${end.last.y.toFixed(3)}${ended}` : "");
    });
  }

  new ResizeObserver(layOut).observe(box);
  return {
    element: element("div.length-story",
      element("div.story-control", label, value), says, box, range, ticks,
    ),
    update(to) {
      length = to;
      move();
    },
  };
}

// Where a line stands between two measured lengths, and the last one before it.
function upTo(points, length) {
  const last = points.findLast(({ x }) => x <= length);
  const next = points.find(({ x }) => x > length);
  if (!last || !next) return last && { last, ...last };
  const share = Math.log(length / last.x) / Math.log(next.x / last.x);
  return { last, x: length, y: last.y + share * (next.y - last.y) };
}

// What has become of every method: linear biases first, then by what was lost.
function lengthInWords(lines, trained, length) {
  if (length <= trained) {
    const at = `At ${grouped(length)} tokens, the length of training`;
    return `${at}. Move on: what if a text is longer?`;
  }
  const changes = lines.map(({ label, main, limit, points }) => {
    const lossAt = (wanted) => points.find(({ x }) => x === wanted)?.y;
    const share = lossAt(length) / lossAt(trained) - 1;
    return { label, main, ended: limit !== null && length > limit, share };
  });
  const going = changes
    .filter(({ ended, share }) => !ended && Number.isFinite(share))
    .sort((a, b) => Boolean(b.main) - Boolean(a.main) || a.share - b.share)
    .map(({ label, share }) => `${label} ${signedPercent(share)}`);
  const ended = changes.filter((one) => one.ended).map(({ label }) => `; ${label}: no rows left`);
  return (
    `At ${grouped(length)} tokens, ${grouped(length / trained)} times the training length, ` +
    `the loss has changed by: ${going.join(", ")}${ended.join("")}.`
  );
}
