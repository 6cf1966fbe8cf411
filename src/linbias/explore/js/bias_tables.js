// The tables below the picture: each in a part that can be folded, and filled only while it is open.

import { MEAN, openSides, QUANTITIES, slopeText } from "./bias_state.js";
import { element, note, setText } from "./dom.js";
import { fixed, general, headName } from "./numbers.js";
import { dataTable } from "./table.js";

// biasTables(example, view) -> { elements, update() } with view() -> { state, heads, slopes, matrix, title }.
export function biasTables(example, view) {
  const parts = [stepsPart(), outputPart(), slopePart(example), pythonPart(), matrixPart(), inputPart()];
  const folds = parts.map(({ title, open, body }) =>
    element(
      "details",
      { class: "fold", open, on: { toggle: update } },
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

// The trace of linbias.explain for the chosen query; of the mean, the weights that it is made of.
function stepsPart() {
  const table = dataTable({ caption: "", corner: "key" });
  const after = element("p", { class: "after" });
  return {
    title: "Step by step",
    open: true,
    body: element("div", {}, table.element, after),
    fill(view) {
      const { state, heads } = view;
      if (state.head === MEAN) fillMean(view);
      else fillSteps(state, heads[state.head]);
    },
  };

  function fillSteps({ tokens, row, head: number }, head) {
    const { S, E, raw, scaled, bias, biased, weight, output, lse } = head.with;
    const from = row * S;
    table.setCaption(`${headName(number)} (${slopeText(head)}), query ${tokens[row]}`);
    table.update(
      ["q . k", "scaled", "bias", "scores", "weights"],
      tokens.map((token, s) => ({
        head: token,
        cells: [raw, scaled, bias, biased, weight].map((values) => fixed(values[from + s])),
      })),
    );
    const out = Array.from(output.slice(row * E, (row + 1) * E), (value) => fixed(value)).join(" ");
    setText(after, `q [${head.q[row].map(general).join(" ")}]   output [${out}]   log-sum-exp ${fixed(lse[row])}`);
  }

  function fillMean({ state: { tokens, row }, heads, matrix }) {
    const from = row * tokens.length;
    table.setCaption(`Weights of the query ${tokens[row]} in every head`);
    table.update(
      [...heads.map((_, h) => headName(h).toLowerCase()), "mean"],
      tokens.map((token, s) => ({
        head: token,
        cells: [...heads.map((head) => head.with.weight), matrix].map((weights) => fixed(weights[from + s])),
      })),
    );
    setText(after, "Only to look at: a layer does not average its heads, it puts their outputs side by side.");
  }
}

function outputPart() {
  const table = dataTable({ caption: "All heads side by side, a row for each query", corner: "query" });
  return {
    title: "Outputs",
    open: true,
    body: table.element,
    fill({ state, heads }) {
      const columns = heads.flatMap((head) => Array.from({ length: head.with.E }));
      table.update(
        columns.map((_, i) => `dim\u2011${i}`),
        state.tokens.map((token, t) => ({
          head: token,
          cells: heads.flatMap(({ with: { E, output } }) =>
            Array.from(output.slice(t * E, (t + 1) * E), (value) => fixed(value)),
          ),
        })),
        state.row,
      );
    },
  };
}

function slopePart({ characters }) {
  const table = dataTable({ caption: "What a key at distance 10 loses, and how far a weight reaches", corner: "head" });
  const rule = characters
    .map(([least, name], i) => (i === characters.length - 1 ? `${name} less` : `${name} at least ${least}`))
    .join(", ");
  return {
    title: "Slopes",
    open: true,
    body: element(
      "div",
      {},
      table.element,
      note(`Characters by what the bias takes away at distance 10: ${rule}; without a slope, Global.`),
    ),
    fill({ state, heads, slopes }) {
      const rows = heads.flatMap((_, h) =>
        openSides(state, slopes, h).map(({ side, slope }) => ({
          head: side === "both" || state.variant === "causal" ? String(h + 1) : `${h + 1} ${side}`,
          cells: [
            general(slope),
            powerText(slope),
            slope === 0 ? "0" : general(-10 * slope),
            slope === 0 ? "Global" : characters.find(([least]) => 10 * slope >= least)[1],
            slope === 0 ? "never" : `${Number((Math.LN2 / slope).toPrecision(3))} tokens`,
          ],
        })),
      );
      const columns = ["slope", "fraction", "bias at distance 10", "character", "weight halves every"];
      const numSides = rows.length / heads.length;
      table.update(columns, rows, state.head === MEAN || numSides !== 1 ? -1 : state.head);
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

function matrixPart() {
  const table = dataTable({ caption: "", corner: "query" });
  return {
    title: "The matrix as a table",
    open: false,
    body: table.element,
    fill({ state, matrix, title }) {
      const S = state.tokens.length;
      table.setCaption(title);
      table.update(
        state.tokens,
        state.tokens.map((token, t) => ({
          head: token,
          cells: Array.from(matrix.slice(t * S, (t + 1) * S), (value) => fixed(value)),
        })),
        state.row,
      );
    },
  };
}

function inputPart() {
  const tables = ["q", "k", "v"].map((role) => ({ role, table: dataTable({ caption: role, corner: "token" }) }));
  return {
    title: "Inputs",
    open: false,
    body: element("div", { class: "traces" }, tables.map(({ table }) => table.element)),
    fill({ state, heads }) {
      for (const { role, table } of tables) {
        const columns = heads.flatMap((head, h) => head[role][0].map((_, i) => `head ${h + 1}, ${i}`));
        table.update(
          columns,
          state.tokens.map((token, t) => ({ head: token, cells: heads.flatMap((head) => head[role][t].map(general)) })),
          state.row,
        );
      }
    },
  };
}

// The same numbers in Python.
function pythonPart() {
  const code = element("code");
  return {
    title: "In Python",
    open: true,
    body: element("pre", { class: "scroll", tabindex: "0", "aria-label": "Python code" }, code),
    fill({ state, slopes }) {
      const list = (values) => `[${values.map((value) => (value === Infinity ? "np.inf" : String(value))).join(", ")}]`;
      const infinite = [...slopes.left, ...slopes.right].includes(Infinity) && state.variant !== "causal";
      const both = `, causal=False, right_slopes=${list(slopes.right)}`;
      const right = { causal: "", symmetric: ", causal=False" }[state.variant] ?? both;
      const head = state.head === MEAN ? "" : `, head=${state.head}`;
      setText(
        code,
        [
          ...(infinite ? ["import numpy as np"] : []),
          "from linbias import explain, explore",
          "",
          `tokens = ${JSON.stringify(state.tokens)}`,
          `q, k, v = explore.vectors(tokens, num_heads=${state.numHeads})`,
          `trace = explain(q, k, v, ${list(slopes.left)}${right})`,
          `print(trace.table(query=${state.row}${head}, tokens=tokens))`,
        ].join("\n"),
      );
    },
  };
}
