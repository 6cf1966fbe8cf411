// One query's weights as bars, each with its numbers: with the bias, and (the thin line) without.

import { element, setText } from "./dom.js";
import { fixed } from "./numbers.js";

const asWidth = (share) => `${(100 * share).toFixed(1)}%`;

// weightBars() -> { element, update({ caption, tokens, weight, without, hidden }) }; weights are those of one row.
export function weightBars() {
  const body = element("tbody");
  const caption = element("caption", { class: "unseen" });
  const heads = ["Key", "", "with bias", "without"].map((text) => element(text ? "th" : "td", {}, text));
  const table = element("table", { class: "bars" }, caption, element("thead", {}, element("tr", {}, heads)), body);

  function build(tokens) {
    body.replaceChildren(
      ...tokens.map((token, s) =>
        element(
          "tr",
          {},
          element("th", { scope: "row", title: token }, element("i", {}, String(s)), element("bdi", {}, token)),
          element("td", { class: "track", "aria-hidden": "true" }),
          element("td"),
          element("td", { class: "soft" }),
        ),
      ),
    );
  }

  let shape = "";
  return {
    element: element(
      "div",
      { class: "scroll bars-box", tabindex: "0", role: "region", "aria-label": "Weights of the chosen query" },
      table,
    ),
    update({ caption: words, tokens, weight, without, hidden }) {
      const wanted = JSON.stringify(tokens);
      if (wanted !== shape) build(tokens);
      shape = wanted;
      setText(caption, words);
      const largest = Math.max(...weight, ...without);
      tokens.forEach((_, s) => {
        const row = body.children[s];
        const [, track, number, other] = row.children;
        row.classList.toggle("unread", hidden[s]);
        track.style.backgroundSize = `${asWidth(weight[s] / largest)} 0.7rem, ${asWidth(without[s] / largest)} 2px`;
        setText(number, fixed(weight[s]));
        setText(other, fixed(without[s]));
      });
    },
  };
}
