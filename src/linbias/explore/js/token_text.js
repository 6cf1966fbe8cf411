// A text whose tokens are coloured by the weight that one of them gives to the others.

import { element, walked } from "./dom.js";

// A token in one line: blanks can be seen, and its own direction does not reach the words around it.
export function readableToken(token) {
  const seen = token.replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5").replaceAll(" ", "\u2423");
  return `\u2068${seen}\u2069`;
}

// tokenText({ tokens, names, separator, onSelect(query) }) -> { element, update(row, query) }
// To assistive technology it is a slider over the tokens.
export function tokenText({ tokens, names, separator, onSelect }) {
  const spans = tokens.map((token, i) =>
    element("span", { class: "token", "data-token": i }, token.replaceAll("\n", "\u21b5") || "\u2205"),
  );
  const box = element(
    "div",
    { class: "token-text", tabindex: "0", role: "slider", "aria-label": "Query", "aria-valuemin": 0, "aria-valuemax": tokens.length - 1 },
    spans.flatMap((span, i) => [span, tokens[i].endsWith("\n") ? "\n" : separator]),
  );
  let chosen = 0;

  box.addEventListener("click", (event) => {
    const span = event.target.closest("[data-token]");
    if (span) onSelect(Number(span.dataset.token));
  });
  box.addEventListener("keydown", (event) => {
    const to = walked(event, chosen, tokens.length - 1);
    if (to !== null) onSelect(to);
  });

  // Scrolls the box, and not the page, to the token.
  function reveal({ offsetTop, offsetHeight }) {
    const lowest = offsetTop + offsetHeight - box.clientHeight;
    if (box.scrollTop > offsetTop || box.scrollTop < lowest) box.scrollTop = offsetTop - box.clientHeight / 2;
  }

  return {
    element: box,
    update(row, query) {
      chosen = query;
      const largest = row.reduce((a, b) => Math.max(a, b), 0);
      spans.forEach((span, s) => {
        const share = s < row.length ? Math.sqrt(row[s] / largest) : 0;
        span.style.setProperty("--share", `${Math.round(70 * share)}%`);
        span.classList.toggle("unseen-key", s >= row.length);
        span.classList.toggle("chosen-token", s === query);
      });
      reveal(spans[query]);
      box.setAttribute("aria-valuenow", query);
      box.setAttribute("aria-valuetext", names[query]);
    },
  };
}
