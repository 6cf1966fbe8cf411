// How it works: scores, bias and weights as three matrices of one head, one query's row of them,
// and what can be changed.

import { copyButton } from "./controls.js";
import { announcer, debounce, element, setText } from "./dom.js";
import { heatmap, MOST_NUMBERS } from "./heatmap.js";
import { howControls } from "./how_controls.js";
import {
  headComputer, openSides, readState, slopesOf, slopeText, stateOfStep, stateText, STEPS,
} from "./how_state.js";
import { howTables, pythonOf, rowTable, signedGeneral } from "./how_tables.js";
import { printed, slopeFraction } from "./numbers.js";

const MATRICES = ["scaled", "bias", "weights"];
const OPERATORS = ["", "+", "\u2192"];

export function mountHow(root, { example }, memory) {
  const compute = headComputer(example);
  let state = readState(memory.read(), example);
  let pointed = null; // the row under the pointer
  const controls = howControls({ example, change });
  const picture = () => heatmap({ onSelect: (row) => change({ row }), onPoint: point });
  const pictures = MATRICES.map(picture);
  const titles = MATRICES.map(() => element("h3"));
  const table = rowTable();
  const rowTitle = element("h3");
  const after = element("p.note.after");
  const tables = howTables(example, currentView);
  const spoken = announcer();
  const says = element("p.step-says");
  const steps = STEPS.map(({ id, label }, i) =>
    element("button", { on: { click: () => change(stateOfStep(id, example)) } },
      element("span.step-number", { "aria-hidden": true }, String(i + 1)), label,
    ),
  );
  root.append(
    element("h2", "How it works"),
    element("div.steps", { role: "group", "aria-label": "Steps" }, steps),
    says,
    element("div.how-controls", controls.head, element("div.how-slopes", controls.slope)),
    element("div.sum",
      pictures.flatMap((one, i) => [
        OPERATORS[i] && element("span.operator", { "aria-hidden": true }, OPERATORS[i]),
        element("figure", titles[i], one.element),
      ]),
    ),
    element("section.row-panel",
      element("div.pair", rowTitle, copyButton("code", () => pythonOf(currentView()))),
      table.element,
      after,
    ),
    element("details.fold.more",
      element("summary", element("h3", "More to change: words, sides, slopes, heads")),
      controls.more,
    ),
    element("div.folds", tables.elements),
    spoken.element,
  );
  const later = debounce(() => {
    tables.update();
    memory.write(stateText(state, example));
  });

  function change(parts) {
    const before = state;
    // What a step says holds for each of its heads and rows.
    const stays = Object.keys(parts).every((name) => name === "head" || name === "row");
    state = { ...state, step: stays ? state.step : null, ...parts };
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
    for (const one of pictures) one.point(row, at);
    pointed = at < 0 ? null : row;
    drawRow(compute(state)[state.head]);
  }

  function draw() {
    const heads = compute(state);
    const head = heads[state.head];
    controls.update(state, heads);
    steps.forEach((button, i) => button.setAttribute("aria-pressed", STEPS[i].id === state.step));
    setText(says, STEPS.find(({ id }) => id === state.step)?.says ?? slopeInWords(head));
    drawMatrices(head);
    drawRow(head);
  }

  function drawMatrices(head) {
    const { tokens, row } = state;
    const hidden = hiddenCells(head);
    // The two that are added share a scale, and it stays where the slope moves.
    const most = head.with.scaled.reduce((a, b) => Math.max(a, Math.abs(b)), 0.5);
    const isDense = tokens.length > MOST_NUMBERS;
    const highest = isDense ? head.with.weights.reduce((a, b) => Math.max(a, b)) : 1;
    const looks = [
      { title: "scaled: q \u00b7 k / \u221a2", low: -most, high: most, power: 1, hidden: null },
      { title: biasInWords(), low: -most, high: 0, power: 1, hidden },
      { title: "weights: softmax of the sum", low: 0, high: highest, power: 0.5, hidden },
    ];
    looks.forEach(({ title, ...look }, i) => {
      setText(titles[i], title);
      pictures[i].update({
        ...look, label: `${title}, head ${state.head}`, rows: tokens, columns: tokens,
        values: head.with[MATRICES[i]], text: (x) => printed(x, 2), exact: printed, selected: row,
      });
    });
  }

  function drawRow(head) {
    const { tokens } = state;
    const row = pointed ?? state.row;
    const { raw, scaled, bias, scores, weights, output, lse, E } = head.with;
    const matrices = { raw, scaled, bias, scores, weights };
    const shown = { ...matrices, without: head.without.weights, hidden: hiddenCells(head) };
    const part = (values, width) => Array.from(values.slice(row * width, (row + 1) * width));
    const parts = Object.entries(shown).map(([name, all]) => [name, part(all, tokens.length)]);
    const of = `head ${state.head}, ${slopeText(head)}`;
    setText(rowTitle, `What \u201c${tokens[row]}\u201d looks at, ${of}`);
    const caption = `The query ${tokens[row]}, key by key`;
    table.update({ caption, tokens, ...Object.fromEntries(parts) });
    const query = head.q[row].map(signedGeneral).join("\u2002");
    const result = part(output, E).map((x) => printed(x)).join("\u2002");
    setText(
      after,
      `q [${query}] \u2003output [${result}] \u2003log-sum-exp ${printed(lse[row])} ` +
        "\u2003The thin bar is the weight without bias.",
    );
  }

  function hiddenCells(head) {
    return (head.hidden ??= Array.from(head.with.bias, (bias) => bias === -Infinity));
  }

  function rowInWords() {
    const { tokens, row, head } = state;
    const { weights } = compute(state)[head].with;
    const [start, end] = [row * tokens.length, (row + 1) * tokens.length];
    const shown = weights.slice(start, end);
    const most = Math.max(...shown);
    const on = tokens[shown.indexOf(most)];
    return `Query ${tokens[row]}, head ${head}: most weight on ${on}, ${printed(most)}`;
  }

  function slopeInWords(head) {
    return (
      `Head ${state.head}, ${slopeText(head)}: that much is taken off a score for each step ` +
      "that the key stands away from the query."
    );
  }

  function biasInWords() {
    const parts = openSides(state, slopesOf(state), state.head).map(({ side, slope }) => {
      const where = state.variant === "causal" || side === "both" ? "" : ` to the ${side}`;
      return `${slope === 0 ? "0" : `\u2212${slopeFraction(slope)}`} \u00d7 distance${where}`;
    });
    return `bias: ${parts.join(", ")}`;
  }

  draw();
}
