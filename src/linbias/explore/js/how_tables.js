// The tables below the picture: each in a part that can be folded, and filled only while it is open.

import { mean } from "./attention.js";
import { element, note, setText } from "./dom.js";
import { openSides } from "./how_state.js";
import { general, printed } from "./numbers.js";
import { slopeFraction } from "./scales.js";
import { dataTable } from "./table.js";

// howTables(example, view) -> { elements, update() } with view() -> { state, heads, slopes }.
export function howTables(example, view) {
  const parts = [
    slopePart(example),
    tablePart("Outputs", outputTable()),
    tablePart("Weights as a table", headTable()),
    tablePart("Mean of all heads", meanTable()),
    tablePart("Inputs", ...["q", "k", "v"].map(inputTable)),
    pythonPart(),
  ];
  const folds = parts.map(({ title, body }) =>
    element("details", { class: "fold", on: { toggle: update } },
      element("summary", {}, element("h3", {}, title)),
      body,
    ),
  );

  function update() {
    const current = view();
    parts.forEach((part, i) => folds[i].open && part.fill(current));
  }

  return { elements: folds, update };
}

function slopePart({ characters }) {
  const table = dataTable({ caption: "The bias of a key at distance 10, and how far a weight reaches", corner: "head" });
  const rule = characters
    .map(([least, name], i) => (i === characters.length - 1 ? `${name} less` : `${name} at least ${least}`))
    .join(", ");
  return {
    title: "Slopes",
    body: element("div", {},
      table.element,
      note(`Characters by what a key at distance 10 loses: ${rule}; without a slope, Global.`),
    ),
    fill({ state, heads, slopes }) {
      const rows = heads.flatMap((_, h) =>
        openSides(state, slopes, h).map(({ side, slope }) => ({
          head: side === "both" || state.variant === "causal" ? String(h) : `${h} ${side}`,
          cells: [
            general(slope),
            powerText(slope),
            slope === 0 ? "0" : `\u2212${general(10 * slope)}`,
            slope === 0 ? "Global" : characters.find(([least]) => 10 * slope >= least)[1],
            slope === 0 ? "never" : `${Number((Math.LN2 / slope).toPrecision(3))} tokens`,
          ],
        })),
      );
      const columns = ["slope", "fraction", "bias at distance 10", "character", "weight halves every"];
      const numSides = rows.length / heads.length;
      table.update(columns, rows, numSides !== 1 ? -1 : state.head);
    },
  };
}

// 1/256 for 2^-8, 2^-0.5 for what is no whole power.
function powerText(slope) {
  if (slope === 0) return "";
  const power = Math.log2(slope);
  if (Number.isInteger(power) && power <= 0 && power >= -16) return power === 0 ? "1" : `1/${2 ** -power}`;
  return Number.isInteger(2 * power) ? `2^${power}` : "";
}

// A table with a row for each token: `of(view)` gives its columns, the texts of a row, and a caption that changes.
function tokenTable(caption, of, corner = "query") {
  const table = dataTable({ caption, corner });
  return {
    element: table.element,
    fill(view) {
      const { tokens, row } = view.state;
      const { columns, rowOf, caption: words } = of(view);
      if (words) table.setCaption(words);
      table.update(columns, tokens.map((token, t) => ({ head: token, cells: rowOf(t) })), row);
    },
  };
}

const rowTexts = (values, t, width) => Array.from(values.slice(t * width, (t + 1) * width), (value) => printed(value));

function tablePart(title, ...tables) {
  return {
    title,
    body: element("div", { class: "traces" }, tables.map((table) => table.element)),
    fill: (view) => tables.forEach((table) => table.fill(view)),
  };
}

const outputTable = () =>
  tokenTable("All heads side by side, a row for each query", ({ heads }) => ({
    columns: heads.flatMap((head) => Array.from({ length: head.with.E })).map((_, i) => `dim\u2011${i}`),
    rowOf: (t) => heads.flatMap(({ with: { E, output } }) => rowTexts(output, t, E)),
  }));

const weightsTable = (caption, of) =>
  tokenTable(caption, (view) => {
    const { tokens } = view.state;
    const { weights, caption: words } = of(view);
    return { columns: tokens, rowOf: (t) => rowTexts(weights, t, tokens.length), caption: words };
  });

