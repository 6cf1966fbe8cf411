// The text and its length: tokens are what stands between spaces.

import { parseWhole, slider } from "./controls.js";
import { element, setText } from "./dom.js";
import { textField } from "./text_field.js";
import { areChapters } from "./vectors.js";

export function textControls(example, change) {
  const origin = element("p", { class: "note" });
  const { field, message } = textField("text", example, (tokens) => {
    known = tokens;
    change(() => ({ tokens }));
  });
  let known = example.tokens; // the longest text so far: what the slider took away, it gives back
  const length = slider({
    label: "Tokens",
    min: 1,
    max: example.max_tokens,
    value: example.tokens.length,
    parse: (text) => parseWhole(text, 1, example.max_tokens),
    onInput: (count) => change(() => ({ tokens: resized(known, count, example.words) })),
  });

  return {
    element: element(
      "div",
      { class: "text" },
      element(
        "div",
        { class: "control" },
        element("label", { class: "label", for: field.id }, `Text, up to ${example.max_tokens} tokens`),
        field,
        message,
      ),
      length.element,
      origin,
    ),
    update({ tokens, numHeads }) {
      if (tokens.length > known.length || tokens.some((token, i) => token !== known[i])) known = tokens;
      if (document.activeElement !== field && field.getRootNode().activeElement !== field) {
        field.value = tokens.join(" ");
        field.ariaInvalid = null;
      }
      length.set(tokens.length);
      setText(
        origin,
        areChapters(tokens, numHeads, example)
          ? "q, k and v are those of the book chapter: two heads of two numbers each."
          : "The book chapter has q, k and v for two heads of its own five tokens. The others are made from the "
            + "token's letters, always the same: linbias.explore.vectors in Python.",
      );
    },
  };
}

// The first `count` tokens, or all and then words of a story.
function resized(tokens, count, words) {
  const more = words.slice(tokens.length);
  return [...tokens, ...more].slice(0, count);
}
