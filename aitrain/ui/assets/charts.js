"use strict";
// The curves, drawn by uPlot. A chart is described by what it shows; series that a run does not have are left out.

const CHARTS = [
  { id: "reward", title: "Reward", hint: "Mean score of a step's episodes", series: [["reward", "reward"]], smooth: true, isScore: true },
  { id: "held-out", title: "Held-out score", hint: "Mean score of cases that are not trained on", heldOut: true, isScore: true },
  { id: "spread", title: "Spread of scores", hint: "Groups whose scores are all equal teach nothing", series: [["reward_std", "standard deviation"], ["frac_reward_zero_std", "share of equal groups"]], smooth: true },
  { id: "length", title: "Length", hint: "Tokens of an episode after its prompt", series: [["completions/mean_length", "mean"], ["thinking/tokens", "thought"], ["thinking/answer_tokens", "answer"]], band: ["completions/min_length", "completions/max_length", "shortest to longest"] },
  { id: "entropy", title: "Entropy", hint: "How undecided the policy is; near 0 it no longer explores", series: [["entropy", "entropy"]], smooth: true },
  { id: "kl", title: "KL", hint: "How far the policy is from the initial model", series: [["kl", "KL"]], smooth: true },
  { id: "failures", title: "Failures", hint: "Share of a step's episodes without a score", series: [["unscored", "unscored"]], prefix: "failed/", unit: true, isQuietAtZero: true },
  { id: "stops", title: "How episodes ended", hint: "Share of a step's episodes", prefix: "stopped/", unit: true, isQuietWhen: "done" },
  { id: "turns", title: "Turns and tool calls", hint: "Mean of an episode", series: [["turns", "turns"], ["tools/calls", "tool calls"], ["tools/wrong_calls", "wrong tool calls"]], isQuietWhen: "turns" },
  { id: "env", title: "The environment's own metrics", hint: "Means of a step's episodes", prefix: "env/" },
  { id: "time", title: "Time", hint: "Seconds of a step", series: [["step_time", "step"]], prefix: "time/" },
  { id: "loss", title: "Loss", hint: "Of the policy; near 0 for most of a healthy run", series: [["loss", "loss"]], smooth: true },
  { id: "gradient", title: "Gradient norm", hint: "Before clipping", series: [["grad_norm", "norm"]], smooth: true },
  { id: "rate", title: "Learning rate", hint: "As scheduled", series: [["learning_rate", "learning rate"]] },
];
const KNOWN = new Set(["seconds", "epoch", ...CHARTS.flatMap((chart) => [...(chart.series ?? []).map(([name]) => name), ...(chart.band ?? [])])]);
const PREFIXES = CHARTS.flatMap((chart) => chart.prefix ?? []);
const FIRST = new Set(["reward", "held-out", "length", "entropy", "kl", "failures", "turns", "env"]);

/** A chart for each other series that a run has and that is not always 0. */
function otherCharts(runs) {
  const names = runs.flatMap(({ summary }) => Object.entries(summary.curves.series).filter(([, values]) => !isZero(values)).map(([name]) => name));
  return [...new Set(names)]
    .filter((name) => !KNOWN.has(name) && !PREFIXES.some((prefix) => name.startsWith(prefix)))
    .map((name) => ({ id: name, title: name, hint: "As the trainer logs it", series: [[name, name.split("/").pop()]] }));
}

/** The lines of a chart in one run: [{label, x, y}]. */
function linesOf(chart, summary) {
  if (chart.heldOut) return heldOutLines(summary);
  return seriesLines(chart, summary.curves.step, summary.curves.series);
}

function seriesLines(chart, x, series) {
  const named = [...(chart.series ?? [])];
  if (chart.prefix)
    for (const name of Object.keys(series)) if (name.startsWith(chart.prefix)) named.push([name, name.slice(chart.prefix.length)]);
  return named
    .filter(([name]) => series[name])
    .filter(([name]) => !chart.prefix || !isZero(series[name]))
    .map(([name, label], place) => ({ label, x, y: series[name], ...(chart.band && place === 0 ? banded(chart, series) : {}) }));
}

function banded(chart, series) {
  const [low, high, between] = chart.band;
  return series[low] && series[high] ? { low: series[low], high: series[high], between } : {};
}

