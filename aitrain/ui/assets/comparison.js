"use strict";
// The filters of the cases of each comparison: their outcome, a text, and how many are shown.

const AT_FIRST = 30;

function filter(section) {
  const cases = [...section.querySelectorAll(".compared-case")];
  const buttons = [...section.querySelectorAll("[data-outcome]")].filter((one) => one.tagName === "BUTTON");
  const [search, more] = [section.querySelector("input"), section.querySelector(".more")];
  let outcome = buttons[0]?.dataset.outcome;
  function show(most) {
    const text = search.value.toLowerCase();
    const found = cases.filter((one) => one.dataset.outcome === outcome && one.firstElementChild.textContent.toLowerCase().includes(text));
    cases.forEach((one) => (one.hidden = true));
    found.slice(0, most).forEach((one) => (one.hidden = false));
    buttons.forEach((button) => button.setAttribute("aria-pressed", String(button.dataset.outcome === outcome)));
    more.hidden = found.length <= most;
    more.textContent = `Show more of ${count(found.length)} cases`;
    more.onclick = () => show(4 * most);
  }
  search.addEventListener("input", () => show(AT_FIRST));
  for (const button of buttons)
    button.addEventListener("click", () => {
      outcome = button.dataset.outcome;
      show(AT_FIRST);
    });
  show(AT_FIRST);
}

document.getElementById("app").append(el("div", { class: "top" }, el("div", { class: "bar" }, brand(), themeButton(() => {}))));
document.querySelectorAll(".comparison").forEach(filter);
