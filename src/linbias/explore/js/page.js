// The page: tabs, a link to what is shown, and a view for each tab.

import { copyButton } from "./controls.js";
import { component, element, roving, uniqueId } from "./dom.js";
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

// Builds the page in `root`; views are made when they are first looked at. `memory` keeps what is shown as a
// text such as "view=how&head=1", and may have the link() that brings it back; `themes` says
// whether the page around it is light or dark.
export function startPage(root, data, memory, themes) {
  const views = VIEWS.filter(({ needs }) => data[needs]).map((view) => ({ ...view }));
  const home = views.find(({ id }) => id === data.start) ?? views[0];
  let current = home;

  const page = component(() => {
    for (const view of views) {
      const [tab, panel] = [uniqueId("tab"), uniqueId(view.id)];
      const isShown = () => view === current;
      view.tab = element("button",
        {
          role: "tab", id: tab, "aria-controls": panel, ...roving(isShown, "aria-selected"),
          on: { click: () => choose(view), keydown: walk },
        },
        view.label,
      );
      view.panel = element(`section.view.view-${view.id}`, {
        role: "tabpanel", id: panel, "aria-labelledby": tab, hidden: () => !isShown(),
      });
    }
    const bar = { role: "tablist", "aria-label": "Views" };
    return [
      element("header.top",
        element("h1", "linbias"),
        element("div.tabs", bar, views.map(({ tab }) => tab)),
        memory.link && element("div.tools", copyButton("link", memory.link)),
      ),
      element("main", views.map(({ panel }) => panel)),
    ];
  });

  function show(view) {
    current = view;
    if (view.panel.childElementCount === 0) {
      const write = (text) => {
        view.text = text;
        remember();
      };
      view.mount(view.panel, data, { read: () => view.text, write }, go);
    }
    page.draw();
  }

  function choose(view) {
    show(view);
    remember();
  }

  function go(id) {
    choose(views.find((one) => one.id === id));
    root.scrollIntoView();
    current.tab.focus();
  }

  function walk(event) {
    const [here, last] = [views.indexOf(current), views.length - 1];
    const to = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose(views.at(to % views.length)); // -1: the last one
    current.tab.focus();
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

  function follow(theme) {
    if (!THEMES.includes(theme)) return;
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    document.dispatchEvent(new Event("linbias-theme"));
  }

  root.append(...page.element);
  follow(themes.read());
  themes.watch(follow);
  start();
  memory.watch(start);
}
