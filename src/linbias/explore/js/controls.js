// Controls, made of the browser's own inputs, so that keyboards and screen readers know them.
// Each is { element, set(value), ... } and tells its owner of changes made by hand only.

import { element, setText, uniqueId } from "./dom.js";

// One of a few: options [{ value, label }], as radio buttons in one bar.
export function choice({ label, options, value, onChange }) {
  const name = uniqueId("choice");
  const inputs = options.map((option) =>
    element("input", {
      type: "radio", name, value: option.value, checked: option.value === value,
      on: { change: () => onChange(option.value) },
    }),
  );
  const labels = options.map((option, i) =>
    element("label", { class: "option" }, inputs[i], element("span", {}, option.label)),
  );
  return {
    element: element("fieldset", { class: "control choice" },
      element("legend", { class: "label" }, label),
      element("div", { class: "options" }, labels),
    ),
    set(to) {
      inputs.forEach((input, i) => (input.checked = options[i].value === to));
    },
  };
}

// A slider with a field for the exact number. `toValue` and `toPosition` translate between the two where the
// slider's scale is not even; `parse` turns the field's text into a number, or throws an Error whose message
// appears beside the control while the last good value stays.
export function slider({
  label, min, max, step = 1, value, onInput, toText = String, toValue = (position) => position,
  toPosition = (number) => number, parse = (text) => parseNumber(text, min, max), marks = [],
}) {
  const message = element("p", { class: "message", id: uniqueId("message"), role: "alert" });
  const range = element("input", {
    type: "range", id: uniqueId("range"), min, max, step,
    on: { input: () => take(toValue(Number(range.value)), range) },
  });
  const field = element("input", {
    type: "text", class: "number", inputmode: "decimal", autocomplete: "off", spellcheck: "false",
    "aria-label": `${label}, exact`, "aria-describedby": message.id,
    on: { input: () => read(), blur: () => field.ariaInvalid === "true" || show(current) },
  });
  const name = element("label", { class: "label", for: range.id }, label);
  let current = value;

  function read() {
    try {
      take(parse(field.value), field);
    } catch (error) {
      field.ariaInvalid = "true";
      setText(message, `${error.message}; still ${toText(current)}.`);
    }
  }

  function take(number, source) {
    current = number;
    show(number, source);
    onInput(number);
  }

  // The control that the reader is using keeps what they typed or where they dragged it.
  function show(number, source = null) {
    field.ariaInvalid = null;
    setText(message, "");
    if (source !== field) field.value = toText(number);
    if (source !== range) range.value = toPosition(number);
    range.setAttribute("aria-valuetext", toText(number));
  }

  show(value);
  return {
    element: element("div", { class: "control slider" },
      name,
      field,
      element("div", { class: "track" },
        range,
        marks.length > 0 &&
          element("div", { class: "marks", "aria-hidden": "true" },
            marks.map((mark) => {
              const share = (toPosition(mark.value) - min) / (max - min);
              return element("span", { style: { "--share": share } }, mark.label);
            }),
          ),
      ),
      message,
    ),
    set(number) {
      if (number === current) return; // what is being typed stays as it was typed
      current = number;
      show(number);
    },
    setMax(to) {
      range.max = to;
    },
    setLabel(text) {
      setText(name, text);
      field.ariaLabel = `${text}, exact`;
    },
  };
}

// A number within bounds, a fraction such as 1/8 too.
export function parseNumber(text, min, max) {
  const [, top, bottom] = /^\s*([^/]*?)\s*(?:\/\s*(\S+))?\s*$/.exec(text) ?? [];
  const read = (part) => Number(part.replace(",", ".")); // as half of Europe writes it
  const number = top ? read(top) / (bottom === undefined ? 1 : read(bottom)) : NaN;
  if (!Number.isFinite(number)) throw new Error(`Must be a number, got "${text}"`);
  if (number < min) throw new Error(`Must be at least ${min}, got ${text}`);
  if (number > max) throw new Error(`Must be at most ${max}, got ${text}`);
  return number;
}

export function parseWhole(text, min, max) {
  const number = parseNumber(text, min, max);
  if (!Number.isInteger(number)) throw new Error(`Must be a whole number, got ${text}`);
  return number;
}

// A button that copies a text. Where the clipboard is refused, the text appears, selected, to be copied by hand.

const CONFIRMED_MS = 2000;

// copyButton({ label, says, text() }) -> element; `says` is what the button shows, and is spoken, once it is done.
export function copyButton({ label, says, text }) {
  const name = element("span", {}, label);
  const status = element("span", { class: "unseen", role: "status" });
  const byHand = element("textarea", {
    class: "by-hand", hidden: true, readonly: true, rows: 2, "aria-label": "To copy by hand",
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
