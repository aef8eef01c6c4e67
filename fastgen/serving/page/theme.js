// Light or dark: the system's, until it is chosen here. Runs before the page is drawn, so that it does not flash.
"use strict";

const THEME = "fastgen-theme";

function stored(read) {
  try {
    return read(localStorage);
  } catch {
    return null; // no storage is allowed here: the choice lasts as long as the page
  }
}

const chosen = stored((storage) => storage.getItem(THEME));
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;

document.addEventListener("DOMContentLoaded", () => {
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const now = root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    stored((storage) => storage.setItem(THEME, root.dataset.theme));
    document.dispatchEvent(new Event("themechange"));
  });
});
