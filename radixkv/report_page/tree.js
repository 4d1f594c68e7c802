// The tree: only the rows in sight are in the document.
const ROW_HEIGHT = 28, MARGIN_ROWS = 8, INDENT = 14, MOST_INDENTS = 22, OPEN_AT_FIRST = 40;
const opened = new Set();
let order = "spared";
let hits = null;  // while something is looked for: the nodes that hold it, and `above`, all that lead to them
let above = null;
let rows = [];  // {node, more}: a node, or what is not in the report of what is below it
let chosen = -1;
let frame = 0;

const more = (i) => nodes.hidden_nodes[i] > 0;
const canOpen = (i) => children[i].length > 0 || more(i);
const compare = (a, b) => nodes[order][b] - nodes[order][a] || nodes.tokens_below[b] - nodes.tokens_below[a] || a - b;

function sortAll() {
  roots.sort(compare);
  children.forEach((list) => list.sort(compare));
}

// Opens what is worth most, as far as it fits a screen.
function openFirst() {
  roots.forEach((i) => opened.add(i));
  const waiting = roots.flatMap((i) => children[i]);
  let shown = roots.length + waiting.length;
  while (waiting.length) {
    waiting.sort((a, b) => compare(b, a));
    const i = waiting.pop();
    if (!canOpen(i) || shown + children[i].length > OPEN_AT_FIRST) continue;
    opened.add(i);
    shown += children[i].length;
    waiting.push(...children[i]);
  }
}

function listRows() {
  const found = [];
  const stack = [...roots].reverse().map((node) => ({ node, more: false }));
  while (stack.length) {
    const row = stack.pop();
    if (above && (row.more || !above.has(row.node))) continue;
    found.push(row);
    if (row.more || !opened.has(row.node)) continue;
    if (more(row.node)) stack.push({ node: row.node, more: true });
    for (let k = children[row.node].length - 1; k >= 0; k--) stack.push({ node: children[row.node][k], more: false });
  }
  rows = found;
  pick("rows").style.height = `${rows.length * ROW_HEIGHT}px`;
  paint();
}

function paint() {
  const tree = pick("tree");
  const first = Math.max(0, Math.floor(tree.scrollTop / ROW_HEIGHT) - MARGIN_ROWS);
  const last = Math.min(rows.length, Math.ceil((tree.scrollTop + tree.clientHeight) / ROW_HEIGHT) + MARGIN_ROWS);
  pick("rows").replaceChildren(...rows.slice(first, last).map((row, k) => rowElement(row, first + k)));
  const active = chosen < 0 ? null : pick(`node-${chosen}`);
  if (active) tree.setAttribute("aria-activedescendant", active.id); else tree.removeAttribute("aria-activedescendant");
}

function rowElement(row, place) {
  const i = row.node;
  const level = depth[i] + (row.more ? 2 : 1);
  const element = make("div", "row");
  element.style.top = `${place * ROW_HEIGHT}px`;
  element.setAttribute("role", "treeitem");
  element.setAttribute("aria-level", level);
  element.dataset.node = i;
  const indent = make("span", "indent");
  indent.style.width = `${INDENT * Math.min(level - 1, MOST_INDENTS)}px`;
  const begin = make("span", "begin", indent, make("span", "twist"));
  const numbers = (values) => values.map(([className, value]) => make("span", `num ${className}`, value));
  if (row.more) {
    element.classList.add("more", "leaf");
    begin.append(make("span", "words", `${plural(nodes.hidden_nodes[i], "node")} more, not in this report`));
    element.append(begin, make("span", "track"), ...numbers([["", count(nodes.hidden_tokens[i])], ["", ""], ["use", ""]]));
    return element;
  }
  element.id = `node-${i}`;
  const siblings = isRoot(i) ? roots : children[nodes.parent[i]];
  element.setAttribute("aria-setsize", siblings.length);
  element.setAttribute("aria-posinset", siblings.indexOf(i) + 1);
  element.setAttribute("aria-selected", i === chosen);
  if (canOpen(i)) element.setAttribute("aria-expanded", opened.has(i));
  element.classList.toggle("open", opened.has(i));
  element.classList.toggle("leaf", !canOpen(i));
  element.classList.toggle("root", isRoot(i));
  element.classList.toggle("chosen", i === chosen);
  begin.append(wordsElement(i));
  if (nodes.leased[i] && !isRoot(i)) begin.append(make("span", "tag", "leased"));
  if (nodes.stale[i]) begin.append(make("span", "tag old", "stale"));
  const tokens = isRoot(i) ? nodes.tokens_below[i] : nodes.tokens[i];
  element.append(begin, ...(isRoot(i) ? [] : [trackElement(i)]));
  element.append(...numbers([["", count(tokens)], ["", count(nodes.hits[i])], ["use", when(nodes.last_use[i])]]));
  return element;
}

// Where in the prompt the edge lies; the more of the best it spared, the stronger.
function trackElement(i) {
  const track = make("span", "track");
  const bar = make("i"), upper = make("i", "upper");
  upper.style.width = `${(100 * nodes.start[i]) / longest}%`;
  bar.style.left = upper.style.width;
  bar.style.width = `${(100 * nodes.tokens[i]) / longest}%`;
  const heat = nodes.hits[i] ? 30 + (70 * Math.log1p(nodes.hits[i])) / Math.log1p(mostHits) : 0;
  bar.style.background = `color-mix(in srgb, var(--reused) ${heat.toFixed(0)}%, var(--faint))`;
  track.append(upper, bar);
  return track;
}
const mostHits = nodes.hits.reduce((most, number, i) => (isRoot(i) ? most : Math.max(most, number)), 1);

