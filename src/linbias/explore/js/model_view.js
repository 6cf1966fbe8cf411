// Trained models on a text: which head departs most from its bias, where a token looks, and what each token cost.

import { lineChart } from "./chart.js";
import { choice } from "./controls.js";
import { debounce, element, note, section } from "./dom.js";
import { headsGrid, rowOfBias } from "./heads_grid.js";
import { heatmap } from "./heatmap.js";
import { headWords, lossWords, openingHead, openingWords, placeOf, storyOfRow } from "./model_words.js";
import { fixed } from "./numbers.js";
import { oneOf, readSaved, savedText, wholeUpTo } from "./saved.js";
import { grouped, scientific } from "./scales.js";
import { lossColumn, readableToken, tokenText } from "./token_text.js";
import { unpackWeights } from "./weights.js";

const MOST_BESIDE = 12; // heads whose pictures fit beside the text
const LEAST_SHOWN = 0.0005; // the weight from which on a key belongs to the linear chart

export function mountModel(root, { model: data, methods }, memory) {
  const { models, tokens } = data;
  const names = tokens.map((token, i) => `${i} \u201c${readableToken(token)}\u201d`);
  const labelOf = ({ method, name }) => methods[method]?.label ?? name;
  const colourOf = ({ method }) => methods[method]?.colour ?? "var(--negative)";
  const saved = (reading) => {
    const { layer, head } = openingHead(reading);
    return {
      model: { is: wholeUpTo(models.length - 1), start: data.chosen },
      layer: { is: wholeUpTo(reading.num_layers - 1), start: layer },
      head: { is: wholeUpTo(reading.num_heads - 1), start: head },
      // The last token that has a next one, where that is guessed.
      query: { is: wholeUpTo(tokens.length - 1), start: Math.max(0, tokens.length - (reading.bits ? 2 : 1)) },
      log: { is: oneOf([0, 1]), start: false },
    };
  };
  const first = readSaved(memory.read(), { model: saved(models[data.chosen]).model }).model;
  const state = readSaved(memory.read(), saved(models[first]));
  const reading = () => models[state.model];

  const lede = element("p", { class: "lede" });
  const noteOfModel = element("p", { class: "note" });
  const attention = element("div", { class: "model-attention" });
  const shown = choice({
    label: "Position method",
    options: models.map((one, i) => ({ value: i, label: labelOf(one) })),
    value: state.model,
    onChange: (model) => change({ model, ...openingOf(models[model]) }),
  });
  const guessing = models.filter(({ bits }) => bits !== null);
  const columns = guessing.map((one) =>
    lossColumn({ data, reading: one, label: labelOf(one), colour: colourOf(one), onSelect: (query) => change({ query }) }),
  );
  let panel = null;

  root.append(
    element("div", { class: "model-top" }, element("h2", {}, "Your model"), models.length > 1 && shown.element),
    lede,
    ...data.notes.map((words) => note(words)),
    noteOfModel,
    attention,
    columns.length > 0 &&
      section("Loss, token by token",
        element("p", { class: "story" }, lossWords(guessing, labelOf, data.unit)),
        note(
          `Each token inked by its loss, the bits that it cost: \u2212log\u2082 of the probability that the model gave it. Full ink: ${Number(data.blind.toFixed(1))} ` +
            "bits, those of a blind guess, or more. Choose a token to see what was expected in its place.",
        ),
        element("div", { class: columns.length > 1 ? "loss-columns" : "loss-columns single" }, columns.map((column) => column.element)),
      ),
    note("Weights are kept in 16 bits: what is shown is within 0.00001 of what the model computed. Nothing is sent anywhere."),
  );

  const later = debounce(() => memory.write(savedText(state, saved(reading()))), 80);

  function openingOf(one) {
    const { layer, head } = openingHead(one);
    return { layer, head };
  }

  function change(changes) {
    Object.assign(state, changes);
    draw();
    later();
  }

  function draw() {
    if (panel?.reading !== reading()) build();
    panel.update();
    columns.forEach((column) => column.update(state.query));
  }

  function build() {
    const one = reading();
    const read = `${data.whole ? "" : "the first "}${count(one.num_tokens, "token")}`;
    lede.textContent = `${one.name}: ${count(one.num_layers, "layer")} of ${count(one.num_heads, "head")}, reading ${read} of ${data.text}.`;
    noteOfModel.textContent = one.note ?? "";
    noteOfModel.hidden = one.note === null;
    const open = (layer, head) => change({ layer, head });
    const parts = one.weights === null ? withoutWeights(one) : attentionPanel({ data, reading: one, names, state, change });
    panel = { reading: one, ...parts };
    attention.replaceChildren(answer(one, open), panel.element);
    panel.paint?.();
  }

  draw();
}

