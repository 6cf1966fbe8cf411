// A line chart: a cursor that pointer and keys move, and a legend that shows the values there and switches
// lines on and off. To assistive technology the drawing is a slider that is read out.
//
// lineChart(specOf, { switchedOff, onSwitch }) is an element; charts may share what is off.
//   spec.label   what the chart shows, for readers who do not see it
//   spec.x       { label, low, high, log, ticks, format(x), at(x) }; at: the heading of the legend
//   spec.y       { label, low, high, log, format(y), tick(y) }; low, high: what is always shown
//   spec.lines   [{ key, name, colour, points: [{ x, y, low, high }], main, bars, stop }]
//                y null: a gap; main: drawn above the others; bars: instead of a line;
//                stop: why the line ends before the others
//   spec.marks   [{ x or y, text, middle }]: a dashed line; middle: of y, the x of its words
//   spec.start   the x at which the cursor stands until it is moved; the last one if left out

import { component, element, onDraw, svgElement, walked } from "./dom.js";
import { decimalsOf, powerTicks, roundTicks, scaleOf, superscript, ticksWithRoom } from "./numbers.js";

const CHART_MARGIN = { top: 18, right: 14, bottom: 46, left: 52 };

export function lineChart(specOf, { switchedOff = new Set(), onSwitch = () => {} } = {}) {
  let spec = null;
  let stops = []; // the x at which the cursor can stand
  let at = null;
  let start = null;
  let plot = null; // the scales of what is drawn, once the chart has a width

  const shownLines = () => spec.lines.filter((line) => !switchedOff.has(line.key));
  const where = () => (at === undefined ? "no points" : spec.x.at(at));

  // What the line is where the cursor stands; null where it has no point.
  const valueAt = (line) => line.points.find(({ x }) => x === at)?.y ?? null;

  function written(line) {
    const value = valueAt(line);
    return value === null ? (line.stop ?? "\u2013") : spec.y.format(value);
  }

  function inWords() {
    const described = shownLines().map((line) => `${line.name} ${written(line)}`);
    return `${where()}: ${described.join(", ") || "no lines"}`;
  }

  function picture() {
    if (plot === null) return [];
    const lines = shownLines();
    const dots = lines.filter((line) => valueAt(line) !== null).map((line) =>
      svgElement("circle", { cx: plot.x(at), cy: plot.y(valueAt(line)), r: 4.5, style: paintOf(line) }),
    );
    return [
      ...axes(spec, plot),
      ...(spec.marks ?? []).map((mark) => markAcross(mark, plot)),
      svgElement("g.cursor", at !== undefined && verticalLine(plot.x(at), plot)),
      ...mainLast(lines).map((line) => drawnLine(line, plot)),
      svgElement("g.dots", dots),
    ];
  }

  function legendLine(line, i) {
    const isOn = !switchedOff.has(line.key);
    const attributes = {
      style: paintOf(line), "aria-pressed": isOn, on: { click: () => flip(spec.lines[i].key) },
    };
    return element("li",
      element("button.legend-line", attributes,
        element("span.swatch", { "aria-hidden": true }),
        element("span.legend-name", line.name),
        element("span.legend-value", isOn ? written(line) : "off"),
      ),
    );
  }

  const chart = component(() =>
    element("div.chart",
      element("div.chart-box",
        svgElement("svg.chart-drawing", {
          tabindex: 0, role: "slider", viewBox: () => plot && `0 0 ${plot.width} ${plot.height}`,
          "aria-label": () => `${spec.label}. ${spec.x.label}`, "aria-valuetext": inWords,
          "aria-valuemin": 0, "aria-valuemax": () => stops.length - 1,
          "aria-valuenow": () => stops.indexOf(at),
          on: { pointermove: point, pointerdown: point, keydown: walk },
        }, picture),
      ),
      element("div.chart-legend",
        element("p.chart-legend-head", where),
        element("ul.chart-legend-list", () => spec.lines.map(legendLine)),
      ),
    ),
  );
  const box = chart.element.firstChild;

  function draw() {
    const { width, height } = box.getBoundingClientRect();
    if (spec === null) return;
    if (width > 0) plot = scalesOf(spec, shownLines(), width, height);
    chart.draw();
  }

  function moveTo(x) {
    at = x;
    chart.draw();
  }

  function point(event) {
    if (plot === null || stops.length === 0) return;
    const { left, width } = box.getBoundingClientRect();
    const pixel = ((event.clientX - left) / width) * plot.width;
    const away = (x) => Math.abs(plot.x(x) - pixel);
    moveTo(stops.reduce((best, x) => (away(x) < away(best) ? x : best)));
  }

  function walk(event) {
    const to = walked(event, stops.indexOf(at), stops.length - 1, { down: -1 });
    if (to !== null) moveTo(stops[to]);
  }

  function flip(key) {
    if (!switchedOff.delete(key)) switchedOff.add(key);
    draw();
    onSwitch();
  }

  onDraw(() => {
    const next = specOf();
    const within = ({ x }) => next.x.low <= x && x <= next.x.high;
    const cut = (line) => ({ ...line, points: line.points.filter(within) });
    spec = { ...next, lines: next.lines.map(cut) };
    stops = spec.lines
      .map((line) => drawnPoints(line).map(({ x }) => x))
      .reduce((most, xs) => (xs.length > most.length ? xs : most), []);
    if (!stops.includes(at) || spec.start !== start) at = spec.start ?? stops.at(-1);
    start = spec.start;
    draw();
  });
  new ResizeObserver(draw).observe(box);
  return chart.element;
}

