// Trained models on a text: their heads, where a token looks, and what each token cost.

import { lineChart } from "./chart.js";
import { largestOf } from "./colours.js";
import { choice } from "./controls.js";
import { debounce, element, note, section } from "./dom.js";
import { headsGrid } from "./heads_grid.js";
import { heatmap } from "./heatmap.js";
import {
  headWords, lossWords, openingHead, openingWords, placeOf, rowOfBias, storyOfRow, unpackWeights,
} from "./model_words.js";
import { fixed, grouped, scientific } from "./numbers.js";
import { oneOf, readSaved, savedText, wholeUpTo } from "./saved.js";
import { endOfRows, lossColumn, namesOf, readableToken, tokenText } from "./token_text.js";

const MOST_BESIDE = 12; // heads whose pictures fit beside the text
const LEAST_SHOWN = 0.0005; // the weight from which on a key belongs to the linear chart
const LEAST_LOG = 1e-5; // to the logarithmic one: what 16 bits can tell from 0

export function mountModel(root, { model: data, methods }, memory) {
  const { models, tokens } = data;
  const labelOf = ({ method, name }) => methods[method]?.label ?? name;
  const colourOf = ({ method }) => methods[method]?.colour ?? "var(--negative)";
  const openingOf = (one) => ({ layer: openingHead(one).layer, head: openingHead(one).head });
  const rulesOf = (one) => ({
    model: { is: wholeUpTo(models.length - 1), start: data.chosen },
    layer: { is: wholeUpTo(one.num_layers - 1), start: openingOf(one).layer },
    head: { is: wholeUpTo(one.num_heads - 1), start: openingOf(one).head },
    // The last token that has a next one, where that is guessed.
    query: {
      is: wholeUpTo(tokens.length - 1), start: Math.max(0, tokens.length - (one.bits ? 2 : 1)),
    },
    log: { is: oneOf([0, 1]), start: false },
  });
  const first = readSaved(memory.read(), rulesOf(models[data.chosen])).model;
  const state = readSaved(memory.read(), rulesOf(models[first]));
  const reading = () => models[state.model];

  const lede = element("p.lede");
  const noteOfModel = note();
  const attention = element("div.model-attention");
  const shown = choice({
    label: "Position method", value: state.model,
    options: models.map((one, i) => ({ value: i, label: labelOf(one) })),
    onChange: (model) => change({ model, ...openingOf(models[model]) }),
  });
  const guessing = models.filter(({ bits }) => bits !== null);
  const columns = guessing.map((one) => {
    const onSelect = (query) => change({ query });
    const [label, colour] = [labelOf(one), colourOf(one)];
    return lossColumn({ data, reading: one, label, colour, onSelect });
  });
  let panel = null;

  root.append(...[
    element("div.model-top", element("h2", "Your model"), models.length > 1 && shown.element),
    lede,
    ...data.notes.map((words) => note(words)),
    noteOfModel,
    attention,
    columns.length > 0 &&
      section("Loss, token by token",
        element("p.story", lossWords(guessing, labelOf, data.unit)),
        note(
          "Each token inked by its loss, the bits that it cost: \u2212log\u2082 of the " +
            "probability that the model gave it. Full ink: " +
            `${Number(data.blind.toFixed(1))} bits, those of a blind guess, or more. Choose a ` +
            "token to see what was expected in its place.",
        ),
        element(columns.length > 1 ? "div.loss-columns" : "div.loss-columns.single",
          columns.map((column) => column.element),
        ),
      ),
    note(
      "Weights are kept in 16 bits: what is shown is within 0.00001 of what the model computed. " +
        "Nothing is sent anywhere.",
    ),
  ].filter(Boolean));

  const later = debounce(() => memory.write(savedText(state, rulesOf(reading()))));

  function change(changes) {
    Object.assign(state, changes);
    draw();
    later();
  }

  function draw() {
    if (panel?.reading !== reading()) build(reading());
    panel.update();
    columns.forEach((column) => column.update(state.query));
  }

  function build(one) {
    const size = `${count(one.num_layers, "layer")} of ${count(one.num_heads, "head")}`;
    const read = `${data.whole ? "" : "the first "}${count(one.num_tokens, "token")}`;
    lede.textContent = `${one.name}: ${size}, reading ${read} of ${data.text}.`;
    noteOfModel.textContent = one.note ?? "";
    noteOfModel.hidden = one.note === null;
    const make = one.weights === null ? withoutWeights : attentionPanel;
    panel = { reading: one, ...make({ data, reading: one, state, change }) };
    // The head on which the view opens and why, in a sentence that leads back to it.
    const { name, rest } = openingWords(one);
    const open = { on: { click: () => change(openingOf(one)) } };
    const answer = element("p.answer", element("button.in-words", open, name), rest);
    attention.replaceChildren(answer, panel.element);
  }

  draw();
}

