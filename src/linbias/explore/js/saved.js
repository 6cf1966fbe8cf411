// What a view shows as a text such as "length=512&head=2", for the page's address. What makes no sense there is
// ignored, as links are typed and cut.

// readSaved(text, rules): a value for each rule, { is(value), start }, of a number, or of true written as 1.
export function readSaved(text, rules) {
  const given = new URLSearchParams(text);
  return Object.fromEntries(
    Object.entries(rules).map(([name, { is, start }]) => {
      const value = given.has(name) && given.get(name) !== "" ? Number(given.get(name)) : NaN;
      return [name, is(value) ? (typeof start === "boolean" ? value === 1 : value) : start];
    }),
  );
}

// Only what differs from the start.
export function savedText(state, rules) {
  const parts = Object.entries(rules)
    .filter(([name, { start }]) => state[name] !== start)
    .map(([name]) => `${name}=${Number(state[name])}`);
  return parts.join("&");
}

export const oneOf = (values) => (value) => values.includes(value);
export const wholeUpTo = (most) => (value) => Number.isInteger(value) && 0 <= value && value <= most;
