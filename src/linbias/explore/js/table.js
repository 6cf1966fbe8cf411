// A table whose cells change in place: the browser lays out anew only where a text is another one.

import { element, setText } from "./dom.js";

// A row is { head, cells } of texts. A wide table scrolls in itself, and keys reach it for that.
export function dataTable({ caption, corner = "" }) {
  const heading = (scope, text = "") => element("th", { scope, dir: "auto" }, text);
  const head = element("tr");
  const body = element("tbody");
  const title = element("span", caption); // which stays in sight where the table scrolls
  const table = element("table", element("caption", title), element("thead", head), body);
  const attributes = { role: "region", tabindex: 0, "aria-label": caption };
  const region = element("div.scroll", attributes, table);
  let shape = "";

  function build(columns, rows) {
    head.replaceChildren(heading("col", corner), ...columns.map(() => heading("col")));
    body.replaceChildren(
      ...rows.map(({ cells }) => element("tr", heading("row"), cells.map(() => element("td")))),
    );
  }

  return {
    element: region,
    setCaption(text) {
      setText(title, text);
      region.ariaLabel = text;
    },
    update(columns, rows, chosen = -1) {
      const wanted = `${columns.length} ${rows.map((row) => row.cells.length)}`;
      if (wanted !== shape) build(columns, rows);
      shape = wanted;
      columns.forEach((text, i) => setText(head.children[i + 1], text));
      rows.forEach((row, i) => {
        const line = body.children[i];
        [row.head, ...row.cells].forEach((text, j) => setText(line.children[j], text));
        line.classList.toggle("chosen", i === chosen);
      });
    },
  };
}
