// Where: order that is not counted, as time on a line and as places in a plane.

import { element, mount, prose } from "./dom.js";
import { NUM_POINTS, planeStory } from "./plane_story.js";
import { savedState, wholeUpTo, within } from "./saved.js";
import { MOST_PLACE, SPOKEN, stampsStory } from "./stamps_story.js";

const list = (text) => text.split(" ").filter(Boolean).map(Number);
const rises = (x) => x.every((place, i) => place >= (x[i - 1] ?? 0)); // from 0 on
const arePlaces = (x) => x.length === SPOKEN.length && rises(x) && x.at(-1) <= MOST_PLACE;

const WHERE_RULES = {
  slope: { start: 0.5, is: within(0, 1) },
  places: { name: "x", start: SPOKEN, is: arePlaces, read: list },
  planeSlope: { name: "plane", start: 0.5, is: within(0, 1) },
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
