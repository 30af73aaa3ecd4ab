"use strict";
// The page of a sweep: what the trials had as values, as parallel coordinates, and the same as a table.

const SVG = "http://www.w3.org/2000/svg";
const NARROW = 640; // below it the axes lie one below the other
const SHORT = 14; // characters of a cell that is not broken into lines
const WORST_TINT = 12; // percent of the accent colour in the line of the worst trial

/** An SVG element; a text is set as text. */
function shape(tag, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

/** Where a trial is on an axis, from 0 to 1; null where it has no value. */
function placeOn(axis, value, text) {
  if (axis.choices) return axis.choices.length < 2 ? 0.5 : axis.choices.indexOf(text) / (axis.choices.length - 1);
  if (value === null || value === undefined) return null;
  const scale = axis.log ? Math.log : Number;
  return axis.low === axis.high ? 0.5 : (scale(value) - scale(axis.low)) / (scale(axis.high) - scale(axis.low));
}

/** Marks of an axis: `[place, text]`. */
function marks(axis) {
  if (axis.choices) return axis.choices.map((text) => [placeOn(axis, null, text), text]);
  if (axis.low === axis.high) return [[0.5, short(axis.low)]];
  const middle = axis.log ? Math.sqrt(axis.low * axis.high) : (axis.low + axis.high) / 2;
  return [axis.low, middle, axis.high].map((value) => [placeOn(axis, value), tick(Number(value.toPrecision(3)))]);
}

function shortened(text, most) {
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}

class SweepPage {
  constructor(data) {
    this.data = data;
    const scores = data.trials.map((trial) => trial.score).filter((value) => value !== null);
    this.worst = data.direction === "minimize" ? Math.max(...scores) : Math.min(...scores);
    this.top = data.direction === "minimize" ? Math.min(...scores) : Math.max(...scores);
    this.axes = [...data.axes, ...(scores.length ? [{ name: "score", low: Math.min(...scores), high: Math.max(...scores) }] : [])];
    this.lines = new Map();
    this.rows = new Map();
    this.chart = el("div", { class: "parallel" });
    this.main = el("main", { id: "main" }, this.head(), this.results(), this.parallel(), this.table(), this.fixed());
    const bar = el("div", { class: "bar" }, brand(), el("nav", { "aria-label": "Sections" }), themeButton(() => {}));
    document.getElementById("app").append(
      el("header", { class: "top" }, bar),
      this.main,
      el("footer", {}, "Made by aitrain. Nothing on this page asks any other machine for anything."),
    );
    bar.querySelector("nav").append(
      ...[...this.main.querySelectorAll("section[id]")].map((part) => el("a", { href: `#${part.id}` }, part.querySelector("h2").textContent)),
    );
    document.title = `${data.name} – aitrain sweep`;
    new ResizeObserver(() => this.draw()).observe(this.chart);
  }

  head() {
    const { data } = this;
    const ended = ["finished", "pruned", "failed", "stopped"].filter((name) => data.counts[name]).map((name) => `${data.counts[name]} ${name}`);
    return el(
      "div",
      { class: "run-head" },
      el("h1", {}, isolated(data.name), " ", el("span", { class: `pill ${data.status}` }, data.status)),
      el("p", { class: "lead" }, `${plural(data.planned, "trial")}${ended.length ? `: ${ended.join(", ")}` : ""}. Sampler ${data.sampler}, pruner ${data.pruner}.`),
    );
  }

  results() {
    const best = this.data.trials.find((trial) => trial.number === this.data.best);
    const { commands } = this.data;
    const command = (label, text) => [el("p", { class: "hint" }, label), el("pre", { class: "command" }, text)];
    return section(
      "best", "Best trial", null,
      best
        ? el(
          "div", { class: "card" },
          el("p", { class: "best-score" }, el("b", {}, score(best.score)), ` ${this.interval(best)} held-out score after training (${this.data.objective})`),
          el("dl", { class: "facts" }, el("div", { class: "fact" }, el("dt", {}, "trial"), el("dd", {}, this.link(best))), best.shown.map((text, index) => this.fact(index, text))),
          el("p", { class: "hint" }, this.data.note),
          el("pre", { class: "command" }, commands.confirm),
          command("Train longer with its options:", commands.train_longer),
        )
        : el("div", { class: "card" }, note("No trial has a score yet.")),
    );
  }

  fact(index, text) {
    return el("div", { class: "fact" }, el("dt", {}, isolated(this.data.axes[index].name)), el("dd", {}, isolated(text)));
  }

  interval(trial) {
    return trial.low === null || trial.low === undefined ? "" : `[${score(trial.low)}, ${score(trial.high)}]`;
  }

  link(trial) {
    return el("a", { href: this.data.link.replaceAll("{name}", encodeURIComponent(trial.name)) }, trial.name);
  }

  // -- parallel coordinates

  parallel() {
    const hint = "One line a trial, through its values to its score; the stronger the colour, the better. Dashed: without a score. Point at a line, or at a row of the table, to see it alone.";
    return section("parallel", "Values and scores", hint, el("div", { class: "card" }, this.chart));
  }

  draw() {
    const width = Math.floor(this.chart.clientWidth);
    if (width === 0 || width === this.width || !this.axes.length) return;
    this.width = width;
    const isNarrow = width < NARROW;
    const count = this.axes.length;
    const box = isNarrow ? { left: 26, right: 26, top: 24, bottom: 34, height: 66 * count } : { left: 56, right: 56, top: 34, bottom: 16, height: 380 };
    const along = (index) => {
      const share = count < 2 ? 0.5 : index / (count - 1);
      return isNarrow ? box.top + share * (box.height - box.top - box.bottom) : box.left + share * (width - box.left - box.right);
    };
    const across = (place) => (isNarrow ? box.left + place * (width - box.left - box.right) : box.height - box.bottom - place * (box.height - box.top - box.bottom));
    const point = (index, place) => (isNarrow ? [across(place), along(index)] : [along(index), across(place)]);
    const picture = shape("svg", { width, height: box.height, role: "img", "aria-label": "Parallel coordinates of the trials; the table below has the same values" });
    this.lines.clear();
    for (const trial of [...this.data.trials].reverse()) picture.append(...this.line(trial, point)); // the best on top
    this.axes.forEach((axis, index) => picture.append(this.axis(axis, index, point, isNarrow, count)));
    this.chart.replaceChildren(picture);
  }

  line(trial, point) {
    const places = this.axes.map((axis, index) =>
      index < this.data.axes.length ? placeOn(axis, trial.values[index], trial.shown[index]) : placeOn(axis, trial.score),
    );
    const points = places.map((place, index) => (place === null ? null : point(index, place))).filter(Boolean);
    const path = points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    const isBest = trial.number === this.data.best;
    const line = shape("path", { d: path, class: `trial-line${trial.score === null ? " unscored" : ""}${isBest ? " best" : ""}` });
    if (trial.score !== null) line.style.setProperty("--tint", `${this.tint(trial.score).toFixed(0)}%`);
    const target = shape("path", { d: path, class: "trial-target" }); // wide enough for a finger
    target.append(shape("title", {}, `${trial.name}: ${trial.score === null ? trial.status : score(trial.score)}\n${trial.shown.map((text, index) => `${this.data.axes[index].name} ${text}`).join("\n")}`));
    for (const [name, isLit] of [["pointerenter", true], ["pointerleave", false]]) target.addEventListener(name, () => this.light(trial.number, isLit));
    this.lines.set(trial.number, line);
    return [line, target];
  }

  tint(value) {
    const share = this.top === this.worst ? 1 : (value - this.worst) / (this.top - this.worst);
    return WORST_TINT + (100 - WORST_TINT) * share;
  }

  axis(axis, index, point, isNarrow, count) {
    const group = shape("g", { class: "axis" });
    const [[x1, y1], [x2, y2]] = [point(index, 0), point(index, 1)];
    group.append(shape("line", { x1, y1, x2, y2 }));
    const side = isNarrow || index < count - 1 ? "start" : "end";
    const most = isNarrow ? 40 : Math.max(6, Math.floor((this.width / count) / 8));
    const name = axis.log ? `${axis.name} (log)` : axis.name;
    const at = isNarrow ? { x: 2, y: y1 - 8 } : { x: x1, y: 14, "text-anchor": index === 0 ? "start" : index === count - 1 ? "end" : "middle" };
    if (!isNarrow && index === 0) at.x = 2;
    if (!isNarrow && index === count - 1) at.x = this.width - 2;
    group.append(shape("text", { ...at, class: "axis-name" }, shortened(name, most * (isNarrow ? 1 : 1.1))));
    const every = Math.ceil(marks(axis).length / (isNarrow ? 6 : 14));
    marks(axis).forEach(([place, text], number) => {
      if (number % every) return;
      const [x, y] = point(index, place);
      const anchor = place < 0.1 ? "start" : place > 0.9 ? "end" : "middle";
      const where = isNarrow ? { x: place < 0.1 ? 2 : place > 0.9 ? this.width - 2 : x, y: y + 16, "text-anchor": anchor } : { x: x + (side === "start" ? 7 : -7), y: y + 4, "text-anchor": side };
      group.append(shape("circle", { cx: x, cy: y, r: 2.5 }), shape("text", where, shortened(text, isNarrow ? Math.max(5, Math.floor(40 / Math.min(6, marks(axis).length))) : most)));
    });
    return group;
  }

  light(number, isLit) {
    this.chart.classList.toggle("has-lit", isLit);
    this.lines.get(number)?.classList.toggle("lit", isLit);
    this.rows.get(number)?.classList.toggle("lit", isLit);
  }

  // -- the table

  table() {
    const columns = [
      { name: "trial", key: (trial) => trial.number, cell: (trial) => this.link(trial) },
      ...this.data.axes.map((axis, index) => ({ name: axis.name, key: (trial) => trial.values[index], cell: (trial) => isolated(trial.shown[index]) })),
      { name: "before", key: (trial) => trial.before, cell: (trial) => score(trial.before) },
      { name: "score", key: (trial) => trial.score, cell: (trial) => this.outcome(trial) },
      { name: "time", key: (trial) => trial.seconds, cell: (trial) => duration(trial.seconds) },
    ];
    const body = el("tbody");
    const fill = (trials) => replaceChildren(body, trials.map((trial) => this.row(trial, columns)));
    const heads = columns.map((column, index) => {
      const button = el("button", { type: "button", onclick: () => sort(index) }, isolated(column.name));
      return el("th", { scope: "col" }, button);
    });
    let sorted = null;
    let up = false;
    const sort = (index) => {
      up = sorted === index ? !up : false;
      sorted = index;
      heads.forEach((head, other) => (other === index ? head.setAttribute("aria-sort", up ? "ascending" : "descending") : head.removeAttribute("aria-sort")));
      const { key } = columns[index];
      const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
      const isMissing = (trial) => key(trial) === null || key(trial) === undefined;
      fill([...this.data.trials].sort((a, b) => isMissing(a) - isMissing(b) || (up ? 1 : -1) * order(key(a), key(b))));
    };
    fill(this.data.trials);
    return section("trials", "Trials", null, el("div", { class: "card table-card" }, el("table", { class: "trials" }, el("thead", {}, el("tr", {}, heads)), body)));
  }

  row(trial, columns) {
    const light = (isLit) => () => this.light(trial.number, isLit);
    const cells = columns.map((column) => {
      const cell = el("td", { "data-name": column.name }, column.cell(trial));
      if (cell.textContent.length <= SHORT) cell.classList.add("short");
      return cell;
    });
    const row = el("tr", { class: trial.number === this.data.best ? "best" : "", onpointerenter: light(true), onpointerleave: light(false), onfocusin: light(true), onfocusout: light(false) }, cells);
    this.rows.set(trial.number, row);
    return row;
  }

  outcome(trial) {
    if (trial.score !== null) return [el("b", {}, score(trial.score)), el("span", { class: "hint" }, ` ${this.interval(trial)}`)];
    const last = trial.scores.at(-1);
    const where = last ? ` at ${score(last[1])} after step ${last[0]}` : "";
    return [el("span", { class: `pill ${trial.status}` }, trial.status), where, trial.error && el("div", { class: "hint" }, isolated(trial.error.slice(0, 300)))];
  }

  fixed() {
    const rows = Object.entries(this.data.fixed);
    if (!rows.length) return null;
    return section("fixed", "Options of all trials", null, el("div", { class: "card" }, el("dl", { class: "facts" }, rows.map(([name, text]) => el("div", { class: "fact" }, el("dt", {}, isolated(name)), el("dd", {}, isolated(text)))))));
  }
}

new SweepPage(JSON.parse(document.getElementById("data").textContent));
