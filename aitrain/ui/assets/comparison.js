"use strict";
// The page of a comparison: the verdict, its numbers, and the cases with what both models said side by side.

const VERDICTS = { better: "better", worse: "worse", undetected: "no detectable difference" };
const OUTCOMES = { lost: "Lost", won: "Won", equal: "Equal", unscored: "No score" };
const ROW_HINTS = {
  sampled: "score of sampled completions",
  greedy: "score of the likeliest completion",
  lenient: "score without the format",
  format: "score less lenient score",
};
const FIRST_ROWS = 30;

function verdictPill(verdict) {
  return el("span", { class: `pill verdict ${verdict}` }, VERDICTS[verdict]);
}

function pText(row) {
  const value = row.p_corrected ?? row.p_value;
  return value < 0.001 ? "< 0.001" : value.toFixed(3);
}

function withInterval(value, format) {
  return value.low === null ? "" : `${format(value.low)} to ${format(value.high)}`;
}

// -- the numbers

function numbersOf(comparison) {
  const rows = Object.values(comparison.rows);
  const reach = Math.max(...rows.map(({ change }) => Math.max(Math.abs(change.low ?? change.mean), Math.abs(change.high ?? change.mean)))) || 1;
  return el("div", { class: "card numbers" }, rows.map((row) => numberRow(row, comparison, reach)), sentences(comparison));
}

function numberRow(row, { a, b }, reach) {
  const means = [[a, row.a], [b, row.b]].map(([label, value]) =>
    el("div", { class: "mean" }, el("span", { class: "label" }, isolated(label)), el("b", {}, score(value.mean)), el("span", { class: "interval" }, withInterval(value, score))),
  );
  return el(
    "div",
    { class: "compared-row" },
    el("div", { class: "what" }, el("h3", {}, row.name), el("p", { class: "hint" }, scoreHint(row.name, ROW_HINTS))),
    el("div", { class: "means" }, means),
    el(
      "div",
      { class: "effect" },
      el("p", {}, el("b", { class: row.verdict }, signed(row.change.mean)), el("span", { class: "interval" }, withInterval(row.change, signed))),
      forest(row, reach),
      el("p", { class: "hint" }, el("span", { class: row.verdict }, VERDICTS[row.verdict]), `, p ${pText(row).startsWith("<") ? pText(row) : `= ${pText(row)}`}`),
    ),
  );
}

/** The interval of a change on a line with 0 in its middle. */
function forest(row, reach) {
  const place = (value) => `${50 + (48 * value) / reach}%`;
  const { low, high, mean } = row.change;
  const span = el("span", { class: "span" });
  span.style.left = place(low ?? mean);
  span.style.right = `calc(100% - ${place(high ?? mean)})`;
  const point = el("span", { class: "point" });
  point.style.left = place(mean);
  return el("div", { class: `forest ${row.verdict}`, "aria-hidden": "true" }, el("span", { class: "zero" }), span, point);
}

function sentences({ format, power, notes }) {
  return [
    format && el("p", { class: "sentence" }, isolated(format)),
    power && el("p", { class: "sentence" }, power),
    notes.length > 0 && el("ul", { class: "warnings" }, notes.map((text) => el("li", {}, isolated(text)))),
  ];
}

function metricsOf(comparison) {
  const rows = Object.values(comparison.metrics);
  if (!rows.length) return null;
  const head = ["Metric", comparison.a, comparison.b, "Change", "95% interval"].map((text) => el("th", { scope: "col" }, isolated(text)));
  const lines = rows.map(({ name, a, b, change }) =>
    el("tr", {}, el("th", { scope: "row" }, isolated(name)), [short(a.mean), short(b.mean), short(change.mean), withInterval(change, short)].map((text) => el("td", {}, text))),
  );
  return el("details", { class: "fold" }, el("summary", {}, `Metrics and lengths (${rows.length})`), el("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Table of metrics" }, el("table", { class: "metrics" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, lines))));
}

// -- the cases

