// The page as a file: its data stand in it, what it shows stands behind # in its address, so that a link shows what
// its sender saw.

import { startPage } from "./page.js";

const address = {
  read: () => location.hash.slice(1),
  write(text) {
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  },
  watch: (callback) => addEventListener("hashchange", callback),
  link: () => location.href,
};

// Under the name that the documentation's own pages use, so that the page in their frame follows them. Browsers may
// keep nothing for a file.
const themes = {
  read() {
    try {
      return localStorage.getItem("theme");
    } catch {
      return null;
    }
  },
  write(theme) {
    try {
      localStorage.setItem("theme", theme);
    } catch {
      // it holds until the page is left
    }
  },
  watch: (callback) => addEventListener("storage", (event) => event.key === "theme" && callback(event.newValue)),
};

const app = document.getElementById("app");
startPage(app, JSON.parse(document.getElementById("data").textContent), address, themes);

// In a frame it has no height of its own: the page around it is told how much room all of it takes.
if (parent !== window) {
  app.classList.add("framed");
  new ResizeObserver(() => parent.postMessage({ linbiasHeight: app.offsetHeight }, "*")).observe(app);
}
