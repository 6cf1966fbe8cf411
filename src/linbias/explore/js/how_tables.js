// The tables of the view "How": a query's row, and others in parts that fill while they are open.

import { mean } from "./attention.js";
import { component, element, keyed, note, onDraw } from "./dom.js";
import { openSides } from "./how_state.js";
import { general, printed } from "./numbers.js";
import { dataTable } from "./table.js";

// view() gives { state, heads, slopes }; draw() draws what is open.
export function howTables(example, view) {
  // A row for each token: `of(view)` gives a caption, columns, and the texts of a row.
  const tokenTable = (of, corner = "query") =>
    dataTable(() => {
      const { caption, columns, rowOf } = of(view());
      const { tokens, row } = view().state;
      const rows = tokens.map((head, t) => ({ head, cells: rowOf(t) }));
      return { caption, columns, rows, chosen: row };
    }, corner);
  const code = () => element("pre.scroll", { tabindex: 0, "aria-label": "Python code" },
    element("code", () => pythonOf(view())),
  );
  const parts = Object.entries({
    Slopes: () => slopePart(example, view),
    Outputs: () => tokenTable(outputs),
    "Weights as a table": () => tokenTable(weightsOfHead),
    "Mean of all heads": () => tokenTable(meanWeights),
    Inputs: () => element("div.traces", ["q", "k", "v"].map((role) => tokenTable(inputs(role), "token"))),
    "In Python": code,
  }).map(([title, build]) => {
    const { element: body, draw } = component(build);
    const update = () => fold.open && draw();
    const summary = element("summary", element("h3", title));
    const fold = element("details.fold", { on: { toggle: update } }, summary, body);
    return { fold, update };
  });
  return {
    elements: parts.map(({ fold }) => fold), draw: () => parts.forEach(({ update }) => update()),
  };
}

function slopePart({ characters }, view) {
  const last = characters.length - 1;
  const bound = ([least, name], i) => `${name} ${i === last ? "less" : `at least ${least}`}`;
  const rule = `Characters by what a key at distance 10 loses: ${characters.map(bound).join(", ")}`;

  function cellsOf(slope) {
    if (slope === 0) return ["0", "", "0", "Global", "never"];
    const character = characters.find(([least]) => 10 * slope >= least)[1];
    const half = `${Number((Math.LN2 / slope).toPrecision(3))} tokens`;
    return [general(slope), powerText(slope), `\u2212${general(10 * slope)}`, character, half];
  }

  const table = dataTable(() => {
    const { state, heads, slopes } = view();
    const oneSided = state.variant === "symmetric" || state.variant === "causal";
    const rows = heads.flatMap((_, h) =>
      openSides(state, slopes, h).map(({ side, slope }) => ({
        head: oneSided ? String(h) : `${h} ${side}`, cells: cellsOf(slope),
      })),
    );
    return {
      caption: "The bias of a key at distance 10, and how far a weight reaches",
      columns: ["slope", "fraction", "bias at distance 10", "character", "weight halves every"],
      rows, chosen: rows.length === heads.length ? state.head : -1,
    };
  }, "head");
  return element("div", table, note(`${rule}; without a slope, Global.`));
}

// 1/256 for 2^-8, 2^-0.5 for what is no whole power.
function powerText(slope) {
  const power = Math.log2(slope);
  if (power === 0) return "1";
  if (Number.isInteger(power) && -16 <= power && power < 0) return `1/${2 ** -power}`;
  return Number.isInteger(2 * power) ? `2^${power}` : "";
}

const rowTexts = (values, t, width) =>
  Array.from(values.slice(t * width, (t + 1) * width), (value) => printed(value));

function outputs({ heads }) {
  const caption = "All heads side by side, a row for each query";
  const rowOf = (t) => heads.flatMap(({ with: { E, output } }) => rowTexts(output, t, E));
  return { caption, columns: rowOf(0).map((_, i) => `dim\u2011${i}`), rowOf };
}

const weightsTable = (caption, { state: { tokens } }, weights) => ({
  caption, columns: tokens, rowOf: (t) => rowTexts(weights, t, tokens.length),
});

function weightsOfHead(view) {
  const { head } = view.state;
  return weightsTable(`Weights of head ${head}`, view, view.heads[head].with.weights);
}

const MEAN_CAPTION =
  "Only to look at: a layer does not average its heads, it puts their outputs side by side";

const meanWeights = (view) =>
  weightsTable(MEAN_CAPTION, view, mean(view.heads.map((head) => head.with.weights)));

const inputs = (role) => ({ heads }) => ({
  caption: role,
  columns: heads.flatMap((head, h) => head[role][0].map((_, i) => `head ${h}, ${i}`)),
  rowOf: (t) => heads.flatMap((head) => head[role][t].map(signedGeneral)),
});

export const signedGeneral = (x) => general(x).replace("-", "\u2212");

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

// One query's row, key by key: its scores, the bias, their sum, and the weights as numbers and bars. The thin
// bar is the weight that the key would have without a bias.

const ROW_COLUMNS = [
  { head: "q \u00b7 k", name: "raw", kind: ".more" },
  { head: "scaled", name: "scaled", kind: "" },
  { head: "+ bias", name: "bias", kind: "" },
  { head: "= scores", name: "scores", kind: ".more" },
  { head: "weights", name: "weights", kind: "" },
  { head: "without bias", name: "without", kind: ".more.soft" },
];
const asWidth = (share) => `${(100 * share).toFixed(1)}%`;

// of() gives { caption, tokens, hidden, raw, scaled, bias, scores, weights, without }, arrays over keys.
export function rowTable(of) {
  const heading = ({ head, kind }) => element(`th${kind}`, { scope: "col" }, head);
  const headings = [{ head: "key", kind: "" }, ...ROW_COLUMNS].map(heading);
  const region = { tabindex: 0, role: "region", "aria-label": "The chosen query\u2019s row" };
  let row = null;
  let largest = 0;
  onDraw(() => {
    row = of();
    largest = Math.max(...row.weights, ...row.without);
  });

  function line(token, s) {
    const bars = () => {
      const [thick, thin] = [row.weights, row.without].map((all) => asWidth(all[s] / largest));
      return { "background-size": `${thick} 0.7rem, ${thin} 2px` };
    };
    return element("tr", { class: () => row.hidden[s] && "unread" },
      element("th", { scope: "row", title: token }, element("i", String(s)), element("bdi", token)),
      ROW_COLUMNS.map(({ kind, name }) => element(`td${kind}`, () => printed(row[name][s]))),
      element("td.track", { "aria-hidden": true, style: bars }),
    );
  }

  return element("div.scroll.row-box", region,
    element("table.row-table",
      element("caption.unseen", () => row.caption),
      element("thead", element("tr", headings, element("td"))),
      element("tbody", keyed(() => row.tokens, () => row.tokens.map(line))),
    ),
  );
}
