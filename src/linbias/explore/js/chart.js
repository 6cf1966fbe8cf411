// A line chart: a cursor that pointer and arrow keys move, and a legend that shows the values there and switches
// lines on and off. To assistive technology the drawing is a slider whose value is read out.
//
// lineChart({ switchedOff, onSwitch }) -> { element, update(spec) }; charts may share the set of lines that are off.
//   spec.label   what the chart shows, for readers who do not see it
//   spec.x       { label, low, high, log, ticks, format(x), at(x) }   at: the heading of the legend's values
//   spec.y       { label, low, high, log, format(y), tick(y) }        low, high: the range that is always shown
//   spec.lines   [{ key, name, colour, points: [{ x, y, low, high }], main, bars, stop }]
//                colour: one of CSS such as "var(--accent)"; y null: a gap; main: drawn above the others; bars: of width
//                1 instead of a line; stop: why the line ends before the others
//   spec.marks   [{ x or y, text, middle }]: a dashed line across; middle: the x around which the words of y stand
//   spec.start   the x at which the cursor stands until it is moved; the last one if left out

import { element, setAll, setText, svgElement, walked } from "./dom.js";
import { decimalsOf, powerTicks, roundTicks, scaleOf, superscript, ticksWithRoom } from "./scales.js";

const CHART_MARGIN = { top: 18, right: 14, bottom: 46, left: 52 };

export function lineChart({ switchedOff = new Set(), onSwitch = () => {} } = {}) {
  const drawing = svgElement("svg", { class: "chart-drawing", tabindex: "0", role: "slider" });
  const legendHead = element("p", { class: "chart-legend-head" });
  const legendList = element("ul", { class: "chart-legend-list" });
  const legend = element("div", { class: "chart-legend" }, legendHead, legendList);
  const box = element("div", { class: "chart-box" }, drawing);
  let spec = null;
  let stops = []; // the x at which the cursor can stand
  let at = null;
  let start = null;
  let plot = null; // the scales of what is drawn
  let keys = "";

  const shownLines = () => spec.lines.filter((line) => !switchedOff.has(line.key));

  function draw() {
    const { width, height } = box.getBoundingClientRect();
    if (spec === null || width === 0) return;
    setAll(drawing, { viewBox: `0 0 ${width} ${height}`, "aria-label": `${spec.label}. ${spec.x.label}` });
    const lines = shownLines();
    plot = scalesOf(spec, lines, width, height);
    drawing.replaceChildren(
      ...axes(spec, plot, width, height),
      ...(spec.marks ?? []).map((mark) => markAcross(mark, plot)),
      svgElement("g", { class: "cursor" }),
      ...[...lines].sort((a, b) => Number(a.main ?? 0) - Number(b.main ?? 0)).map((line) => drawnLine(line, plot)),
      svgElement("g", { class: "dots" }),
    );
    moveTo(at);
  }

  function moveTo(x) {
    at = x;
    const lines = shownLines();
    const values = lines.map((line) => valueAt(line, at));
    const where = at === undefined ? "no points" : spec.x.at(at);
    legendHead.textContent = where;
    spec.lines.forEach((line, i) => {
      const button = legendList.children[i].firstChild;
      const on = !switchedOff.has(line.key);
      button.setAttribute("aria-pressed", String(on));
      setText(button.lastChild, on ? written(line, valueAt(line, at), spec) : "off");
    });
    const described = lines.map((line, i) => `${line.name} ${written(line, values[i], spec)}`);
    setAll(drawing, {
      "aria-valuemin": 0, "aria-valuemax": stops.length - 1, "aria-valuenow": stops.indexOf(at),
      "aria-valuetext": `${where}: ${described.join(", ") || "no lines"}`,
    });
    if (plot === null || at === undefined) return;
    const { top, bottom } = plot;
    const across = plot.x(at);
    drawing.querySelector(".cursor").replaceChildren(
      svgElement("line", { x1: across, x2: across, y1: top, y2: bottom }),
    );
    drawing.querySelector(".dots").replaceChildren(
      ...lines.flatMap((line, i) =>
        values[i] === null
          ? []
          : [svgElement("circle", { cx: across, cy: plot.y(values[i]), r: 4.5, style: paintOf(line) })],
      ),
    );
  }

  function point(event) {
    if (plot === null || stops.length === 0) return;
    const bounds = drawing.getBoundingClientRect();
    const pixel = ((event.clientX - bounds.left) / bounds.width) * plot.width;
    const away = (x) => Math.abs(plot.x(x) - pixel);
    moveTo(stops.reduce((best, x) => (away(x) < away(best) ? x : best)));
  }

  function walk(event) {
    const to = walked(event, stops.indexOf(at), stops.length - 1, { down: -1 });
    if (to !== null) moveTo(stops[to]);
  }

  function buildLegend() {
    legendList.replaceChildren(
      ...spec.lines.map((line) =>
        element("li", {},
          element(
            "button",
            { type: "button", class: "legend-line", style: paintOf(line), on: { click: () => flip(line.key) } },
            element("span", { class: "swatch", "aria-hidden": "true" }),
            element("span", { class: "legend-name" }, line.name),
            element("span", { class: "legend-value" }),
          ),
        ),
      ),
    );
  }

  function flip(key) {
    if (!switchedOff.delete(key)) switchedOff.add(key);
    draw();
    onSwitch();
  }

  drawing.addEventListener("pointermove", point);
  drawing.addEventListener("pointerdown", point);
  drawing.addEventListener("keydown", walk);
  new ResizeObserver(draw).observe(box);

  return {
    element: element("div", { class: "chart" }, box, legend),
    update(next) {
      const within = ({ x }) => next.x.low <= x && x <= next.x.high;
      spec = { ...next, lines: next.lines.map((line) => ({ ...line, points: line.points.filter(within) })) };
      stops = spec.lines
        .map((line) => line.points.filter(({ y }) => y !== null).map(({ x }) => x))
        .reduce((most, xs) => (xs.length > most.length ? xs : most), []);
      if (!stops.includes(at) || spec.start !== start) at = spec.start ?? stops.at(-1);
      start = spec.start;
      const wanted = spec.lines.map((line) => `${line.key} ${line.name}`).join();
      if (wanted !== keys) buildLegend();
      keys = wanted;
      draw();
      if (plot === null) moveTo(at); // not laid out yet: the legend can be read nevertheless
    },
  };
}

