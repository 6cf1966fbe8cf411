// Methods compared as `linbias extrapolate` measured them, and what Python says of a run.

import { lineChart } from "./chart.js";
import { choice } from "./controls.js";
import { element, keyed, mount, note, prose, section } from "./dom.js";
import { grouped, signedPercent } from "./numbers.js";
import { dataTable } from "./table.js";

export function mountLengths(root, { methods, results: { runs } }) {
  const switchedOff = new Set();
  let run = runs[0];
  let group = run.groups[0];
  let read = "lengths";

  // A choice of value(), where there is more than one; `take` sets it.
  function offer(label, values, text, value, take) {
    const onInput = (to) => {
      take(to);
      draw();
    };
    const options = values.map((one) => ({ value: one, label: text(one) }));
    return values.length > 1 && choice({ label, options, value, onInput });
  }

  // Runs of the command measure segments alone.
  const ways = () => Object.keys(WAYS).filter((way) => group.lines.every((line) => line[way]));

  function open(to) {
    run = to;
    group = run.groups[0];
    if (!ways().includes(read)) read = "lengths";
  }

  const lengthText = (one) => grouped(one.train_length);
  const lengths = () => offer("Trained on, tokens", run.groups, lengthText, () => group, (to) => (group = to));
  const wayText = (way) => WAYS[way].label;
  const reads = () => offer("Read the text", ways(), wayText, () => read, (to) => (read = to));

  const trainedOn = () => grouped(group.train_length);
  const chart = (specOf) => lineChart(specOf, { switchedOff, onSwitch: () => draw() });
  const losses = () => ({
    caption: `Bits per byte, trained on ${trainedOn()} tokens, tested on`,
    columns: [...group.test_lengths.map(grouped), "change"],
    rows: group.lines.map((line) => tableRow(line, group, methods, read)),
  });
  const fact = ([name, value]) => [element("dt", name), element("dd", value)];

  // What the run of the README does not have.
  function said() {
    const { scope, findings, cautions = [] } = run;
    return [
      findings && scope && note(scope), findings && sentences(findings, methods),
      cautions.map((text) => note(text)),
    ];
  }

  const measured = () => run.cost && section("What training cost", finishedTable(run.cost, methods));

  const draw = mount(root, () => [
    element("h2", "Train short, test long"),
    element("p.lede", () => prose`Language models that differ only in how they represent the order of tokens,
      trained on ${trainedOn()} tokens at a time and tested on up to ${grouped(group.test_lengths.at(-1))}.`),
    element("div.said", said),
    element("div.abreast",
      runs.length > 1 && element("div", offer("Run", runs, (one) => one.name, () => run, open)),
      element("div", keyed(() => run, lengths)),
    ),
    section("Loss by test length",
      note(() => WAYS[read].says), element("div", keyed(() => run, reads)),
      chart(() => lengthChart(group, methods, read)),
      dataTable(losses, "method"), note(() => seedsInWords(run)),
    ),
    section("Loss by position",
      note(prose`The loss by the number of tokens that a prediction can read. On the left there is little
        context yet; right of the dashed line there is more than the model was ever trained on.`),
      chart(() => positionChart(group, methods)),
    ),
    element("div.measured", keyed(() => group, measured)),
    element("details", { open: Boolean(run.findings) },
      element("summary", "How this was made"), note(() => run.scored),
      element("dl.facts", () => Object.entries(run.made).map(fact)),
    ),
  ]);
}

const WAYS = {
  lengths: {
    label: "in segments",
    says: prose`The same text in ever longer segments. A model that makes use of more context gets better to
      the right; one that meets positions it was not trained on gets worse; a learned table has no row for
      them at all.`,
  },
  sliding: {
    label: "with a sliding window",
    says: prose`Every prediction reads about as many tokens as the window has, so that none stands at the
      beginning of a segment. What is gained to the right is the use of more context, and nothing else.`,
  },
};

function seedsInWords({ num_seeds: numSeeds, findings }) {
  if (numSeeds > 1) return `Lines are means of up to ${numSeeds} seeds, bands their range.`;
  if (findings) return ""; // they say it
  return prose`One model of each kind was trained (one seed): another seed gives other numbers, and small
    differences may turn round.`;
}

function sentences(list, methods) {
  const items = list.map(({ method, says }) => {
    const { label, colour } = methods[method];
    return element("li", { style: { "--line-colour": colour } },
      element("strong", label), ` ${signed(says)}`,
    );
  });
  return element("ul.sentences", items);
}

// A table that Python made; a cell is null where the method has no rows for its length.
function finishedTable({ caption: title, note: remark, heads, rows }, methods) {
  const caption = remark ? `${title} (${remark})` : title;
  const cellText = (cell) => (cell === null ? "no rows" : signed(cell));
  const rowOf = ({ method, cells }) => ({ head: methods[method].label, cells: cells.map(cellText) });
  return dataTable(() => ({ caption, columns: heads, rows: rows.map(rowOf) }), "method");
}

const signed = (text) => text.replace(/(?<!\w)-(?=\d)/g, "\u2212");

function lengthChart(group, methods, read) {
  const ticks = group.test_lengths;
  return {
    label: "Loss by test length",
    x: {
      label: "tokens read at a time", low: ticks[0], high: ticks.at(-1), log: true, ticks,
      format: grouped, at: (x) => `at ${grouped(x)} tokens`,
    },
    ...lossLines(group, methods, read, 3),
  };
}

function positionChart(group, methods) {
  const xs = group.lines.flatMap((line) => line.positions.map(({ x }) => x));
  const longest = group.test_lengths.at(-1);
  const after = (number) => `after ${grouped(number)} token${number === 1 ? "" : "s"}`;
  return {
    label: "Loss by position",
    x: {
      label: "tokens of context", low: Math.min(1, ...xs), high: Math.max(longest, ...xs),
      log: true, format: grouped, at: (x) => after(Math.round(x)),
      ticks: Array.from({ length: Math.floor(Math.log2(longest)) + 1 }, (_, i) => 2 ** i),
    },
    ...lossLines(group, methods, "positions", 2),
  };
}

// The lines in the order in which they end, as the legend shows them; those that stop short last.
function lossLines(group, methods, part, digits) {
  const end = (line) => (line.limit === null ? (line[part].at(-1)?.y ?? Infinity) : -Infinity);
  const lines = group.lines.toSorted((a, b) => end(b) - end(a)).map((line) => {
    const { label, colour, main } = methods[line.method];
    const stop = line.limit === null ? null : `no rows past ${grouped(line.limit)}`;
    return { key: line.method, name: label, colour, main, points: line[part], stop };
  });
  return {
    y: { label: "bits per byte, lower is better", format: (y) => y.toFixed(digits) },
    lines,
    marks: [{ x: group.train_length, text: "training length" }],
  };
}

function tableRow(line, group, methods, read) {
  const lossAt = (length) => line[read].find(({ x }) => x === length)?.y ?? null;
  const first = lossAt(group.train_length);
  const last = lossAt(group.test_lengths.at(-1));
  const change = first === null || last === null ? "" : signedPercent(last / first - 1);
  const cells = group.test_lengths.map((length) => {
    const none = line.limit !== null && length > line.limit ? "no rows" : "\u2013";
    return lossAt(length)?.toFixed(3) ?? none;
  });
  return { head: methods[line.method].label, cells: [...cells, change] };
}
