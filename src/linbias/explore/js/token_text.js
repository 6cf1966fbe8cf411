// A text whose tokens are inked, each by a share from 0 to 1. To assistive technology it is a slider over the tokens.

import { element, setAll, setText, walked } from "./dom.js";
import { fixed } from "./numbers.js";

// Line ends, blanks and control characters as they can be seen.
function visible(token) {
  const control = (sign) => ({ "\n": "\u21b5", "\t": "\u21e5", "\x7f": "\u2421" })[sign] ?? String.fromCharCode(0x2400 + sign.charCodeAt(0));
  return token.replace(/[\x00-\x1f\x7f]/g, control);
}

// A token in one line: its own direction does not reach the words around it.
export const readableToken = (token) => `\u2068${visible(token).replaceAll(" ", "\u2423") || "\u2205"}\u2069`;

// Scrolls a box, and not the page around it, to what stands in it.
export function revealWithin(box, { offsetTop: top, offsetHeight: height, offsetLeft: left, offsetWidth: width }) {
  if (box.scrollTop > top || box.scrollTop < top + height - box.clientHeight) box.scrollTop = top - box.clientHeight / 2;
  if (box.scrollLeft > left || box.scrollLeft < left + width - box.clientWidth) box.scrollLeft = left - box.clientWidth / 2;
}

// tokenText({ tokens, separator, label, marks, onSelect(token) }) -> { element, ink(shares), choose(token, words) }
// marks: { 128: "words" } stand before these tokens. A share of null: the token takes no part. words: what the token is.
export function tokenText({ tokens, separator, label, marks = {}, onSelect }) {
  const spans = tokens.map((token, i) =>
    element("span", { class: "token", "data-token": i }, visible(token) || "\u2205"),
  );
  const box = element(
    "div",
    { class: "token-text", dir: "ltr", tabindex: "0", role: "slider", "aria-label": label, "aria-valuemin": 0, "aria-valuemax": tokens.length - 1 },
    spans.flatMap((span, i) => [
      marks[i] && element("span", { class: "token-mark" }, marks[i]),
      span,
      tokens[i].endsWith("\n") ? "\n" : separator,
    ]),
  );
  let at = 0;

  box.addEventListener("click", (event) => {
    const span = event.target.closest("[data-token]");
    if (span) onSelect(Number(span.dataset.token));
  });
  box.addEventListener("keydown", (event) => {
    const to = walked(event, at, tokens.length - 1);
    if (to !== null) onSelect(to);
  });

  new ResizeObserver(() => revealWithin(box, spans[at])).observe(box);

  return {
    element: box,
    ink(shares) {
      spans.forEach((span, i) => {
        span.style.setProperty("--share", `${Math.round(100 * (shares[i] ?? 0))}%`);
        span.classList.toggle("without-part", shares[i] === null);
      });
    },
    choose(token, words) {
      spans[at].classList.remove("chosen-token");
      at = token;
      spans[at].classList.add("chosen-token");
      revealWithin(box, spans[at]);
      setAll(box, { "aria-valuenow": at, "aria-valuetext": words });
    },
  };
}

// What each token of a text cost a model, and what the model expected instead: a column for each model.

// lossColumn({ data, reading, label, colour, onSelect(token) }) -> { element, update(query) }
// The framed token is the one that follows the query.
export function lossColumn({ data, reading, label, colour, onSelect }) {
  const { tokens, places, unit, vocabulary, blind, separator } = data;
  const { bits, guesses, losses, train_length: trainLength, num_tokens: T } = reading;
  const names = tokens.map((token, i) => `${i} \u201c${readableToken(token)}\u201d`);
  const stops = T < tokens.length ? { [T]: `no rows past ${T}` } : {};
  const text = tokenText({
    tokens, separator, label: `Token to be guessed, ${label}`,
    marks: losses.beyond === null ? stops : { [trainLength + 1]: "trained up to here" },
    onSelect: (token) => onSelect(Math.max(0, token - 1)),
  });
  text.ink(tokens.map((_, i) => (bits[i] == null ? null : Math.min(1, bits[i] / blind))));
  const heading = element("p", { class: "guess-heading" });
  const body = element("tbody");
  const caption = element("caption", { class: "unseen" });
  const total = losses.all === null ? "\u2013" : losses.all.toFixed(3);

  function row(name, probability, came) {
    return element("tr", { class: came ? "came" : null },
      element("th", { scope: "row" }, readableToken(name), came && element("small", {}, "came")),
      element("td", { class: "guess-bar", "aria-hidden": "true", style: { "--share": `${100 * probability}%` } }),
      element("td", {}, `${fixed(100 * probability, 1)}%`),
    );
  }

  return {
    element: element("section", { class: "loss-column", style: { "--method": colour }, "aria-label": label },
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
