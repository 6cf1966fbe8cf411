// The tables of the view "How": a query's row, and two in parts that fill while they are open.

import { component, element, keyed, note, onDraw } from "./dom.js";
import { openSides } from "./how_state.js";
import { general, printed } from "./numbers.js";
import { dataTable } from "./table.js";

// view() gives { state, heads, slopes }; draw() draws what is open.
export function howTables(example, view) {
  const parts = Object.entries({
    Slopes: () => slopePart(example, view),
    "Weights as a table": () => dataTable(() => weightsOfHead(view()), "query"),
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

function weightsOfHead({ state: { tokens, row, head }, heads }) {
  const { weights, T } = heads[head].with;
  const cellsOf = (t) => Array.from(weights.slice(t * T, (t + 1) * T), (x) => printed(x));
  const rows = tokens.map((token, t) => ({ head: token, cells: cellsOf(t) }));
  return { caption: `Weights of head ${head}`, columns: tokens, rows, chosen: row };
}

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
