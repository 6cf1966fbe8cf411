// What a view shows as a text such as "length=512&head=2", for the page's address. What makes no
// sense there is ignored, as links are typed and cut.

const asNumber = (text) => (text === "" ? NaN : Number(text));

// The values of a text by rules { start, is, read, name }: a number, or true written as 1, where
// no `read` is given. `name` is that in the text; `is` and `read` get the values before it too.
export function readSaved(text, rules) {
  const given = new URLSearchParams(text);
  const state = {};
  for (const [key, { start, is, read = asNumber, name = key }] of Object.entries(rules)) {
    const value = given.has(name) ? read(given.get(name), state) : null;
    if (value === null || !is(value, state)) state[key] = start;
    else state[key] = typeof start === "boolean" ? value === 1 : value;
  }
  return state;
}

// Only what differs from the start.
export function savedText(state, rules) {
  const parts = new URLSearchParams();
  for (const [key, { start, name = key }] of Object.entries(rules)) {
    if (written(state[key]) !== written(start)) parts.set(name, written(state[key]));
  }
  return parts.toString();
}

function written(value) {
  if (typeof value === "boolean") return String(Number(value));
  if (value === null || typeof value !== "object") return String(value);
  if (Array.isArray(value)) return value.join(" ");
  return Object.entries(value).map((pair) => pair.join(":")).join(" ");
}

export const oneOf = (values) => (value) => values.includes(value);
export const within = (low, high) => (value) => low <= value && value <= high;
export const wholeUpTo = (most) => (value) => Number.isInteger(value) && within(0, most)(value);
