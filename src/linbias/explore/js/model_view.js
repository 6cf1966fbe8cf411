// Trained models on a text: their heads, where a token looks, and what each token cost.

import { lineChart } from "./chart.js";
import { largestOf } from "./colours.js";
import { choice } from "./controls.js";
import { element, keyed, mount, note, onDraw, prose, section } from "./dom.js";
import { headsGrid } from "./heads_grid.js";
import { heatmap } from "./heatmap.js";
import {
  headWords, lossWords, openingHead, openingWords, placeOf, rowOfBias, storyOfRow, unpackWeights,
} from "./model_words.js";
import { fixed, grouped } from "./numbers.js";
import { savedState, wholeUpTo } from "./saved.js";
import { endOfRows, lossColumn, namesOf, readableToken, tokenText } from "./token_text.js";

const MOST_BESIDE = 12; // heads whose pictures fit beside the text
const LEAST_SHOWN = 0.0005; // the weight from which on a key belongs to the chart

export function mountModel(root, { model: data, methods }, memory) {
  const { models, tokens } = data;
  const labelOf = ({ method, name }) => methods[method]?.label ?? name;
  const colourOf = ({ method }) => methods[method]?.colour ?? "var(--negative)";
  const reading = ({ model } = state) => models[model];
  const openingOf = (model) => {
    const { layer, head } = openingHead(models[model]);
    return { layer, head };
  };
  const { state, change } = savedState(memory, {
    model: { is: wholeUpTo(models.length - 1), start: data.chosen },
    layer: {
      is: (layer, to) => wholeUpTo(reading(to).num_layers - 1)(layer),
      start: ({ model }) => openingOf(model).layer,
    },
    head: {
      is: (head, to) => wholeUpTo(reading(to).num_heads - 1)(head),
      start: ({ model }) => openingOf(model).head,
    },
    // The last token that has a next one, where that is guessed.
    query: {
      is: wholeUpTo(tokens.length - 1),
      start: (to) => Math.max(0, tokens.length - (reading(to).bits ? 2 : 1)),
    },
  }, () => draw());
  const guessing = models.filter(({ bits }) => bits !== null);
  const makePanel = () => {
    const make = reading().weights === null ? withoutWeights : attentionPanel;
    return make({ data, reading: reading(), state, change });
  };

  function lede() {
    const { name, num_layers: layers, num_heads: heads, num_tokens: T } = reading();
    const size = `${count(layers, "layer")} of ${count(heads, "head")}`;
    const read = `${data.whole ? "" : "the first "}${count(T, "token")}`;
    return `${name}: ${size}, reading ${read} of ${data.text}.`;
  }

  // The head on which the view opens and why, in a sentence that leads back to it.
  function answer() {
    const [name, rest] = openingWords(reading());
    const open = { on: { click: () => change(openingOf(state.model)) } };
    return [element("button.in-words", open, name), rest];
  }

  const column = (one) =>
    lossColumn({
      data, reading: one, label: labelOf(one), colour: colourOf(one), state,
      onSelect: (query) => change({ query }),
    });
  const losses = () =>
    section("Loss, token by token",
      element("p.story", lossWords(guessing, labelOf, data.unit)),
      note(prose`Each token inked by its loss, the bits that it cost: \u2212log\u2082 of the probability that
        the model gave it. Full ink: ${Number(data.blind.toFixed(1))} bits, those of a blind guess, or more.
        Choose a token to see what was expected in its place.`),
      element(guessing.length > 1 ? "div.loss-columns" : "div.loss-columns.single",
        guessing.map(column),
      ),
    );

  const draw = mount(root, () => {
    const shown = choice({
      label: "Position method", value: () => state.model,
      options: models.map((one, i) => ({ value: i, label: labelOf(one) })),
      onInput: (model) => change({ model, ...openingOf(model) }),
    });
    return [
      element("div.model-top", element("h2", "Your model"), models.length > 1 && shown),
      element("p.lede", lede),
      ...data.notes.map((words) => note(words)),
      element("p.note", { hidden: () => reading().note === null }, () => reading().note),
      element("p.answer", answer),
      element("div.model-attention", keyed(() => reading(), makePanel)),
      guessing.length > 0 && losses(),
      note(prose`Weights are kept in 16 bits: what is shown is within 0.00001 of what the model computed.
        Nothing is sent anywhere.`),
    ];
  });
}

