"use strict";
// The head of a run's page: its status, how far it is, its newest score, and if it has ended early, why.

const STATUS = { running: "running", finished: "finished", stopped: "stopped", failed: "failed", stalled: "stalled", dead: "dead", unknown: "no status" };
const STATUS_HINTS = {
  stopped: "It was asked to stop, and saved",
  stalled: "It made no progress and was ended",
  dead: "Its process is gone, and has left no word",
  unknown: "The folder has no valid status.json",
};
const FAILED = { failed: "Why it failed", stalled: "Why it was ended", dead: "What happened" };
const VERDICTS = { better: "better than before", worse: "worse than before", undetected: "no detectable difference" };

function statusPill({ status }) {
  const word = STATUS[status] ?? "no status";
  return el("span", { class: `pill ${word.replace(" ", "-")}`, title: STATUS_HINTS[status] }, word);
}

/** `showFailures` shows the episodes that the environment failed on. */
function runHead(summary, showFailures) {
  return [el("h1", {}, isolated(summary.name), " ", statusPill(summary)), endedEarly(summary, showFailures), foundInMetrics(summary), newestScore(summary), lead(summary), progressBar(summary), el("p", { class: "hint live" }, progress(summary))];
}

function lead(summary) {
  const environment = summary.environment.class || option(summary, "rl_env");
  const { model } = summary;
  if (!model && !environment) return el("p", { class: "lead" }, "A run that has not said yet what it trains.");
  const where = el("b", {}, isolated(environment || "an environment"));
  if (summary.job === "eval") return el("p", { class: "lead" }, el("b", {}, isolated(model || "a model")), ", evaluated on ", where);
  const what = option(summary, "peft") === "true" ? "a LoRA adapter for " : "";
  return el("p", { class: "lead" }, what, el("b", {}, isolated(model || "a model")), ", trained with GRPO on ", where);
}

/** The score after training, or the newest one while it lasts, with what it was before. */
function newestScore(summary) {
  const { value, when, change } = scoreNow(summary);
  if (!value) return null;
  const { verdict } = summary;
  const since = verdict ? [", ", el("span", { class: verdict }, VERDICTS[verdict])] : change === null ? [] : [`, ${signed(change)} since the start`];
  return el("p", { class: "newest" }, el("b", {}, score(value.mean)), " ", el("span", {}, `held-out score ${when}`, since));
}

function scoreNow(summary) {
  const { before, after } = summary.scores.sampled ?? {};
  const [when, last] = newest(summary, "sampled");
  const value = after ?? last ?? before ?? null;
  const isEval = summary.job === "eval";
  const text = isEval ? "of sampled answers" : after ? "after training" : last ? `at ${when}` : "before training";
  return { value, when: text, change: value && before && value !== before ? value.mean - before.mean : null };
}

/** The last scoring of a run that has not come to its end. */
function newest(summary, decoding) {
  const point = summary.held_out.findLast((other) => other.step > 0 && other[decoding]);
  return point ? [`step ${count(point.step)}`, point[decoding]] : ["after", null];
}

/** Why a run has ended early, and the command that continues it. */
function endedEarly(summary, showFailures) {
  const { status, reason, next, log } = summary;
  const isFailed = status in FAILED;
  if (!isFailed && !(status === "stopped" && (reason || next))) return null;
  const why = reason || (isFailed ? "The run has recorded no reason. The end of its log may tell." : "");
  return el(
    "section",
    { class: `card early ${isFailed ? "bad" : ""}`, id: "reason", "aria-labelledby": "reason-title" },
    el("h2", { id: "reason-title" }, isFailed ? FAILED[status] : "Why it stopped"),
    why && longText(why),
    isFailed && summary.episodes.failed > 0 && el("button", { type: "button", class: "quiet", onclick: showFailures }, `Show the ${plural(summary.episodes.failed, "failed episode")}`),
    next && el("p", { class: "next" }, "Continue it with ", el("code", {}, isolated(next))),
    log && el("details", { class: "fold", open: !reason }, el("summary", {}, `End of train.log (${plural(log.split("\n").length, "line")})`), el("div", { class: "log scroll", tabindex: "0", role: "region", "aria-label": "End of train.log" }, longText(log, 20_000))),
  );
}

/** What the diagnostics found, with the step of each. */
function foundInMetrics({ findings }) {
  if (!findings?.length) return null;
  const rows = findings.map(({ step, text }) => [el("dt", {}, `step ${count(step)}`), el("dd", {}, isolated(text))]);
  return el("section", { class: "card early", id: "findings", "aria-labelledby": "findings-title" }, el("h2", { id: "findings-title" }, "What the diagnostics found"), el("dl", { class: "findings" }, rows));
}

function progressBar(summary) {
  const { status, step, steps } = summary;
  if (status !== "running" || !steps) return null;
  const fill = el("span", { class: "fill" });
  fill.style.width = `${100 * Math.min(1, (step ?? 0) / steps)}%`;
  return el("div", { class: "progress", role: "progressbar", "aria-label": "Steps done", "aria-valuemin": "0", "aria-valuemax": String(steps), "aria-valuenow": String(step ?? 0) }, fill);
}

/** Where a run is, in words. */
function progress(summary) {
  const { status, step, steps } = summary;
  const unit = summary.job === "eval" ? "episode" : "step";
  const parts = [];
  if (step !== null && step !== undefined) parts.push(status === "running" && steps ? `${unit} ${count(step)} of ${count(steps)}` : plural(step, unit));
  if (summary.written) parts.push(`written ${new Date(1000 * summary.written).toLocaleString()}`);
  else if (status === "running") parts.push(timeLeft(summary), summary.phase, signOfLife(summary));
  if (summary.machines.length > 1) parts.push(`${plural(summary.machines.length, "machine")}: ${summary.machines.map(({ host, processes }) => `${host} (${plural(processes, "rank")})`).join(", ")}`);
  return parts.filter(Boolean).join(" · ");
}

function timeLeft({ ends_at, job }) {
  const left = ends_at === null || ends_at === undefined ? 0 : ends_at - Date.now() / 1000;
  return left > 0 ? `about ${duration(left)} ${job === "eval" ? "left" : "of training left"}` : "";
}

/** Silence of more than 20 seconds is told: a heartbeat comes every two. */
function signOfLife({ heartbeat }) {
  const silence = heartbeat ? Date.now() / 1000 - heartbeat : 0;
  return silence > 20 ? `last sign of life ${duration(silence)} ago` : "live";
}
