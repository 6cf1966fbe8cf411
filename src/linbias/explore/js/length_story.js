// What it is good for: lines of loss that draw themselves as one moves the length past that of training. The
// slider is the chart's own axis: its thumb stands under the ends of the lines.

import { mainLast, paintOf, pathOf, svgText, verticalLine, yTick } from "./chart.js";
import { component, element, onDraw, prose, svgElement, uniqueId } from "./dom.js";
import { decimalsOf, grouped, roundTicks, scaleOf, signedPercent, spread, ticksWithRoom } from "./numbers.js";
import { storySlider } from "./slope_story.js";

const STORY_MARGIN = { top: 30, bottom: 8, left: 34 };
const THUMB = 22; // pixels, as style.css has it
const LINE_HEIGHT = 16; // of the names at the lines' ends
const PER_OCTAVE = 32; // positions of the slider between a length and its double

// The losses up to state.length.
export function lengthStory({ group, methods, state, onInput }) {
  const lengths = group.test_lengths;
  const [shortest, longest] = [lengths[0], lengths.at(-1)];
  const pointsOf = (line) => line.lengths.filter(({ y }) => y !== null);
  const lines = mainLast(
    group.lines
      .map((line) => ({ ...line, ...methods[line.method], points: pointsOf(line) }))
      .filter(({ points }) => points.length > 0),
  );
  const isCut = ({ limit }) => limit !== null;
  const clip = uniqueId("clip");
  let plot = null; // the scales of what is drawn, once it has a width

  // By keys from one measured length to the next.
  function walk(event) {
    const up = lengths.find((one) => one > state.length) ?? longest;
    const down = lengths.findLast((one) => one < state.length) ?? shortest;
    const to = {
      ArrowRight: up, ArrowUp: up, PageUp: up, End: longest,
      ArrowLeft: down, ArrowDown: down, PageDown: down, Home: shortest,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    onInput(to);
  }

  function take({ target }) {
    const to = shortest * 2 ** (Number(target.value) / PER_OCTAVE);
    const measured = lengths.find((one) => Math.abs(Math.log2(to / one)) < 0.5 / PER_OCTAVE);
    onInput(measured ?? Math.round(to));
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
    plot = { width, height, top, bottom, left, right, x, y, grid: roundTicks(low, high, height / 60) };
    story.draw();
  }

  function picture() {
    if (plot === null) return [];
    const { top, bottom, x, height, grid } = plot;
    const decimals = decimalsOf(grid);
    const trained = x(group.train_length);
    const across = x(state.length);
    const path = (line) => ({ style: paintOf(line), d: pathOf(line.points, plot) });
    const paths = () =>
      lines.map((line) => svgElement(line.main ? "path.drawn.main" : "path.drawn", path(line)));
    const covered = svgElement("rect", { x: 0, y: 0, width: across, height });
    const middles = middlesOfNames();
    return [
      svgElement("defs", svgElement("clipPath", { id: clip }, covered)),
      svgText(0, 9, null, "bits per byte, lower is better"),
      ...grid.map((loss) => yTick(plot, loss, loss.toFixed(decimals))),
      svgElement("g.trained", verticalLine(trained, plot)),
      svgText(trained + 6, top + 14, null, "training length"),
      svgElement("g.to-come", paths()),
      svgElement("g", { "clip-path": `url(#${clip})` }, paths()),
      ...lines.filter(isCut).map((line) =>
        svgElement("path.ending", { style: paintOf(line), d: ending(line) }),
      ),
      svgElement("g.cursor",
        verticalLine(across, { top, bottom: bottom + STORY_MARGIN.bottom }),
      ),
      svgElement("g.tips", lines.map((line) => tip(line, middles))),
    ];
  }

  // Where a table of positions has no more rows, its line leaves the chart through the top.
  function ending({ points }) {
    const end = points.at(-1);
    return `M${plot.x(end.x)} ${plot.y(end.y)}V${plot.top - 12}`;
  }

  // A name stands where its line will end, so that none is in the way while all lines are close.
  function middlesOfNames() {
    const { y, top, bottom } = plot;
    const wanted = lines.filter((line) => !isCut(line)).map(({ points }) => y(points.at(-1).y));
    const [from, to] = [top - LINE_HEIGHT / 2, bottom + LINE_HEIGHT / 2];
    return spread(wanted, wanted.map(() => LINE_HEIGHT), from, to);
  }

  function tip(line, middles) {
    const { x, y, top, right } = plot;
    const { label, main, limit, points } = line;
    const end = upTo(points, state.length);
    const place = isCut(line)
      ? { x: x(points.at(-1).x) + 8, y: top - 10 }
      : { x: right + 11, y: middles.shift() };
    const dot = { r: main ? 5 : 4, cx: x(end?.x ?? shortest), cy: y(end?.y ?? 0) };
    const ended = isCut(line) ? `: its table ends here, at ${grouped(limit)}` : "";
    return svgElement(main ? "g.tip.main" : "g.tip", { style: paintOf(line) },
      svgElement("circle", dot),
      svgElement("text", { dy: "0.34em", ...place },
        end && `${label} ${end.last.y.toFixed(3)}${ended}`,
      ),
    );
  }

  function tick(one) {
    return element("span", { style: { left: `${plot.x(one)}px` } }, grouped(one));
  }

  function says() {
    const measured = lengths.findLast((one) => one <= state.length) ?? shortest;
    return lengthInWords(lines, group.train_length, measured);
  }

  const story = component(() => {
    const [label, value, range] = storySlider("length of the text", {
      min: 0, max: Math.round(PER_OCTAVE * Math.log2(longest / shortest)), step: 1,
      value: () => Math.round(PER_OCTAVE * Math.log2(state.length / shortest)),
      "aria-valuetext": says, on: { input: take, keydown: walk },
      style: () => plot && {
        "margin-left": `${plot.left - THUMB / 2}px`,
        width: `${plot.right - plot.left + THUMB}px`,
      },
    }, () => `${grouped(state.length)} tokens`);
    const viewBox = () => plot && `0 0 ${plot.width} ${plot.height}`;
    const drawing = svgElement("svg.length-drawing", { "aria-hidden": true, viewBox }, picture);
    return element("div.length-story",
      element("div.story-control", label, value),
      element("p.ink-says.length-says", says),
      element("div.length-box", drawing),
      range,
      element("div.length-ticks", { "aria-hidden": true },
        () => plot && ticksWithRoom(lengths, plot.x, 40).map(tick),
      ),
    );
  });
  const box = story.element.querySelector(".length-box");
  onDraw(story.draw);
  new ResizeObserver(layOut).observe(box);
  return story.element;
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
  return prose`At ${grouped(length)} tokens, ${grouped(length / trained)} times the training length, the loss
    has changed by: ${going.join(", ")}${ended.join("")}.`;
}
