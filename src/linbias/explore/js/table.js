// A table whose cells change in place: the browser lays out anew only where a text is another one.

import { element, onDraw, setText } from "./dom.js";

// of() gives { caption, columns, rows, chosen }, texts; a row is { head, cells }. A wide table scrolls in
// itself, and keys reach it for that.
export function dataTable(of, corner = "") {
  const heading = (scope, text = "") => element("th", { scope, dir: "auto" }, text);
  const head = element("tr");
  const body = element("tbody");
  const title = element("span"); // which stays in sight where the table scrolls
  let shape = "";

  function build(columns, rows) {
    head.replaceChildren(heading("col", corner), ...columns.map(() => heading("col")));
    body.replaceChildren(
      ...rows.map(({ cells }) => element("tr", heading("row"), cells.map(() => element("td")))),
    );
  }

  const table = element("table", element("caption", title), element("thead", head), body);
  const region = element("div.scroll", { role: "region", tabindex: 0 }, table);
  onDraw(() => {
    const { caption, columns, rows, chosen = -1 } = of();
    const wanted = `${columns.length} ${rows.map((row) => row.cells.length)}`;
    if (wanted !== shape) build(columns, rows);
    shape = wanted;
    setText(title, caption);
    region.ariaLabel = caption;
    columns.forEach((text, i) => setText(head.children[i + 1], text));
    rows.forEach((row, i) => {
      const line = body.children[i];
      [row.head, ...row.cells].forEach((text, j) => setText(line.children[j], text));
      line.classList.toggle("chosen", i === chosen);
    });
  });
  return region;
}
