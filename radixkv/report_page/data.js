"use strict";

// What the report knows, read once, and how it is put into words.
const data = JSON.parse(document.getElementById("data").textContent);
const nodes = data.nodes;
const numNodes = nodes.parent.length;
const isRoot = (i) => nodes.parent[i] < 0;
// Tokens that need not be computed so far because an edge was there: each hit at or below it reused all of it.
nodes.spared = nodes.tokens.map((tokens, i) => tokens * nodes.hits[i]);
const depth = new Int32Array(numNodes);
const children = Array.from({ length: numNodes }, () => []);
const roots = [];
const rootOf = new Int32Array(numNodes);
for (let i = 0; i < numNodes; i++) {  // a parent comes before its children
  rootOf[i] = isRoot(i) ? i : rootOf[nodes.parent[i]];
  if (isRoot(i)) {
    roots.push(i);
  } else {
    depth[i] = depth[nodes.parent[i]] + 1;
    children[nodes.parent[i]].push(i);
    nodes.spared[rootOf[i]] += nodes.spared[i];
  }
}
const longest = nodes.start.reduce((most, start, i) => Math.max(most, start + nodes.tokens[i]), 1);

const pick = (id) => document.getElementById(id);
const count = (number) => number.toLocaleString("en-US");
const plural = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString("en-GB");
const day = (seconds) => new Date(1000 * seconds).toLocaleDateString("en-GB", { year: "numeric", month: "short", day: "numeric" });
const bytes = (number) => {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  for (; number >= 1000 && unit < units.length - 1; unit++) number /= 1000;
  return `${number >= 100 || unit === 0 ? Math.round(number) : number.toFixed(1)} ${units[unit]}`;
};
const brief = (number) => {
  if (number < 10000) return count(number);
  return number < 999500 ? `${+(number / 1e3).toPrecision(3)} k` : `${+(number / 1e6).toPrecision(3)} M`;
};
const oneLine = (text) => text.replaceAll("\n", "↵");
const clip = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

// The time of day of a logical step, as far as something that was noted tells it: the last note that is not later.
const notes = [...data.log, ...data.given_up].map(([step, seconds]) => [step, seconds]).sort((a, b) => a[0] - b[0]);
function timeOf(step) {
  let low = 0, high = notes.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (notes[middle][0] <= step) low = middle + 1; else high = middle;
  }
  return low ? notes[low - 1][1] : null;
}
const when = (step) => (timeOf(step) === null ? `step ${count(step)}` : clock(timeOf(step)));

// An element with a class and text or children. Text is set as text: nothing of a prompt is ever read as HTML.
function make(tag, className = "", ...content) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...content);
  return element;
}

// The same in the drawing that it becomes a part of.
function draw(parent, tag, attributes = {}, text = null) {
  const element = document.createElementNS(parent.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  parent.append(element);
  return element;
}

// The tooltip: lines of text at a place in the window.
function showTip(x, y, words, line) {
  const tip = pick("tip");
  tip.replaceChildren(...(words ? [make("span", "words", words)] : []), line);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(12, Math.min(x + 14, innerWidth - box.width - 12))}px`;
  tip.style.top = `${y + 20 + box.height > innerHeight ? Math.max(12, y - box.height - 12) : y + 18}px`;
}
const hideTip = () => { pick("tip").hidden = true; };
