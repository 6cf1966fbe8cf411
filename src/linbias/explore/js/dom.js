// Elements. Text from users only ever becomes a text node, never markup.


// element("p", { class: "note", style: { "--share": 0.5 }, on: { click } }, "words", child)
export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svgElement(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

// A quiet remark, and a section of a view under its title.
export const note = (...words) => element("p", { class: "note" }, ...words);

export const section = (title, ...children) => element("section", {}, element("h3", {}, title), ...children);

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    } else if (name === "style") {
      for (const [property, to] of Object.entries(value)) made.style.setProperty(property, to);
    } else if (name === "value" || name === "checked" || name === "disabled") {
      made[name] = value;
    } else {
      made.setAttribute(name, value === true ? "" : value);
    }
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// What several attributes, or properties of style, are from now on.
export const setAll = (node, attributes) => fill(node, attributes, []);

// Writing a text that is there already would still cost the browser a layout.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Where a key takes a cursor that stands at `here` among 0 .. last; null if the key is none of those that walk.
export function walked(event, here, last, { down = 1 } = {}) {
  const steps = { ArrowRight: 1, ArrowDown: down, ArrowLeft: -1, ArrowUp: -down, PageDown: 10, PageUp: -10, Home: -last, End: last };
  const step = steps[event.key];
  if (step === undefined) return null;
  event.preventDefault();
  return Math.min(Math.max(here + step, 0), last);
}

let numIds = 0;

export function uniqueId(prefix) {
  numIds += 1;
  return `${prefix}-${numIds}`;
}

// A region that a screen reader speaks when its text changes; sighted readers see the same elsewhere.
export function announcer() {
  const region = element("p", { class: "unseen", role: "status", "aria-live": "polite" });
  return { element: region, say: (text) => setText(region, text) };
}

// Calls `later` once things have been quiet for a while, however often it is asked.
export function debounce(later, milliseconds) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(later, milliseconds);
  };
}
