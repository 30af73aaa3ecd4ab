"use strict";
// The table of runs, evaluations and sweeps: filtered, sorted, and two of them chosen to be compared.

const JOBS = { grpo: "training", eval: "evaluation", sweep: "sweep" };
const EVERY = 3000; // or ten times as long as an answer took, as each reads all runs
const FIRST_RUNS = 100;
const FILTERS = { q: "", status: "", job: "", sort: "-heartbeat" };

/** Columns: key, title, hint, and the value to sort by. */
const RUN_COLUMNS = [
  ["name", "Run", "its folder's name, with model and environment", (row) => row.name],
  ["status", "Status", "whether it is still going", (row) => row.status],
  ["options", "Options", "those in which the runs differ", (row) => row.differing],
  ["curve", "Reward", "mean score of the training steps, from the first to the last; all on one scale", (row) => row.rewards.at(-1) ?? null],
  ["before", "Before", "held-out score before training", (row) => row.before?.mean ?? null],
  ["after", "After", "held-out score after training", (row) => row.after?.mean ?? null],
  ["change", "Change", "of the held-out score on the same cases, with its 95% interval", (row) => row.change?.mean ?? null],
  ["steps", "Steps", "optimizer steps", (row) => row.step],
  ["time", "Time", "duration of the training, or what is left of it", (row) => row.seconds],
  ["heartbeat", "Last active", "when it gave its last sign of life", (row) => row.heartbeat],
];

class RunTable {
  constructor(source, main, rows) {
    Object.assign(this, { source, main, rows, chosen: [], open: new Set(), most: FIRST_RUNS });
    const wanted = new URLSearchParams(location.search);
    this.filters = Object.fromEntries(Object.entries(FILTERS).map(([name, usual]) => [name, wanted.get(name) ?? usual]));
    const top = rows.filter((row) => !row.sweep);
    if (top.length === 1) this.open.add(top[0].id); // a sweep that is shown alone shows its trials
    this.draw();
    this.schedule(EVERY);
  }

