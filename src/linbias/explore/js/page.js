// The page: a header with tabs and the choice of light or dark, and a view for each tab.

import { mountBias } from "./bias_view.js";
import { choice, tabs } from "./controls.js";
import { element, uniqueId } from "./dom.js";

const VIEWS = [{ id: "bias", label: "Bias", mount: mountBias, needs: "example" }];

// Builds the page in `root`, a `.explore` element. Views are made when they are first looked at. `memory` keeps
// what they show: { read() -> text, write(text) }.
export function startPage(root, data, memory) {
  const views = VIEWS.filter((view) => data[view.needs]).map((view) => ({
    ...view,
    panel: element("section", { id: uniqueId(view.id), class: "view", hidden: true }),
  }));

  function show(id) {
    const view = views.find((one) => one.id === id) ?? views[0];
    if (view.panel.childElementCount === 0) view.mount(view.panel, data, memory);
    bar.set(view.id);
  }

  const bar = tabs({ label: "Views", items: views, onChange: show });
  root.append(
    element("header", { class: "top" }, element("h1", {}, "linbias"), bar.element, themeChoice(root)),
    element("main", {}, views.map((view) => view.panel)),
  );
  show("bias");
}

function themeChoice(root) {
  const control = choice({
    label: "Theme",
    options: ["auto", "light", "dark"].map((value) => ({ value, label: value })),
    value: "auto",
    onChange(theme) {
      if (theme === "auto") delete root.dataset.theme;
      else root.dataset.theme = theme;
      document.dispatchEvent(new Event("linbias-theme"));
    },
  });
  control.element.classList.add("theme");
  return control.element;
}

// The state stands behind # in the page's address, so that a link shows what its sender saw.
const address = {
  read: () => location.hash.slice(1),
  write: (text) => history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search),
};

const app = document.getElementById("app");
if (app) startPage(app, JSON.parse(document.getElementById("data").textContent), address);
