// q, k and v for any text, as linbias.explore.vectors makes them: the chapter's where it gives them, else
// numbers made from the token itself.


const SIZE = 2; // of a head

// -> for each head { q, k, v }, rows of numbers for the tokens.
export function vectors(tokens, numHeads, example) {
  const known = new Map(example.tokens.map((token, i) => [token, i]));
  const rows = (role, head) =>
    tokens.map((token) => {
      const row = example[role][known.get(token)];
      if (row && head * SIZE < row.length) return row.slice(head * SIZE, (head + 1) * SIZE);
      return [0, 1].map((i) => ((hash(`${role}${head}.${i} ${token}`) % 5) - 1) / 2);
    });
  return Array.from({ length: numHeads }, (_, head) => ({
    q: rows("q", head), k: rows("k", head), v: rows("v", head),
  }));
}

// Whether all vectors of this text are the chapter's.
export function areChapters(tokens, numHeads, example) {
  return numHeads <= 2 && tokens.every((token) => example.tokens.includes(token));
}

// FNV-1a of the text in UTF-8, its bits mixed once more.
function hash(text) {
  let state = 0x811c9dc5;
  for (const byte of new TextEncoder().encode(text)) state = Math.imul(state ^ byte, 0x01000193);
  state = Math.imul(state ^ (state >>> 16), 0x85ebca6b);
  return (state ^ (state >>> 13)) >>> 0;
}
