// One query's row, key by key: its scores, the bias, their sum, and the weights as numbers and bars. The thin bar is the
// weight that the key would have without a bias.

import { element, setText } from "./dom.js";
import { printed } from "./numbers.js";

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
  const table = element(
    "table",
    { class: "row-table" },
    caption,
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "key"), heads, element("td"))),
    body,
  );
  let shape = "";

  function build(tokens) {
    body.replaceChildren(
      ...tokens.map((token, s) =>
        element(
          "tr",
          {},
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
