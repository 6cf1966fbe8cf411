// A text whose tokens are inked, each by a share from 0 to 1. To assistive technology it is a slider over the tokens.

import { element, walked } from "./dom.js";

// Line ends, blanks and control characters as they can be seen.
function visible(token) {
  const control = (sign) => ({ "\n": "\u21b5", "\t": "\u21e5", "\x7f": "\u2421" })[sign] ?? String.fromCharCode(0x2400 + sign.charCodeAt(0));
  return token.replace(/[\x00-\x1f\x7f]/g, control);
}

// A token in one line: its own direction does not reach the words around it.
export function readableToken(token) {
  return `\u2068${visible(token).replaceAll(" ", "\u2423") || "\u2205"}\u2069`;
}

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
      box.setAttribute("aria-valuenow", at);
      box.setAttribute("aria-valuetext", words);
    },
  };
}
