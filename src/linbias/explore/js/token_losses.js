// What each token of a text cost a model, and what the model expected instead: a column for each model.

import { element, setText } from "./dom.js";
import { fixed } from "./numbers.js";
import { readableToken, tokenText } from "./token_text.js";

// lossColumn({ data, reading, label, colour, onSelect(token) }) -> { element, update(query) }
// The framed token is the one that follows the query.
export function lossColumn({ data, reading, label, colour, onSelect }) {
  const { tokens, places, unit, vocabulary, blind, separator } = data;
  const { bits, guesses, losses, train_length: trainLength, num_tokens: T } = reading;
  const names = tokens.map((token, i) => `${i} \u201c${readableToken(token)}\u201d`);
  const stops = T < tokens.length ? { [T]: `no rows past ${T}` } : {};
  const text = tokenText({
    tokens,
    separator,
    label: `Token to be guessed, ${label}`,
    marks: losses.beyond === null ? stops : { [trainLength + 1]: "trained up to here" },
    onSelect: (token) => onSelect(Math.max(0, token - 1)),
  });
  text.ink(tokens.map((_, i) => (bits[i] == null ? null : Math.min(1, bits[i] / blind))));
  const heading = element("p", { class: "guess-heading" });
  const body = element("tbody");
  const caption = element("caption", { class: "unseen" });
  const total = losses.all === null ? "\u2013" : losses.all.toFixed(3);

  function row(name, probability, came) {
    return element(
      "tr",
      { class: came ? "came" : null },
      element("th", { scope: "row" }, readableToken(name), came && element("small", {}, "came")),
      element("td", { class: "guess-bar", "aria-hidden": "true", style: { "--share": `${100 * probability}%` } }),
      element("td", {}, `${fixed(100 * probability, 1)}%`),
    );
  }

  return {
    element: element(
      "section",
      { class: "loss-column", style: { "--method": colour }, "aria-label": label },
      element("h4", {}, element("span", { class: "swatch", "aria-hidden": "true" }), label),
      element("p", { class: "loss-total" }, element("strong", {}, total), ` bits per ${unit}`),
      element("p", { class: "note" }, partWords(losses, trainLength)),
      text.element,
      element("div", { class: "guesses" }, heading, element("table", {}, caption, body)),
    ),
    update(query) {
      const next = query + 1;
      const at = Math.min(next, tokens.length - 1);
      text.choose(at, bits[at] == null ? `${names[at]}: not guessed` : `${names[at]}: ${bits[at].toFixed(2)} bits`);
      setText(heading, headingOf(query));
      setText(caption, `Guesses of ${label} after token ${names[query]}`);
      const shown = guesses[query] ?? [];
      const known = next < tokens.length && bits[next] != null;
      const rows = shown.map(([at, probability]) => row(vocabulary[at], probability, known && at === places[next]));
      const missed = known && !shown.some(([at]) => at === places[next]);
      body.replaceChildren(...rows, ...(missed ? [row(tokens[next], 2 ** -bits[next], true)] : []));
    },
  };

  function headingOf(query) {
    if (query >= T) return `Nothing is guessed after token ${T - 1}: the model has no more rows.`;
    if (query + 1 >= tokens.length) return `After ${names[query]} the shown text ends.`;
    if (query + 1 >= T) return `After ${names[query]} comes ${names[query + 1]}, which this model cannot read.`;
    return `After ${names[query]} came ${names[query + 1]}: ${bits[query + 1].toFixed(2)} bits.`;
  }
}

function partWords({ within, beyond }, trainLength) {
  if (within === null) return "";
  if (beyond === null) return `all within the ${trainLength} tokens of its training`;
  return `${within.toFixed(3)} within ${trainLength} tokens, ${beyond.toFixed(3)} beyond`;
}
