// The tables of the view "How": a query's row, and others in parts that fill while they are open.

import { mean } from "./attention.js";
import { element, note, setText } from "./dom.js";
import { openSides } from "./how_state.js";
import { general, printed, slopeFraction } from "./numbers.js";
import { dataTable } from "./table.js";

export function howTables(example, view) {
  const parts = [
    slopePart(example),
    tablePart("Outputs", tokenTable("All heads side by side, a row for each query", outputs)),
    tablePart("Weights as a table", tokenTable("Weights", weightsOfHead)),
    tablePart("Mean of all heads", tokenTable(MEAN_CAPTION, meanWeights)),
    tablePart("Inputs", ...["q", "k", "v"].map((role) => tokenTable(role, inputs(role), "token"))),
    pythonPart(),
  ];
  const folds = parts.map(({ title, body }) =>
    element("details.fold", { on: { toggle: update } },
      element("summary", element("h3", title)), body,
    ),
  );

  function update() {
    const current = view();
    parts.forEach((part, i) => folds[i].open && part.fill(current));
  }

  return { elements: folds, update };
}

function slopePart({ characters }) {
  const caption = "The bias of a key at distance 10, and how far a weight reaches";
  const columns = ["slope", "fraction", "bias at distance 10", "character", "weight halves every"];
  const table = dataTable({ caption, corner: "head" });
  const last = characters.length - 1;
  const bound = ([least, name], i) => `${name} ${i === last ? "less" : `at least ${least}`}`;
  const bounds = characters.map(bound).join(", ");
  const rule = `Characters by what a key at distance 10 loses: ${bounds}`;

  function cellsOf(slope) {
    if (slope === 0) return ["0", "", "0", "Global", "never"];
    const character = characters.find(([least]) => 10 * slope >= least)[1];
    const half = `${Number((Math.LN2 / slope).toPrecision(3))} tokens`;
    return [general(slope), powerText(slope), `\u2212${general(10 * slope)}`, character, half];
  }

  return {
    title: "Slopes",
    body: element("div", table.element, note(`${rule}; without a slope, Global.`)),
    fill({ state, heads, slopes }) {
      const oneSided = state.variant === "symmetric" || state.variant === "causal";
      const rows = heads.flatMap((_, h) =>
        openSides(state, slopes, h).map(({ side, slope }) => ({
          head: oneSided ? String(h) : `${h} ${side}`, cells: cellsOf(slope),
        })),
      );
      table.update(columns, rows, rows.length === heads.length ? state.head : -1);
    },
  };
}

// 1/256 for 2^-8, 2^-0.5 for what is no whole power.
function powerText(slope) {
  const power = Math.log2(slope);
  if (power === 0) return "1";
  if (Number.isInteger(power) && -16 <= power && power < 0) return `1/${2 ** -power}`;
  return Number.isInteger(2 * power) ? `2^${power}` : "";
}

// A row for each token: `of(view)` gives columns, texts of a row, and a caption that changes.
function tokenTable(caption, of, corner = "query") {
  const table = dataTable({ caption, corner });
  return {
    element: table.element,
    fill(view) {
      const { tokens, row } = view.state;
      const { columns, rowOf, caption: words } = of(view);
      if (words) table.setCaption(words);
      table.update(columns, tokens.map((head, t) => ({ head, cells: rowOf(t) })), row);
    },
  };
}

const tablePart = (title, ...tables) => ({
  title,
  body: element("div.traces", tables.map((table) => table.element)),
  fill: (view) => tables.forEach((table) => table.fill(view)),
});

const rowTexts = (values, t, width) =>
  Array.from(values.slice(t * width, (t + 1) * width), (value) => printed(value));

function outputs({ heads }) {
  const rowOf = (t) => heads.flatMap(({ with: { E, output } }) => rowTexts(output, t, E));
  return { columns: rowOf(0).map((_, i) => `dim\u2011${i}`), rowOf };
}

const weightsTable = ({ state: { tokens } }, weights) => ({
  columns: tokens, rowOf: (t) => rowTexts(weights, t, tokens.length),
});

