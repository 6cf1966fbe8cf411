// A field for a text, with a message beside it: tells the tokens of what is typed, or says what is wrong with it.

import { element, setText, uniqueId } from "./dom.js";
import { readTokens } from "./tokens.js";

export function textField(name, example, onTokens) {
  const message = element("p", { class: "message", role: "alert", id: uniqueId("message") });
  const field = element("textarea", {
    id: uniqueId(name),
    rows: 2,
    dir: "auto",
    spellcheck: "false",
    autocomplete: "off",
    "aria-describedby": message.id,
    on: { input: read },
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
