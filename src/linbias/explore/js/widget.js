// The page inside a notebook, in a shadow root, where the notebook's style does not reach it.

import { element } from "./dom.js";
import { startPage } from "./page.js";

// Light or dark as JupyterLab and VS Code say on their page; elsewhere as the system does.
const NOTEBOOK_THEMES = {
  true: "light", false: "dark", "vscode-light": "light", "vscode-dark": "dark",
  "vscode-high-contrast-light": "light", "vscode-high-contrast": "dark",
};
const notebookThemes = {
  read() {
    const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
    return NOTEBOOK_THEMES[jpThemeLight ?? vscodeThemeKind] ?? "auto";
  },
  watch(callback) {
    const attributeFilter = ["data-jp-theme-light", "data-vscode-theme-kind"];
    new MutationObserver(() => callback(this.read())).observe(document.body, { attributeFilter });
  },
};

// What anywidget calls: `model` holds the Python side's data, stylesheet and state.
export function renderWidget({ model, el }) {
  const app = element("div.explore.notebook", { tabindex: -1 });
  // Keys typed here are no shortcuts of the notebook: JupyterLab, which sees them first, asks for this
  // attribute; others listen further out. The focus stays here wherever one clicks, on words or a button that
  // is disabled then.
  el.dataset.lmSuppressShortcuts = "true";
  el.addEventListener("keydown", (event) => event.stopPropagation());
  const root = el.attachShadow({ mode: "open" });
  app.addEventListener("click", () => {
    if (root.activeElement?.matches(":disabled") ?? true) app.focus({ preventScroll: true });
  });
  root.append(element("style", model.get("stylesheet")), app);
  let written = null;
  startPage(app, JSON.parse(model.get("data")), {
    read: () => model.get("state"),
    write(text) {
      written = text;
      model.set("state", text);
      model.save_changes();
    },
    watch(callback) {
      model.on("change:state", () => model.get("state") !== written && callback());
    },
  }, notebookThemes);
}