export const mainLast = (lines) => lines.toSorted((a, b) => Boolean(a.main) - Boolean(b.main));

export const paintOf = ({ colour }) => ({ "--line-colour": colour });

const drawnPoints = ({ points }) => points.filter(({ y }) => y !== null);

function scalesOf(spec, lines, width, height) {
  const left = CHART_MARGIN.left;
  const [right, bottom] = [width - CHART_MARGIN.right, height - CHART_MARGIN.bottom];
  const heights = lines.flatMap(drawnPoints).flatMap(({ y, low = y, high = y }) => [low, high]);
  const all = [...heights, spec.y.low, spec.y.high].filter((y) => y !== undefined);
  let [low, high] = [Math.min(...all), Math.max(...all)];
  if (!(low < high)) [low, high] = all.length > 0 ? [low - 0.5, low + 0.5] : [0, 1];
  const ends = { from: bottom, to: CHART_MARGIN.top, log: spec.y.log };
  const room = spec.y.log ? 0 : (high - low) * 0.06;
  const forWords = spec.marks?.some((mark) => mark.x !== undefined) ? 3 * room : room;
  const under = low === spec.y.low ? 0 : forWords;
  return {
    ...{ top: CHART_MARGIN.top, bottom, left, right, width, height, low, high },
    x: scaleOf({ low: spec.x.low, high: spec.x.high, from: left, to: right, log: spec.x.log }),
    y: scaleOf({ low: low - under, high: high + room, ...ends }),
  };
}

// Lines over the whole height and width of a plot, and a text.
export const verticalLine = (x, { top, bottom }) => svgElement("line", { x1: x, x2: x, y1: top, y2: bottom });

export const horizontalLine = (y, { left, right }) =>
  svgElement("line", { x1: left, x2: right, y1: y, y2: y });

export const svgText = (x, y, anchor, text, attributes = {}) =>
  svgElement("text", { x, y, "text-anchor": anchor, ...attributes }, text);

