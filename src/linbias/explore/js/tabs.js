import { element, uniqueId } from "./dom.js";

// Tabs: [{ id, label, panel }]. Arrow keys, Home and End walk them; only the chosen one is in the tab order.
export function tabs({ label, items, onChange }) {
  const buttons = items.map((item) =>
    element(
      "button",
      {
        type: "button",
        role: "tab",
        id: uniqueId("tab"),
        "aria-controls": item.panel.id,
        on: { click: () => choose(item.id), keydown: (event) => walk(event, item.id) },
      },
      item.label,
    ),
  );
  items.forEach((item, i) => {
    item.panel.setAttribute("role", "tabpanel");
    item.panel.setAttribute("aria-labelledby", buttons[i].id);
  });

  function show(id) {
    items.forEach((item, i) => {
      const chosen = item.id === id;
      buttons[i].setAttribute("aria-selected", String(chosen));
      buttons[i].tabIndex = chosen ? 0 : -1;
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
