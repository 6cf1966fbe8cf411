// The bias explorer: a text, its heads, one matrix of a head, one row of it as bars, and every step in tables.

import { mean } from "./attention.js";
import { weightBars } from "./bars.js";
import { biasControls } from "./bias_controls.js";
import { headComputer, matrixOf, MEAN, openSides, powerOf } from "./bias_state.js";
import { QUANTITIES, readState, slopesOf, stateText } from "./bias_state.js";
import { biasTables } from "./bias_tables.js";
import { announcer, debounce, element, setText } from "./dom.js";
import { heatmap } from "./heatmap.js";
import { fixed, general, headName } from "./numbers.js";

const QUIET = 60; // milliseconds after which tables follow a slider

// memory: { read() -> text, write(text) } keeps the state, behind # in a page.
export function mountBias(root, { example }, memory) {
  const compute = headComputer(example);
  let state = readState(memory.read(), example);
  const controls = biasControls({ example, change });
  const pictures = [true, false].map(() => heatmap({ onSelect: (row) => change(() => ({ row })) }));
  const bars = weightBars();
  const tables = biasTables(example, currentView);
  const spoken = announcer();
  const titles = pictures.map(() => element("h3"));
  const formula = element("p", { class: "formula" });
  const rowTitle = element("h3");
  const figures = pictures.map((picture, i) => element("figure", {}, titles[i], picture.element));
  const stage = element(
    "div",
    { class: "explorer" },
    element("div", { class: "panel chosen-head" }, controls.head),
    element(
      "div",
      { class: "stage" },
      element("div", { class: "stage-controls" }, controls.picture),
      formula,
      element("div", { class: "figures" }, figures),
    ),
    element("div", { class: "row-panel" }, rowTitle, bars.element),
    element("div", { class: "panel setup" }, controls.side),
  );
  root.append(
    element("h2", {}, "Attention with linear biases"),
    element(
      "p",
      { class: "lede" },
      "Every key loses a little of its score for each token that lies between it and the query. How much is the "
        + "head\u2019s slope: a steep one looks nearby, a flat one far, and a slope of 0 is plain attention.",
    ),
    controls.text,
    stage,
    element("div", { class: "folds" }, tables.elements),
    spoken.element,
  );
  const later = debounce(() => {
    tables.update();
    memory.write(stateText(state, example));
  }, QUIET);

  function change(next) {
    const before = state;
    state = { ...state, ...next(state) };
    state.row = Math.min(state.row, state.tokens.length - 1);
    draw();
    later();
    if (before.row !== state.row || before.head !== state.head) spoken.say(rowInWords());
  }

  function currentView() {
    const heads = compute(state);
    return { state, heads, slopes: slopesOf(state), matrix: matrixOf(heads, state, "with"), title: titleOf("with") };
  }

  function titleOf(kind) {
    const name = QUANTITIES.find(({ value }) => value === state.quantity).name;
    const of = state.head === MEAN ? `mean of ${state.numHeads} heads` : headName(state.head).toLowerCase();
    return kind === "with" ? `${name}, ${of}` : `${name}, ${of}, without bias`;
  }

  function draw() {
    const heads = compute(state);
    const means = mean(heads.map((head) => head.with.weight));
    controls.update(state, heads, means);
    const matrices = ["with", "without"].map((kind) => matrixOf(heads, state, kind));
    drawPictures(heads, matrices);
    drawRow(heads);
    setText(formula, formulaOf(heads));
  }

  function drawPictures(heads, matrices) {
    stage.classList.toggle("compare", state.compare);
    const seen = matrices.slice(0, state.compare ? 2 : 1);
    let [low, high] = [0, 0];
    for (const matrix of seen) {
      for (const value of matrix) {
        if (value === -Infinity) continue;
        if (value < low) low = value;
        if (value > high) high = value;
      }
    }
    const power = powerOf(state.quantity, state.tokens);
    const hidden = ["raw", "scaled"].includes(state.quantity) ? null : hiddenCells(heads);
    figures[1].hidden = !state.compare;
    seen.forEach((values, i) => {
      const label = titleOf(i === 0 ? "with" : "without");
      setText(titles[i], label);
      const { tokens, row } = state;
      pictures[i].update({
        ...{ label, rows: tokens, columns: tokens, values, text: fixed },
        ...{ low, high, power, hidden, selected: row },
      });
    });
  }

  function drawRow(heads) {
    const S = state.tokens.length;
    const part = (matrix) => [...matrix.slice(state.row * S, (state.row + 1) * S)];
    const weights = { head: state.head, quantity: "weight" };
    setText(rowTitle, `Query ${state.tokens[state.row]}`);
    bars.update({
      caption: `Weights of the query ${state.tokens[state.row]}`,
      tokens: state.tokens,
      weight: part(matrixOf(heads, weights, "with")),
      without: part(matrixOf(heads, weights, "without")),
      hidden: part(hiddenCells(heads)),
    });
  }

  // Whether a key takes no part: in the chosen head, or for the mean in any.
  function hiddenCells(heads) {
    const seen = state.head === MEAN ? heads : [heads[state.head]];
    return Array.from(seen[0].with.bias, (_, i) => seen.every((head) => head.with.bias[i] === -Infinity));
  }

  function rowInWords() {
    const S = state.tokens.length;
    const matrix = matrixOf(compute(state), { head: state.head, quantity: "weight" }, "with");
    const row = [...matrix.slice(state.row * S, (state.row + 1) * S)];
    const most = row.indexOf(Math.max(...row));
    const of = state.head === MEAN ? "mean of all heads" : headName(state.head);
    return `Query ${state.tokens[state.row]}, ${of}: most weight on ${state.tokens[most]}, ${fixed(row[most])}`;
  }

  function formulaOf(heads) {
    const scaled = "q \u00b7 k / \u221a2";
    if (state.head === MEAN) return `mean over heads of softmax(${scaled} \u2212 slope \u00d7 distance)`;
    const sides = openSides(state, slopesOf(state), state.head).map(({ side, slope }) => {
      const where = { both: "", left: "to the left", right: "to the right" }[side];
      return `${general(slope)} \u00d7 distance ${state.variant === "causal" ? "" : where}`.trim();
    });
    return `softmax(${scaled} \u2212 ${sides.join(", ")})`;
  }

  draw();
  tables.update();
}
