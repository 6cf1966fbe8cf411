// The page inside a notebook: the same views in a shadow root, where the notebook's style does not reach them.

import { element } from "./dom.js";
import { startPage } from "./page.js";

// What anywidget calls: `model` holds the Python side's data, style and state.
export function renderWidget({ model, el }) {
  const app = element("div", { class: "explore notebook" });
  const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
  if (jpThemeLight === "false" || vscodeThemeKind === "vscode-dark") app.dataset.theme = "dark";
  // Keys typed here are no shortcuts of the notebook: JupyterLab, which sees them first, asks for this attribute; others
  // listen further out.
  el.dataset.lmSuppressShortcuts = "true";
  el.addEventListener("keydown", (event) => event.stopPropagation());
  const root = el.attachShadow({ mode: "open" });
  root.append(element("style", {}, model.get("style")), app);
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
  });
}
