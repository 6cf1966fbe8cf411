// Elements. Text from users only ever becomes a text node, never markup.

// element("p.note", { style: { "--share": 0.5 }, on: { click } }, "words", child); attributes may
// be missing, and a child that is false, null or empty is left out.
export const element = (kind, ...rest) => make((name) => document.createElement(name), kind, rest);

const SVG = "http://www.w3.org/2000/svg";

export const svgElement = (kind, ...rest) =>
  make((name) => document.createElementNS(SVG, name), kind, rest);

function make(create, kind, rest) {
  const [name, ...classes] = kind.split(".");
  const node = create(name);
  if (classes.length > 0) node.setAttribute("class", classes.join(" "));
  if (rest[0]?.constructor === Object) setAll(node, rest.shift());
  node.append(...rest.flat().filter(Boolean));
  return node;
}

// What several attributes, or properties of style, are from now on.
export function setAll(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    const isAria = name.startsWith("aria-"); // whose false is a word
    if (value === null || value === undefined || (value === false && !isAria)) continue;
    if (name === "on") {
      for (const event of Object.keys(value)) node.addEventListener(event, value[event]);
    } else if (name === "style") {
      for (const [property, to] of Object.entries(value)) node.style.setProperty(property, to);
    } else if (["value", "checked", "disabled"].includes(name)) {
      node[name] = value;
    } else {
      node.setAttribute(name, value === true && !isAria ? "" : value);
    }
  }
}

// A quiet remark, and a section of a view under its title.
export const note = (...words) => element("p.note", ...words);

export const section = (title, ...children) =>
  element("section", element("h3", title), ...children);

// Writing a text that is there already would still cost the browser a layout.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Where a key takes a cursor that stands at `here` among 0 .. last; null if it is not to walk.
export function walked(event, here, last, { down = 1, page = 10 } = {}) {
  const steps = {
    ArrowRight: 1, ArrowLeft: -1, ArrowDown: down, ArrowUp: -down,
    PageDown: page, PageUp: -page, Home: -last, End: last,
  };
  const step = steps[event.key];
  if (step === undefined) return null;
  event.preventDefault();
  return Math.min(Math.max(here + step, 0), last);
}

// Nodes that are one stop of the tab key, at the chosen one; `state` is "aria-checked" or alike.
export function rove(nodes, chosen, state) {
  nodes.forEach((node, i) =>
    setAll(node, { [state]: i === chosen, tabindex: i === chosen ? 0 : -1 }),
  );
}

let numIds = 0;

export function uniqueId(prefix) {
  numIds += 1;
  return `${prefix}-${numIds}`;
}

// A region that a screen reader speaks when its text changes; others see the same elsewhere.
export function announcer() {
  const region = element("p.unseen", { role: "status", "aria-live": "polite" });
  return { element: region, say: (text) => setText(region, text) };
}

// Calls `later` once things have been quiet for a while, however often it is asked.
export function debounce(later) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(later, 60);
  };
}
