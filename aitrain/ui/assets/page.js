"use strict";
// The page of a run, top to bottom, and how it follows one that is still going.

const POLL = 2000;
const POLL_WHILE_READING = 500;
const POLL_AFTERWARDS = 10_000; // it may be resumed
const CASES_EVERY = 15_000;
const FIRST_OF_SOURCE = 12_000; // characters

// -- the sections

function option(summary, name) {
  return summary.options.find((row) => row.name === name)?.value ?? "";
}

function results(summary) {
  const rows = Object.entries(summary.scores)
    .map(([name, one]) => [name, scoreHint(name, { sampled: "sampled as in training", greedy: "the likeliest answer" }), one])
    .filter(([, , one]) => one.before || one.after);
  if (!rows.length) return el("div", { class: "card empty" }, note(summary.job === "eval" ? "No score yet." : `No held-out score${summary.status === "running" ? " yet" : ""}: it is taken before and after training, of cases that are not trained on (--eval-cases).`));
  if (summary.job === "eval") return el("div", { class: "card result" }, rows.map(([name, hint, one]) => evalRow(name, hint, one)), overlapNote({ eval_overlap: summary.result.overlap, eval_cases: summary.result.cases }), intervalNote(rows), evaluationTable(summary.result));
  return el("div", { class: "card result" }, rows.map(([name, hint, one]) => resultRow(name, hint, one, newest(summary, name), summary.verdicts[name])), selectionNote(summary.result), overlapNote(summary.result), intervalNote(rows), nextSteps(summary));
}

/** What the result suggests, and the commands that follow on it. */
function nextSteps({ advice, next_steps: steps }) {
  if (!advice && !steps?.length) return null;
  const lines = steps.map(({ what, command }) => [el("dt", {}, what), el("dd", {}, el("code", {}, isolated(command)))]);
  return el("div", { class: "next-steps" }, advice && el("p", {}, advice), el("dl", {}, lines));
}

/** Which step --save-best chose, as the score it was chosen by is not the score after. */
function selectionNote(result) {
  if ((result.selection_score ?? null) === null) return null;
  return el("p", { class: "hint selection" }, `The model is that of step ${count(result.model_step)}: its score of ${score(result.selection_score)} was the best of ${plural(result.selection_scorings, "scoring")}. The best of several is high by luck as well, so the score after training is of ${result.selection_cases ? "other cases" : "new samples"}.`);
}

/** How many held-out cases were seen in training. */
function overlapNote(result) {
  if (!result.eval_overlap) return null;
  return el("p", { class: "hint selection" }, `${count(result.eval_overlap)} of ${plural(result.eval_cases, "held-out case")} have the same prompt as a training case: their score does not show what was learned for new ones.`);
}

function resultRow(name, hint, one, [when, last], verdict) {
  const [now, after] = one.after ? ["after", one.after] : [when, last];
  const change = one.change;
  const bounds = name.startsWith("pass@") ? [0, 1] : scoreBounds;
  return el(
    "div",
    { class: `scores ${decodingOf(name)}` },
    el("div", { class: "what" }, el("h3", {}, scoreTitle(name)), el("p", { class: "hint" }, hint)),
    el("div", { class: "figures" }, bigScore("before", one.before), el("span", { class: "arrow", "aria-hidden": "true" }, "→"), bigScore(now, after)),
    el("div", { class: "ranges", "aria-hidden": "true" }, rangeBar("before", one.before, bounds), rangeBar("after", after, bounds)),
    change &&
      el("p", { class: "change" }, el("b", { class: verdict }, signed(change.mean)), ` change on the same ${plural(change.count, "case")}`, change.low === null ? "" : `, 95% interval ${signed(change.low)} to ${signed(change.high)}`),
  );
}

function scoreTitle(name) {
  return name.startsWith("pass@") ? `Held-out ${name}` : `Held-out score, ${name}`;
}

/** A score of an eval, which has no other one beside it. */
function evalRow(name, hint, { after }) {
  const bounds = name.startsWith("pass@") ? [0, 1] : scoreBounds;
  const cases = after && after.count !== null ? plural(after.count, "case") : "score";
  const what = el("div", { class: "what" }, el("h3", {}, scoreTitle(name)), el("p", { class: "hint" }, hint));
  const range = el("div", { class: "ranges", "aria-hidden": "true" }, rangeBar("after", after, bounds));
  return el("div", { class: `scores ${decodingOf(name)}` }, what, el("div", { class: "figures" }, bigScore(cases, after)), range);
}

