"use strict";
// Elements, text and numbers. All text goes into the page as text nodes: nothing here, or anywhere else, writes HTML.

/** An element: el("div", {class: "card", onclick: f}, "text", child). What is null, undefined or false is left out. */
function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  return replaceChildren(element, children);
}

function replaceChildren(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Characters that are not seen, or that change how others are: C0 and C1 but tab and newline, marks of writing
// direction, zero widths, line separators, tags, private and lone halves of pairs.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{e0000}-\u{e007f}]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/gu;

/** Text as nodes: characters that nobody would see are shown by their number, and turn nothing around. */
function visible(text) {
  const nodes = [];
  let last = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > last) nodes.push(document.createTextNode(text.slice(last, match.index)));
    const number = match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.push(el("span", { class: "hidden-character", title: `character U+${number}` }, `U+${number}`));
    last = match.index + match[0].length;
  }
  nodes.push(document.createTextNode(text.slice(last)));
  return nodes;
}

/** The same on one line, as a span that keeps its writing direction to itself. */
function isolated(text, className = "") {
  return el("bdi", { class: className }, visible(String(text)));
}

const FIRST_CHARACTERS = 3000;

/** A long text: its beginning, and a button that shows four times as much every time. */
function longText(text, first = FIRST_CHARACTERS) {
  const body = el("div", { class: "text", dir: "auto" });
  let shown = 0;
  let next = first;
  const more = el("button", { type: "button", class: "quiet", onclick: () => show() });
  const holder = el("div", {}, body, more);
  function show() {
    const piece = text.slice(shown, shown + next);
    shown += piece.length;
    next *= 4;
    body.append(...visible(piece));
    const left = text.length - shown;
    if (left > 0) more.textContent = `Show more (${count(left)} more characters)`;
    else more.remove();
  }
  show();
  return holder;
}

function note(text) {
  return el("p", { class: "note" }, text);
}

// -- scores

/** `sampled`, `greedy` or `pass@K`, of all cases or of those of one environment: `sampled, hotel`. */
function decodingOf(name) {
  return name.split(/[@,]/)[0];
}

/** What a score is, by the words for its decoding. */
function scoreHint(name, words) {
  const [decoding, environment] = name.split(/, (.*)/s);
  const hint = words[decoding] ?? `the share of cases solved by at least one of ${decoding.split("@")[1]} samples`;
  return environment ? `${hint}, of the cases of ${environment}` : hint;
}

// -- numbers

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

function count(value) {
  return value === null || value === undefined ? "–" : WHOLE.format(value);
}

function plural(value, word) {
  return `${count(value)} ${word}${value === 1 ? "" : "s"}`;
}

function score(value, digits = 3) {
  return value === null || value === undefined ? "–" : rounded(value, digits).toFixed(digits).replace("-", "\u2212");
}

/** Halves go to the even neighbour, as in the terminal and the model card, which show the same numbers. */
function rounded(value, digits) {
  const scaled = value * 10 ** digits;
  const isHalf = Math.abs(scaled) % 1 === 0.5 && Number.isInteger(value * 2 ** 20);
  return isHalf ? (2 * Math.round(scaled / 2)) / 10 ** digits : value;
}

function signed(value, digits = 3) {
  return value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + score(value, digits);
}

/** Four significant digits. */
function short(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e6)) return value.toExponential(2).replace("-", "\u2212");
  return String(Number(value.toPrecision(4))).replace("-", "\u2212");
}

const COMPACT = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });

/** As few characters as an axis has room for: `0.25`, `300K`, `5e−5`. */
function tick(value) {
  if (Math.abs(value) >= 1e4) return COMPACT.format(value);
  if (value !== 0 && Math.abs(value) < 1e-3) return Number(value.toPrecision(2)).toExponential().replaceAll("-", "\u2212");
  return short(value);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** Short times, too: `0.6 ms`, `1.25 s`. */
function seconds(value) {
  return value < 0.1 ? `${short(value * 1000)} ms` : `${short(value)} s`;
}

// -- pieces of the page

/** The name in the bar: a link to all runs on a page of `aitrain view`, to the top of a page that is a file. */
function brand() {
  return el("a", { class: "brand", href: ["/", "/compare"].includes(location.pathname) ? "/" : "#" }, "aitrain");
}

function section(id, title, hint, ...children) {
  return el("section", { id, "aria-labelledby": `${id}-title` }, el("h2", { id: `${id}-title` }, title), hint && el("p", { class: "hint" }, hint), ...children);
}

let scoreBounds = [0, 1]; // the lowest and the highest score of the run; null where scores have no bounds

/** Where a score is between the bounds, from 0 to 1; 0 where there are no bounds. */
function placeOf(value, bounds = scoreBounds) {
  if (!bounds || value === null || value === undefined) return 0;
  const [low, high] = bounds;
  return Math.min(1, Math.max(0, (value - low) / (high - low)));
}

/** A bar that is filled as far as a score is between the bounds, for the eye; the number stands beside it. */
function scoreBar(value) {
  const fill = el("span", { class: "fill" });
  fill.style.width = `${100 * placeOf(value)}%`;
  return el("span", { class: "score-bar", "aria-hidden": "true" }, fill);
}

function select(label, options, value, onchange) {
  const chooser = el("select", { onchange: () => onchange(chooser.value) }, options.map(([key, text]) => el("option", { value: key }, text)));
  chooser.value = value;
  return el("label", { class: "field" }, el("span", {}, label), chooser);
}

function input(label, properties, onchange) {
  const box = el("input", { ...properties, onchange: () => onchange(box.value) });
  return el("label", { class: "field" }, el("span", {}, label), box);
}

/** Buttons of which one is pressed. */
function choice(label, options, value, onchange) {
  const buttons = options.map(([key, text]) =>
    el("button", { type: "button", "aria-pressed": String(key === value), onclick: () => choose(key) }, text),
  );
  function choose(key) {
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(options[index][0] === key)));
    onchange(key);
  }
  return el("div", { class: "choice", role: "group", "aria-label": label }, buttons);
}