class ComparedCases {
  constructor(comparison) {
    this.comparison = comparison;
    const kinds = Object.entries(OUTCOMES).filter(([key]) => comparison.counts[key]);
    this.state = { outcome: kinds[0]?.[0], text: "", most: FIRST_ROWS };
    const chosen = choice("Cases", kinds.map(([key, word]) => [key, `${word} (${count(comparison.counts[key])})`]), this.state.outcome, (outcome) => this.show({ outcome, most: FIRST_ROWS }));
    const search = el("input", { type: "search", placeholder: "find a case", "aria-label": "Find a case", oninput: () => this.show({ text: search.value.toLowerCase(), most: FIRST_ROWS }) });
    this.list = el("div", { class: "compared-cases" });
    this.more = el("button", { type: "button", class: "wide", onclick: () => this.show({ most: 4 * this.state.most }) });
    const listed = comparison.cases.length;
    const left = listed < comparison.counts.matched && note(`${count(listed)} of ${count(comparison.counts.matched)} cases: those whose scores differ most.`);
    this.element = el("div", {}, this.bar(kinds), el("div", { class: "toolbar" }, chosen, search), left, this.list, this.more);
    this.show({});
  }

  /** How many cases were won and lost, for the eye. */
  bar(kinds) {
    const parts = kinds.map(([key]) => {
      const part = el("span", { class: key });
      part.style.flexGrow = this.comparison.counts[key];
      return part;
    });
    return el("div", { class: "outcomes", "aria-hidden": "true" }, parts);
  }

  show(changes) {
    Object.assign(this.state, changes);
    const { outcome, text, most } = this.state;
    const found = this.comparison.cases.filter((one) => one.outcome === outcome && (!text || one.names.includes(text) || one.prompt.toLowerCase().includes(text)));
    replaceChildren(this.list, found.slice(0, most).map((one) => this.row(one)));
    if (!found.length) this.list.append(note("No case of this kind."));
    this.more.hidden = found.length <= most;
    this.more.textContent = `Show more of ${count(found.length)} cases`;
  }

  row(one) {
    const [first, second] = one.scores;
    const difference = first === null || second === null ? null : second - first;
    const place = el("div", { class: "opened", hidden: true });
    const toggle = () => {
      place.hidden = !place.hidden;
      button.setAttribute("aria-expanded", String(!place.hidden));
      if (!place.hidden && !place.hasChildNodes()) place.append(this.transcripts(one));
    };
    const button = el(
      "button",
      { type: "button", class: "compared-case", "aria-expanded": "false", onclick: toggle },
      el("span", { class: "number" }, score(first), " → ", score(second)),
      el("span", { class: `number ${one.outcome === "won" ? "better" : one.outcome === "lost" ? "worse" : ""}` }, signed(difference)),
      isolated(one.prompt || `case ${one.names[0]}`, "prompt"),
    );
    return el("div", { class: "compared-holder" }, button, place);
  }

  transcripts(one) {
    const { a, b, folders } = this.comparison;
    const names = one.names[0] === one.names[1] ? one.names[0] : `${one.names[0]} in ${a}, ${one.names[1]} in ${b}`;
    if (!one.sides) return note(`Its transcripts are not in this page. See them with: aitrain show ${folders[0]} --case ${one.names[0]}`);
    const asked = one.sides[0][0].asked.length ? [] : one.case.asked;
    const about = el(
      "div",
      { class: "about" },
      el("p", { class: "hint" }, "Case ", isolated(names)),
      fold(`Case row (${plural(one.case.columns, "column")})`, one.case.row, one.case.columns - one.case.row.length),
      fold(`Tools (${count(one.case.tools.length)})`, one.case.tools),
      asked.length > 0 && conversation({ ...one.sides[0][0], asked, said: [], skipped: null }),
    );
    return el("div", { class: "side-by-sides" }, about, el("div", { class: "columns" }, [a, b].map((label, side) => this.side(label, one, side))));
  }