/** Further numbers of an eval, by decoding. */
function evaluationTable({ lengths, metrics }) {
  const found = { "tokens of an episode, mean": lengths ?? {} };
  for (const [decoding, named] of Object.entries(metrics ?? {})) for (const [name, value] of Object.entries(named)) (found[name] ??= {})[decoding] = value;
  const rows = Object.entries(found).filter(([, values]) => Object.keys(values).length);
  if (!rows.length) return null;
  const names = [...new Set(rows.flatMap(([, values]) => Object.keys(values)))];
  const head = el("thead", {}, el("tr", {}, el("th", {}, el("span", { class: "unseen" }, "What")), names.map((name) => el("th", { scope: "col" }, isolated(name)))));
  const line = ([what, values]) => el("tr", {}, el("th", { scope: "row" }, isolated(what)), names.map((name) => el("td", { class: "value" }, short(values[name]))));
  return el("div", { class: "scroll" }, el("table", { class: "options compared evaluation" }, head, el("tbody", {}, rows.map(line))));
}

function bigScore(when, value) {
  const range = value && value.low !== null ? `${score(value.low)} to ${score(value.high)}` : "";
  return el("div", { class: `big ${when}` }, el("span", { class: "label" }, when), el("b", {}, value ? score(value.mean) : "–"), el("span", { class: "interval" }, range));
}

/** A score on a line between the bounds, with its interval. */
function rangeBar(when, value, bounds) {
  const bar = el("div", { class: `range ${when}` });
  if (!value || !bounds) return bar;
  const span = el("span", { class: "span" });
  const point = el("span", { class: "point" });
  const [low, high] = [placeOf(value.low ?? value.mean, bounds), placeOf(value.high ?? value.mean, bounds)];
  span.style.left = `${100 * low}%`;
  span.style.width = `${100 * (high - low)}%`;
  point.style.left = `${100 * placeOf(value.mean, bounds)}%`;
  bar.append(span, point);
  return bar;
}

function intervalNote(rows) {
  if (!rows.some(([, , one]) => one.before?.low !== null && one.before)) return null;
  return el("p", { class: "hint intervals" }, "Intervals are 95%, over cases: all samples of a case count as one value. They say how much other cases might differ, not how much another training run would.");
}

function facts(summary) {
  const { episodes, result } = summary;
  const reward = summary.curves.series.reward?.filter((value) => value !== null) ?? [];
  const tile = (name, value, hint) => el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, value), hint && el("dd", { class: "hint" }, hint));
  return el(
    "dl",
    { class: "tiles" },
    reward.length > 0 && tile("reward, last step", score(reward[reward.length - 1]), `first step ${score(reward[0])}`),
    summary.job === "eval" ? tile("time", duration(result.seconds)) : tile("steps", count(summary.step ?? result.steps), result.seconds ? `in ${duration(result.seconds)}` : null),
    episodes.all > 0 && tile("episodes", count(episodes.all), episodes.held_out && summary.job !== "eval" ? `${count(episodes.held_out)} of them held-out` : null),
    episodes.all > 0 && tile("failed episodes", el("span", { class: episodes.failed ? "worse" : "" }, count(episodes.failed)), failureHint(episodes)),
    episodes.damaged > 0 && tile("damaged lines", count(episodes.damaged), "in the rollout files, left out"),
    result.cases && tile("cases", count(result.cases), result.samples > 1 ? `${count(result.samples)} samples of each` : "one sample of each"),
    result.train_cases && tile("cases", count(result.train_cases), `${count(result.eval_cases)} more held out`),
  );
}

function failureHint(episodes) {
  if (!episodes.failed) return "no failure of the environment";
  return Object.entries(episodes.failures).map(([kind, number]) => `${failed(kind)} ${count(number)}`).join(", ");
}

function configuration(summary, other) {
  if (!summary.options.length) return null;
  const isDefault = (row) => row.value === row.default;
  const set = summary.options.filter((row) => !isDefault(row));
  const rest = summary.options.filter(isDefault);
  const table = (rows) => el("table", { class: "options" }, el("tbody", {}, rows.map((row) => el("tr", {}, el("th", { scope: "row" }, isolated(row.name)), el("td", {}, value(row.value)), el("td", { class: "hint" }, isDefault(row) ? "" : ["default ", value(row.default)])))));
  const value = (text) => (text === "" ? el("span", { class: "hint" }, "unset") : isolated(text, "value"));
  return section(
    "configuration",
    "Configuration",
    `What was set; the same run again: aitrain ${summary.job === "eval" ? "eval MODEL" : "grpo"} --config config.yaml`,
    el("div", { class: "card" }, table(set), el("details", { class: "fold" }, el("summary", {}, `${count(rest.length)} options at their defaults`), table(rest))),
    provenance(summary),
  );
}

