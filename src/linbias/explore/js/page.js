// The page: tabs, a link to what is shown, the choice of light or dark, and a view for each tab.

import { choice, copyButton } from "./controls.js";
import { element, rove, setAll, uniqueId } from "./dom.js";
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

// Builds the page in `root`; views are made when they are first looked at. `memory` keeps what is
// shown as a text such as "view=how&head=1", and may have the link() that brings it back; `themes`
// keeps the reader's choice of light or dark likewise.
export function startPage(root, data, memory, themes) {
  const views = VIEWS.filter(({ needs }) => data[needs]).map((view) => {
    const attributes = { id: uniqueId(view.id), hidden: true };
    return { ...view, panel: element(`section.view.view-${view.id}`, attributes) };
  });
  const home = views.find(({ id }) => id === data.start) ?? views[0];
  let current = home;

  function show(view) {
    current = view;
    if (view.panel.childElementCount === 0) {
      const write = (text) => {
        view.text = text;
        remember();
      };
      view.mount(view.panel, data, { read: () => view.text, write }, go);
    }
    bar.show(view);
  }

  function choose(view) {
    show(view);
    remember();
  }

  function go(id) {
    const view = views.find((one) => one.id === id);
    choose(view);
    root.scrollIntoView();
    bar.focus(view);
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
    show(first);
  }

  const bar = tabs(views, choose);
  root.append(
    element("header.top",
      element("h1", "linbias"),
      bar.element,
      element("div.tools",
        memory.link && copyButton("link", memory.link), themeChoice(root, themes),
      ),
    ),
    element("main", views.map((view) => view.panel)),
  );
  start();
  memory.watch(start);
}

function themeChoice(root, themes) {
  const control = choice({
    label: "Theme", options: THEMES, value: "auto",
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

// Tabs that arrow keys, Home and End walk; onChange(view) is asked to show another one.
function tabs(views, onChange) {
  const buttons = views.map((view) =>
    element("button", {
      role: "tab", id: uniqueId("tab"), "aria-controls": view.panel.id,
      on: { click: () => onChange(view), keydown: (event) => walk(event, views.indexOf(view)) },
    }, view.label),
  );
  views.forEach(({ panel }, i) => {
    setAll(panel, { role: "tabpanel", "aria-labelledby": buttons[i].id });
  });

  function walk(event, here) {
    const last = views.length - 1;
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = (to + views.length) % views.length;
    onChange(views[next]);
    buttons[next].focus();
  }

  return {
    element: element("div.tabs", { role: "tablist", "aria-label": "Views" }, buttons),
    show(view) {
      rove(buttons, views.indexOf(view), "aria-selected");
      for (const one of views) one.panel.hidden = one !== view;
    },
    focus: (view) => buttons[views.indexOf(view)].focus(),
  };
}