function withoutWeights({ reading }) {
  const words =
    `The weights of ${reading.name} do not fit into the page beside those of the others: ` +
    "linbias explore on its own folder shows them.";
  return { element: note(words), update() {} };
}

function attentionPanel({ data, reading, state, change }) {
  const { num_tokens: T } = reading;
  const weights = unpackWeights(reading);
  const names = namesOf(data.tokens);
  const rowNames = data.tokens.slice(0, T).map((token, i) => `${i}\u2002${readableToken(token)}`);
  const hidden = weights.matrix(0, 0).map((weight) => Number(weight === -Infinity));
  const onSelect = (query) => change({ query });
  const open = (layer, head) => change({ layer, head });
  const heads = headsGrid({ reading, weights, onSelect: open });
  const title = element("h3");
  const story = element("p.story");
  const picture = heatmap({ onSelect });
  const chart = lineChart();
  const text = tokenText({ data, label: "Query", marks: endOfRows(data.tokens, T), onSelect });
  const scale = choice({
    label: "Scale", value: state.log, onChange: (log) => change({ log }),
    options: [{ value: false, label: "linear" }, { value: true, label: "logarithmic" }],
  });
  const measured = reading.departure
    ? "Departure is the share of a query\u2019s weight that lies elsewhere than the bias alone " +
      "would put it (the total variation distance of the two). All numbers are means over the " +
      "later half of the queries."
    : "How far each head looks, in tokens, over the later half of the queries.";
  let shownHead = "";
  let matrix = null;

  return {
    element: element(`div.attention-parts${reading.num_heads > MOST_BESIDE ? ".wide" : ""}`,
      element("section.heads-part", element("h3", "Every head"), heads.element, note(measured)),
      element("section.query-part",
        title,
        note(
          "Each token inked by the weight that the framed one, the query, gives it. Choose " +
            "another by click or arrow keys.",
        ),
        text.element,
        story,
        scale.element,
        chart.element,
      ),
      section("All queries of this head", picture.element),
    ),
    update() {
      const { layer, head } = state;
      const query = Math.min(state.query, T - 1);
      const row = weights.row(layer, head, query);
      const largest = largestOf(row);
      title.textContent = headWords(reading, layer, head);
      heads.choose(layer, head);
      text.ink(data.tokens.map((_, s) => (s < row.length ? Math.sqrt(row[s] / largest) : null)));
      text.choose(query, names[query]);
      story.textContent = storyOfRow(row, query, names, reading.causal);
      if (shownHead !== `${layer} ${head}`) matrix = weights.matrix(layer, head);
      shownHead = `${layer} ${head}`;
      picture.update({
        label: `Weights of layer ${layer}, head ${head}`, rows: rowNames, columns: rowNames,
        values: matrix, hidden, selected: query,
        text: (weight) => (weight === -Infinity ? "hidden" : fixed(weight)),
        low: 0, high: largestOf(matrix), power: 0.5, // most weights are small
      });
      const alone = reading.slopes && rowOfBias(reading, head, query);
      chart.update(rowChart(row, query, alone, names, state.log));
    },
  };
}

const count = (number, thing) => `${grouped(number)} ${thing}${number === 1 ? "" : "s"}`;

function rowChart(row, query, alone, names, log) {
  const line = (values) =>
    Array.from(values, (y, x) => ({ x, y: log && y < LEAST_LOG ? null : y }));
  const largest = Array.from(row, (weight, x) => Math.max(weight, alone?.[x] ?? 0));
  const isSeen = (weight) => weight >= (log ? LEAST_LOG : LEAST_SHOWN);
  const bias = alone && {
    key: "alone", name: "bias alone", colour: "var(--ink)", points: line(alone),
  };
  return {
    label: `Weights of query ${names[query]}`,
    x: {
      label: "key", format: (x) => grouped(Math.round(x)),
      low: largest.findIndex(isSeen) - 0.5, high: largest.findLastIndex(isSeen) + 0.5,
      at: (x) => `on ${names[x]}, ${placeOf(x, query)}`,
    },
    y: {
      label: "weight", low: log ? LEAST_LOG : 0, log,
      format: (y) => (log ? scientific(y) : fixed(y)),
    },
    lines: [
      { key: "weight", name: "weight", colour: "var(--accent)", bars: true, points: line(row) },
      bias,
    ].filter(Boolean),
    start: query,
  };
}
