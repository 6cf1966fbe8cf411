// Why: what ALiBi is in a sentence, one slope to move, and what it is good for.

import { announcer, debounce, element, note } from "./dom.js";
import { lengthStory } from "./length_story.js";
import { grouped } from "./scales.js";
import { STORY_SLOPE, STORY_WORDS, slopeStory } from "./slope_story.js";
import { textField } from "./text_field.js";
import { readTokens } from "./tokens.js";

const LINK_NAMES = { paper: "The paper", docs: "Documentation", code: "Code" };

// go(view) leads to another view.
export function mountWhy(root, { example, results, methods, links }, memory, go) {
  const run = results?.runs[0];
  const group = run?.groups.find(({ lines }) => lines.some((line) => line.lengths.some(({ y }) => y !== null)));
  let state = readWhy(memory.read(), example, group);
  const story = slopeStory({ example, onInput: (slope) => change({ slope }) });
  const lengths = group && lengthStory({ group, methods, onInput: (length) => change({ length }) });
  const { field, message } = textField("words", example, (words) => {
    change({ words });
    story.update(state);
    spoken.say(story.inWords());
  });
  const spoken = announcer();
  field.value = state.words.join(" ");
  const later = debounce(() => memory.write(whyText(state, group)), 60);

  function change(changes) {
    state = { ...state, ...changes };
    later();
  }

  root.append(
    element("h2", {}, "Attention with linear biases"),
    element(
      "div",
      { class: "opening" },
      element(
        "p",
        { class: "lede" },
        element("strong", {}, "ALiBi"),
        " lowers each attention score by a slope times the distance between the two words, and tells a model nothing else about order.",
      ),
      element(
        "p",
        { class: "lede" },
        "Most models break on texts longer than those they were trained on. A distance means the same at any length, so a model with ALiBi goes on. ",
        element(
          "span",
          { class: "links" },
          Object.entries(links).map(([name, href]) => element("a", { href, target: "_top", rel: "noreferrer" }, LINK_NAMES[name])),
        ),
      ),
    ),
    story.element,
    spoken.element,
    element(
      "details",
      {},
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
    element(
      "section",
      { class: "pay-off" },
      element("h2", {}, "Train short, test long"),
      element(
        "p",
        { class: "lede" },
        `Language models that differ only in how they are told about order, all trained on ${grouped(group.train_length)} tokens at a time. `,
        element("button", { type: "button", class: "as-link", on: { click: () => go("results") } }, "How they were made"),
      ),
      lengths.element,
    ),
  );
  lengths.update(state.length);
}

function startOfWhy(group) {
  return { words: STORY_WORDS, slope: STORY_SLOPE, length: group?.train_length ?? 0 };
}

function whyText(state, group) {
  const start = startOfWhy(group);
  const parts = new URLSearchParams();
  const written = { ...state, words: state.words.join(" ") };
  for (const [name, usual] of Object.entries({ ...start, words: start.words.join(" ") })) {
    if (written[name] !== usual) parts.set(name, written[name]);
  }
  return parts.toString();
}

// What makes no sense is left at the start.
function readWhy(text, example, group) {
  const parts = new URLSearchParams(text);
  const state = startOfWhy(group);
  const number = (name, low, high) => {
    const found = Number(parts.get(name) || NaN);
    if (low <= found && found <= high) state[name] = found;
  };
  number("slope", 0, 1);
  if (group) number("length", group.test_lengths[0], group.test_lengths.at(-1));
  try {
    if (parts.has("words")) state.words = readTokens(parts.get("words"), example).tokens;
  } catch {
    // no words
  }
  return state;
}
