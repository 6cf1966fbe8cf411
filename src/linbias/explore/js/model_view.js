// A trained model on a text: the weights of every layer and head, and how far each head looks.

import { lineChart } from "./chart.js";
import { choice, parseWhole, slider } from "./controls.js";
import { debounce, element, note, section } from "./dom.js";
import { heatmap } from "./heatmap.js";
import { fixed } from "./numbers.js";
import { reachTable } from "./reach_table.js";
import { oneOf, readSaved, savedText, wholeUpTo } from "./saved.js";
import { grouped, scientific, slopeFraction } from "./scales.js";
import { readableToken, tokenText } from "./token_text.js";
import { reachOfRow, unpackWeights, weightsOfBias } from "./weights.js";

const MOST_BUTTONS = 12; // layers or heads of which each has a button
const LEAST_SHOWN = 0.0005; // the weight from which on a key belongs to the linear chart

export function mountModel(root, { model }, memory) {
  const T = model.tokens.length;
  const names = model.tokens.map((token, i) => `${i}\u2002${readableToken(token)}`);
  const quoted = model.tokens.map((token, i) => `${i} \u201c${readableToken(token)}\u201d`);
  const weights = unpackWeights(model);
  const saved = {
    layer: { is: wholeUpTo(model.num_layers - 1), start: 0 },
    head: { is: wholeUpTo(model.num_heads - 1), start: 0 },
    query: { is: wholeUpTo(T - 1), start: T - 1 },
    log: { is: oneOf([0, 1]), start: false },
  };
  const state = readSaved(memory.read(), saved);
  const layerControl = numberControl("Layer", model.num_layers, (layer) => change({ layer }));
  const headControl = numberControl("Head", model.num_heads, (head) => change({ head }));
  const text = tokenText({ ...model, names: quoted, onSelect: (query) => change({ query }) });
  const title = element("h3");
  const story = element("p", { class: "story" });
  const picture = heatmap({ onSelect: (query) => change({ query }) });
  const chart = lineChart();
  const scale = choice({
    label: "Scale",
    options: [
      { value: false, label: "linear" },
      { value: true, label: "logarithmic" },
    ],
    value: state.log,
    onChange: (log) => change({ log }),
  });
  const reach = reachTable({ model, onSelect: (layer, head) => change({ layer, head }) });
  const hidden = weights.matrix(0, 0).map((weight) => Number(weight === -Infinity));
  let shownMatrix = "";
  let matrix = null;

  root.append(
    element("h2", {}, "A trained model"),
    element(
      "p",
      { class: "lede" },
      `${model.name}: ${count(model.num_layers, "layer")} of ${count(model.num_heads, "head")}, reading ${count(T, "token")} of ${model.text}.`,
    ),
    ...[model.note, model.cut].filter(Boolean).map((words) => note(words)),
    element("div", { class: "abreast" }, layerControl.element, headControl.element),
    element(
      "section",
      {},
      title,
      note("The text, each token coloured by the weight that the framed one gives it. Choose another by click or arrow keys."),
      text.element,
      story,
    ),
    element(
      "section",
      { class: "beside" },
      element("div", {}, element("h3", {}, "All queries"), picture.element),
      element("div", {}, element("h3", {}, "This query"), scale.element, chart.element),
    ),
    section(
      "Reach",
      note(
        "How far each head looks, in tokens, over the later half of the queries" +
          (model.alone ? "; below, how far its bias alone would make it look." : "."),
      ),
      reach.element,
    ),
    note("Weights are kept in 16 bits: what is shown is within 0.00001 of what the model computed. Nothing is sent anywhere."),
  );

  const later = debounce(() => memory.write(savedText(state, saved)), 80);

  function change(changes) {
    Object.assign(state, changes);
    draw();
    later();
  }

  function draw() {
    const { layer, head, query } = state;
    const row = weights.row(layer, head, query);
    const slope = model.slopes?.[head] ?? null;
    layerControl.set(layer);
    headControl.set(head);
    title.textContent = `Layer ${layer + 1}, head ${head + 1}${slope === null ? "" : `, slope ${slopeFraction(slope)}`}`;
    text.update(row, query);
    story.textContent = storyOfRow(row, query, quoted, model.causal);
    if (shownMatrix !== `${layer} ${head}`) matrix = weights.matrix(layer, head);
    shownMatrix = `${layer} ${head}`;
    picture.update({
      label: `Weights of layer ${layer + 1}, head ${head + 1}`,
      rows: names,
      columns: names,
      values: matrix,
      hidden,
      text: (weight) => (weight === -Infinity ? "hidden" : fixed(weight)),
      low: 0,
      high: matrix.reduce((a, b) => Math.max(a, b), 0),
      power: 0.5, // most weights are small
      selected: query,
    });
    chart.update(rowChart(row, query, slope, quoted, state.log));
    reach.choose(layer, head);
  }

  draw();
}

// Buttons for a few, a slider for many; readers count from 1.
function numberControl(label, number, onChange) {
  if (number > MOST_BUTTONS) {
    const control = slider({
      label,
      min: 1,
      max: number,
      value: 1,
      parse: (text) => parseWhole(text, 1, number),
      onInput: (value) => onChange(value - 1),
    });
    return { element: control.element, set: (value) => control.set(value + 1) };
  }
  const options = Array.from({ length: number }, (_, value) => ({ value, label: String(value + 1) }));
  return choice({ label, options, value: 0, onChange });
}

function count(number, thing) {
  return `${grouped(number)} ${thing}${number === 1 ? "" : "s"}`;
}

function storyOfRow(row, query, names, causal) {
  const { mean, within } = reachOfRow(row, query);
  const most = row.reduce((best, weight, s) => (weight > row[best] ? s : best), 0);
  const on = most === query ? "itself" : `${names[most]} (${placeOf(most, query)})`;
  return (
    `Token ${names[query]} looks ${mean.toFixed(1)} tokens ${causal ? "back" : "away"} on average; ` +
    `90% of its weight lies within ${within}. Most is on ${on}: ${fixed(row[most])}.`
  );
}

function placeOf(key, query) {
  if (key === query) return "itself";
  return key < query ? `${query - key} before` : `${key - query} after`;
}

function rowChart(row, query, slope, names, log) {
  const floor = 1e-5; // what 16 bits can tell from 0
  const line = (values) => [...values].map((y, x) => ({ x, y: log && y < floor ? null : y }));
  const alone = slope === null ? null : weightsOfBias(slope, query, row.length);
  const seen = (x) => Math.max(row[x], alone?.[x] ?? 0) >= (log ? floor : LEAST_SHOWN);
  const [low, high] = [[...row].findIndex((_, x) => seen(x)), [...row].findLastIndex((_, x) => seen(x))];
  return {
    label: `Weights of query ${names[query]}`,
    x: {
      label: "key",
      low: low - 0.5,
      high: high + 0.5,
      format: (x) => grouped(Math.round(x)),
      at: (x) => `on ${names[x]}, ${placeOf(x, query)}`,
    },
    y: { label: "weight", low: log ? floor : 0, log, format: (y) => (log ? scientific(y, 3) : fixed(y)) },
    lines: [
      { key: "weight", name: "weight", colour: "var(--accent)", bars: true, points: line(row) },
      ...(alone ? [{ key: "alone", name: "bias alone", colour: "var(--ink)", points: line(alone) }] : []),
    ],
    start: query,
  };
}