function heldOutLines(summary) {
  const names = [...new Set(summary.held_out.flatMap((point) => Object.keys(point.environments ?? {})))];
  const each = names.map((name) => {
    const points = summary.held_out.filter((point) => point.environments?.[name]);
    return { label: name, x: points.map((point) => point.step), y: points.map((point) => point.environments[name].mean), hasPoints: true };
  });
  return ["sampled", "greedy"].flatMap((decoding) => {
    const points = summary.held_out.filter((point) => point[decoding]);
    const line = { label: decoding, x: points.map((point) => point.step), y: points.map((point) => point[decoding].mean), hasPoints: true };
    if (decoding === "sampled") {
      line.low = points.map((point) => point[decoding].low);
      line.high = points.map((point) => point[decoding].high);
      line.between = "95% interval";
    }
    return points.length ? [line] : [];
  }).concat(each);
}

function isZero(values) {
  return values.every((value) => !value);
}

/** Whether there is anything to see: no chart of failures without a failure. */
function isTelling(chart, lines) {
  if (!lines.length) return false;
  if (chart.isQuietAtZero) return lines.some((line) => !isZero(line.y));
  if (chart.isQuietWhen) return lines.some((line) => line.label !== chart.isQuietWhen && !isZero(line.y));
  return lines.some((line) => line.y.some((value) => value !== null));
}

