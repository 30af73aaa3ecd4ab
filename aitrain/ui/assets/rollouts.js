"use strict";
// The rollouts: filtered and searched, group by group.

const EMPTY_QUERY = { eval_phase: "", step: "", case: "", low: "", high: "", failure: "", stop: "", text: "" };

class RolloutList {
  constructor(source, run, summary) {
    Object.assign(this, { source, run, summary });
    this.pinned = [];
    this.query = { ...EMPTY_QUERY, eval_phase: "training" };
    const { steps } = this.counted;
    if (steps.length) this.query.step = String(steps[steps.length - 1]);
    else this.query.eval_phase = "";
    this.list = el("div", { class: "groups" });
    this.status = el("p", { class: "hint", role: "status" });
    this.more = el("button", { type: "button", class: "wide", hidden: true, onclick: () => this.load(this.next) }, "Show more");
    this.fresh = el("button", { type: "button", class: "wide fresh", hidden: true, onclick: () => this.showNewest() });
    this.form = el("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() });
    this.element = el("div", {}, this.form, this.fresh, this.status, this.list, this.more);
    this.drawForm();
    this.load(0);
  }

  get counted() {
    return this.summary.episodes;
  }

  /** The sets, steps, failures and ends that there are, as things to choose. */
  drawForm() {
    const set = (name) => (value) => this.change({ [name]: value });
    const { eval_phases, failures, stops } = this.counted;
    const query = this.query;
    const range = scoreBounds ? { min: scoreBounds[0], max: scoreBounds[1] } : {};
    const box = (label, name, properties) => input(label, { ...properties, value: query[name] }, set(name));
    const phaseOptions = [["", "all episodes"], ["training", "training"], ["held-out", "all held-out scorings"], ...eval_phases.map((phase) => [phase, `held-out, ${moment({ eval_phase: phase, step: Number(phase.match(/\d+/)?.[0] ?? 0) })}`])];
    const failureOptions = [["", "any or none"], ["any", "failed ones"], ...Object.entries(failures).map(([kind, number]) => [kind, `${failed(kind)} (${count(number)})`])];
    const stopOptions = [["", "any way"], ...Object.entries(stops).map(([stop, number]) => [stop, `${stopped(stop)} (${count(number)})`])];
    replaceChildren(
      this.form,
      box("Text", "text", { type: "search", placeholder: "search what was said", class: "search", autocomplete: "off" }),
      select("Episodes", phaseOptions, query.eval_phase, (phase) => this.change({ eval_phase: phase, ...(phase && phase !== "training" ? { step: "" } : {}) })),
      this.stepField(),
      box("Case", "case", { type: "text", size: 6, autocomplete: "off" }),
      el("div", { class: "pair" }, box("Score from", "low", { type: "number", ...range, step: "any" }), box("to", "high", { type: "number", ...range, step: "any" })),
      select("Failure", failureOptions, query.failure, set("failure")),
      select("Ended", stopOptions, query.stop, set("stop")),
      el("button", { type: "button", class: "quiet", onclick: () => this.change({ ...EMPTY_QUERY }) }, "Clear"),
    );
  }

  /** The step, with buttons to the one before and the one after. */
  stepField() {
    const { steps } = this.counted;
    const go = (direction) => {
      const now = this.query.step === "" ? (direction > 0 ? -Infinity : Infinity) : Number(this.query.step);
      const next = direction > 0 ? steps.find((step) => step > now) : steps.findLast((step) => step < now);
      if (next !== undefined) this.change({ eval_phase: "training", step: String(next) });
    };
    const box = input("Step", { type: "number", min: 0, value: this.query.step, placeholder: "all" }, (step) => this.change({ step }));
    return el(
      "div",
      { class: "stepper" },
      el("button", { type: "button", "aria-label": "Previous step", onclick: () => go(-1) }, "‹"),
      box,
      el("button", { type: "button", "aria-label": "Next step", onclick: () => go(1) }, "›"),
    );
  }

  /** Other filters: the list from its beginning. */
  change(changes) {
    Object.assign(this.query, changes);
    this.drawForm();
    return this.load(0);
  }

  async load(start) {
    const query = { ...this.query };
    const asked = (this.asked = Symbol("asked"));
    this.status.textContent = query.text ? "Searching…" : this.status.textContent;
    let found;
    try {
      found = await this.source.episodes(this.run, query, start);
    } catch (error) {
      this.status.textContent = `The rollouts could not be read: ${error.message}`;
      return;
    }
    if (this.asked !== asked) return; // the query has changed meanwhile
    if (start === 0) this.list.replaceChildren();
    this.append(grouped(found.rows));
    this.next = found.next;
    this.more.hidden = found.next === null;
    this.status.textContent = this.describe(found);
  }

  describe(found) {
    const shown = plural(found.total, "episode");
    if (!this.source.isSample) return shown;
    const where = `${shown} among the ${count(this.source.held)} of ${count(this.counted.all)} that this page holds`;
    return `${where}. All of them: aitrain view ${this.summary.name}`;
  }

  append(groups) {
    if (this.summary.job === "eval") return this.appendRows(groups);
    const last = this.list.lastElementChild;
    for (const group of groups) {
      if (last?.dataset.group === group.key) last.querySelector(".episodes").append(...this.rows(group));
      else this.list.append(this.card(group));
    }
  }

  /** The episodes of an eval as one dense table: a card for each case would say little in much room. */
  appendRows(groups) {
    if (!this.list.firstChild) this.list.append(el("div", { class: "group" }, el("div", { class: "episodes dense" }, episodeLabels(false, true))));
    for (const { members } of groups) this.list.querySelector(".episodes").append(...episodeRows(members, this.run, this.source, false, true));
  }

  rows(group) {
    return episodeRows(group.members, this.run, this.source);
  }

  card(group) {
    const [first] = group.members;
    const scores = group.members.map((episode) => episode.score).filter((value) => value !== null);
    const what = [el("b", {}, moment(first)), first.eval_phase ? null : ` · group ${count(first.group)}${first.discarded === null ? "" : " (discarded)"}`, " · case ", isolated(caseName(first), "case")];
    const pin = el("button", { type: "button", class: "quiet", "aria-pressed": "false", onclick: () => this.pin(group, pin) }, "Compare");
    return el(
      "article",
      { class: "group", "data-group": group.key },
      el(
        "header",
        {},
        el("div", { class: "group-title" }, what),
        scores.length > 1 && el("span", { class: "hint" }, `mean ${score(mean(scores))}`),
        pin,
        isolated(first.prompt, "prompt"),
      ),
      el("div", { class: "episodes" }, episodeLabels(!first.eval_phase), this.rows(group)),
    );
  }

  /** The first of two groups waits for the other; then both are shown. */
  pin(group, button) {
    const at = this.pinned.findIndex((other) => other.group.key === group.key);
    if (at >= 0) this.pinned.splice(at, 1);
    else this.pinned.push({ group, button });
    button.setAttribute("aria-pressed", String(at < 0));
    button.textContent = at < 0 ? "Choose another to compare" : "Compare";
    if (this.pinned.length < 2) return;
    const columns = this.pinned.map(({ group: { members } }) => ({
      heading: [`${moment(members[0])}${members[0].eval_phase ? "" : ` · group ${count(members[0].group)}`} · case `, isolated(caseName(members[0]))],
      run: this.run,
      rows: members,
    }));
    for (const { button: other } of this.pinned.splice(0)) {
      other.setAttribute("aria-pressed", "false");
      other.textContent = "Compare";
    }
    sideBySide("Two groups", columns, this.source);
  }

  /** The run went on: what is shown stays, and a button offers the newest step. */
  update(summary) {
    const before = this.counted;
    this.summary = summary;
    const news = this.counted.all - before.all;
    if (!news) return;
    this.unseen = (this.unseen ?? 0) + news;
    this.fresh.textContent = `${plural(this.unseen, "new episode")}: show the newest step`;
    this.fresh.hidden = false;
    if (!this.form.contains(document.activeElement)) this.drawForm();
    if (!before.all) this.showNewest();
  }

  showNewest() {
    this.unseen = 0;
    this.fresh.hidden = true;
    const { steps } = this.counted;
    this.change({ ...EMPTY_QUERY, eval_phase: steps.length ? "training" : "", step: steps.length ? String(steps[steps.length - 1]) : "" });
  }
}
