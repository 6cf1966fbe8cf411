// A table whose cells change in place: the browser lays it out again only where a text is another one.

import { element, setText } from "./dom.js";

// dataTable({ caption }) -> { element, update(columns, rows) }; columns are headings, a row is { head, cells }
// of texts, and `chosen` marks one row. A wide table scrolls in itself and can be reached by keyboard for that.
export function dataTable({ caption, corner = "" }) {
  const head = element("tr");
  const body = element("tbody");
  const title = element("span", {}, caption); // which stays in sight where the table scrolls
  const table = element("table", {}, element("caption", {}, title), element("thead", {}, head), body);
  let shape = "";

  function build(columns, rows) {
    head.replaceChildren(
      element("th", { scope: "col", dir: "auto" }, corner),
      ...columns.map(() => element("th", { scope: "col", dir: "auto" })),
    );
    body.replaceChildren(
      ...rows.map((row) =>
        element("tr", {}, element("th", { scope: "row", dir: "auto" }), row.cells.map(() => element("td"))),
      ),
    );
  }

  const region = element("div", { class: "scroll", role: "region", tabindex: "0", "aria-label": caption }, table);
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
        const [first, ...cells] = body.children[i].children;
        setText(first, row.head);
        row.cells.forEach((text, j) => setText(cells[j], text));
        body.children[i].classList.toggle("chosen", i === chosen);
      });
    },
  };
}
