// The slope and its line of words alone, in a page that is not the explorer.

import { element } from "./dom.js";
import { slopeStory, STORY_SLOPE, STORY_WORDS } from "./slope_story.js";

export function startCard(root, example, style) {
  const story = slopeStory({ example, onInput() {} });
  root.replaceChildren(element("style", style), story.element);
  story.update({ words: STORY_WORDS, slope: STORY_SLOPE });
}
