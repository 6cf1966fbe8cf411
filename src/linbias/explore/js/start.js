// The page as a file: its data stand in it, what it shows stands behind # in its address, so that a link shows what
// its sender saw.

import { startPage } from "./page.js";

const address = {
  read: () => location.hash.slice(1),
  write(text) {
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  },
  watch: (callback) => addEventListener("hashchange", callback),
};

startPage(document.getElementById("app"), JSON.parse(document.getElementById("data").textContent), address);
