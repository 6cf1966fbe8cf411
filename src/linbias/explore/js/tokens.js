// A text as tokens: what stands between spaces.

import { element, setText, uniqueId } from "./dom.js";

const LONGEST_TOKEN = 32;

// -> { tokens, note }, the note says what had to be cut.
export function readTokens(text, example) {
  const words = text.split(/\s+/u).filter(Boolean);
  if (words.length === 0) throw new Error("Needs at least one token.");
  const tokens = words.slice(0, example.max_tokens).map((word) => [...word].slice(0, LONGEST_TOKEN).join(""));
  const notes = [];
  if (words.length > tokens.length) notes.push(`Cut to the first ${tokens.length} of ${words.length} tokens.`);
  if (tokens.some((token, i) => token !== words[i])) {
    notes.push(`Tokens longer than ${LONGEST_TOKEN} characters are cut.`);
  }
  return { tokens, note: notes.join(" ") };
}

// A field for a text, with a message beside it: tells the tokens of what is typed, or says what is wrong with it.

export function textField(name, example, onTokens) {
  const message = element("p", { class: "message", role: "alert", id: uniqueId("message") });
  const field = element("textarea", {
    id: uniqueId(name), rows: 2, dir: "auto", spellcheck: "false", autocomplete: "off",
    "aria-describedby": message.id, on: { input: read },
  });

  function read() {
    try {
      const { tokens, note } = readTokens(field.value, example);
      field.ariaInvalid = null;
      setText(message, note);
      onTokens(tokens);
    } catch (error) {
      field.ariaInvalid = "true";
      setText(message, error.message);
    }
  }

  return { field, message };
}
