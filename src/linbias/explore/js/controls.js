// Controls, made of the browser's own inputs, so that keyboards and screen readers know them. Each is an
// element that draws the value() of its owner, and tells it of changes made by hand.

import { element, now, onDraw, setText, uniqueId } from "./dom.js";
import { general, slopeFraction } from "./numbers.js";

// One of a few, as radio buttons in one bar; options [{ value, label }], or the values alone.
export function choice({ label, options, value, onInput }) {
  const name = uniqueId("choice");
  const items = options.map((option) => option.label ? option : { value: option, label: option });
  const input = (item) =>
    element("input", {
      type: "radio", name, value: item.value, checked: () => item.value === value(),
      on: { change: () => onInput(item.value) },
    });
  return element("fieldset.control.choice",
    element("legend.label", label),
    element("div.options",
      items.map((item) => element("label.option", input(item), element("span", item.label))),
    ),
  );
}

// A slider with a field for the exact number, which its own scale may translate; `parse` may throw an Error,
// whose message appears beside it while the last good value stays. Label and largest value may be functions.
export function slider({
  label, min, max, step = 1, value, onInput, toText = String, toValue = (position) => position,
  toPosition = (number) => number, parse = (text) => parseWhole(text, min, now(max)), marks = [],
}) {
  const message = element("p.message", { id: uniqueId("message"), role: "alert" });
  const range = element("input", {
    type: "range", id: uniqueId("range"), min, max, step,
    on: { input: () => take(toValue(Number(range.value)), range) },
  });
  const field = element("input.number", {
    type: "text", inputmode: "decimal", autocomplete: "off", spellcheck: "false",
    "aria-label": () => `${now(label)}, exact`, "aria-describedby": message.id,
    on: { input: read, blur: () => field.ariaInvalid === "true" || show() },
  });
  const shareOf = (mark) => (toPosition(mark.value) - min) / (max - min);
  let current = null;

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
    show(source);
    onInput(number);
  }

  // The control that the reader is using keeps what they typed or where they dragged it.
  function show(source = null) {
    field.ariaInvalid = null;
    setText(message, "");
    if (source !== field) field.value = toText(current);
    if (source !== range) range.value = toPosition(current);
    range.setAttribute("aria-valuetext", toText(current));
  }

  onDraw(() => {
    if (value() === current) return; // what is being typed stays as it was typed
    current = value();
    show();
  });
  return element("div.control.slider",
    element("label.label", { for: range.id }, label),
    field,
    element("div.track",
      range,
      marks.length > 0 &&
        element("div.marks", { "aria-hidden": true },
          marks.map((mark) => element("span", { style: { "--share": shareOf(mark) } }, mark.label)),
        ),
    ),
    message,
  );
}

const SLOPE_MARKS = [0, 1 / 256, 1 / 64, 1 / 16, 1 / 4, 1];

// A slider of slopes: 0, then powers of two from 2^-10 to 2 in steps of an eighth. A typed slope is at most
// `most`.
export function slopeSlider({ label, most, value, onInput, toText = general }) {
  const [nothing, step] = [-10 - 1 / 8, 1 / 8];
  return slider({
    label, min: nothing, max: 1, step, value, onInput, toText,
    toValue: (position) => (position === nothing ? 0 : 2 ** position),
    toPosition: (slope) => (slope === 0 ? nothing : Math.max(Math.log2(slope), nothing + step)),
    parse: (text) => parseNumber(text, 0, most),
    marks: SLOPE_MARKS.map((slope) => ({ value: slope, label: slopeFraction(slope) })),
  });
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

export function copyButton(what, text) {
  const label = `Copy ${what}`;
  const name = element("span", label);
  const status = element("span.unseen", { role: "status" });
  let timer = 0;

  function show(words, spoken = words) {
    setText(name, words);
    setText(status, spoken);
    clearTimeout(timer);
    if (spoken) timer = setTimeout(() => show(label, ""), 2000);
  }

  async function copy() {
    try {
      await navigator.clipboard.writeText(text());
      show(`${what[0].toUpperCase()}${what.slice(1)} copied`);
    } catch {
      show("The browser refuses its clipboard");
    }
  }

  return element("div.copy", element("button", { on: { click: copy } }, name), status);
}

const LONGEST_TOKEN = 32;

// What stands between spaces is a token; the note says what had to be cut.
export function readTokens(text, example) {
  const words = text.split(/\s+/u).filter(Boolean);
  if (words.length === 0) throw new Error("Needs at least one token.");
  const short = (word) => [...word].slice(0, LONGEST_TOKEN).join("");
  const tokens = words.slice(0, example.max_tokens).map(short);
  const isCut = words.length > tokens.length;
  const notes = [
    isCut && `Cut to the first ${tokens.length} of ${words.length} tokens.`,
    tokens.some((token, i) => token !== words[i]) &&
      `Tokens longer than ${LONGEST_TOKEN} characters are cut.`,
  ];
  return { tokens, note: notes.filter(Boolean).join(" ") };
}

export function tokensOrNull(text, example) {
  try {
    return readTokens(text, example).tokens;
  } catch {
    return null; // no words
  }
}

// A field of the tokens value(), which tells those of what is typed, or says what is wrong.
export function textField({ id, label, example, value, onTokens }) {
  const message = element("p.message", { role: "alert", id: uniqueId("message") });
  const field = element("textarea", {
    id: uniqueId(id), rows: 2, dir: "auto", spellcheck: "false", autocomplete: "off",
    "aria-describedby": message.id, on: { input: read },
  });

  function read() {
    try {
      const { tokens, note: cut } = readTokens(field.value, example);
      field.ariaInvalid = null;
      setText(message, cut);
      onTokens(tokens);
    } catch (error) {
      field.ariaInvalid = "true";
      setText(message, error.message);
    }
  }

  onDraw(() => {
    if (field.getRootNode().activeElement === field) return;
    field.value = value().join(" ");
    field.ariaInvalid = null;
  });
  return element("div.control", element("label.label", { for: field.id }, label), field, message);
}