  side(label, one, side) {
    const episodes = one.sides[side];
    const left = one.samples[side] - episodes.length;
    return el(
      "section",
      { class: "column" },
      el("h3", {}, isolated(label), el("span", { class: "hint" }, one.samples[side] > 1 ? `mean of ${plural(one.samples[side], "sample")}: ${score(one.scores[side])}` : "")),
      this.sample(episodes[0]),
      episodes.length > 1 && el("details", { class: "fold" }, el("summary", {}, plural(episodes.length - 1, "more sample")), episodes.slice(1).map((episode) => this.sample(episode))),
      left > 0 && note(`${plural(left, "more sample")} of it not in this page.`),
    );
  }

  sample(episode) {
    const facts = [fact("score", score(episode.score)), fact("ended", stopped(episode.stop)), episode.turns > 1 && fact("turns", count(episode.turns)), fact("tokens", count(episode.tokens))];
    const metrics = Object.entries(episode.metrics).map(([name, value]) => fact(isolated(name), short(value)));
    return el("div", { class: "compared-sample" }, el("dl", { class: "facts" }, facts, metrics), episode.failure && failure(episode), conversation(episode));
  }
}

// -- the page

function overview(comparisons, current, onchoose) {
  if (comparisons.length < 2) return null;
  const names = ["Model", "Score", `Change from ${comparisons[0].a}`, `p, corrected for ${comparisons.length}`, "Verdict"];
  const rows = comparisons.map((comparison, index) => {
    const main = comparison.rows[comparison.decoding];
    const button = el("button", { type: "button", class: "quiet", "aria-pressed": String(index === current), onclick: () => onchoose(index) }, isolated(comparison.b));
    const cells = [score(main.b.mean), [el("b", { class: main.verdict }, signed(main.change.mean)), " ", el("span", { class: "interval" }, withInterval(main.change, signed))], pText(main), el("span", { class: comparison.verdict }, VERDICTS[comparison.verdict])];
    return el("tr", {}, el("th", { scope: "row" }, button), cells.map((cell, place) => el("td", { "data-label": names[place + 1] }, cell)));
  });
  const head = names.map((text) => el("th", { scope: "col" }, isolated(text)));
  return el("div", { class: "card scroll overview", tabindex: "0", role: "region", "aria-label": "Table of comparisons" }, el("table", { class: "metrics" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
}

function head(comparison, written) {
  const { a, b, models, decoding } = comparison;
  const main = comparison.rows[decoding];
  return el(
    "div",
    { class: "run-head" },
    el("h1", {}, isolated(b), " compared with ", isolated(a), " ", verdictPill(comparison.verdict)),
    el("p", { class: "lead" }, isolated(models[1]), " against ", isolated(models[0]), ` on the same ${plural(main.change.count, "case")}`),
    el("p", { class: "hint" }, `written ${new Date(1000 * written).toLocaleString()}`),
  );
}

function showComparison(main, { comparisons, written }, current) {
  const comparison = comparisons[current];
  scoreBounds = comparison.bounds;
  const { counts, a, b } = comparison;
  const hint = `${b} has a higher score than ${a} on ${count(counts.won)}, a lower one on ${count(counts.lost)}, the same on ${count(counts.equal)}; the largest differences first.`;
  replaceChildren(
    main,
    head(comparison, written),
    overview(comparisons, current, (index) => {
      showComparison(main, { comparisons, written }, index);
      main.querySelector('[aria-pressed="true"]').focus();
    }),
    section("numbers", "Scores", null, numbersOf(comparison), metricsOf(comparison)),
    section("cases", `Cases (${count(counts.matched)})`, hint, new ComparedCases(comparison).element),
  );
  document.title = `${b} compared with ${a}`;
}

function startComparison() {
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = el("main", {});
  const links = [["numbers", "Scores"], ["cases", "Cases"]].map(([id, text]) => el("a", { href: `#${id}` }, text));
  const bar = el("div", { class: "top" }, el("div", { class: "bar" }, brand(), el("nav", { "aria-label": "Sections" }, links), themeButton(() => {})));
  const words = "Changes and intervals are of the cases that both models have a score for, 95%, over cases; a case's score is the mean of its samples. p: sign-flip test of the cases' differences.";
  document.getElementById("app").append(bar, main, el("footer", {}, words));
  showComparison(main, data, 0);
}

startComparison();
