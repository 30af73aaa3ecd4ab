"use strict";
// One episode: its facts, and all that was said, by whom.

const STOPS = {
  done: "done",
  max_tokens: "last answer cut off",
  max_turns: "too many turns",
  truncated: "no room for another answer",
  env_error: "environment failed",
  env_timeout: "environment timed out",
  no_room: "dropped: no room for an answer",
};

function stopped(stop) {
  return STOPS[stop] ?? (stop || "unknown");
}

const FAILURES = {
  raised: "raised an error",
  timed_out: "timed out",
  not_finite: "score not finite",
  out_of_range: "score out of range",
  wrong_type: "wrong type",
  server: "server failed",
  crashed: "crashed",
};

function failed(kind) {
  return FAILURES[kind] ?? kind;
}

/** When an episode was: "step 12", or "before training, greedy". */
function moment(episode) {
  if (!episode.eval_phase) return `step ${count(episode.step)}`;
  const [time, decoding] = [episode.eval_phase.replace(/_[^_]*$/, ""), episode.eval_phase.split("_").pop()];
  const words = { before: "before training", after: "after training", eval: "evaluation" };
  return `${words[time] ?? `at step ${count(episode.step)}`}, ${decoding}`;
}

/** A case by its environment, if there are several, and its row, with what the environment knows it by where that is
 * something else. */
function caseName(one) {
  const environment = one.environment ? `${one.environment} ` : "";
  return environment + (one.case_idx === one.case ? one.case : `${one.case} (case_idx ${one.case_idx})`);
}

function fact(name, value) {
  return el("div", { class: "fact" }, el("dt", {}, name), el("dd", {}, value));
}

function transcript(episode) {
  const facts = [
    fact("score", score(episode.score)),
    episode.advantage !== null && fact("advantage", signed(episode.advantage)),
    fact("ended", stopped(episode.stop)),
    fact("turns", count(episode.turns)),
    fact("tokens", count(episode.tokens)),
    fact("weight version", count(episode.weight_version)),
    episode.seconds !== null && fact("environment", seconds(episode.seconds)),
    Object.entries(episode.metrics).map(([name, value]) => fact(isolated(name), short(value))),
  ];
  const spoken = el("div", { class: "spoken" }, episode.failure && failure(episode), conversation(episode));
  return el("div", { class: "transcript" }, el("dl", { class: "facts" }, facts), el("div", { class: "transcript-body" }, spoken, given(episode)));
}

/** Beside the conversation: the row of the dataset, the schemas of the tools, and the prompt as the model got it. */
function given(episode) {
  const text = episode.rendered;
  const prompt = text && el("details", { class: "fold rendered" }, el("summary", {}, `Rendered prompt (${plural(text.length, "character")})`), el("div", { class: "holder" }, longText(text, 2000)));
  const folds = [fold(`Case row (${plural(episode.row.length, "column")})`, episode.row, matchMedia("(min-width: 1000px)").matches), fold(`Tools (${count(episode.tools.length)})`, episode.tools), prompt].filter(Boolean);
  return folds.length ? el("aside", { class: "given", "aria-label": "What the episode was given" }, folds) : null;
}

/** Named texts, shown when they are opened. */
function fold(title, items, open = false) {
  if (!items.length) return null;
  const lines = items.map(({ name, text }) => [el("dt", {}, isolated(name)), el("dd", {}, longText(text, 600))]);
  return el("details", { class: "fold", open }, el("summary", {}, title), el("dl", {}, lines));
}

function failure(episode) {
  const speaker = isolated(`${episode.error.place || "The environment"}: ${failed(episode.failure)}`);
  return el("div", { class: "message failure" }, el("div", { class: "speaker" }, speaker), longText(episode.error.message ?? ""));
}

const FIRST_MESSAGES = 14;
const LAST_MESSAGES = 4;

/** The messages: of a long conversation its beginning and its end, and a button for what lies between. */
function conversation(episode) {
  let turn = 0;
  const asked = episode.asked.map((message) => [message, message.role === "system" ? "System" : message.role === "user" ? "Prompt" : message.role, "asked"]);
  const said = episode.said.map((message) => {
    if (message.role === "assistant") return [message, `Model${episode.turns > 1 ? `, turn ${count((turn += 1))}` : ""}`, "model"];
    if (message.role === "tool") return [message, "Tool result", "tool"];
    return [message, message.role === "user" ? "Environment" : `Environment, as ${message.role || "unknown"}`, "environment"];
  });
  const all = [...asked, ...said];
  const first = all.length > FIRST_MESSAGES + LAST_MESSAGES ? FIRST_MESSAGES : all.length;
  const holder = el("div", { class: "conversation" }, all.slice(0, first).map((item) => messageBlock(item)));
  if (first < all.length) addMiddle(holder, all, first);
  return holder;
}