const weightsOfHead = (view) => ({
  ...weightsTable(view, view.heads[view.state.head].with.weights),
  caption: `Weights of head ${view.state.head}`,
});

const MEAN_CAPTION =
  "Only to look at: a layer does not average its heads, it puts their outputs side by side";

const meanWeights = (view) =>
  weightsTable(view, mean(view.heads.map((head) => head.with.weights)));

const inputs = (role) => ({ heads }) => ({
  columns: heads.flatMap((head, h) => head[role][0].map((_, i) => `head ${h}, ${i}`)),
  rowOf: (t) => heads.flatMap((head) => head[role][t].map(signedGeneral)),
});

export const signedGeneral = (x) => general(x).replace("-", "\u2212");

function pythonPart() {
  const code = element("code");
  return {
    title: "In Python",
    body: element("pre.scroll", { tabindex: 0, "aria-label": "Python code" }, code),
    fill: (view) => setText(code, pythonOf(view)),
  };
}

// The same numbers in Python.
export function pythonOf({ state, slopes }) {
  const list = (values) => `[${values.join(", ").replaceAll("Infinity", "np.inf")}]`;
  const [left, right] = [slopes.left, slopes.right].map(list);
  const both = { causal: "", symmetric: ", causal=False" };
  const sides = both[state.variant] ?? `, causal=False, right_slopes=${right}`;
  const explained = `explain(q, k, v, ${left}${sides})`;
  return `${explained.includes("np.inf") ? "import numpy as np\n" : ""}\
from linbias import explain, explore

tokens = ${JSON.stringify(state.tokens)}
q, k, v = explore.vectors(tokens, num_heads=${state.numHeads})
trace = ${explained}
print(trace.table(query=${state.row}, head=${state.head}, tokens=tokens))`;
}

// One query's row, key by key: its scores, the bias, their sum, and the weights as numbers and
// bars. The thin bar is the weight that the key would have without a bias.

const ROW_COLUMNS = [
  { head: "q \u00b7 k", name: "raw", kind: ".more" },
  { head: "scaled", name: "scaled", kind: "" },
  { head: "+ bias", name: "bias", kind: "" },
  { head: "= scores", name: "scores", kind: ".more" },
  { head: "weights", name: "weights", kind: "" },
  { head: "without bias", name: "without", kind: ".more.soft" },
];
const asWidth = (share) => `${(100 * share).toFixed(1)}%`;

// rowTable() -> { element, update({ caption, tokens, hidden, raw, scaled, bias, scores, weights,
// without }) }, arrays over keys.
export function rowTable() {
  const body = element("tbody");
  const caption = element("caption.unseen");
  const heading = ({ head, kind }) => element(`th${kind}`, { scope: "col" }, head);
  const headings = [{ head: "key", kind: "" }, ...ROW_COLUMNS].map(heading);
  const heads = element("tr", headings, element("td"));
  const region = { tabindex: 0, role: "region", "aria-label": "The chosen query\u2019s row" };
  let shape = "";

  function build(tokens) {
    body.replaceChildren(
      ...tokens.map((token, s) =>
        element("tr",
          element("th", { scope: "row", title: token },
            element("i", String(s)), element("bdi", token),
          ),
          ROW_COLUMNS.map(({ kind }) => element(`td${kind}`)),
          element("td.track", { "aria-hidden": true }),
        ),
      ),
    );
  }

  return {
    element: element("div.scroll.row-box", region,
      element("table.row-table", caption, element("thead", heads), body),
    ),
    update({ caption: words, tokens, hidden, ...values }) {
      const wanted = JSON.stringify(tokens);
      if (wanted !== shape) build(tokens);
      shape = wanted;
      setText(caption, words);
      const { weights, without } = values;
      const largest = Math.max(...weights, ...without);
      [...body.children].forEach((row, s) => {
        const [thick, thin] = [weights, without].map((of) => asWidth(of[s] / largest));
        row.classList.toggle("unread", hidden[s]);
        ROW_COLUMNS.forEach(({ name }, i) =>
          setText(row.children[i + 1], printed(values[name][s])),
        );
        row.lastChild.style.backgroundSize = `${thick} 0.7rem, ${thin} 2px`;
      });
    },
  };
}
