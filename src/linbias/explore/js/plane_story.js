// Order that is not counted, in the plane: points, one of which looks at all others, and token 0,
// a global one that stands nowhere. All are alike, so that distance alone decides.

import { choice, copyButton } from "./controls.js";
import { element, rove, setAll, setText, svgElement, uniqueId } from "./dom.js";
import { printed } from "./numbers.js";
import { inkShares, slopeOfStory } from "./slope_story.js";

export const NUM_POINTS = 72;
export const METRICS = ["euclidean", "manhattan"];
const GOLDEN_ANGLE = Math.PI * (3 - Math.sqrt(5));
const EDGE = Math.sqrt(NUM_POINTS) + 0.8; // of the picture
const RINGS = 4;
const DOT = 0.55;

// As seeds stand in a sunflower: as dense everywhere, and no two directions alike.
const POINTS = Array.from({ length: NUM_POINTS }, (_, i) => {
  const [r, angle] = [Math.sqrt(i + 0.5), i * GOLDEN_ANGLE];
  return [r * Math.cos(angle), r * Math.sin(angle)];
});
const DRAWN = [[DOT - EDGE, DOT - EDGE], ...POINTS]; // the global token has its place in a corner

function distancesFrom(query, metric) {
  if (query === 0) return DRAWN.map(() => 0);
  const [x, y] = POINTS[query - 1];
  const length = metric === "manhattan" ? (a, b) => Math.abs(a) + Math.abs(b) : Math.hypot;
  return [0, ...POINTS.map((point) => length(point[0] - x, point[1] - y))];
}

