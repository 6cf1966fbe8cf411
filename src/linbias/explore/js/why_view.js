// Why: what ALiBi is in a sentence, one slope to move, and what it is good for.

import { textField, tokensOrNull } from "./controls.js";
import { announcer, element, mount, note, prose } from "./dom.js";
import { lengthStory } from "./length_story.js";
import { grouped } from "./numbers.js";
import { savedState, within } from "./saved.js";
import { slopeStory, STORY_SLOPE, STORY_WORDS } from "./slope_story.js";

const LINK_NAMES = { paper: "The paper", docs: "Documentation" };

export function mountWhy(root, { example, results, methods, links }, memory, go) {
  const hasLosses = ({ lines }) => lines.some((line) => line.lengths.some(({ y }) => y !== null));
  const group = results?.runs[0]?.groups.find(hasLosses);
  const { state, change, bind } = savedState(memory, whyRules(example, group), () => draw());
  const spoken = announcer();
  const link = ([name, href]) => element("a", { href, target: "_top", rel: "noreferrer" }, LINK_NAMES[name]);
  const leadsTo = (id, says) => element("button.as-link", { on: { click: () => go(id) } }, says);

  const payOff = () =>
    element("section.pay-off",
      element("h2", "Train short, test long"),
      element("p.lede",
        prose`Language models that differ only in how they are told about order, all trained on
          ${grouped(group.train_length)} tokens at a time. `,
        leadsTo("results", "How they were made"),
      ),
      lengthStory({ group, methods, state, ...bind("length") }),
    );

  const draw = mount(root, () => {
    const story = slopeStory({ example, state, ...bind("slope") });
    const text = textField({
      id: "words", example, label: `Up to ${example.max_tokens} words; the last one looks back`,
      value: () => state.words,
      onTokens(words) {
        change({ words });
        spoken.say(story.inWords());
      },
    });
    return [
      element("h2", "Attention with linear biases"),
      element("div.opening",
        element("p.lede",
          element("strong", "ALiBi"),
          prose` lowers each attention score by a slope times the distance between the two words, and tells a
            model nothing else about order.`,
        ),
        element("p.lede",
          prose`Most models break on texts longer than those they were trained on. A distance means the same
            at any length, so a model with ALiBi goes on. `,
          element("span.links", Object.entries(links).map(link)),
        ),
      ),
      story.element,
      spoken.element,
      element("details",
        element("summary", "Change the words"),
        text,
        note(
          "The contents of words are made from their letters: no model was trained here. ",
          leadsTo("how", "How it works, number by number"),
        ),
      ),
      group && payOff(),
    ];
  });
}

function whyRules(example, group) {
  const lengths = group?.test_lengths ?? [];
  return {
    words: { start: STORY_WORDS, is: () => true, read: (text) => tokensOrNull(text, example) },
    slope: { start: STORY_SLOPE, is: within(0, 1) },
    length: { start: group?.train_length ?? 0, is: within(lengths[0], lengths.at(-1)) },
  };
}