const paintOf = (line) => ({ "--line-colour": line.colour });

// What the line is at x; null where it has no point.
const valueAt = (line, x) => line.points.find((point) => point.x === x)?.y ?? null;

const written = (line, value, spec) => value === null ? (line.stop ?? "\u2013") : spec.y.format(value);

function scalesOf(spec, lines, width, height) {
  const { top, right, bottom, left } = CHART_MARGIN;
  const points = lines.flatMap((line) => line.points).filter(({ y }) => y !== null);
  const heights = points.flatMap(({ y, low = y, high = y }) => [low, high]);
  const all = [...heights, spec.y.low, spec.y.high].filter((y) => y !== undefined);
  let [low, high] = [Math.min(...all), Math.max(...all)];
  if (!(low < high)) [low, high] = all.length > 0 ? [low - 0.5, low + 0.5] : [0, 1];
  const room = (high - low) * 0.06;
  const forWords = spec.marks?.some((mark) => mark.x !== undefined) ? 3 * room : room;
  const under = low === spec.y.low ? 0 : forWords;
  const inner = { top, bottom: height - bottom, left, right: width - right };
  const ends = { from: inner.bottom, to: inner.top, log: spec.y.log };
  return {
    ...inner,
    width,
    x: scaleOf({ low: spec.x.low, high: spec.x.high, from: left, to: width - right, log: spec.x.log }),
    y: spec.y.log ? scaleOf({ low, high, ...ends }) : scaleOf({ low: low - under, high: high + room, ...ends }),
    yLow: low,
    yHigh: high,
  };
}

