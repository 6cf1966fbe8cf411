// Order that is not counted, in the plane: points, one of which looks at all others, and token 0, a global
// one that stands nowhere. All are alike, so that distance alone decides.

import { component, element, onDraw, prose, roving, svgElement, uniqueId } from "./dom.js";
import { printed } from "./numbers.js";
import { inkShares, slopeOfStory } from "./slope_story.js";

export const NUM_POINTS = 72;
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

function distancesFrom(query) {
  if (query === 0) return DRAWN.map(() => 0);
  const [x, y] = POINTS[query - 1];
  return [0, ...POINTS.map((point) => Math.hypot(point[0] - x, point[1] - y))];
}

// The plane of state.planeSlope and query.
export function planeStory({ state, change, bind }) {
  let pointed = null; // the token under the pointer
  let query = 0; // that one, or else the chosen one
  let away = [];
  let weights = [];
  let ink = [];

  function weigh() {
    query = pointed ?? state.query;
    away = distancesFrom(query);
    const parts = away.map((d) => Math.exp(-state.planeSlope * d));
    const sum = parts.reduce((a, b) => a + b, 0);
    weights = parts.map((part) => part / sum);
    ink = inkShares(weights);
  }

  function dot([x, y], i) {
    const name = i === 0 ? "global token" : `point ${i}`;
    const attributes = {
      role: "radio", ...roving(() => i === state.query),
      class: () => (i === query ? "dot looks" : "dot"), style: () => ({ "--ink-share": ink[i] }),
      "aria-label": () => `${name}: ${printed(weights[i])}`,
      on: { keydown: (event) => walk(event, i) },
    };
    if (i > 0) return svgElement("circle", { ...attributes, cx: x, cy: y, r: DOT });
    const square = { x: x - DOT, y: y - DOT, width: 2 * DOT, height: 2 * DOT, rx: 0.15 };
    return svgElement("rect", { ...attributes, ...square });
  }

  function ring(_, i) {
    const d = () => {
      const radius = ((i + 1) * Math.LN2) / state.planeSlope;
      const isDrawn = query > 0 && state.planeSlope > 0;
      return isDrawn ? ringAround(...DRAWN[query], radius) : "";
    };
    return svgElement("path.ring", { d });
  }

  function says() {
    const own = printed(weights[query]);
    if (query === 0) {
      return `The global token stands nowhere: all points are alike to it, and get ${own} each.`;
    }
    const next = nearest(away.map((d, i) => (i === query || i === 0 ? Infinity : d)));
    const lines =
      state.planeSlope === 0
        ? "At slope 0 all are alike."
        : "From each line to the next weights halve.";
    return prose`Point ${query} gives ${own} to itself, as much to the global token, which stands nowhere, and
      ${printed(weights[next])} to the nearest point, ${printed(away[next], 2)} away. ${lines}`;
  }

  function plane() {
    const clip = uniqueId("disc");
    const disc = { r: EDGE - 0.05 };
    const listeners = {
      pointermove: (event) => point(nearestTo(event)), pointerleave: () => point(null),
      click: (event) => change({ query: nearestTo(event) }),
    };
    const attributes = {
      viewBox: `${-EDGE} ${-EDGE} ${2 * EDGE} ${2 * EDGE}`, role: "radiogroup",
      "aria-label": "Token that looks", on: listeners,
    };
    return svgElement("svg.plane", attributes,
      svgElement("clipPath", { id: clip }, svgElement("circle", disc)),
      svgElement("circle.disc", disc),
      svgElement("g", { "clip-path": `url(#${clip})` }, Array.from({ length: RINGS }, ring)),
      DRAWN.map(dot),
    );
  }

  const story = component(() => {
    onDraw(weigh);
    return element("section.plane-story",
      element("h3", "In a plane: places"),
      element("p.lede", prose`Patches of an image, or cells on a slide, have no order, but they have
        distances. Point at one to see what it looks at; click it, or walk with the arrow keys, to keep it.`),
      element("div.plane-parts",
        element("div.plane-box",
          plane(), element("span.plane-name", { "aria-hidden": true }, "global token"),
        ),
        element("div.plane-controls",
          slopeOfStory({
            ends: ["0: all alike", "1: the nearest points"], ...bind("planeSlope"),
            words: () => `${printed(weights[query])} on itself`,
          }),
          element("p.ink-says", says),
        ),
      ),
    );
  });

  function point(token) {
    pointed = token;
    story.draw();
  }

  // To the nearest token that lies more in the arrow's direction than across it.
  function walk(event, from) {
    const arrows = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] };
    if (!(event.key in arrows)) return;
    const [right, down] = arrows[event.key];
    event.preventDefault();
    const to = nearest(DRAWN.map(([px, py]) => {
      const [x, y] = [px - DRAWN[from][0], py - DRAWN[from][1]];
      const ahead = x * right + y * down;
      const isAhead = ahead > 0 && ahead >= Math.abs(x * down + y * right);
      return isAhead ? Math.hypot(x, y) : Infinity;
    }));
    if (to < 0) return;
    pointed = null;
    change({ query: to });
    story.element.querySelectorAll(".dot")[to].focus();
  }

  onDraw(story.draw);
  return story.element;
}

function nearestTo({ clientX, clientY, currentTarget }) {
  const { left, top, width, height } = currentTarget.getBoundingClientRect();
  const x = ((clientX - left) / width - 0.5) * 2 * EDGE;
  const y = ((clientY - top) / height - 0.5) * 2 * EDGE;
  return nearest(DRAWN.map(([px, py]) => Math.hypot(px - x, py - y)));
}

// The index of the least distance, -1 if all are infinite.
const nearest = (distances) =>
  distances.reduce((best, d, i) => (d < (distances[best] ?? Infinity) ? i : best), -1);

// All places at one distance.
function ringAround(x, y, r) {
  return `M${x - r} ${y}a${r} ${r} 0 1 1 ${2 * r} 0a${r} ${r} 0 1 1 ${-2 * r} 0`;
}