export function planeStory({ onChange }) {
  let shown = null;
  let pointed = null; // the token under the pointer
  const slider = slopeOfStory({
    ends: ["0: all alike", "1: the nearest points"], onInput: (slope) => onChange({ slope }),
  });
  const metrics = choice({
    label: "Distance", options: METRICS, value: METRICS[0],
    onChange: (metric) => onChange({ metric }),
  });
  const dots = DRAWN.map(([x, y], i) => {
    const attributes = { role: "radio", on: { keydown: (event) => walk(event, i) } };
    if (i > 0) return svgElement("circle.dot", { ...attributes, cx: x, cy: y, r: DOT });
    const square = { x: x - DOT, y: y - DOT, width: 2 * DOT, height: 2 * DOT, rx: 0.15 };
    return svgElement("rect.dot", { ...attributes, ...square });
  });
  const rings = Array.from({ length: RINGS }, () => svgElement("path.ring"));
  const clip = uniqueId("disc");
  const disc = { r: EDGE - 0.05 };
  const listeners = {
    pointermove: (event) => point(nearestTo(event)), pointerleave: () => point(null),
    click: (event) => onChange({ query: nearestTo(event) }),
  };
  const drawing = svgElement(
    "svg.plane",
    {
      viewBox: `${-EDGE} ${-EDGE} ${2 * EDGE} ${2 * EDGE}`, role: "radiogroup",
      "aria-label": "Token that looks", on: listeners,
    },
    svgElement("clipPath", { id: clip }, svgElement("circle", disc)),
    svgElement("circle.disc", disc),
    svgElement("g", { "clip-path": `url(#${clip})` }, rings),
    dots,
  );
  const says = element("p.ink-says");

  function nearestTo({ clientX, clientY }) {
    const { left, top, width, height } = drawing.getBoundingClientRect();
    const x = ((clientX - left) / width - 0.5) * 2 * EDGE;
    const y = ((clientY - top) / height - 0.5) * 2 * EDGE;
    return nearest(DRAWN.map(([px, py]) => Math.hypot(px - x, py - y)));
  }

  function point(token) {
    pointed = token;
    draw();
  }

  // To the nearest token that lies more in the arrow's direction than across it.
  function walk(event, from) {
    const arrows = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
    if (!(event.key in arrows)) return;
    const [right, down] = arrows[event.key];
    event.preventDefault();
    const away = DRAWN.map(([px, py]) => {
      const [x, y] = [px - DRAWN[from][0], py - DRAWN[from][1]];
      const ahead = x * right + y * down;
      const isAhead = ahead > 0 && ahead >= Math.abs(x * down + y * right);
      return isAhead ? Math.hypot(x, y) : Infinity;
    });
    const to = nearest(away);
    if (to < 0) return;
    pointed = null;
    onChange({ query: to });
    dots[to].focus();
  }

  function draw() {
    const { slope, metric } = shown;
    const query = pointed ?? shown.query;
    const away = distancesFrom(query, metric);
    const parts = away.map((d) => Math.exp(-slope * d));
    const sum = parts.reduce((a, b) => a + b, 0);
    const weights = parts.map((part) => part / sum);
    rove(dots, shown.query, "aria-checked");
    inkShares(weights).forEach((share, i) => {
      dots[i].classList.toggle("looks", i === query);
      const name = i === 0 ? "global token" : `point ${i}`;
      const label = `${name}: ${printed(weights[i])}`;
      setAll(dots[i], { style: { "--ink-share": share }, "aria-label": label });
    });
    const [x, y] = DRAWN[query];
    rings.forEach((ring, i) => {
      const radius = ((i + 1) * Math.LN2) / slope;
      ring.setAttribute("d", query > 0 && slope > 0 ? ringAround(x, y, radius, metric) : "");
    });
    const next = nearest(away.map((d, i) => (i === query || i === 0 ? Infinity : d)));
    const own = printed(weights[query]);
    const lines =
      slope === 0 ? "At slope 0 all are alike." : "From each line to the next weights halve.";
    slider.set(slope, `${own} on itself`);
    setText(
      says,
      query === 0
        ? `The global token stands nowhere: all points are alike to it, and get ${own} each.`
        : `Point ${query} gives ${own} to itself, as much to the global token, which stands ` +
          `nowhere, and ${printed(weights[next])} to the nearest point, ` +
          `${printed(away[next], 2)} away. ${lines}`,
    );
  }

  return {
    element: element("section.plane-story",
      element("div.pair",
        element("h3", "In a plane: places"),
        copyButton("code", () => planeInPython(shown)),
      ),
      element("p.lede",
        "Patches of an image, or cells on a slide, have no order, but they have distances. " +
          "Point at one to see what it looks at; click it, or walk with the arrow keys, to " +
          "keep it.",
      ),
      element("div.plane-parts",
        element("div.plane-box",
          drawing, element("span.plane-name", { "aria-hidden": true }, "global token"),
        ),
        element("div.plane-controls", slider.element, metrics.element, says),
      ),
    ),
    update(next) {
      shown = next;
      metrics.set(next.metric);
      draw();
    },
  };
}

// The index of the least distance, -1 if all are infinite.
const nearest = (distances) =>
  distances.reduce((best, d, i) => (d < (distances[best] ?? Infinity) ? i : best), -1);

// All places at one distance.
function ringAround(x, y, r, metric) {
  if (metric === "manhattan") return `M${x - r} ${y}L${x} ${y - r}L${x + r} ${y}L${x} ${y + r}Z`;
  return `M${x - r} ${y}a${r} ${r} 0 1 1 ${2 * r} 0a${r} ${r} 0 1 1 ${-2 * r} 0`;
}

// The same numbers in Python.
const planeInPython = ({ slope, metric, query }) => `\
import torch
from linbias.torch import attention_points

seed = torch.arange(${NUM_POINTS}, dtype=torch.float64)
angle, radius = seed * ${GOLDEN_ANGLE}, (seed + 0.5).sqrt()
points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
# A global token comes first, and its place is not read.
points = torch.cat([torch.zeros(1, 2), points])
q = k = torch.zeros(1, 1, len(points), 1, dtype=torch.float64)  # all alike
v = torch.eye(len(points), dtype=torch.float64)[None, None]  # so that the output is the weights
weights = attention_points(q, k, v, points, [${slope}], metric="${metric}", global_tokens=1)[0, 0]
print(weights[${query}])`;
