// The page: a header with tabs and the choice of light or dark, and a view for each tab.

import { mountBias } from "./bias_view.js";
import { choice } from "./controls.js";
import { element, uniqueId } from "./dom.js";
import { mountLengths } from "./lengths_view.js";
import { mountModel } from "./model_view.js";
import { mountReach } from "./reach_view.js";
import { tabs } from "./tabs.js";

// A view is shown where the page's data have what it needs.
const VIEWS = [
  { id: "bias", label: "Bias", mount: mountBias, needs: "example" },
  { id: "reach", label: "Near to far", mount: mountReach, needs: "example" },
  { id: "lengths", label: "Lengths", mount: mountLengths, needs: "results" },
  { id: "model", label: "Model", mount: mountModel, needs: "model" },
];

const THEMES = ["auto", "light", "dark"];
const NO_THEMES = { read: () => null, write() {}, watch() {} };

// Builds the page in `root`, a `.explore` element. Views are made when they are first looked at. `memory` keeps what
// is shown as a text such as "view=bias&head=2": { read() -> text, write(text), watch(callback) }. `themes` does the same for
// the reader's choice of light or dark.
export function startPage(root, data, memory, themes = NO_THEMES) {
  const views = VIEWS.filter((view) => data[view.needs]).map((view) => ({
    ...view,
    panel: element("section", { id: uniqueId(view.id), class: "view", hidden: true }),
    text: "",
  }));
  let current = null;

  function show(id) {
    current = views.find((view) => view.id === id) ?? views[0];
    if (current.panel.childElementCount === 0) {
      const view = current;
      view.text = memory.read();
      view.mount(view.panel, data, {
        read: () => view.text,
        write(text) {
          view.text = text;
          remember();
        },
      });
    }
    bar.set(current.id);
  }

  function remember() {
    const parts = new URLSearchParams(current.text);
    parts.delete("view");
    if (current !== views[0]) parts.set("view", current.id);
    memory.write(parts.toString());
  }

  function start() {
    for (const view of views) view.panel.replaceChildren();
    show(new URLSearchParams(memory.read()).get("view"));
  }

  const bar = tabs({
    label: "Views",
    items: views,
    onChange(id) {
      show(id);
      remember();
    },
  });
  root.append(
    element("header", { class: "top" }, element("h1", {}, "linbias"), bar.element, themeChoice(root, themes)),
    element("main", {}, views.map((view) => view.panel)),
  );
  start();
  memory.watch(start);
}

function themeChoice(root, themes) {
  const control = choice({
    label: "Theme",
    options: THEMES.map((value) => ({ value, label: value })),
    value: root.dataset.theme ?? "auto",
    onChange(theme) {
      show(theme);
      themes.write(theme);
    },
  });
  control.element.classList.add("theme");

  function show(theme) {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    document.dispatchEvent(new Event("linbias-theme"));
  }

  function follow(theme) {
    if (!THEMES.includes(theme)) return;
    show(theme);
    control.set(theme);
  }

  follow(themes.read());
  themes.watch(follow);
  return control.element;
}
