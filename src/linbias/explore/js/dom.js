// Elements, and what is drawn again as a state changes. Text from users only ever becomes a text node, never
// markup.

// element("p.note", { style: { "--share": 0.5 }, on: { click } }, "words", child); attributes may be missing,
// and a child that is false, null or empty is left out. A function stands for what it gives, an attribute or
// children, at each draw() of the component in which the element is made.
export const element = (kind, ...rest) => make((name) => document.createElement(name), kind, rest);

const SVG = "http://www.w3.org/2000/svg";

export const svgElement = (kind, ...rest) => make((name) => document.createElementNS(SVG, name), kind, rest);

function make(create, kind, rest) {
  const [name, ...classes] = kind.split(".");
  const node = create(name);
  if (draws !== null) lasting.add(node);
  if (classes.length > 0) node.setAttribute("class", classes.join(" "));
  if (rest[0]?.constructor === Object) setAll(node, rest.shift());
  const fill = () => patch(node, rest.map(now));
  if (rest.some((child) => typeof child === "function")) onDraw(fill);
  else fill();
  return node;
}

export const now = (value) => (typeof value === "function" ? value() : value);

// What several attributes, or properties of style, are from now on.
export function setAll(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    const isAria = name.startsWith("aria-"); // whose false is a word
    if (typeof value === "function") {
      onDraw(() => setAll(node, { [name]: value() }));
    } else if (name === "on") {
      for (const event of Object.keys(value)) node.addEventListener(event, value[event]);
    } else if (name === "style") {
      for (const [property, to] of Object.entries(value ?? {})) node.style.setProperty(property, to);
    } else if (["value", "checked", "disabled"].includes(name)) {
      node[name] = value;
      if (name === "checked") node.toggleAttribute(name, value); // by which `become` goes
    } else if (value === null || value === undefined || (value === false && !isAria)) {
      node.removeAttribute(name);
    } else {
      setAttribute(node, name, value === true && !isAria ? "" : String(value));
    }
  }
}

// Writing what is there already would still cost the browser a layout.
function setAttribute(node, name, value) {
  if (node.getAttribute(name) !== value) node.setAttribute(name, value);
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Makes the children of a node those that are given. Nodes of a component go where they are given; of others,
// made to be drawn once, an old one like the new one in its place stays, with its listeners, and takes what
// differs.
function patch(node, given) {
  const children = given.flat(2).filter(Boolean);
  children.forEach((child, i) => {
    const [old, fresh] = [node.childNodes[i], child instanceof Node ? child : new Text(child)];
    if (!old) node.append(fresh);
    else if (old === fresh) return;
    else if (lasting.has(fresh) || old.nodeName !== fresh.nodeName) old.replaceWith(fresh);
    else if (fresh instanceof Text) setText(old, fresh.data);
    else if (!old.isEqualNode(fresh)) become(old, fresh);
  });
  while (node.childNodes.length > children.length) node.lastChild.remove();
}

function become(old, fresh) {
  const names = [...old.getAttributeNames(), ...fresh.getAttributeNames()];
  for (const name of names) {
    const value = fresh.getAttribute(name);
    if (name === "checked") old.checked = value !== null;
    if (value === null) old.removeAttribute(name);
    else setAttribute(old, name, value);
  }
  patch(old, [...fresh.childNodes]);
}

let draws = null; // what the component that is being made draws again
const lasting = new WeakSet(); // the nodes of components

export const onDraw = (callback) => draws.push(callback);

// What `build` makes; draw() draws what of it is given by functions, and calls what onDraw was given, in the
// order in which they were made.
export function component(build) {
  const [outer, own] = [draws, []];
  draws = own;
  const made = build();
  draws = outer;
  return { element: made, draw: () => own.forEach((draw) => draw()) };
}

// A function that gives what `build` makes, drawn again at each call, and made anew when key() is another one.
export function keyed(key, build) {
  let [made, known] = [null, null];
  return () => {
    const wanted = key();
    if (wanted !== known) made = component(build);
    known = wanted;
    made.draw();
    return made.element;
  };
}

// Puts the elements that `build` makes into a page, and gives the function that draws them.
export function mount(root, build) {
  const made = component(build);
  root.append(...made.element.filter(Boolean));
  made.draw();
  return made.draw;
}

// A quiet remark, and a section of a view under its title.
export const note = (...words) => element("p.note", ...words);

export const section = (title, ...children) => element("section", element("h3", title), ...children);

// Words over several lines of code as one line: prose`...`.
export const prose = (parts, ...values) =>
  parts.map((part, i) => part.replace(/ *\n */g, " ") + (values[i] ?? "")).join("");

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

// Of one among nodes that are a single stop of the tab key, at the chosen one.
export const roving = (isChosen, state = "aria-checked") => ({
  [state]: isChosen, tabindex: () => (isChosen() ? 0 : -1),
});

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