function axes(spec, plot) {
  const { top, bottom, left, right, width, height, low, high } = plot;
  const count = Math.max(2, Math.floor((bottom - top) / 48));
  const yTicks = spec.y.log ? powerTicks(low, high, count) : roundTicks(low, high, count);
  const decimals = decimalsOf(yTicks);
  const onLog = (y) => `10${superscript(Math.round(Math.log10(y)))}`;
  const yText = spec.y.tick ?? (spec.y.log ? onLog : (y) => y.toFixed(decimals));
  const xTicks = spec.x.ticks ?? roundTicks(spec.x.low, spec.x.high, width / 90);
  const name = { class: "axis-name" };
  return [
    ...yTicks.map((y) => yTick(plot, y, yText(y))),
    ...ticksWithRoom(xTicks, plot.x, 46).map((x) =>
      svgText(plot.x(x), bottom + 18, "middle", spec.x.format(x), { class: "tick" }),
    ),
    svgElement("g.base", horizontalLine(bottom, plot)),
    svgText((left + right) / 2, height - 6, "middle", spec.x.label, name),
    svgText(0, 9, null, spec.y.label, name),
  ];
}

export const yTick = (plot, y, text) =>
  svgElement("g.tick",
    horizontalLine(plot.y(y), plot),
    svgText(plot.left - 8, plot.y(y), "end", text, { dy: "0.32em" }),
  );

function markAcross(mark, plot) {
  const { x, y, bottom, left, right } = plot;
  if (mark.x === undefined) {
    const [at, anchor] = mark.middle === undefined ? [left + 6] : [x(mark.middle), "middle"];
    const up = y(mark.y);
    return svgElement("g.mark", horizontalLine(up, plot), svgText(at, up - 6, anchor, mark.text));
  }
  const across = x(mark.x);
  const [aside, anchor] = across < (left + right) / 2 ? [6, "start"] : [-6, "end"];
  return svgElement("g.mark",
    verticalLine(across, plot), svgText(across + aside, bottom - 8, anchor, mark.text),
  );
}

function drawnLine(line, plot) {
  const style = paintOf(line);
  const points = drawnPoints(line);
  if (line.bars) return svgElement("g.line", { style }, barsOf(points, plot));
  const band = points.filter(({ low, high }) => low < high);
  const upper = band.map(({ x, high }) => ({ x, y: high }));
  const lower = band.map(({ x, low }) => ({ x, y: low })).reverse();
  return svgElement(line.main ? "g.line.main" : "g.line", { style },
    band.length > 1 && svgElement("path.band", { d: `${pathOf([...upper, ...lower], plot)}Z` }),
    runsOf(line.points).map((run) => svgElement("path.drawn", { d: pathOf(run, plot) })),
    points.length <= 12 && points.map(({ x, y }) =>
      svgElement("circle.point", { cx: plot.x(x), cy: plot.y(y), r: 3 }),
    ),
    line.stop && points.length > 0 && crash(line, points.at(-1), plot),
  );
}

function barsOf(points, plot) {
  const width = Math.max(1, 0.75 * (plot.x(1) - plot.x(0)));
  return points.map(({ x, y }) => {
    const height = Math.max(0, plot.bottom - plot.y(y));
    const [left, top] = [plot.x(x) - width / 2, plot.bottom - height];
    return svgElement("rect", { x: left, y: top, width, height });
  });
}

// The points between gaps.
function runsOf(points) {
  const runs = [[]];
  for (const point of points) {
    if (point.y === null) runs.push([]);
    else runs.at(-1).push(point);
  }
  return runs.filter((run) => run.length > 0);
}

export const pathOf = (points, { x, y }) =>
  `M${points.map((point) => `${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}`).join("L")}`;

// A line that ends because the model has nothing more to say leaves the chart through its top.
function crash(line, { x, y }, plot) {
  const [from, down] = [plot.x(x), plot.y(y)];
  const to = from + 14;
  const said = `${line.name}: ${line.stop}`;
  const fits = to + 6 + 6.5 * said.length < plot.right;
  const [aside, anchor] = fits ? [6, "start"] : [-6, "end"];
  const d = `M${from} ${down}C${to} ${down} ${to} ${down} ${to} ${plot.top}`;
  const text = svgText(to + aside, plot.top + 10, anchor, said, { class: "crash-text" });
  return [svgElement("path.crash", { d }), text];
}
