"use strict";
// Where the page's data come from: from the page itself (report.html), or from `aitrain view`. Both answer the same.

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function groupKey(episode) {
  return JSON.stringify([episode.step, episode.eval_phase, episode.group, episode.eval_phase ? episode.case : ""]);
}

/** The episodes of a list in groups, each with its key, in the order of the list. */
function grouped(episodes) {
  const groups = new Map();
  for (const episode of episodes) {
    const key = groupKey(episode);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(episode);
  }
  return [...groups.entries()].map(([key, members]) => ({ key, members }));
}

/** The data of report.html; `all` are the episodes that it holds. */
function embedded({ summary, cases, source, episodes: all, written }) {
  const isSample = summary.episodes.all > all.length;
  const steps = all.filter((episode) => !episode.eval_phase).map((episode) => episode.step);
  summary.episodes.steps = [...new Set(steps)].sort((one, other) => one - other); // those that can be shown
  function episodes(run, query, start = 0) {
    const wanted = query.text.toLowerCase();
    const isRow = all.some((episode) => episode.case === query.case);
    const rows = sorted(all.filter((episode) => takes(query, episode, isRow) && (!wanted || holds(episode, wanted))));
    let end = start + 48;
    while (end < rows.length && groupKey(rows[end]) === groupKey(rows[end - 1])) end += 1; // a group's head is of all of it
    return { rows: rows.slice(start, end), total: rows.length, next: end < rows.length ? end : null };
  }
  const episode = (run, number) => all.find((one) => one.n === number);
  const shown = { ...summary, is_ready: true, written };
  return { isServed: false, isSample, held: all.length, runs: () => [], run: () => shown, source: () => source, cases: () => cases, episodes, episode };
}

/** `isRow`: whether the query's case is the number of a row, or else a case_idx. */
function takes(query, episode, isRow) {
  const kind = episode.eval_phase ? "held-out" : "training";
  return (
    ["", kind, episode.eval_phase].includes(query.eval_phase) &&
    (query.step === "" || Number(query.step) === episode.step) &&
    (query.case === "" || query.case === (isRow ? episode.case : episode.case_idx)) &&
    ((query.low === "" && query.high === "") ||
      (episode.score !== null && (query.low === "" || episode.score >= Number(query.low)) && (query.high === "" || episode.score <= Number(query.high)))) &&
    (query.failure === "" || query.failure === episode.failure || (query.failure === "any" && episode.failure !== "")) &&
    (query.stop === "" || query.stop === episode.stop)
  );
}

function holds(episode, wanted) {
  const messages = [...episode.asked, ...episode.said];
  const texts = messages.flatMap((message) => [message.text, message.thought ?? "", ...(message.calls ?? []).flat()]);
  return [...texts, episode.error.message ?? ""].some((text) => text.toLowerCase().includes(wanted));
}

/** Group by group, in the order of the training. */
function sorted(episodes) {
  const byCase = (one, other) => (one.eval_phase ? one.case.length - other.case.length || one.case.localeCompare(other.case) : 0);
  return [...episodes].sort((one, other) => one.step - other.step || one.eval_phase.localeCompare(other.eval_phase) || one.group - other.group || byCase(one, other));
}

/** The data of `aitrain view`. */
function served() {
  async function ask(what, parameters) {
    const answer = await fetch(`/api/${what}?${new URLSearchParams(parameters)}`);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  }
  const [run, source, cases] = ["run", "source", "cases"].map((what) => (run) => ask(what, { run }));
  const episodes = (run, query, start = 0) => ask("episodes", { ...query, run, start });
  const episode = (run, number) => ask("episode", { run, n: number });
  return { isServed: true, isSample: false, runs: () => ask("runs", {}), run, source, cases, episodes, episode };
}

function openSource() {
  const data = document.getElementById("data");
  return data ? embedded(JSON.parse(data.textContent)) : served();
}