function addMiddle(holder, all, first) {
  let shown = first;
  let next = 50;
  const end = all.length - LAST_MESSAGES;
  const more = el("button", { type: "button", class: "quiet between", onclick: () => show() });
  const label = () => (more.textContent = `Show ${count(Math.min(next, end - shown))} more of ${count(end - shown)} messages in between`);
  function show() {
    more.before(...all.slice(shown, Math.min(end, shown + next)).map((item) => messageBlock(item)));
    shown = Math.min(end, shown + next);
    next = Math.min(next * 2, 400);
    if (shown < end) label();
    else more.remove();
  }
  label();
  holder.append(more, ...all.slice(end).map((item) => messageBlock(item)));
}

function messageBlock(item) {
  const [message, speaker, kind] = item;
  const calls = (message.calls ?? []).map(([name, given]) =>
    el("div", { class: "call" }, el("div", { class: "speaker" }, "Tool call ", isolated(name, "name")), longText(given, 1500)),
  );
  const head = el("div", { class: "speaker" }, isolated(speaker), message.name && [" ", isolated(message.name, "name")]);
  const text = message.text || !calls.length ? longText(message.text || "(nothing)") : null;
  const thought = message.thought && el("details", {}, el("summary", {}, "Thought"), longText(message.thought));
  return el("div", { class: `message ${kind}` }, head, thought, text, calls);
}

// -- side by side

/** A dialog with columns, each `{heading, run, rows}`: groups, or the same case at two times or in two runs. */
function sideBySide(title, columns, source) {
  const close = el("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Close");
  const body = columns.map(({ heading, run, rows }) =>
    el(
      "section",
      { class: "column" },
      el("h3", {}, heading),
      el("div", { class: "episodes" }, rows.length ? [episodeLabels(!rows[0].eval_phase), episodeRows(rows, run, source, true)] : note("No episode of it here.")),
    ),
  );
  const dialog = el("dialog", { class: "side-by-side", "aria-label": title }, el("div", { class: "dialog-head" }, el("h2", {}, isolated(title)), close), el("div", { class: "columns" }, body));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

/** The names of the columns of episode rows. */
function episodeLabels(hasAdvantage, hasCase = false) {
  const names = [hasCase && "Case", "Score", hasCase && "Prompt", hasAdvantage && "Advantage", "Last answer", "Ended", "Turns", "Tokens"].filter(Boolean);
  return el("div", { class: `episode-labels ${hasAdvantage ? "" : "without-advantage"}`, "aria-hidden": "true" }, names.map((name) => el("span", { class: name.split(" ").pop().toLowerCase() }, name)));
}

/** Rows of a group's episodes. */
function episodeRows(episodes, run, source, isOpen = false, hasCase = false) {
  return episodes.map((episode, index) => episodeRow(episode, run, source, isOpen && index === 0, hasCase));
}

/** An episode as a line that opens: score, how it ended, the beginning of its last answer. */
function episodeRow(episode, run, source, isOpen = false, hasCase = false) {
  const place = el("div", { class: "opened", hidden: true });
  const ended = episode.failure ? failed(episode.failure) : stopped(episode.stop);
  const tag = episode.failure ? "tag bad" : episode.stop === "done" ? "quiet-tag" : "tag";
  const hasAdvantage = !episode.eval_phase;
  const cell = (name, label, ...children) => el("span", { class: `number ${name}`, "data-label": label }, children);
  const words = [`score ${score(episode.score)}`, hasAdvantage && `advantage ${signed(episode.advantage, 2)}`, ended, plural(episode.turns, "turn"), plural(episode.tokens, "token")].filter(Boolean).join(", ");
  const button = el(
    "button",
    { type: "button", "aria-label": `${words}: ${episode.answer || "no answer"}`, class: `episode ${hasAdvantage ? "" : "without-advantage"}`, "aria-expanded": "false", onclick: () => toggle() },
    hasCase && isolated(caseName(episode), "case"),
    cell("score", "score", scoreBar(episode.score), score(episode.score)),
    hasCase && isolated(episode.prompt, "prompt"),
    hasAdvantage && cell("advantage", "advantage", episode.advantage === null ? "–" : signed(episode.advantage, 2)),
    isolated(episode.answer || "(no answer)", "answer"),
    el("span", { class: "ended" }, el("span", { class: tag }, ended)),
    cell("turns", "turns", count(episode.turns)),
    cell("tokens", "tokens", count(episode.tokens)),
  );
  async function toggle() {
    const opens = place.hidden;
    button.setAttribute("aria-expanded", String(opens));
    place.hidden = !opens;
    if (!opens || place.hasChildNodes()) return;
    try {
      place.append(transcript(await source.episode(run, episode.n)));
    } catch (error) {
      place.append(note(`This episode could not be read: ${error.message}`));
    }
  }
  if (isOpen) toggle();
  return el("div", { class: "episode-holder", "data-episode": episode.n }, button, place);
}