function provenance(summary) {
  const { environment } = summary;
  const rows = [
    ["environment", [environment.module, environment.class].filter(Boolean).join(":")],
    ["file", environment.file],
    ["SHA-256", environment.sha256],
    ["package", environment.package],
    ["constructor", environment.config && Object.keys(environment.config).length ? JSON.stringify(environment.config) : ""],
    ["git commit", environment.git_commit],
    ["packages", Object.entries(environment.packages ?? {}).map(([name, version]) => `${name} ${version}`).join(", ")],
    ["machine", [environment.platform, environment.cpus && `${environment.cpus} CPU cores`, ...(environment.gpus ?? [])].filter(Boolean).join(", ")],
  ].filter(([, text]) => text);
  if (!rows.length) return null;
  return el("div", { class: "card" }, el("h3", {}, "Where it came from"), el("table", { class: "options" }, el("tbody", {}, rows.map(([name, text]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", {}, isolated(text, "value")))))));
}

/** The environment's files; its own is open. */
function sourceFiles(files, own) {
  if (!files.length) return el("div", { class: "card" }, note("This run has not kept the source of its environment."));
  const ownName = String(own ?? "").split(/[\\/]/).pop();
  return el("div", { class: "card" }, files.map(({ name, text }) => el("details", { class: "fold source", open: files.length === 1 || name.split("/").pop() === ownName }, el("summary", {}, isolated(name)), longText(text, FIRST_OF_SOURCE))));
}

/** Two runs: their results and the options that differ. */
function comparison(runs) {
  const names = [...new Set(runs.flatMap(({ summary }) => summary.options.map((row) => row.name)))].filter((name) => name !== "project_name");
  const differing = names.filter((name) => option(runs[0].summary, name) !== option(runs[1].summary, name));
  const cell = (text) => el("td", {}, text === "" ? el("span", { class: "hint" }, "unset") : isolated(text, "value"));
  const scoreText = (one) => (one ? `${score(one.mean)}${one.low !== null ? ` (${score(one.low)} to ${score(one.high)})` : ""}` : "–");
  const rows = [
    ...[...new Set(runs.flatMap(({ summary }) => Object.keys(summary.scores)))].flatMap((name) => ["before", "after"].map((when) => [`${name}, ${when}`, ...runs.map(({ summary }) => scoreText(summary.scores[name]?.[when]))])),
    ["steps", ...runs.map(({ summary }) => count(summary.step))],
  ];
  const head = el("thead", {}, el("tr", {}, el("th"), runs.map(({ name }, index) => el("th", { scope: "col" }, el("span", { class: `mark run-${index}` }), isolated(name)))));
  return section(
    "comparison",
    "Side by side",
    null,
    el("div", { class: "card scroll" }, el("table", { class: "options compared" }, head, el("tbody", {}, rows.map(([name, ...values]) => el("tr", {}, el("th", { scope: "row" }, name), values.map((text) => el("td", { class: "value" }, text))))))),
    el("div", { class: "card scroll" }, el("h3", {}, "Options that differ"), differing.length ? el("table", { class: "options compared" }, head.cloneNode(true), el("tbody", {}, differing.map((name) => el("tr", {}, el("th", { scope: "row" }, isolated(name)), runs.map(({ summary }) => cell(option(summary, name))))))) : note("None: the runs differ by something else.")),
  );
}

/** Whether anything of a run has changed but what its line of progress tells. */
function isOther(one, other) {
  const told = { heartbeat: 0, ends_at: 0, phase: "" };
  return JSON.stringify({ ...one, ...told }) !== JSON.stringify({ ...other, ...told });
}

function beside(id, summary) {
  return { id, name: summary.name, summary };
}

// -- the page

class Page {
  constructor(source) {
    this.source = source;
    this.main = el("main", { id: "main", tabindex: "-1" });
    this.navigation = el("nav", { "aria-label": "Sections" });
    this.chooser = el("div", { class: "chooser" });
    this.spoken = el("p", { class: "unseen", role: "status" });
    const bar = el("div", { class: "bar" }, brand(), this.chooser, this.navigation, themeButton(() => this.drawCharts()));
    const foot = el("footer", {}, "Made by aitrain. Nothing on this page asks any other machine for anything.");
    document.getElementById("app").append(el("a", { class: "skip", href: "#main" }, "Skip to the content"), el("header", { class: "top" }, bar), this.spoken, this.main, foot);
    addEventListener("keydown", (event) => this.onKey(event));
  }

  async start() {
    try {
      this.runs = await this.source.runs();
      const wanted = new URLSearchParams(location.search);
      const named = (id) => this.runs.find((run) => run.id === id)?.id;
      const only = this.runs.length === 1 && this.runs[0].is_given && this.runs[0].job !== "sweep" ? this.runs[0].id : undefined;
      this.run = wanted.has("run") ? named(wanted.get("run")) : only;
      this.otherRun = named(wanted.get("with"));
      if (this.source.isServed && !this.run) return this.showTable(wanted.get("run"));
      await this.open();
    } catch (error) {
      this.main.replaceChildren(el("div", { class: "card" }, note(`This run cannot be shown: ${error.message}`)));
    }
  }

  /** All runs; `missing` is the id of a run that does not exist. */
  showTable(missing) {
    new RunTable(this.source, this.main, this.runs);
    this.search = this.main.querySelector(".search");
    if (missing) this.main.prepend(el("p", { class: "sample", role: "alert" }, "There is no run ", isolated(missing), " here any more."));
  }

  /** Read the run, or two, and draw everything. */
  async open() {
    this.summary = await this.source.run(this.run);
    scoreBounds = this.summary.bounds;
    this.other = this.otherRun ? beside(this.otherRun, await this.source.run(this.otherRun)) : null;
    this.draw();
    await this.drawSource();
    await this.drawCases();
    this.schedule();
  }

  draw() {
    const { summary } = this;
    this.head = el("div", { class: "run-head" });
    this.results = el("div", {});
    this.tiles = el("div", {});
    this.comparison = el("div", {});
    this.charts = el("div", { onmouseleave: () => this.areChartsOld && this.drawCharts() });
    this.cases = el("div", {}, note("Reading the rollouts…"));
    this.code = el("div", {}, note("Reading the source…"));
    this.list = new RolloutList(this.source, this.run, summary);
    replaceChildren(
      this.main,
      this.head,
      section("results", "Results", null, this.results, this.tiles),
      this.comparison,
      summary.job !== "eval" && section("curves", "Curves", "Over the steps of training. Drag across a curve to look closer, double-click to go back.", this.charts),
      section("environment", "Environment", "Its source as it ran, with secrets masked.", this.code),
      section("cases", "Cases", summary.job === "eval" ? "Each with its score." : "Each with its first and its last score. Compare shows what was said then.", this.cases),
      section("rollouts", summary.job === "eval" ? "Episodes" : "Rollouts", null, this.sampleNote(), this.list.element),
      configuration(summary),
    );
    this.drawNumbers();
    this.drawChooser();
    this.drawNavigation();
  }

  sampleNote() {
    if (!this.source.isSample) return null;
    return el("p", { class: "sample" }, `This page holds ${count(this.source.held)} of ${count(this.summary.episodes.all)} episodes: held-out cases before and after, the first and last steps, failures, and some of all the rest. All of them are in the folder rollouts/ beside this page; aitrain view shows and searches them.`);
  }

  /** What changes during a run. */
  drawNumbers() {
    const { summary } = this;
    replaceChildren(this.head, runHead(summary, () => this.showFailures()));
    const now = scoreNow(summary);
    const news = `${summary.name}: ${summary.status}${now.value ? `, held-out score ${now.when} ${score(now.value.mean)}` : ""}`;
    if (this.spoken.textContent !== news) this.spoken.textContent = news;
    document.title = `${summary.status === "running" && now.value ? `${score(now.value.mean)} · ` : ""}${summary.name} · aitrain`;
    this.results.replaceChildren(results(summary));
    this.tiles.replaceChildren(facts(summary));
    this.comparison.replaceChildren(...(this.other ? [comparison([{ name: summary.name, summary }, this.other])] : []));
    if (this.charts.matches(":hover")) this.areChartsOld = true; // the user reads them: they are drawn when the pointer leaves
    else this.drawCharts();
  }

  drawCharts() {
    if (!this.charts) return;
    this.areChartsOld = false;
    const wasOpen = this.grid?.isOpen();
    this.grid?.destroy();
    const runs = [{ name: this.summary.name, summary: this.summary }, ...(this.other ? [this.other] : [])];
    this.grid = chartGrid(runs);
    this.charts.replaceChildren(this.grid);
    if (wasOpen) this.grid.open();
    this.grid.fit();
  }

  showFailures() {
    this.list.change({ ...EMPTY_QUERY, failure: "any" });
    document.getElementById("rollouts").scrollIntoView();
    this.list.form.querySelector(".search").focus({ preventScroll: true });
  }

  async drawCases() {
    if (!this.isReady) return;
    this.casesAt = Date.now();
    const cases = await this.source.cases(this.run);
    const other = this.other ? { ...this.other, cases: await this.source.cases(this.other.id) } : null;
    const before = this.caseTable;
    this.caseTable = new CaseTable(this.source, this.run, cases, other);
    if (before && this.casesOf === this.run) {
      const { sort, text, isHeldOut, most, direction } = before;
      if (text || direction || most > FIRST_CASES || isHeldOut !== this.caseTable.isHeldOut) return; // the user works with it
      this.caseTable.show({ sort });
    }
    this.casesOf = this.run;
    this.cases.replaceChildren(this.caseTable.element);
  }

  async drawSource() {
    const files = await this.source.source(this.run);
    this.code.replaceChildren(sourceFiles(files, this.summary.environment.file));
  }

  drawChooser() {
    if (this.runs.length < 2) return this.chooser.replaceChildren();
    const runs = this.runs.filter((run) => run.job !== "sweep");
    const label = (run) => [run.id, `${run.name}${run.after ? `  ${score(run.after.mean)}` : ""}${run.status === "running" ? "  running" : ""}`];
    const others = [["", "none"], ...runs.filter((run) => run.id !== this.run).map(label)];
    this.chooser.replaceChildren(
      select("Run", runs.map(label), this.run, (run) => this.go(run, this.otherRun === run ? "" : this.otherRun)),
      select("beside", others, this.otherRun ?? "", (other) => this.go(this.run, other)),
    );
  }

  go(run, other) {
    const address = new URLSearchParams({ run, ...(other ? { with: other } : {}) });
    history.replaceState(null, "", `?${address}`);
    clearTimeout(this.timer);
    this.run = run;
    this.otherRun = other || undefined;
    this.caseTable = undefined;
    this.open().catch((error) => this.main.replaceChildren(el("div", { class: "card" }, note(error.message))));
  }

  drawNavigation() {
    const sections = [...this.main.querySelectorAll(":scope > section[id]:not([hidden])")]; // those of the head come and go
    this.navigation.replaceChildren(...sections.map((part) => el("a", { href: `#${part.id}` }, part.querySelector("h2").textContent)));
  }

  /** `/` goes to the search. */
  onKey(event) {
    const isTyping = event.target.closest?.("input, select, textarea, dialog");
    if (event.key !== "/" || isTyping || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    (this.search ?? this.list?.form.querySelector(".search"))?.focus();
  }

  // -- following

  schedule() {
    if (!this.source.isServed) return;
    clearTimeout(this.timer);
    const isRunning = [this.summary, this.other?.summary].some((one) => one?.status === "running");
    this.timer = setTimeout(() => this.follow(), !this.isReady ? POLL_WHILE_READING : isRunning ? POLL : POLL_AFTERWARDS);
  }

  async follow() {
    const run = this.run;
    try {
      const news = await this.source.run(run);
      const others = this.otherRun && (await this.source.run(this.otherRun));
      if (this.run !== run || (others && others.id !== this.otherRun)) return;
      const isNews = isOther(news, this.summary) || (others && isOther(others, this.other.summary));
      if (isNews) await this.take(news, others);
      else if (news.status === "running") this.head.querySelector(".live").textContent = progress(news);
      this.lost = false;
    } catch {
      if (!this.lost) this.head.querySelector(".live").textContent = "aitrain view has ended: this is what it showed last";
      this.lost = true;
    }
    this.schedule();
  }

  /** Whether the rollouts of all runs on the page are read. */
  get isReady() {
    return this.summary.is_ready && (!this.other || this.other.summary.is_ready);
  }

  async take(news, others) {
    const hadEpisodes = this.isReady;
    this.summary = news;
    if (others) this.other = beside(this.otherRun, others);
    this.drawNumbers();
    if (news.is_ready) {
      this.list.update(news);
      const isDue = Date.now() - this.casesAt > CASES_EVERY || news.status !== "running";
      if (!hadEpisodes || (isDue && !this.cases.contains(document.activeElement))) await this.drawCases();
    }
  }
}

new Page(openSource()).start();