function axes(spec, plot, width, height) {
  const { top, bottom, left, right } = plot;
  const count = Math.max(2, Math.floor((bottom - top) / 48));
  const yTicks = spec.y.log ? powerTicks(plot.yLow, plot.yHigh, 10, count) : roundTicks(plot.yLow, plot.yHigh, count);
  const decimals = decimalsOf((yTicks[1] ?? 1) - (yTicks[0] ?? 0));
  const onLog = (y) => `10${superscript(Math.round(Math.log10(y)))}`;
  const yText = spec.y.tick ?? (spec.y.log ? onLog : (y) => y.toFixed(decimals));
  const xTicks = ticksWithRoom(spec.x.ticks ?? roundTicks(spec.x.low, spec.x.high, width / 90), plot.x, 46);
  return [
    ...yTicks.map((y) =>
      svgElement("g", { class: "tick" },
        svgElement("line", { x1: left, x2: right, y1: plot.y(y), y2: plot.y(y) }),
        svgElement("text", { x: left - 8, y: plot.y(y), dy: "0.32em", "text-anchor": "end" }, yText(y)),
      ),
    ),
    ...xTicks.map((x) =>
      svgElement("text", { class: "tick", x: plot.x(x), y: bottom + 18, "text-anchor": "middle" }, spec.x.format(x)),
    ),
    svgElement("line", { class: "base", x1: left, x2: right, y1: bottom, y2: bottom }),
    svgElement("text", { class: "axis-name", x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, spec.x.label),
    svgElement("text", { class: "axis-name", x: 0, y: 9 }, spec.y.label),
  ];
}

function markAcross(mark, { x, y, top, bottom, left, right }) {
  if (mark.x !== undefined) {
    const across = x(mark.x);
    const onRight = across < (left + right) / 2;
    return svgElement("g", { class: "mark" },
      svgElement("line", { x1: across, x2: across, y1: top, y2: bottom }),
      svgElement("text", { x: across + (onRight ? 6 : -6), y: bottom - 8, "text-anchor": onRight ? "start" : "end" }, mark.text),
    );
  }
  const height = y(mark.y);
  const words = mark.middle === undefined ? { x: left + 6 } : { x: x(mark.middle), "text-anchor": "middle" };
  return svgElement("g", { class: "mark" },
    svgElement("line", { x1: left, x2: right, y1: height, y2: height }),
    svgElement("text", { ...words, y: height - 6 }, mark.text),
  );
}

function drawnLine(line, plot) {
  if (line.bars) return svgElement("g", { class: "line", style: paintOf(line) }, barsOf(line.points, plot));
  const parts = [];
  const band = line.points.filter(({ y, low, high }) => y !== null && low < high);
  if (band.length > 1) {
    const [over, under] = [band.map((p) => [p.x, p.high]), [...band].reverse().map((p) => [p.x, p.low])];
    parts.push(svgElement("path", { class: "band", d: `${pathOf([...over, ...under], plot)}Z` }));
  }
  for (const run of runsOf(line.points)) {
    parts.push(svgElement("path", { class: "drawn", d: pathOf(run, plot) }));
  }
  const points = line.points.filter(({ y }) => y !== null);
  if (points.length <= 12) {
    for (const { x, y } of points) parts.push(svgElement("circle", { class: "point", cx: plot.x(x), cy: plot.y(y), r: 3 }));
  }
  if (line.stop && points.length > 0) parts.push(...crash(line, points.at(-1), plot));
  return svgElement("g", { class: line.main ? "line main" : "line", style: paintOf(line) }, parts);
}

function barsOf(points, plot) {
  const width = Math.max(1, 0.75 * (plot.x(1) - plot.x(0)));
  return points
    .filter(({ y }) => y !== null)
    .map(({ x, y }) => {
      const height = Math.max(0, plot.bottom - plot.y(y));
      return svgElement("rect", { x: plot.x(x) - width / 2, y: plot.bottom - height, width, height });
    });
}

// The points between gaps.
function runsOf(points) {
  const runs = [[]];
  for (const { x, y } of points) {
    if (y === null) runs.push([]);
    else runs.at(-1).push([x, y]);
  }
  return runs.filter((run) => run.length > 0);
}

function pathOf(run, plot) {
  return run
    .map(([x, y], i) => {
      const [across, down] = [plot.x(x), plot.y(y)].map((pixel) => pixel.toFixed(1));
      return `${i === 0 ? "M" : "L"}${across} ${down}`;
    })
    .join("");
}

// A line that ends because the model has nothing more to say leaves the chart through its top.
function crash(line, { x, y }, plot) {
  const [from, down] = [plot.x(x), plot.y(y)];
  const to = from + 14;
  const words = `${line.name}: ${line.stop}`;
  const fits = to + 6 + 6.5 * words.length < plot.right;
  return [
    svgElement("path", { class: "crash", d: `M${from} ${down}C${to} ${down} ${to} ${down} ${to} ${plot.top}` }),
    svgElement(
      "text",
      { class: "crash-text", x: fits ? to + 6 : to - 6, y: plot.top + 10, "text-anchor": fits ? "start" : "end" },
      words,
    ),
  ];
}
