// A text whose tokens are inked by shares from 0 to 1; to assistive technology it is a slider.

import { element, onDraw, walked } from "./dom.js";
import { fixed } from "./numbers.js";

// Line ends, blanks and control characters as they can be seen.
function visible(token) {
  const signs = { "\n": "\u21b5", "\t": "\u21e5", "\x7f": "\u2421" };
  const control = (sign) => signs[sign] ?? String.fromCharCode(0x2400 + sign.charCodeAt(0));
  return token.replace(/[\x00-\x1f\x7f]/g, control) || "\u2205";
}

// A token in one line: its own direction does not reach the words around it.
export const readableToken = (token) => `\u2068${visible(token).replaceAll(" ", "\u2423")}\u2069`;

export const namesOf = (tokens) => tokens.map((token, i) => `${i} \u201c${readableToken(token)}\u201d`);

// Scrolls a box, and not the page around it, to what stands in it.
export function revealWithin(box, { offsetTop, offsetHeight, offsetLeft, offsetWidth }) {
  const isIn = (from, start, size, room) => start + size - room <= from && from <= start;
  if (!isIn(box.scrollTop, offsetTop, offsetHeight, box.clientHeight)) {
    box.scrollTop = offsetTop - box.clientHeight / 2;
  }
  if (!isIn(box.scrollLeft, offsetLeft, offsetWidth, box.clientWidth)) {
    box.scrollLeft = offsetLeft - box.clientWidth / 2;
  }
}

// shareOf(i) is the ink of a token, null for one that takes no part; chosen() is that with the frame, which
// words() tells; marks: { 128: "words" } stand before these tokens.
export function tokenText({
  data: { tokens, separator }, label, marks = {}, shareOf, chosen, words, onSelect,
}) {
  const last = tokens.length - 1;

  function tokenSpan(token, i) {
    const share = shareOf(i);
    const without = share === null ? ".without-part" : "";
    const frame = i === chosen() ? ".chosen-token" : "";
    const style = { "--share": `${Math.round(100 * (share ?? 0))}%` };
    return [
      marks[i] && element("span.token-mark", marks[i]),
      element(`span.token${without}${frame}`, { "data-token": i, style }, visible(token)),
      token.endsWith("\n") ? "\n" : separator,
    ];
  }

  const attributes = {
    dir: "ltr", tabindex: 0, role: "slider", "aria-label": label,
    "aria-valuemin": 0, "aria-valuemax": last,
    "aria-valuenow": chosen, "aria-valuetext": words,
    on: { click, keydown: (event) => select(walked(event, chosen(), last)) },
  };
  const box = element("div.token-text", attributes, () => tokens.map(tokenSpan));

  function click(event) {
    const span = event.target.closest("[data-token]");
    select(span && Number(span.dataset.token));
  }

  function select(token) {
    if (token !== null) onSelect(token);
  }

  function reveal() {
    const span = box.querySelector(".chosen-token");
    if (span) revealWithin(box, span);
  }

  onDraw(reveal);
  new ResizeObserver(reveal).observe(box);
  return box;
}

export const endOfRows = (tokens, T) => T < tokens.length ? { [T]: `no rows past ${T}` } : {};

// What each token cost a model, and what it expected; the framed token follows state.query.
export function lossColumn({ data, reading, label, colour, state, onSelect }) {
  const { tokens, places, unit, vocabulary, blind } = data;
  const { bits, guesses, losses, train_length: trainLength, num_tokens: T } = reading;
  const names = namesOf(tokens);
  const trained = { [trainLength + 1]: "trained up to here" };
  const next = () => state.query + 1;
  const chosen = () => Math.min(next(), tokens.length - 1);
  const text = tokenText({
    data, label: `Token to be guessed, ${label}`, chosen,
    marks: losses.beyond === null ? endOfRows(tokens, T) : trained,
    shareOf: (i) => (bits[i] == null ? null : Math.min(1, bits[i] / blind)),
    words() {
      const cost = bits[chosen()];
      return `${names[chosen()]}: ${cost == null ? "not guessed" : `${cost.toFixed(2)} bits`}`;
    },
    onSelect: (token) => onSelect(Math.max(0, token - 1)),
  });
  const total = losses.all === null ? "\u2013" : losses.all.toFixed(3);

  function row(name, probability, came) {
    const share = { "--share": `${100 * probability}%` };
    return element(came ? "tr.came" : "tr",
      element("th", { scope: "row" }, readableToken(name), came && element("small", "came")),
      element("td.guess-bar", { "aria-hidden": true, style: share }),
      element("td", `${fixed(100 * probability, 1)}%`),
    );
  }

  function rows() {
    const came = bits[next()] == null ? null : places[next()];
    const shown = guesses[state.query] ?? [];
    const isMissing = came !== null && !shown.some(([place]) => place === came);
    return [
      ...shown.map(([place, p]) => row(vocabulary[place], p, place === came)),
      isMissing && row(tokens[next()], 2 ** -bits[next()], true),
    ];
  }

  function heading() {
    if (state.query >= T) {
      return `Nothing is guessed after token ${T - 1}: the model has no more rows.`;
    }
    const [before, after] = [names[state.query], names[next()]];
    if (next() >= tokens.length) return `After ${before} the shown text ends.`;
    if (next() >= T) return `After ${before} comes ${after}, which this model cannot read.`;
    return `After ${before} came ${after}: ${bits[next()].toFixed(2)} bits.`;
  }

  const caption = () => `Guesses of ${label} after token ${names[state.query]}`;
  return element("section.loss-column", { style: { "--method": colour }, "aria-label": label },
    element("h4", element("span.swatch", { "aria-hidden": true }), label),
    element("p.loss-total", element("strong", total), ` bits per ${unit}`),
    element("p.note", partWords(losses, trainLength)),
    text,
    element("div.guesses",
      element("p.guess-heading", heading),
      element("table", element("caption.unseen", caption), element("tbody", rows)),
    ),
  );
}

function partWords({ within, beyond }, trainLength) {
  if (within === null) return "";
  if (beyond === null) return `all within the ${trainLength} tokens of its training`;
  return `${within.toFixed(3)} within ${trainLength} tokens, ${beyond.toFixed(3)} beyond`;
}
