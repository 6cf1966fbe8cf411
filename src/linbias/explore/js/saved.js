// What a view shows as a text such as "length=512&head=2", for the page's address. What makes no sense there is
// ignored, as links are typed and cut.

const asNumber = (text) => (text === "" ? NaN : Number(text));

// readSaved(text, rules): a value for each rule, { start, is(value), read(text) }: of a number, or of true written as 1, where
// the rule does not read it itself.
export function readSaved(text, rules) {
  const given = new URLSearchParams(text);
  return Object.fromEntries(
    Object.entries(rules).map(([name, { start, is, read = asNumber }]) => {
      const value = given.has(name) ? read(given.get(name)) : null;
      if (value === null || !is(value)) return [name, start];
      return [name, typeof start === "boolean" ? value === 1 : value];
    }),
  );
}

// Only what differs from the start; of a list its entries.
export function savedText(state, rules) {
  const written = (value) => (typeof value === "boolean" ? String(Number(value)) : [value].flat().join(" "));
  const parts = new URLSearchParams();
  for (const [name, { start }] of Object.entries(rules)) {
    if (written(state[name]) !== written(start)) parts.set(name, written(state[name]));
  }
  return parts.toString();
}

export const oneOf = (values) => (value) => values.includes(value);
export const within = (low, high) => (value) => low <= value && value <= high;
export const wholeUpTo = (most) => (value) => Number.isInteger(value) && 0 <= value && value <= most;