const withoutWeights = ({ reading }) =>
  note(prose`The weights of ${reading.name} do not fit into the page beside those of the others: linbias
    explore on its own folder shows them.`);

function attentionPanel({ data, reading, state, change }) {
  const { num_tokens: T } = reading;
  const weights = unpackWeights(reading);
  const names = namesOf(data.tokens);
  const rowNames = data.tokens.slice(0, T).map((token, i) => `${i}\u2002${readableToken(token)}`);
  const hidden = weights.matrix(0, 0).map((weight) => Number(weight === -Infinity));
  const query = () => Math.min(state.query, T - 1);
  const onSelect = (to) => change({ query: to });
  let row = [];
  let largest = 0;
  let matrix = { of: "" };
  onDraw(() => {
    const { layer, head } = state;
    row = weights.row(layer, head, query());
    largest = largestOf(row);
    const of = `Weights of layer ${layer}, head ${head}`;
    if (matrix.of !== of) matrix = { of, values: weights.matrix(layer, head) };
  });

  function map() {
    const { of: label, values } = matrix;
    return {
      label, rows: rowNames, columns: rowNames, values, hidden, selected: query(),
      text: (weight) => (weight === -Infinity ? "hidden" : fixed(weight)),
      low: 0, high: largestOf(values), power: 0.5, // most weights are small
    };
  }

  function chart() {
    const alone = reading.slopes && rowOfBias(reading, state.head, query());
    return rowChart(row, query(), alone, names);
  }

  const measured = reading.departure
    ? prose`Departure is the share of a query\u2019s weight that lies elsewhere than the bias alone would put
      it (the total variation distance of the two). All numbers are means over the later half of the queries.`
    : "How far each head looks, in tokens, over the later half of the queries.";
  const heads = headsGrid({ reading, weights, state, onSelect: (layer, head) => change({ layer, head }) });
  return element(`div.attention-parts${reading.num_heads > MOST_BESIDE ? ".wide" : ""}`,
    element("section.heads-part", element("h3", "Every head"), heads, note(measured)),
    element("section.query-part",
      element("h3", () => headWords(reading, state.layer, state.head)),
      note(prose`Each token inked by the weight that the framed one, the query, gives it. Choose another by
        click or arrow keys.`),
      tokenText({
        data, label: "Query", marks: endOfRows(data.tokens, T), chosen: query,
        words: () => names[query()],
        shareOf: (s) => (s < row.length ? Math.sqrt(row[s] / largest) : null), onSelect,
      }),
      element("p.story", () => storyOfRow(row, query(), names, reading.causal)),
      lineChart(chart),
    ),
    section("All queries of this head", heatmap({ shownOf: map, onSelect }).element),
  );
}

const count = (number, thing) => `${grouped(number)} ${thing}${number === 1 ? "" : "s"}`;

function rowChart(row, query, alone, names) {
  const line = (values) => Array.from(values, (y, x) => ({ x, y }));
  const largest = Array.from(row, (weight, x) => Math.max(weight, alone?.[x] ?? 0));
  const isSeen = (weight) => weight >= LEAST_SHOWN;
  const bias = alone && { key: "alone", name: "bias alone", colour: "var(--ink)", points: line(alone) };
  return {
    label: `Weights of query ${names[query]}`,
    x: {
      label: "key", format: (x) => grouped(Math.round(x)),
      low: largest.findIndex(isSeen) - 0.5, high: largest.findLastIndex(isSeen) + 0.5,
      at: (x) => `on ${names[x]}, ${placeOf(x, query)}`,
    },
    y: { label: "weight", low: 0, format: fixed },
    lines: [
      { key: "weight", name: "weight", colour: "var(--accent)", bars: true, points: line(row) },
      bias,
    ].filter(Boolean),
    start: query,
  };
}
