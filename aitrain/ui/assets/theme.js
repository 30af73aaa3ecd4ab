"use strict";
// Light and dark: the button in the bar of every page.

const THEMES = ["system", "light", "dark"];
const darkness = matchMedia("(prefers-color-scheme: dark)");

function storedTheme() {
  try {
    const stored = localStorage.getItem("aitrain-theme");
    return THEMES.includes(stored) ? stored : "system";
  } catch {
    return "system"; // a page from a file may have no storage
  }
}

function applyTheme(theme) {
  document.documentElement.dataset.theme = theme === "system" ? (darkness.matches ? "dark" : "light") : theme;
}

function themeButton(onchange) {
  let theme = storedTheme();
  const button = el("button", { type: "button", class: "quiet theme", onclick: () => next() });
  const show = () => {
    applyTheme(theme);
    button.textContent = { system: "Auto", light: "Light", dark: "Dark" }[theme];
    button.setAttribute("aria-label", `Colours: ${theme}. Change`);
  };
  function next() {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    try {
      localStorage.setItem("aitrain-theme", theme);
    } catch {
      // it lasts as long as the page then
    }
    show();
    onchange();
  }
  darkness.addEventListener("change", () => {
    show();
    onchange();
  });
  show();
  return button;
}

if (!document.getElementById("app")) applyTheme(storedTheme()); // a page without a bar
