// Where: order that is not counted, as time on a line and as places in a plane.

import { element, mount, prose } from "./dom.js";
import { METRICS, NUM_POINTS, planeStory } from "./plane_story.js";
import { oneOf, savedState, wholeUpTo, within } from "./saved.js";
import { MOST_PLACE, SPOKEN, stampsStory } from "./stamps_story.js";

const list = (text) => text.split(" ").filter(Boolean).map(Number);
const rises = (numbers, apart) => numbers.every((x, i) => i === 0 || x - numbers[i - 1] >= apart);
const arePlaces = (x) => x.length === SPOKEN.length && rises(x, 0) && x[0] >= 0 && x.at(-1) <= MOST_PLACE;
const isGate = (gate) => gate > 0 && wholeUpTo(SPOKEN.length - 1)(gate);

const WHERE_RULES = {
  slope: { start: 0.5, is: within(0, 1) },
  places: { name: "x", start: SPOKEN, is: arePlaces, read: list },
  gates: { start: [], is: (gates) => rises(gates, 1) && gates.every(isGate), read: list },
  planeSlope: { name: "plane", start: 0.5, is: within(0, 1) },
  metric: { start: METRICS[0], is: oneOf(METRICS), read: String },
  query: { start: 24, is: wholeUpTo(NUM_POINTS) },
};

export function mountWhere(root, { example }, memory) {
  const saved = savedState(memory, WHERE_RULES, () => draw());
  const draw = mount(root, () => [
    element("h2", "Where things stand"),
    element("p.lede", prose`A linear bias asks how far apart two tokens are. Nothing says that distance must
      be counted in tokens.`),
    stampsStory({ example, ...saved }),
    planeStory(saved),
  ]);
}
