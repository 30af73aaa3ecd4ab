"use strict";
// Light and dark: the button in the bar of every page.

const THEMES = { system: "Auto", light: "Light", dark: "Dark" };
const darkness = matchMedia("(prefers-color-scheme: dark)");
let theme = "system";
try {
  theme = localStorage.getItem("aitrain-theme") ?? theme;
} catch {
  // a page from a file may have no storage: it lasts as long as the page then
}

function applyTheme() {
  document.documentElement.dataset.theme = theme in THEMES && theme !== "system" ? theme : darkness.matches ? "dark" : "light";
}

function themeButton(onchange) {
  const button = el("button", { type: "button", class: "quiet theme", onclick: () => next() });
  const show = () => {
    applyTheme();
    button.textContent = THEMES[theme] ?? THEMES.system;
    button.setAttribute("aria-label", `Colours: ${button.textContent}. Change`);
    onchange();
  };
  function next() {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    try {
      localStorage.setItem("aitrain-theme", theme);
    } finally {
      show();
    }
  }
  darkness.addEventListener("change", show);
  show();
  return button;
}

applyTheme();