  draw() {
    document.title = "Runs · aitrain";
    const search = el("input", { type: "search", class: "search", placeholder: "name, model or environment", value: this.filters.q, "aria-label": "Find a run", oninput: () => this.filter({ q: search.value }) });
    const statuses = [["", "any status"], ...Object.entries(STATUS)];
    const jobs = [["", "all"], ...Object.entries(JOBS).map(([job, word]) => [job, `${word}s`])];
    this.count = el("p", { class: "hint", role: "status" });
    this.head = el("tr");
    this.body = el("tbody");
    this.bar = el("div", { class: "selection-bar", role: "region", "aria-label": "Chosen runs", hidden: true });
    this.empty = el("div", { class: "card empty", hidden: true });
    this.more = el("button", { type: "button", class: "wide", onclick: () => this.show((this.most *= 4)) }, "Show more");
    this.table = el("div", { class: "scroll" }, el("table", { class: "runs stacked" }, el("caption", { class: "unseen" }, "Runs, evaluations and sweeps"), el("thead", {}, this.head), this.body));
    this.form = el("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() }, el("label", { class: "field" }, el("span", {}, "Find"), search), select("Status", statuses, this.filters.status, (status) => this.filter({ status })), select("Kind", jobs, this.filters.job, (job) => this.filter({ job })));
    replaceChildren(this.main, el("div", { class: "run-head" }, el("h1", {}, "Runs"), this.count), this.form, this.empty, this.table, this.more, this.bar);
    this.show();
  }

  filter(changes) {
    Object.assign(this.filters, changes);
    this.most = FIRST_RUNS;
    const said = Object.entries(this.filters).filter(([name, value]) => value !== FILTERS[name]);
    history.replaceState(null, "", said.length ? `?${new URLSearchParams(said)}` : location.pathname);
    this.show();
  }

  show() {
    const shown = this.sorted(this.rows.filter((row) => !this.parent(row) && (this.takes(row) || this.children(row).some((child) => this.takes(child)))));
    this.compareOptions();
    const rewards = this.rows.flatMap((row) => row.rewards);
    this.scale = [Math.min(...rewards), Math.max(...rewards)];
    replaceChildren(this.head, el("th", { scope: "col", class: "choose" }, el("span", { class: "unseen" }, "Choose to compare")), RUN_COLUMNS.map((column) => this.heading(column)));
    replaceChildren(this.body, shown.slice(0, this.most).flatMap((row) => [this.line(row), ...(this.open.has(row.id) ? this.sorted(this.children(row)).map((child) => this.line(child)) : [])]));
    this.more.hidden = shown.length <= this.most;
    this.count.textContent = this.describe(shown.length);
    this.table.hidden = this.form.hidden = !this.rows.length;
    this.empty.hidden = shown.length > 0;
    replaceChildren(this.empty, this.rows.length ? note("No run is like that.") : [el("h2", {}, "No runs here yet"), note("aitrain demo makes one in a minute. This page shows it as soon as it starts.")]);
    this.drawBar();
  }

  /** The options of each row that another row has with another value: an evaluation lacks those of a training. */
  compareOptions() {
    const values = (name) => this.rows.filter((row) => name in row.options).map((row) => row.options[name]);
    const names = [...new Set(this.rows.flatMap((row) => Object.keys(row.options)))];
    const differing = names.filter((name) => name !== "model" && name !== "rl_env" && new Set(values(name)).size > 1);
    const isSet = (row, name) => (row.options[name] ?? "null") !== "null";
    for (const row of this.rows) row.differing = differing.filter((name) => isSet(row, name)).map((name) => `${name} ${row.options[name]}`).join(", ");
  }

  describe(shown) {
    const top = this.rows.filter((row) => !this.parent(row));
    const numbers = Object.keys(STATUS).map((status) => [STATUS[status], top.filter((row) => row.status === status).length]);
    const kinds = numbers.filter(([, number]) => number).map(([word, number]) => `${count(number)} ${word}`);
    return top.length ? `${shown < top.length ? `${count(shown)} of ` : ""}${count(top.length)} shown: ${kinds.join(", ")}` : "";
  }

  parent(row) {
    return row.sweep ? this.rows.find((other) => other.id === row.sweep) : undefined;
  }

  children(row) {
    return row.job === "sweep" ? this.rows.filter((other) => other.sweep === row.id) : [];
  }

  takes(row) {
    const { q, status, job } = this.filters;
    const text = `${row.name} ${row.model} ${row.environment}`.toLowerCase();
    return (!status || row.status === status) && (!job || row.job === job) && q.toLowerCase().split(/\s+/).every((word) => text.includes(word));
  }

  /** Without a value: last, whichever the direction. */
  sorted(rows) {
    const key = this.filters.sort.replace("-", "");
    const value = (RUN_COLUMNS.find(([name]) => name === key) ?? RUN_COLUMNS.at(-1))[3];
    const way = this.filters.sort.startsWith("-") ? -1 : 1;
    return [...rows].sort((one, other) => {
      const [first, second] = [value(one), value(other)];
      if (first === null || second === null) return (first === null) - (second === null);
      return way * (typeof first === "string" ? first.localeCompare(second, "en", { numeric: true }) : first - second);
    });
  }

  heading([key, title, hint]) {
    const isSorted = this.filters.sort.replace("-", "") === key;
    const isDown = this.filters.sort.startsWith("-");
    const sort = () => {
      const isText = ["name", "status", "options"].includes(key);
      this.filter({ sort: (isSorted ? !isDown : !isText) ? `-${key}` : key });
      this.head.querySelector(`[data-key="${key}"]`).focus();
    };
    const button = el("button", { type: "button", title: hint, "data-key": key, onclick: sort }, title, el("span", { class: "arrow", "aria-hidden": "true" }, isSorted ? (isDown ? "↓" : "↑") : ""));
    return el("th", { scope: "col", class: key, "aria-sort": isSorted ? (isDown ? "descending" : "ascending") : "none" }, button);
  }

  line(row) {
    const cells = {
      status: [statusPill(row), row.status === "running" && row.phase && el("span", { class: "hint phase" }, isolated(row.phase))],
      options: el("div", { class: "clipped", title: row.differing }, isolated(row.differing)),
      curve: sparkline(row.rewards, this.scale),
      before: this.scoreCell(row.before),
      after: this.scoreCell(row.after),
      change: this.changeCell(row),
      steps: row.job === "eval" ? plural(row.step ?? 0, "episode") : row.job === "sweep" ? `${count(row.step)} of ${plural(row.steps, "trial")}` : row.step === null ? "–" : row.steps && row.steps !== row.step ? `${count(row.step)} of ${count(row.steps)}` : count(row.step),
      time: row.status === "running" ? timeLeft(row).replace("about ", "").replace(" of training", "") || "–" : duration(row.seconds),
      heartbeat: row.heartbeat ? el("time", { dateTime: new Date(1000 * row.heartbeat).toISOString(), title: new Date(1000 * row.heartbeat).toLocaleString() }, ago(row.heartbeat)) : "–",
    };
    const first = [el("td", { class: "choose" }, row.job === "sweep" ? null : this.chooser(row)), el("th", { scope: "row", class: "name" }, this.nameCell(row))];
    const others = RUN_COLUMNS.slice(1).map(([key, title]) => el("td", { class: key, "data-label": title }, cells[key]));
    return el("tr", { class: row.sweep && this.parent(row) ? "trial" : null, "data-run": row.id }, first, others);
  }

  nameCell(row) {
    const children = this.children(row);
    const isOpen = this.open.has(row.id);
    const toggle = () => {
      isOpen ? this.open.delete(row.id) : this.open.add(row.id);
      this.show();
      this.body.querySelector(`[data-run="${CSS.escape(row.id)}"] .unfold`)?.focus();
    };
    const about = [row.model, row.environment].filter(Boolean);
    return [
      row.job === "sweep" ? isolated(row.name) : el("a", { href: `/?${new URLSearchParams({ run: row.id })}` }, isolated(row.name)),
      row.job !== "grpo" && el("span", { class: "tag job" }, JOBS[row.job] ?? row.job),
      children.length > 0 && el("button", { type: "button", class: "quiet unfold", "aria-expanded": String(isOpen), onclick: toggle }, plural(children.length, "trial")),
      about.length > 0 && el("span", { class: "hint" }, about.flatMap((text, index) => [index ? " · " : "", isolated(text)])),
      row.reason && el("span", { class: row.status in FAILED ? "hint worse" : "hint" }, isolated(row.reason)),
    ];
  }

  scoreCell(value) {
    const interval = value && value.low !== null ? `95% interval ${score(value.low)} to ${score(value.high)}` : undefined;
    return el("span", { title: interval }, score(value?.mean ?? null));
  }

  changeCell({ change, verdict }) {
    if (!change) return "–";
    const words = verdict === "undetected" ? "no detectable difference" : verdict;
    return [el("b", { class: verdict ?? "", title: words }, signed(change.mean)), el("span", { class: "unseen" }, ` ${words}`), change.low !== null && el("span", { class: "hint" }, `${signed(change.low)} to ${signed(change.high)}`)];
  }

  // -- two to compare

  chooser(row) {
    const box = el("input", { type: "checkbox", "aria-label": `Choose ${row.name} to compare`, onchange: () => this.choose(row.id, box.checked) });
    box.checked = this.chosen.includes(row.id);
    return box;
  }

  /** At most two: a third one replaces the first. */
  choose(id, isChosen) {
    this.chosen = [...this.chosen.filter((other) => other !== id), ...(isChosen ? [id] : [])].slice(-2);
    for (const line of this.body.children) {
      const box = line.querySelector("input");
      if (box) box.checked = this.chosen.includes(line.dataset.run);
    }
    this.drawBar();
  }

  drawBar() {
    const rows = this.chosen.map((id) => this.rows.find((row) => row.id === id)).filter(Boolean);
    this.bar.hidden = !rows.length;
    const names = rows.flatMap((row, index) => [index ? " and " : "", el("b", {}, isolated(row.name))]);
    const [a, b] = this.chosen;
    const areRuns = rows.every((row) => row.job === "grpo");
    const links = [
      el("a", { class: "button", href: `/compare?${new URLSearchParams({ a, b })}` }, "Compare case by case"),
      areRuns && el("a", { class: "button quiet", href: `/?${new URLSearchParams({ run: a, with: b })}` }, "Curves in the same axes"),
    ];
    const clear = el("button", { type: "button", class: "quiet", onclick: () => this.clear() }, "Clear");
    replaceChildren(this.bar, el("span", { role: "status" }, names, rows.length === 1 ? ": choose another one to compare" : ""), rows.length === 2 && links, clear);
  }

  clear() {
    this.chosen = [];
    this.show();
  }

  // -- following

  schedule(wait) {
    setTimeout(() => this.follow(Date.now()), wait);
  }

  /** Draw the rows again; the focus stays where it was. */
  showAgain() {
    const focused = this.table.contains(document.activeElement) ? document.activeElement : null;
    const line = focused?.closest("tr")?.dataset.run;
    this.show();
    if (line === undefined) return focused && this.head.querySelector(`[data-key="${focused.dataset.key}"]`)?.focus();
    this.body.querySelector(`[data-run="${CSS.escape(line)}"] ${focused.tagName.toLowerCase()}`)?.focus();
  }

  async follow(began) {
    try {
      const rows = await this.source.runs();
      const isNews = JSON.stringify(rows) !== JSON.stringify(this.rows);
      this.rows = rows;
      if (isNews && getSelection().isCollapsed) this.showAgain();
    } catch {
      this.count.textContent = "aitrain view has ended: this is what it showed last";
    }
    this.schedule(Math.max(EVERY, 10 * (Date.now() - began)));
  }
}

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];

