// Random queries and keys, and what a query of them reads near to far.

import { normals, numVisible, prepareQuery, visit } from "./near_to_far.js";

const HEAD_SIZE = 16;
const KEY_SCALE = HEAD_SIZE ** -0.5;

// headReader(mostKeys) -> read({ head, slope, length, position, both, tolerance, block }), which gives
// { query, found, read, visible }: what near_to_far.js knows of the query and finds, and how many keys that is of how many.
// What does not change with tolerance and slopes is kept: of the last queries of texts for good, of others the newest.
export function headReader(mostKeys) {
  const streams = new Map();
  const prepared = new Map();

  function queryOf(head, length, position) {
    const key = `${head} ${position === length - 1 ? length : "chosen"}`;
    const kept = prepared.get(key);
    if (kept?.numKeys === length && kept.position === position) return kept;
    if (!streams.has(head)) streams.set(head, normals(2 * head + 1, mostKeys * HEAD_SIZE));
    const made = prepareQuery({
      query: normals(2 * head, HEAD_SIZE, position * HEAD_SIZE),
      keys: streams.get(head).subarray(0, length * HEAD_SIZE),
      position,
      scale: KEY_SCALE,
    });
    prepared.set(key, made);
    return made;
  }

  return ({ head, slope, length, position, both, tolerance, block }) => {
    const query = queryOf(head, length, position);
    const sides = [slope, both ? slope : Infinity];
    const found = visit(query, { slopes: sides, tolerance, block });
    return { query, found, read: found.end - found.first, visible: numVisible(query, sides) };
  };
}

export function totalOf(results, name) {
  return results.reduce((total, result) => total + result[name], 0);
}