// The head on which the view opens and why, in a sentence that leads back to it.
function answer(reading, open) {
  const { layer, head } = openingHead(reading);
  const { name, rest } = openingWords(reading);
  const button = element("button", { type: "button", class: "in-words", on: { click: () => open(layer, head) } }, name);
  return element("p", { class: "answer" }, button, rest);
}

function withoutWeights(reading) {
  const words = `The weights of ${reading.name} do not fit into the page beside those of the others: linbias explore on its own folder shows them.`;
  return { element: note(words), update() {} };
}

// The heads of one model, and where they look.
function attentionPanel({ data, reading, names, state, change }) {
  const { num_tokens: T } = reading;
  const weights = unpackWeights(reading);
  const rowNames = data.tokens.slice(0, T).map((token, i) => `${i}\u2002${readableToken(token)}`);
  const hidden = weights.matrix(0, 0).map((weight) => Number(weight === -Infinity));
  const open = (layer, head) => change({ layer, head });
  const heads = headsGrid({ reading, weights, onSelect: open });
  const title = element("h3");
  const story = element("p", { class: "story" });
  const picture = heatmap({ onSelect: (query) => change({ query }) });
  const chart = lineChart();
  const text = tokenText({
    tokens: data.tokens, separator: data.separator, label: "Query",
    marks: T < data.tokens.length ? { [T]: `no rows past ${T}` } : {},
    onSelect: (query) => change({ query }),
  });
  const scale = choice({
    label: "Scale",
    options: [{ value: false, label: "linear" }, { value: true, label: "logarithmic" }],
    value: state.log, onChange: (log) => change({ log }),
  });
  const measured = reading.departure
    ? "Departure is the share of a query\u2019s weight that lies elsewhere than the bias alone would put it (the total variation distance of the two). All numbers are " +
      "means over the later half of the queries."
    : "How far each head looks, in tokens, over the later half of the queries.";
  let shownHead = "";
  let matrix = null;

  return {
    element: element("div", { class: reading.num_heads > MOST_BESIDE ? "attention-parts wide" : "attention-parts" },
      element("section", { class: "heads-part" }, element("h3", {}, "Every head"), heads.element, note(measured)),
      element("section", { class: "query-part" },
        title,
        note("Each token inked by the weight that the framed one, the query, gives it. Choose another by click or arrow keys."),
        text.element,
        story,
        scale.element,
        chart.element,
      ),
      element("section", {}, element("h3", {}, "All queries of this head"), picture.element),
    ),
    paint: heads.paint,
    update() {
      const { layer, head } = state;
      const query = Math.min(state.query, T - 1);
      const row = weights.row(layer, head, query);
      const largest = row.reduce((a, b) => Math.max(a, b), 0);
      title.textContent = headWords(reading, layer, head);
      heads.choose(layer, head);
      text.ink(data.tokens.map((_, s) => (s < row.length ? Math.sqrt(row[s] / largest) : null)));
      text.choose(query, names[query]);
      story.textContent = storyOfRow(row, query, names, reading.causal);
      if (shownHead !== `${layer} ${head}`) matrix = weights.matrix(layer, head);
      shownHead = `${layer} ${head}`;
      picture.update({
        label: `Weights of layer ${layer}, head ${head}`, rows: rowNames, columns: rowNames, values: matrix,
        hidden,
        text: (weight) => (weight === -Infinity ? "hidden" : fixed(weight)),
        low: 0, high: matrix.reduce((a, b) => Math.max(a, b), 0),
        power: 0.5, // most weights are small
        selected: query,
      });
      const alone = reading.slopes && rowOfBias(reading, head, query);
      chart.update(rowChart(row, query, alone, names, state.log));
    },
  };
}

const count = (number, thing) => `${grouped(number)} ${thing}${number === 1 ? "" : "s"}`;

function rowChart(row, query, alone, names, log) {
  const floor = 1e-5; // what 16 bits can tell from 0
  const line = (values) => [...values].map((y, x) => ({ x, y: log && y < floor ? null : y }));
  const seen = (x) => Math.max(row[x], alone?.[x] ?? 0) >= (log ? floor : LEAST_SHOWN);
  const [low, high] = [[...row].findIndex((_, x) => seen(x)), [...row].findLastIndex((_, x) => seen(x))];
  return {
    label: `Weights of query ${names[query]}`,
    x: {
      label: "key", low: low - 0.5, high: high + 0.5, format: (x) => grouped(Math.round(x)),
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
