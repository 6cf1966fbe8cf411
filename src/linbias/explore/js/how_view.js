// How it works: scores, the bias that is added to them, and the weights, as three matrices of one head; one query's row of
// them, key by key; and what can be changed.

import { copyButton } from "./controls.js";
import { announcer, debounce, element, setText } from "./dom.js";
import { heatmap, MOST_NUMBERS } from "./heatmap.js";
import { howControls } from "./how_controls.js";
import { headComputer, openSides, readState, slopesOf, slopeText, stateOfStep, stateText, STEPS } from "./how_state.js";
import { howTables, pythonOf, rowTable } from "./how_tables.js";
import { general, printed } from "./numbers.js";
import { slopeFraction } from "./scales.js";

const QUIET = 60; // milliseconds after which tables follow a slider
const MATRICES = ["scaled", "bias", "weights"];
const OPERATORS = ["", "+", "\u2192"];

// memory: { read() -> text, write(text) } keeps the state, behind # in a page.
export function mountHow(root, { example }, memory) {
  const compute = headComputer(example);
  let state = readState(memory.read(), example);
  let pointed = null; // the row under the pointer
  const controls = howControls({ example, change });
  const pictures = MATRICES.map(() => heatmap({ onSelect: (row) => change(() => ({ row })), onPoint: point }));
  const titles = MATRICES.map(() => element("h3"));
  const table = rowTable();
  const rowTitle = element("h3");
  const after = element("p", { class: "note after" });
  const tables = howTables(example, currentView);
  const spoken = announcer();
  const says = element("p", { class: "step-says" });
  const steps = STEPS.map(({ id, label }, i) =>
    element("button", { type: "button", on: { click: () => change(() => stateOfStep(id, example)) } },
      element("span", { class: "step-number", "aria-hidden": "true" }, String(i + 1)),
      label,
    ),
  );
  root.append(
    element("h2", {}, "How it works"),
    element("div", { class: "steps", role: "group", "aria-label": "Steps" }, steps),
    says,
    element("div", { class: "how-controls" }, controls.head, element("div", { class: "how-slopes" }, controls.slope)),
    element("div", { class: "sum" },
      pictures.flatMap((picture, i) => [
        OPERATORS[i] && element("span", { class: "operator", "aria-hidden": "true" }, OPERATORS[i]),
        element("figure", {}, titles[i], picture.element),
      ]),
    ),
    element("section", { class: "row-panel" },
      element("div", { class: "pair" },
        rowTitle,
        copyButton({ label: "Copy code", says: "Code copied", text: () => pythonOf(currentView()) }),
      ),
      table.element,
      after,
    ),
    element("details", { class: "fold more" },
      element("summary", {}, element("h3", {}, "More to change: words, sides, slopes, heads")),
      controls.more,
    ),
    element("div", { class: "folds" }, tables.elements),
    spoken.element,
  );
  const later = debounce(() => {
    tables.update();
    memory.write(stateText(state, example));
  }, QUIET);

  function change(next) {
    const before = state;
    const parts = next(state);
    // What a step says holds for each of its heads and rows.
    const kept = Object.keys(parts).every((name) => ["step", "head", "row"].includes(name)) || "step" in parts;
    state = { ...state, ...(kept ? {} : { step: null }), ...parts };
    state.row = Math.min(state.row, state.tokens.length - 1);
    pointed = null;
    draw();
    later();
    if (parts.step) spoken.say(says.textContent);
    else if (before.row !== state.row || before.head !== state.head) spoken.say(rowInWords());
  }

  function currentView() {
    return { state, heads: compute(state), slopes: slopesOf(state) };
  }

  // The same place in all three matrices, and its row below them.
  function point(row, at) {
    for (const picture of pictures) picture.point(row, at);
    pointed = at < 0 ? null : row;
    drawRow(compute(state)[state.head]);
  }

  function draw() {
    const heads = compute(state);
    controls.update(state, heads);
    steps.forEach((button, i) => button.setAttribute("aria-pressed", String(STEPS[i].id === state.step)));
    setText(says, STEPS.find(({ id }) => id === state.step)?.says ?? slopeInWords(heads[state.head]));
    drawMatrices(heads[state.head]);
    drawRow(heads[state.head]);
  }

  function drawMatrices(head) {
    const { tokens, row } = state;
    const dense = tokens.length > MOST_NUMBERS;
    // The two that are added share a scale, and it stays where the slope moves.
    const most = head.with.scaled.reduce((a, b) => Math.max(a, Math.abs(b)), 0.5);
    const ranges = {
      scaled: { low: -most, high: most, power: 1, hidden: null },
      bias: { low: -most, high: 0, power: 1, hidden: hiddenCells(head) },
      weights: { low: 0, high: dense ? head.with.weights.reduce((a, b) => Math.max(a, b)) : 1, power: 0.5, hidden: hiddenCells(head) },
    };
    const names = { scaled: "scaled: q \u00b7 k / \u221a2", bias: biasInWords(), weights: "weights: softmax of the sum" };
    MATRICES.forEach((name, i) => {
      setText(titles[i], names[name]);
      pictures[i].update({
        ...{ label: `${names[name]}, head ${state.head}`, rows: tokens, columns: tokens, values: head.with[name] },
        ...{ text: (x) => printed(x, 2), exact: printed, selected: row, ...ranges[name] },
      });
    });
  }

  function drawRow(head) {
    const { tokens } = state;
    const row = pointed ?? state.row;
    const S = tokens.length;
    const part = (matrix) => matrix.slice(row * S, (row + 1) * S);
    const { raw, scaled, bias, scores, weights, output, lse, E } = head.with;
    setText(rowTitle, `What \u201c${tokens[row]}\u201d looks at, head ${state.head}, ${slopeText(head)}`);
    table.update({
      caption: `The query ${tokens[row]}, key by key`, tokens, hidden: part(hiddenCells(head)),
      raw: part(raw), scaled: part(scaled), bias: part(bias), scores: part(scores), weights: part(weights),
      without: part(head.without.weights),
    });
    const numbers = (values, text) => Array.from(values, text).join("\u2002");
    setText(
      after,
      `q [${numbers(head.q[row], (x) => general(x).replace("-", "\u2212"))}] \u2003output [${numbers(output.slice(row * E, (row + 1) * E), (x) => printed(x))}] `
        + `\u2003log-sum-exp ${printed(lse[row])} \u2003The thin bar is the weight without bias.`,
    );
  }

  // Whether a key takes no part.
  function hiddenCells(head) {
    return (head.hidden ??= Array.from(head.with.bias, (bias) => bias === -Infinity));
  }

  function rowInWords() {
    const S = state.tokens.length;
    const head = compute(state)[state.head];
    const row = [...head.with.weights.slice(state.row * S, (state.row + 1) * S)];
    const most = row.indexOf(Math.max(...row));
    return `Query ${state.tokens[state.row]}, head ${state.head}: most weight on ${state.tokens[most]}, ${printed(row[most])}`;
  }

  function slopeInWords(head) {
    return `Head ${state.head}, ${slopeText(head)}: that much is taken off a score for each step that the key stands away from the query.`;
  }

  function biasInWords() {
    const sides = openSides(state, slopesOf(state), state.head).map(({ side, slope }) => {
      const where = state.variant === "causal" ? "" : { both: "", left: " to the left", right: " to the right" }[side];
      return `${slope === 0 ? "0" : `\u2212${slopeFraction(slope)}`} \u00d7 distance${where}`;
    });
    return `bias: ${sides.join(", ")}`;
  }

  draw();
}