/** A mean over about a twentieth of the points around each. */
function smoothed(values) {
  const half = Math.max(1, Math.floor(values.length / 40));
  return values.map((value, index) => {
    const window = values.slice(Math.max(0, index - half), index + half + 1).filter((other) => other !== null);
    return window.length ? mean(window) : null;
  });
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function palette() {
  return ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"].map(colour);
}

/** The cards of those charts that have something to show, for one run or for two in the same axes: [{name, summary}]. */
function chartCards(runs, charts, drawn) {
  const make = (chart) => {
    const lines = runs.flatMap(({ name, summary }, index) => linesOf(chart, summary).map((line) => ({ ...line, run: index, name })));
    return isTelling(chart, lines) ? chartCard(chart, lines, runs, drawn) : null;
  };
  return charts.map(make).filter(Boolean);
}

/** All curves over the steps. Returns an element with `.destroy()`. */
function chartGrid(runs) {
  const drawn = [];
  const first = chartCards(runs, CHARTS.filter((chart) => FIRST.has(chart.id)), drawn);
  const more = chartCards(runs, [...CHARTS.filter((chart) => !FIRST.has(chart.id)), ...otherCharts(runs)], drawn);
  const rest = el("div", { class: "charts" }, more);
  const fold = el("details", { class: "fold", ontoggle: () => drawn.forEach((chart) => chart.fit()) }, el("summary", {}, `More curves (${more.length})`), rest);
  const holder = el("div", {}, first.length ? el("div", { class: "charts" }, first) : note("No step has been logged yet."), more.length > 0 && fold);
  holder.isOpen = () => fold.open;
  holder.open = () => (fold.open = true);
  return withDrawn(holder, drawn);
}

function withDrawn(holder, drawn) {
  holder.destroy = () => drawn.forEach((chart) => chart.destroy());
  holder.fit = () => drawn.forEach((chart) => chart.fit());
  return holder;
}

function chartCard(chart, lines, runs, charts) {
  const legend = el("div", { class: "legend" });
  const plot = el("div", { class: "plot", role: "img", "aria-label": describe(chart, lines) });
  const save = el("button", { type: "button", class: "quiet save", title: `Save the chart of ${chart.title} as an image` }, "PNG");
  const card = el("figure", { class: "card chart", "data-chart": chart.id }, el("figcaption", {}, el("h3", {}, isolated(chart.title)), el("p", { class: "hint" }, chart.hint), save), plot, legend);
  const drawn = new Drawn(chart, lines, plot, legend, runs.length > 1);
  save.addEventListener("click", () => drawn.save(`${runs[0].name}-${chart.id.replaceAll("/", "-")}.png`));
  charts.push(drawn);
  return card;
}

function describe(chart, lines) {
  const ends = lines.map((line) => {
    const values = line.y.filter((value) => value !== null);
    return `${line.label} from ${short(values[0])} to ${short(values[values.length - 1])}`;
  });
  return `${chart.title}: ${ends.join("; ")}`;
}

const HEIGHT = 190;

class Drawn {
  constructor(chart, lines, plot, legend, isComparison) {
    Object.assign(this, { chart, lines, plot, legend, isComparison });
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(plot);
  }

  /** As wide as its place; made when it has one. */
  fit() {
    const width = Math.floor(this.plot.clientWidth);
    if (width < 40 || this.width === width) return;
    this.width = width;
    if (this.drawn) this.drawn.setSize({ width, height: HEIGHT });
    else this.drawn = this.make(width);
  }

  make(width) {
    const colours = palette();
    const { data, series, bands } = this.series(colours);
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--rule"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const made = new uPlot(
      {
        width,
        height: HEIGHT,
        padding: [10, 14, 0, 0],
        legend: { show: false },
        cursor: { sync: { key: "steps", setSeries: false }, drag: { x: true, y: false }, points: { size: 7 } },
        scales: { x: { time: false, range: (_, low, high) => (low === high ? [low - 1, high + 1] : [low, high]) }, y: { range: (_, low, high) => this.range(low, high) } },
        axes: [
          { ...axis, size: 28, grid: { show: false }, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 1e6] },
          { ...axis, size: 50, space: 40, values: (_, ticks) => ticks.map(tick) },
        ],
        series,
        bands,
        hooks: { setCursor: [(plot) => this.readout(plot)] },
      },
      data,
      this.plot,
    );
    this.readout(made);
    return made;
  }

  range(low, high) {
    if (this.chart.unit || (this.chart.isScore && scoreBounds)) return this.chart.unit ? [0, 1] : scoreBounds;
    if (low === null) return [0, 1];
    const bottom = low >= 0 && low < high * 0.7 ? 0 : low;
    const room = (high - bottom) * 0.08 || Math.abs(high) * 0.1 || 1;
    return [bottom === 0 ? 0 : bottom - room, high + room];
  }

  /** uPlot's columns: one x for all, and for each line its values; pale ones behind smooth ones. */
  series(colours) {
    const x = [...new Set(this.lines.flatMap((line) => line.x))].sort((one, other) => one - other);
    const data = [x];
    const series = [{}];
    const bands = [];
    this.shown = [];
    const add = (line, y, options) => {
      const at = new Map(line.x.map((step, index) => [step, y[index]]));
      data.push(x.map((step) => at.get(step) ?? null));
      series.push({ spanGaps: true, points: { show: false }, ...options });
      return series.length - 1;
    };
    const labels = [...new Set(this.lines.map((line) => line.label))];
    this.lines.forEach((line) => {
      const place = this.isSingle() ? line.run : labels.indexOf(line.label);
      const stroke = colours[place % colours.length];
      const dash = line.run && !this.isSingle() ? [6, 4] : undefined;
      const isSmooth = this.chart.smooth && line.y.length > 12;
      if (line.low?.some((value) => value !== null) && !this.isComparison) {
        const high = add(line, line.high, { stroke: "transparent", width: 0 });
        const low = add(line, line.low, { stroke: "transparent", width: 0 });
        bands.push({ series: [high, low], fill: stroke + "26" });
      }
      if (isSmooth) add(line, line.y, { stroke: stroke + "55", width: 1 });
      const raw = series.length - 1;
      const y = isSmooth ? smoothed(line.y) : line.y;
      const number = add(line, y, { stroke, width: 2, dash, points: { show: line.hasPoints || x.length === 1, size: 6, fill: stroke } });
      this.shown.push({ line, stroke, number: isSmooth ? raw : number, dash });
    });
    return { data, series, bands };
  }

  /** One line a run: then colours tell runs apart. Elsewhere they tell lines apart, and dashes the second run. */
  isSingle() {
    return new Set(this.lines.map((line) => line.label)).size === 1;
  }

  /** The values under the pointer, or the last ones. */
  readout(plot) {
    const index = plot.cursor.idx ?? null;
    const items = this.shown.map(({ line, stroke, number, dash }) => {
      const values = plot.data[number];
      const at = index === null ? values.findLastIndex((value) => value !== null) : index;
      const mark = el("span", { class: dash ? "mark dashed" : "mark" });
      mark.style.color = stroke;
      const name = this.isComparison ? (this.isSingle() ? line.name : `${line.label}, ${line.name}`) : line.label;
      return el("span", { class: "item" }, mark, isolated(name), " ", el("b", {}, this.chart.unit || this.chart.isScore ? score(values[at]) : short(values[at])));
    });
    const band = !this.isComparison && this.lines.find((line) => line.between);
    if (band) items.push(el("span", { class: "item" }, el("span", { class: "mark band" }), band.between));
    const step = index === null ? null : el("span", { class: "item step" }, `step ${short(plot.data[0][index])}`);
    replaceChildren(this.legend, items, step);
  }

  /** The drawing as a PNG file, on the page's own background. */
  save(name) {
    if (!this.drawn) return;
    const from = this.drawn.ctx.canvas;
    const canvas = el("canvas", { width: from.width, height: from.height });
    const context = canvas.getContext("2d");
    context.fillStyle = colour("--surface");
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(from, 0, 0);
    canvas.toBlob((blob) => {
      const link = el("a", { href: URL.createObjectURL(blob), download: name });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    });
  }

  destroy() {
    this.observer.disconnect();
    this.drawn?.destroy();
  }
}
