// How it works: scores, bias and weights as three matrices of one head, one query's row of them, and what can
// be changed.

import { copyButton } from "./controls.js";
import { announcer, component, debounce, element, mount, onDraw, prose } from "./dom.js";
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
  const spoken = announcer();
  const state = readState(memory.read(), example);
  let heads = [];
  let shown = null; // the chosen one of them
  let looks = []; // of the three matrices
  let pointed = null; // the row under the pointer

  const view = () => ({ state, heads, slopes: slopesOf(state) });
  const tables = howTables(example, view);
  const later = debounce(() => {
    tables.draw();
    memory.write(stateText(state, example));
  });

  function change(parts) {
    const { row, head } = state;
    // What a step says holds for each of its heads and rows.
    const stays = Object.keys(parts).every((name) => name === "head" || name === "row");
    Object.assign(state, { step: stays ? state.step : null, ...parts });
    state.row = Math.min(state.row, state.tokens.length - 1);
    pointed = null;
    draw();
    later();
    if (parts.step) spoken.say(says());
    else if (row !== state.row || head !== state.head) spoken.say(rowInWords());
  }

  const rowPanel = component(() =>
    element("section.row-panel",
      element("div.pair",
        element("h3", rowTitle), copyButton("code", () => pythonOf(view())),
      ),
      rowTable(rowValues),
      element("p.note.after", afterRow),
    ),
  );

  // The same place in all three matrices, and its row below them.
  function point(at, column) {
    for (const one of pictures) one.point(at, column);
    pointed = column < 0 ? null : at;
    rowPanel.draw();
  }

  function lookAt() {
    heads = compute(state);
    shown = heads[state.head];
    const { tokens } = state;
    const hidden = hiddenCells();
    // The two that are added share a scale, and it stays where the slope moves.
    const most = shown.with.scaled.reduce((a, b) => Math.max(a, Math.abs(b)), 0.5);
    const isDense = tokens.length > MOST_NUMBERS;
    const highest = isDense ? shown.with.weights.reduce((a, b) => Math.max(a, b)) : 1;
    looks = [
      { title: "scaled: q \u00b7 k / \u221a2", low: -most, high: most, power: 1, hidden: null },
      { title: biasInWords(), low: -most, high: 0, power: 1, hidden },
      { title: "weights: softmax of the sum", low: 0, high: highest, power: 0.5, hidden },
    ].map(({ title, ...look }, i) => ({
      ...look, title, label: `${title}, head ${state.head}`, rows: tokens, columns: tokens,
      values: shown.with[MATRICES[i]], text: (x) => printed(x, 2), exact: printed,
      selected: state.row,
    }));
  }

  let pictures = [];
  function stepButton({ id, label }, i) {
    const on = { click: () => change(stateOfStep(id, example)) };
    return element("button", { "aria-pressed": () => id === state.step, on },
      element("span.step-number", { "aria-hidden": true }, String(i + 1)), label,
    );
  }
  const draw = mount(root, () => {
    onDraw(lookAt);
    const controls = howControls({ example, change, state, headsOf: () => heads });
    pictures = MATRICES.map((_, i) =>
      heatmap({ shownOf: () => looks[i], onSelect: (to) => change({ row: to }), onPoint: point }),
    );
    onDraw(rowPanel.draw);
    return [
      element("h2", "How it works"),
      element("div.steps", { role: "group", "aria-label": "Steps" }, STEPS.map(stepButton)),
      element("p.step-says", says),
      element("div.how-controls", controls.head, element("div.how-slopes", controls.slope)),
      element("div.sum",
        pictures.flatMap((one, i) => [
          OPERATORS[i] && element("span.operator", { "aria-hidden": true }, OPERATORS[i]),
          element("figure", element("h3", () => looks[i].title), one.element),
        ]),
      ),
      rowPanel.element,
      element("details.fold.more",
        element("summary", element("h3", "More to change: words, sides, slopes, heads")),
        controls.more,
      ),
      element("div.folds", tables.elements),
      spoken.element,
    ];
  });

  function rowTitle() {
    const of = `head ${state.head}, ${slopeText(shown)}`;
    return `What \u201c${state.tokens[pointed ?? state.row]}\u201d looks at, ${of}`;
  }

  function partOf(values, width = state.tokens.length) {
    const at = pointed ?? state.row;
    return Array.from(values.slice(at * width, (at + 1) * width));
  }

  function rowValues() {
    const { tokens } = state;
    const { raw, scaled, bias, scores, weights } = shown.with;
    const without = shown.without.weights;
    const all = { raw, scaled, bias, scores, weights, without, hidden: hiddenCells() };
    const parts = Object.entries(all).map(([name, values]) => [name, partOf(values)]);
    const caption = `The query ${tokens[pointed ?? state.row]}, key by key`;
    return { caption, tokens, ...Object.fromEntries(parts) };
  }

  function afterRow() {
    const at = pointed ?? state.row;
    const { output, lse, E } = shown.with;
    const query = shown.q[at].map(signedGeneral).join("\u2002");
    const result = partOf(output, E).map((x) => printed(x)).join("\u2002");
    return prose`q [${query}] \u2003output [${result}] \u2003log-sum-exp ${printed(lse[at])} \u2003The thin
      bar is the weight without bias.`;
  }

  function hiddenCells() {
    return (shown.hidden ??= Array.from(shown.with.bias, (bias) => bias === -Infinity));
  }

  function rowInWords() {
    const { tokens, row, head } = state;
    const weights = partOf(shown.with.weights);
    const most = Math.max(...weights);
    const on = tokens[weights.indexOf(most)];
    return `Query ${tokens[row]}, head ${head}: most weight on ${on}, ${printed(most)}`;
  }

  function says() {
    const chosen = STEPS.find(({ id }) => id === state.step);
    return chosen?.says ?? prose`Head ${state.head}, ${slopeText(shown)}: that much is taken off a score for
      each step that the key stands away from the query.`;
  }

  function biasInWords() {
    const parts = openSides(state, slopesOf(state), state.head).map(({ side, slope }) => {
      const where = state.variant === "causal" || side === "both" ? "" : ` to the ${side}`;
      return `${slope === 0 ? "0" : `\u2212${slopeFraction(slope)}`} \u00d7 distance${where}`;
    });
    return `bias: ${parts.join(", ")}`;
  }
}