// How many characters a node's text has in common with that of a sibling: edges part at block borders only.
const sharedLengths = new Int32Array(numNodes).fill(-1);
function sharedLength(i) {
  if (sharedLengths[i] < 0) {
    const siblings = (isRoot(i) ? [] : [...children[nodes.parent[i]]]).sort((a, b) => (nodes.text[a] < nodes.text[b] ? -1 : 1));
    sharedLengths[i] = 0;
    siblings.forEach((node) => { sharedLengths[node] = 0; });
    for (let k = 1; k < siblings.length; k++) {
      const [one, other] = [nodes.text[siblings[k - 1]], nodes.text[siblings[k]]];
      let common = 0;
      while (common < one.length && one[common] === other[common]) common++;
      sharedLengths[siblings[k - 1]] = Math.max(sharedLengths[siblings[k - 1]], common);
      sharedLengths[siblings[k]] = common;
    }
  }
  return sharedLengths[i];
}

// One line of a node's text: from where it differs from its siblings, or from where it holds what is looked for.
function wordsElement(i) {
  if (isRoot(i)) return make("span", "words", nodes.label[i]);
  const element = make("span", "words");
  const word = hits && hits.has(i) ? hits.word : "";
  const text = oneLine(nodes.text[i]);
  const found = word ? text.toLowerCase().indexOf(word) : -1;
  const shared = Math.min(sharedLength(i), text.length - 1);
  const from = found > 36 ? found - 24 : found < 0 && shared > 24 ? shared - 12 : 0;
  const differs = from ? Math.max(from, found < 0 ? shared : Math.min(shared, found)) : 0;
  if (from) element.append(make("span", "same", `…${text.slice(from, differs)}`));
  let rest = text.slice(differs, differs + 400);
  for (let at; word && (at = rest.toLowerCase().indexOf(word)) >= 0; rest = rest.slice(at + word.length)) {
    element.append(rest.slice(0, at), make("mark", "", rest.slice(at, at + word.length)));
  }
  element.append(rest);
  return element;
}

function toggle(i, open = !opened.has(i)) {
  if (!canOpen(i)) return;
  if (open) opened.add(i); else opened.delete(i);
  listRows();
}

// Chooses a node, opens what leads to it, and brings it into sight.
function choose(i) {
  chosen = i;
  for (let up = nodes.parent[i]; up >= 0; up = nodes.parent[up]) opened.add(up);
  if (above && !above.has(i)) stopFinding();
  listRows();
  const place = rows.findIndex((row) => row.node === i && !row.more);
  const tree = pick("tree"), top = place * ROW_HEIGHT;
  if (top < tree.scrollTop) tree.scrollTop = top;
  else if (top + ROW_HEIGHT > tree.scrollTop + tree.clientHeight) tree.scrollTop = top + ROW_HEIGHT - tree.clientHeight;
  paint();
  showDetails(i);
}

function onTreeKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const visible = rows.filter((row) => !row.more).map((row) => row.node);
  if (!visible.length) return;
  const place = visible.indexOf(chosen);
  const page = Math.max(1, Math.floor(pick("tree").clientHeight / ROW_HEIGHT) - 1);
  const move = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }[event.key];
  if (move !== undefined) {
    choose(visible[Math.max(0, Math.min(visible.length - 1, place < 0 && move > 0 && move < Infinity ? 0 : Math.max(0, place) + move))]);
  } else if (chosen < 0) {
    return;
  } else if (event.key === "ArrowRight") {
    if (canOpen(chosen) && !opened.has(chosen)) toggle(chosen, true);
    else if (children[chosen].length && visible[place + 1] !== undefined) choose(visible[place + 1]);
  } else if (event.key === "ArrowLeft") {
    if (canOpen(chosen) && opened.has(chosen)) toggle(chosen, false);
    else if (!isRoot(chosen)) choose(nodes.parent[chosen]);
  } else if (event.key === "Enter" || event.key === " ") {
    toggle(chosen);
  } else {
    return;
  }
  event.preventDefault();
}

function watchTree() {
  const tree = pick("tree");
  const nodeAt = (event) => event.target.closest(".row:not(.more)");
  tree.addEventListener("scroll", () => {
    hideTip();
    if (!frame) frame = requestAnimationFrame(() => { frame = 0; paint(); });
  }, { passive: true });
  tree.addEventListener("click", (event) => {
    const row = nodeAt(event);
    if (!row) return;
    const i = Number(row.dataset.node);
    choose(i);
    if (event.target.closest(".twist")) toggle(i);
  });
  tree.addEventListener("dblclick", (event) => {
    const row = nodeAt(event);
    if (row && !event.target.closest(".twist")) toggle(Number(row.dataset.node));
  });
  tree.addEventListener("pointermove", (event) => {
    const row = event.pointerType === "touch" ? null : nodeAt(event);
    if (!row) return hideTip();
    const i = Number(row.dataset.node);
    showTip(event.clientX, event.clientY, clip(nodes.text[i], 300), inWords(i));
  });
  tree.addEventListener("pointerleave", hideTip);
  tree.addEventListener("keydown", onTreeKey);
}

function inWords(i) {
  const below = `${plural(nodes.nodes_below[i], "node")} below`;
  if (isRoot(i)) return `Namespace: ${plural(nodes.tokens_below[i], "token")}, ${below}, ${plural(nodes.hits[i], "hit")}`;
  return `Tokens ${count(nodes.start[i])} to ${count(nodes.start[i] + nodes.tokens[i])}, ${plural(nodes.blocks[i], "block")}, ` +
    `${plural(nodes.hits[i], "hit")}, last used ${when(nodes.last_use[i])}${nodes.leased[i] ? ", leased" : ""}; ${below}`;
}
