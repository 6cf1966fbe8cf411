// A text whose tokens are inked by shares from 0 to 1; to assistive technology it is a slider.

import { element, setAll, setText, walked } from "./dom.js";
import { fixed } from "./numbers.js";

// Line ends, blanks and control characters as they can be seen.
function visible(token) {
  const signs = { "\n": "\u21b5", "\t": "\u21e5", "\x7f": "\u2421" };
  const control = (sign) => signs[sign] ?? String.fromCharCode(0x2400 + sign.charCodeAt(0));
  return token.replace(/[\x00-\x1f\x7f]/g, control) || "\u2205";
}

// A token in one line: its own direction does not reach the words around it.
export const readableToken = (token) => `\u2068${visible(token).replaceAll(" ", "\u2423")}\u2069`;

export const namesOf = (tokens) =>
  tokens.map((token, i) => `${i} \u201c${readableToken(token)}\u201d`);

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

// marks: { 128: "words" } stand before these tokens; without a share a token takes no part.
export function tokenText({ data: { tokens, separator }, label, marks = {}, onSelect }) {
  const last = tokens.length - 1;
  const spans = tokens.map((token, i) =>
    element("span.token", { "data-token": i }, visible(token)),
  );
  const attributes = {
    dir: "ltr", tabindex: 0, role: "slider", "aria-label": label,
    "aria-valuemin": 0, "aria-valuemax": last,
    on: { click, keydown: (event) => select(walked(event, at, last)) },
  };
  const box = element("div.token-text", attributes,
    spans.flatMap((span, i) => [
      marks[i] && element("span.token-mark", marks[i]),
      span,
      tokens[i].endsWith("\n") ? "\n" : separator,
    ]),
  );
  let at = 0;

  function click(event) {
    const span = event.target.closest("[data-token]");
    select(span && Number(span.dataset.token));
  }

  function select(token) {
    if (token !== null) onSelect(token);
  }

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

export const endOfRows = (tokens, T) => T < tokens.length ? { [T]: `no rows past ${T}` } : {};

// What each token cost a model, and what it expected; the framed token follows the query.
export function lossColumn({ data, reading, label, colour, onSelect }) {
  const { tokens, places, unit, vocabulary, blind } = data;
  const { bits, guesses, losses, train_length: trainLength, num_tokens: T } = reading;
  const names = namesOf(tokens);
  const trained = { [trainLength + 1]: "trained up to here" };
  const text = tokenText({
    data, label: `Token to be guessed, ${label}`,
    marks: losses.beyond === null ? endOfRows(tokens, T) : trained,
    onSelect: (token) => onSelect(Math.max(0, token - 1)),
  });
  text.ink(tokens.map((_, i) => (bits[i] == null ? null : Math.min(1, bits[i] / blind))));
  const heading = element("p.guess-heading");
  const body = element("tbody");
  const caption = element("caption.unseen");
  const total = losses.all === null ? "\u2013" : losses.all.toFixed(3);

  function row(name, probability, came) {
    const share = { "--share": `${100 * probability}%` };
    return element(came ? "tr.came" : "tr",
      element("th", { scope: "row" }, readableToken(name), came && element("small", "came")),
      element("td.guess-bar", { "aria-hidden": true, style: share }),
      element("td", `${fixed(100 * probability, 1)}%`),
    );
  }

  return {
    element: element("section.loss-column", { style: { "--method": colour }, "aria-label": label },
      element("h4", element("span.swatch", { "aria-hidden": true }), label),
      element("p.loss-total", element("strong", total), ` bits per ${unit}`),
      element("p.note", partWords(losses, trainLength)),
      text.element,
      element("div.guesses", heading, element("table", caption, body)),
    ),
    update(query) {
      const next = query + 1;
      const at = Math.min(next, tokens.length - 1);
      const cost = bits[at] == null ? "not guessed" : `${bits[at].toFixed(2)} bits`;
      text.choose(at, `${names[at]}: ${cost}`);
      setText(heading, headingOf(query, next));
      setText(caption, `Guesses of ${label} after token ${names[query]}`);
      const came = bits[next] == null ? null : places[next];
      const shown = guesses[query] ?? [];
      const rows = shown.map(([place, p]) => row(vocabulary[place], p, place === came));
      if (came !== null && !shown.some(([place]) => place === came)) {
        rows.push(row(tokens[next], 2 ** -bits[next], true));
      }
      body.replaceChildren(...rows);
    },
  };

  function headingOf(query, next) {
    if (query >= T) return `Nothing is guessed after token ${T - 1}: the model has no more rows.`;
    const [now, then] = [names[query], names[next]];
    if (next >= tokens.length) return `After ${now} the shown text ends.`;
    if (next >= T) return `After ${now} comes ${then}, which this model cannot read.`;
    return `After ${now} came ${then}: ${bits[next].toFixed(2)} bits.`;
  }
}

function partWords({ within, beyond }, trainLength) {
  if (within === null) return "";
  if (beyond === null) return `all within the ${trainLength} tokens of its training`;
  return `${within.toFixed(3)} within ${trainLength} tokens, ${beyond.toFixed(3)} beyond`;
}
