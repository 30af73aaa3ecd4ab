"use strict";
// The cases: one line each, sorted by any column.

const FIRST_CASES = 25;

class CaseTable {
  /** `other`: a second run, whose last scores stand beside. */
  constructor(source, run, { rows: cases, count: all }, other = null) {
    Object.assign(this, { source, run, other, direction: "" });
    this.cases = cases.map((row) => ({ ...row, other: this.otherScore(row) }));
    this.isHeldOut = cases.some((row) => row.is_held_out);
    this.sort = { key: cases.some((row) => row.change !== null) ? "change" : "last", isUp: false };
    this.text = "";
    this.most = FIRST_CASES;
    const kinds = [[true, `Held-out (${count(cases.filter((row) => row.is_held_out).length)})`], [false, `Training (${count(cases.filter((row) => !row.is_held_out).length)})`]];
    const hasBoth = new Set(cases.map((row) => row.is_held_out)).size > 1;
    const chosen = hasBoth && choice("Cases", kinds, this.isHeldOut, (isHeldOut) => this.show({ isHeldOut, direction: "", most: FIRST_CASES }));
    this.counts = el("div", { class: "counts" });
    const search = el("input", { type: "search", placeholder: "find a case", "aria-label": "Find a case", oninput: () => this.show({ text: search.value.toLowerCase(), most: FIRST_CASES }) });
    this.head = el("tr");
    this.body = el("tbody");
    this.more = el("button", { type: "button", class: "wide", onclick: () => this.show({ most: this.most * 4 }) });
    const left = cases.length < all && note(`${count(cases.length)} of ${count(all)} cases: those whose scores changed most.`);
    this.element = el("div", {}, left, this.counts, el("div", { class: "toolbar" }, chosen || el("span", { class: "hint" }, plural(cases.length, "case")), search), el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of cases" }, el("table", { class: "cases" }, el("thead", {}, this.head), this.body)), this.more);
    this.show({});
  }

  otherScore(row) {
    return this.other?.cases.rows.find((one) => one.case === row.case && one.is_held_out === row.is_held_out)?.last ?? null;
  }

  /** How many cases got better, stayed and got worse, as buttons that show only those. */
  drawCounts() {
    const all = this.cases.filter((row) => row.is_held_out === this.isHeldOut);
    const [better, same, worse] = ["better", "same", "worse"].map((direction) => all.filter((row) => directionOf(row) === direction).length);
    if (!better && !same && !worse) return replaceChildren(this.counts);
    const options = [["", "all"], ["better", `${count(better)} better`], ["same", `${count(same)} the same`], ["worse", `${count(worse)} worse`]];
    const show = (direction) => this.show({ direction, most: FIRST_CASES, ...(direction ? { sort: { key: "change", isUp: direction === "worse" } } : {}) });
    const hint = "By the mean score of each case; one case alone also varies by chance.";
    replaceChildren(this.counts, choice("How the cases changed", options, this.direction, show), el("span", { class: "hint" }, hint));
  }

  get columns() {
    const isChanged = this.cases.some((row) => row.change !== null);
    const columns = [
      ["case", "Case", "the row of the dataset, and its case_idx where that is something else"],
      ["prompt", "Prompt", "the beginning of what was asked"],
      ["first", "First", this.isHeldOut ? "score before training" : "mean score of its first group"],
      ["last", "Last", this.isHeldOut ? "score at the last scoring" : "mean score of its last group"],
      ["change", "Change", "last less first; none for a case that was played at one time only"],
    ];
    if (!isChanged) columns.splice(2, 3, ["last", "Score", "the mean of its samples"]);
    if (this.other) columns.push(["other", `Last in ${this.other.name}`, "the other run's last score"]);
    return columns;
  }

  show(changes) {
    Object.assign(this, changes);
    this.drawCounts();
    const rows = this.cases.filter((row) => row.is_held_out === this.isHeldOut && (!this.direction || directionOf(row) === this.direction) && (!this.text || row.case.toLowerCase() === this.text || row.case_idx.toLowerCase() === this.text || row.prompt.toLowerCase().includes(this.text)));
    rows.sort((one, other) => this.compare(one, other));
    replaceChildren(this.head, this.columns.map((column) => this.heading(column)), el("th", {}, el("span", { class: "unseen" }, "Look closer")));
    replaceChildren(this.body, rows.slice(0, this.most).map((row) => this.line(row)));
    if (!rows.length) this.body.append(el("tr", {}, el("td", { colSpan: this.columns.length + 1 }, note("No case of this kind."))));
    this.more.hidden = rows.length <= this.most;
    this.more.textContent = `Show more of ${count(rows.length)} cases`;
  }

  /** Without a value: last, whichever the direction. */
  compare(one, other) {
    const [first, second] = [one[this.sort.key], other[this.sort.key]];
    if (first === null || second === null) return (first === null) - (second === null);
    const way = this.sort.isUp ? 1 : -1;
    if (typeof first === "string") return way * first.localeCompare(second, "en", { numeric: true });
    return way * (first - second);
  }

  heading([key, title, hint]) {
    const isSorted = this.sort.key === key;
    const isText = key === "case" || key === "prompt";
    const sort = () => {
      this.show({ sort: { key, isUp: isSorted ? !this.sort.isUp : isText } });
      this.head.querySelector(`[data-key="${key}"]`).focus();
    };
    const button = el("button", { type: "button", title: hint, "data-key": key, onclick: sort }, isolated(title), el("span", { class: "arrow", "aria-hidden": "true" }, isSorted ? (this.sort.isUp ? "↑" : "↓") : ""));
    return el("th", { scope: "col", class: key, "aria-sort": isSorted ? (this.sort.isUp ? "ascending" : "descending") : "none" }, button);
  }

  line(row) {
    const change = row.change === null || row.change === 0 ? "" : row.change > 0 ? "better" : "worse";
    const cells = {
      case: isolated(caseName(row), "case"),
      prompt: isolated(row.prompt, "prompt"),
      first: [scoreBar(row.first), score(row.first)],
      last: [scoreBar(row.last), score(row.last)],
      change: el("span", { class: change }, signed(row.change)),
      other: score(row.other),
    };
    const isOne = row.change === null && !this.other;
    const look = el("button", { type: "button", class: "quiet", "aria-label": `${isOne ? "Show the" : "Compare the first and last"} episodes of case ${caseName(row)}`, onclick: () => this.compareCase(row) }, isOne ? "Show" : "Compare");
    return el("tr", {}, this.columns.map(([key, title]) => el("td", { class: key, "data-label": title }, cells[key])), el("td", { class: "look" }, look));
  }

  /** The case's first and last episodes, or its last ones in two runs. */
  async compareCase(row) {
    const query = { ...EMPTY_QUERY, case: row.case, eval_phase: row.is_held_out ? "held-out" : "training" };
    const episodes = await this.all(this.run, query);
    const groups = grouped(episodes.filter((episode) => !episode.eval_phase.endsWith("greedy")));
    groups.sort((one, other) => place(one.members[0]) - place(other.members[0]));
    const column = (group, run, title) => ({ heading: group ? `${title}: ${moment(group.members[0])}` : title, run, rows: group?.members ?? [] });
    const word = (time) => (this.other ? `This run, ${time}` : time[0].toUpperCase() + time.slice(1));
    const columns = [column(groups[0], this.run, groups.length > 1 ? word("first") : "Episodes")];
    if (groups.length > 1) columns.push(column(groups.at(-1), this.run, word("last")));
    if (this.other) {
      const others = grouped((await this.all(this.other.id, query)).filter((episode) => !episode.eval_phase.endsWith("greedy")));
      others.sort((one, other) => place(one.members[0]) - place(other.members[0]));
      columns.push(column(others[others.length - 1], this.other.id, `${this.other.name}, last`));
    }
    sideBySide(`Case ${caseName(row)}`, columns, this.source);
  }

  /** All episodes of a query, which are few for one case. */
  async all(run, query) {
    const rows = [];
    for (let start = 0; start !== null && rows.length < 2000; ) {
      const found = await this.source.episodes(run, query, start);
      rows.push(...found.rows);
      start = found.next;
    }
    return rows;
  }
}

function directionOf({ change }) {
  if (change === null) return "once";
  return Math.abs(change) < 1e-9 ? "same" : change > 0 ? "better" : "worse";
}

function place(episode) {
  return episode.step + (episode.eval_phase.startsWith("after") ? 0.5 : 0);
}
