"use strict";
// Draws Optuna's plots, which the page holds as Plotly figures.

const figures = JSON.parse(document.getElementById("data").textContent);
document.querySelectorAll(".figure").forEach((element, index) => {
  Plotly.newPlot(element, figures[index].data, figures[index].layout, { displaylogo: false, responsive: true });
});
