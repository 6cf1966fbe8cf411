// The page: a header with tabs, a link to what is shown and the choice of light or dark, and a view for each tab.

import { choice, copyButton } from "./controls.js";
import { element, setAll, uniqueId } from "./dom.js";
import { mountHow } from "./how_view.js";
import { mountLengths } from "./lengths_view.js";
import { mountModel } from "./model_view.js";
import { mountReach } from "./reach_view.js";
import { mountWhere } from "./where_view.js";
import { mountWhy } from "./why_view.js";

// A view is shown where the page's data have what it needs.
const VIEWS = [
  { id: "why", label: "Why", mount: mountWhy, needs: "example" },
  { id: "how", label: "How", mount: mountHow, needs: "example" },
  { id: "where", label: "Where", mount: mountWhere, needs: "example" },
  { id: "results", label: "Results", mount: mountLengths, needs: "results" },
  { id: "cost", label: "Cost", mount: mountReach, needs: "example" },
  { id: "model", label: "Your model", mount: mountModel, needs: "model" },
];

const THEMES = ["auto", "light", "dark"];
const NO_THEMES = { read: () => null, write() {}, watch() {} };

// Builds the page in `root`, a `.explore` element. Views are made when they are first looked at. `memory` keeps what
// is shown as a text such as "view=how&head=1": { read() -> text, write(text), watch(callback) }, and link(), the address that
// brings it back, where there is one. `themes` keeps the reader's choice of light or dark likewise.
export function startPage(root, data, memory, themes = NO_THEMES) {
  const views = VIEWS.filter((view) => data[view.needs]).map((view) => ({
    ...view,
    panel: element("section", { id: uniqueId(view.id), class: `view view-${view.id}`, hidden: true }),
  }));
  const home = views.find(({ id }) => id === data.start) ?? views[0];
  let current = null;

  function show(id) {
    current = views.find((view) => view.id === id);
    if (current.panel.childElementCount === 0) {
      const view = current;
      const own = {
        read: () => view.text,
        write(text) {
          view.text = text;
          remember();
        },
      };
      view.mount(view.panel, data, own, go);
    }
    bar.set(current.id);
  }

  function go(id) {
    show(id);
    remember();
    root.scrollIntoView();
    bar.focus(id);
  }

  function remember() {
    const parts = new URLSearchParams(current.text);
    parts.delete("view");
    if (current !== home) parts.set("view", current.id);
    memory.write(parts.toString());
  }

  function start() {
    const text = memory.read();
    const wanted = new URLSearchParams(text).get("view");
    const first = views.find(({ id }) => id === wanted) ?? home;
    for (const view of views) {
      view.panel.replaceChildren();
      view.text = view === first ? text : ""; // names mean different things in different views
    }
    show(first.id);
  }

  const bar = tabs({
    label: "Views", items: views,
    onChange(id) {
      show(id);
      remember();
    },
  });
  root.append(
    element("header", { class: "top" },
      element("h1", {}, "linbias"),
      bar.element,
      element("div", { class: "tools" },
        memory.link && copyButton({ label: "Copy link", says: "Link copied", text: memory.link }),
        themeChoice(root, themes),
      ),
    ),
    element("main", {}, views.map((view) => view.panel)),
  );
  start();
  memory.watch(start);
}

function themeChoice(root, themes) {
  const control = choice({
    label: "Theme", options: THEMES.map((value) => ({ value, label: value })),
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

// Tabs: [{ id, label, panel }]. Arrow keys, Home and End walk them; only the chosen one is in the tab order.
function tabs({ label, items, onChange }) {
  const buttons = items.map((item) =>
    element(
      "button",
      {
        type: "button", role: "tab", id: uniqueId("tab"), "aria-controls": item.panel.id,
        on: { click: () => choose(item.id), keydown: (event) => walk(event, item.id) },
      },
      item.label,
    ),
  );
  items.forEach((item, i) => {
    setAll(item.panel, { role: "tabpanel", "aria-labelledby": buttons[i].id });
  });

  function show(id) {
    items.forEach((item, i) => {
      const chosen = item.id === id;
      setAll(buttons[i], { "aria-selected": String(chosen), tabindex: chosen ? 0 : -1 });
      item.panel.hidden = !chosen;
    });
  }

  function choose(id) {
    show(id);
    onChange(id);
  }

  function walk(event, id) {
    const here = items.findIndex((item) => item.id === id);
    const last = items.length - 1;
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = (to + items.length) % items.length;
    choose(items[next].id);
    buttons[next].focus();
  }

  return {
    element: element("div", { role: "tablist", "aria-label": label, class: "tabs" }, buttons),
    set: show,
    focus: (id) => buttons[items.findIndex((item) => item.id === id)].focus(),
  };
}
