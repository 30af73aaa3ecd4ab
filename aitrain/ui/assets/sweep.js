"use strict";
// Draws Optuna's plots, which the page holds as Plotly figures, in the colours of the page.

const figures = JSON.parse(document.getElementById("data").textContent);
const [ink, rule] = ["--ink", "--rule"].map((name) => getComputedStyle(document.documentElement).getPropertyValue(name));
document.querySelectorAll(".figure").forEach((element, index) => {
  const { data, layout } = figures[index];
  for (const name of Object.keys(layout)) if (/^[xy]axis/.test(name)) Object.assign(layout[name], { gridcolor: rule, zerolinecolor: rule, automargin: true });
  Object.assign(layout, { font: { color: ink }, paper_bgcolor: "transparent", plot_bgcolor: "transparent" });
  Plotly.newPlot(element, data, layout, { displaylogo: false, responsive: true });
});
