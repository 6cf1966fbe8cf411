// A button that copies a text. Where the clipboard is refused, the text appears, selected, to be copied by hand.

import { element, setText } from "./dom.js";

const CONFIRMED_MS = 2000;

// copyButton({ label, says, text() }) -> element; `says` is what the button shows, and is spoken, once it is done.
export function copyButton({ label, says, text }) {
  const name = element("span", {}, label);
  const status = element("span", { class: "unseen", role: "status" });
  const byHand = element("textarea", {
    class: "by-hand",
    hidden: true,
    readonly: true,
    rows: 2,
    "aria-label": "To copy by hand",
    on: { blur: () => (byHand.hidden = true) },
  });
  let timer = 0;

  function show(words) {
    setText(name, words);
    setText(status, words);
    clearTimeout(timer);
    timer = setTimeout(() => {
      setText(name, label);
      setText(status, "");
    }, CONFIRMED_MS);
  }

  async function copy() {
    const copied = text();
    try {
      await navigator.clipboard.writeText(copied);
      show(says);
    } catch {
      byHand.value = copied;
      byHand.hidden = false;
      byHand.select();
      byHand.focus();
      show("Selected: copy it by hand");
    }
  }

  return element("div", { class: "copy" }, element("button", { type: "button", on: { click: copy } }, name), status, byHand);
}
