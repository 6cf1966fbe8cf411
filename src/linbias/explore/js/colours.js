// The page's colours as numbers, for what is painted rather than styled.

import { element } from "./dom.js";

const READABLE = 0.179; // a ground of this luminance is as far from black as from white

// A colour variable where `node` stands as [red, green, blue]; black for one out of the page.
function colour(node, name) {
  const probe = element("span", { style: { color: `var(${name})`, display: "none" } });
  node.append(probe);
  const numbers = getComputedStyle(probe).color.match(/[\d.]+/g) ?? [0, 0, 0];
  probe.remove();
  return numbers.slice(0, 3).map(Number);
}

// 256 steps from one colour variable to another, where `node` stands.
function ramp(node, from, to) {
  const [start, end] = [colour(node, from), colour(node, to)];
  const mixed = (share) => start.map((low, c) => Math.round(low + (end[c] - low) * share));
  return Array.from({ length: 256 }, (_, i) => mixed(i / 255));
}

// Paints cells, row by row, a pixel each: shadeOf(i) is [red, green, blue], or null for none.
export function paintCells(canvas, width, height, shadeOf) {
  if (canvas.width !== width) canvas.width = width;
  if (canvas.height !== height) canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let i = 0; i < width * height; i += 1) {
    const shade = shadeOf(i);
    if (shade !== null) image.data.set([...shade, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
}

// A small square picture: the largest weight is darkest, and small ones can be told from none.
export function paintWeights(canvas, side, weights, steps) {
  const most = largestOf(weights) || 1;
  paintCells(canvas, side, side, (i) => steps[Math.round(255 * Math.sqrt(weights[i] / most))]);
}

export const largestOf = (weights) => weights.reduce((a, b) => Math.max(a, b), 0);

export function wantsLightText(shade) {
  const [r, g, b] = shade.map((value) => {
    const share = value / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b < READABLE;
}

// A function that gives the ramps between these pairs of colour variables where `node` stands. They are looked
// up again, and `repaint` is called, when they may have changed: once the node stands in a page, since it has
// no colours before, and when that turns light or dark, by the system or by the switch.
export function rampsOf(node, pairs, repaint) {
  let ramps = null;
  function renew() {
    ramps = null;
    repaint();
  }
  new ResizeObserver(renew).observe(node);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renew);
  document.addEventListener("linbias-theme", renew);
  return () => (ramps ??= pairs.map(([from, to]) => ramp(node, from, to)));
}
