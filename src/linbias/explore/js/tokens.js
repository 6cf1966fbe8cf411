// A text as tokens: what stands between spaces.

const LONGEST_TOKEN = 32;

// -> { tokens, note }, the note says what had to be cut.
export function readTokens(text, example) {
  const words = text.split(/\s+/u).filter(Boolean);
  if (words.length === 0) throw new Error("Needs at least one token.");
  const tokens = words.slice(0, example.max_tokens).map((word) => [...word].slice(0, LONGEST_TOKEN).join(""));
  const notes = [];
  if (words.length > tokens.length) {
    notes.push(`Cut to the first ${tokens.length} of ${words.length} tokens.`);
  }
  if (tokens.some((token, i) => token !== words[i])) {
    notes.push(`Tokens longer than ${LONGEST_TOKEN} characters are cut.`);
  }
  return { tokens, note: notes.join(" ") };
}