const headTable = () =>
  weightsTable("Weights", ({ state, heads }) => ({
    caption: `Weights of head ${state.head}`, weights: heads[state.head].with.weights,
  }));

const meanTable = () =>
  weightsTable("Only to look at: a layer does not average its heads, it puts their outputs side by side", ({ heads }) => ({
    weights: mean(heads.map((head) => head.with.weights)),
  }));

const inputTable = (role) =>
  tokenTable(role, ({ heads }) => ({
    columns: heads.flatMap((head, h) => head[role][0].map((_, i) => `head ${h}, ${i}`)),
    rowOf: (t) => heads.flatMap((head) => head[role][t].map((x) => general(x).replace("-", "\u2212"))),
  }), "token");

function pythonPart() {
  const code = element("code");
  return {
    title: "In Python",
    body: element("pre", { class: "scroll", tabindex: "0", "aria-label": "Python code" }, code),
    fill: (view) => setText(code, pythonOf(view)),
  };
}

// The same numbers in Python.
export function pythonOf({ state, slopes }) {
  const list = (values) => `[${values.map((value) => (value === Infinity ? "np.inf" : String(value))).join(", ")}]`;
  const infinite = [...slopes.left, ...slopes.right].includes(Infinity) && state.variant !== "causal";
  const both = `, causal=False, right_slopes=${list(slopes.right)}`;
  const right = { causal: "", symmetric: ", causal=False" }[state.variant] ?? both;
  return [
    ...(infinite ? ["import numpy as np"] : []),
    "from linbias import explain, explore",
    "",
    `tokens = ${JSON.stringify(state.tokens)}`,
    `q, k, v = explore.vectors(tokens, num_heads=${state.numHeads})`,
    `trace = explain(q, k, v, ${list(slopes.left)}${right})`,
    `print(trace.table(query=${state.row}, head=${state.head}, tokens=tokens))`,
  ].join("\n");
}

// One query's row, key by key: its scores, the bias, their sum, and the weights as numbers and bars. The thin bar is the
// weight that the key would have without a bias.

const ROW_COLUMNS = [
  { head: "q \u00b7 k", name: "raw", class: "more" },
  { head: "scaled", name: "scaled" },
  { head: "+ bias", name: "bias" },
  { head: "= scores", name: "scores", class: "more" },
  { head: "weights", name: "weights" },
  { head: "without bias", name: "without", class: "more soft" },
];
const asWidth = (share) => `${(100 * share).toFixed(1)}%`;

// rowTable() -> { element, update({ caption, tokens, hidden, raw, scaled, bias, scores, weights, without }) }, arrays over keys.
export function rowTable() {
  const body = element("tbody");
  const caption = element("caption", { class: "unseen" });
  const heads = ROW_COLUMNS.map(({ head, class: kind }) => element("th", { scope: "col", class: kind }, head));
  const table = element("table", { class: "row-table" },
    caption,
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "key"), heads, element("td"))),
    body,
  );
  let shape = "";

  function build(tokens) {
    body.replaceChildren(
      ...tokens.map((token, s) =>
        element("tr", {},
          element("th", { scope: "row", title: token }, element("i", {}, String(s)), element("bdi", {}, token)),
          ROW_COLUMNS.map(({ class: kind }) => element("td", { class: kind })),
          element("td", { class: "track", "aria-hidden": "true" }),
        ),
      ),
    );
  }

  return {
    element: element(
      "div",
      { class: "scroll row-box", tabindex: "0", role: "region", "aria-label": "The chosen query\u2019s row" },
      table,
    ),
    update({ caption: words, tokens, hidden, ...values }) {
      const wanted = JSON.stringify(tokens);
      if (wanted !== shape) build(tokens);
      shape = wanted;
      setText(caption, words);
      const { weights, without } = values;
      const largest = Math.max(...weights, ...without);
      tokens.forEach((_, s) => {
        const row = body.children[s];
        row.classList.toggle("unread", hidden[s]);
        ROW_COLUMNS.forEach(({ name }, i) => setText(row.children[i + 1], printed(values[name][s])));
        row.lastChild.style.backgroundSize = `${asWidth(weights[s] / largest)} 0.7rem, ${asWidth(without[s] / largest)} 2px`;
      });
    },
  };
}