function ago(time) {
  const seconds = Math.max(1, Date.now() / 1000 - time);
  const [size, unit] = UNITS.find(([size]) => seconds >= size);
  return `${count(Math.floor(seconds / size))} ${unit} ago`;
}

const SVG = "http://www.w3.org/2000/svg";

/** A small curve without axes, on the scale of all rows; its ends in words for those who do not see it. */
function sparkline(values, [low, high]) {
  if (values.length < 2) return el("span", { class: "hint" }, values.length ? score(values[0]) : "–");
  const [width, height] = [110, 26];
  const place = (value) => (high === low ? height / 2 : height - 2 - ((value - low) / (high - low)) * (height - 4));
  const svg = document.createElementNS(SVG, "svg");
  const line = document.createElementNS(SVG, "polyline");
  const words = `from ${score(values[0])} to ${score(values.at(-1))}`;
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, class: "sparkline", role: "img", "aria-label": `reward ${words}`, preserveAspectRatio: "none" })) svg.setAttribute(name, value);
  line.setAttribute("points", values.map((value, index) => `${((index / (values.length - 1)) * width).toFixed(1)},${place(value).toFixed(1)}`).join(" "));
  svg.append(line);
  return el("span", { class: "curve-cell", title: `${words}; the scale is ${score(low)} to ${score(high)}` }, svg);
}
