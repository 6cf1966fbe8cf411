// Why: what ALiBi is in a sentence, one slope to move, and what it is good for.

import { announcer, debounce, element, note } from "./dom.js";
import { lengthStory } from "./length_story.js";
import { readSaved, savedText, within } from "./saved.js";
import { grouped } from "./scales.js";
import { slopeStory, STORY_SLOPE, STORY_WORDS } from "./slope_story.js";
import { readTokens, textField } from "./tokens.js";

const LINK_NAMES = { paper: "The paper", docs: "Documentation", code: "Code" };

// go(view) leads to another view.
export function mountWhy(root, { example, results, methods, links }, memory, go) {
  const run = results?.runs[0];
  const group = run?.groups.find(({ lines }) => lines.some((line) => line.lengths.some(({ y }) => y !== null)));
  const rules = whyRules(example, group);
  const state = readSaved(memory.read(), rules);
  const story = slopeStory({ example, onInput: (slope) => change({ slope }) });
  const lengths = group && lengthStory({ group, methods, onInput: (length) => change({ length }) });
  const { field, message } = textField("words", example, (words) => {
    change({ words });
    story.update(state);
    spoken.say(story.inWords());
  });
  const spoken = announcer();
  field.value = state.words.join(" ");
  const later = debounce(() => memory.write(savedText(state, rules)), 60);

  function change(changes) {
    Object.assign(state, changes);
    later();
  }

  root.append(
    element("h2", {}, "Attention with linear biases"),
    element("div", { class: "opening" },
      element("p", { class: "lede" },
        element("strong", {}, "ALiBi"),
        " lowers each attention score by a slope times the distance between the two words, and tells a model nothing else about order.",
      ),
      element("p", { class: "lede" },
        "Most models break on texts longer than those they were trained on. A distance means the same at any length, so a model with ALiBi goes on. ",
        element("span", { class: "links" },
          Object.entries(links).map(([name, href]) => element("a", { href, target: "_top", rel: "noreferrer" }, LINK_NAMES[name])),
        ),
      ),
    ),
    story.element,
    spoken.element,
    element("details", {},
      element("summary", {}, "Change the words"),
      element("div", { class: "control" }, element("label", { class: "label", for: field.id }, `Up to ${example.max_tokens} words; the last one looks back`), field, message),
      note(
        "The contents of words are made from their letters: no model was trained here. ",
        element("button", { type: "button", class: "as-link", on: { click: () => go("how") } }, "How it works, number by number"),
      ),
    ),
  );
  story.update(state);
  if (!lengths) return;
  root.append(
    element("section", { class: "pay-off" },
      element("h2", {}, "Train short, test long"),
      element("p", { class: "lede" },
        `Language models that differ only in how they are told about order, all trained on ${grouped(group.train_length)} tokens at a time. `,
        element("button", { type: "button", class: "as-link", on: { click: () => go("results") } }, "How they were made"),
      ),
      lengths.element,
    ),
  );
  lengths.update(state.length);
}

// The words, the slope and the length that the view opens with, unless a link says others.
function whyRules(example, group) {
  const lengths = group?.test_lengths ?? [];
  const read = (text) => {
    try {
      return readTokens(text, example).tokens;
    } catch {
      return null; // no words
    }
  };
  return {
    words: { start: STORY_WORDS, is: () => true, read },
    slope: { start: STORY_SLOPE, is: within(0, 1) },
    length: { start: group?.train_length ?? 0, is: within(lengths[0], lengths.at(-1)) },
  };
}
