// The page as a file: what it shows stands behind # in its address, as a link for others.

import { startPage } from "./page.js";

const address = {
  read: () => location.hash.slice(1),
  write(text) {
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  },
  watch: (callback) => addEventListener("hashchange", callback),
  link: () => location.href,
};

// Under the name that the documentation's own pages use, so that the page in their frame follows them.
// Browsers may keep nothing for a file.
const themes = {
  read() {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null;
    }
  },
  watch: (callback) =>
    addEventListener("storage", ({ key, newValue }) => key === "theme" && callback(newValue)),
};

const app = document.getElementById("app");
startPage(app, JSON.parse(document.getElementById("data").textContent), address, themes);

// In a frame it has no height of its own: the page around it is told how much room it takes.
if (parent !== window) {
  app.classList.add("framed");
  const tell = () => parent.postMessage({ linbiasHeight: app.offsetHeight }, "*");
  new ResizeObserver(tell).observe(app);
}
