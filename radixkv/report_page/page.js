// The rest of the page, and what starts it all.
const ABOVE_SHOWN = 240, LISTED = 8, LISTED_MORE = 40;

function showDetails(i) {
  const facts = make("dl");
  const fact = (name, value) => facts.append(make("dt", "", name), make("dd", "", value));
  const parts = [];
  if (isRoot(i)) {
    parts.push(make("h3", "", "Namespace"));
    fact("State", nodes.stale[i] ? "stale: of older weights" : "current");
  } else {
    parts.push(make("h3", "", `Tokens ${count(nodes.start[i])} to ${count(nodes.start[i] + nodes.tokens[i])}`));
    fact("Tokens", `${count(nodes.tokens[i])} in ${plural(nodes.blocks[i], "block")}`);
    fact("State", nodes.leased[i] ? "leased" : "may be evicted");
  }
  fact("Hits, at and below", count(nodes.hits[i]));
  fact("Tokens spared", `about ${count(nodes.spared[i])}`);
  const step = nodes.last_use[i];
  fact("Last use", timeOf(step) === null ? when(step) : `${when(step)}, step ${count(step)}`);
  fact("Below", `${plural(nodes.nodes_below[i], "node")}, ${plural(nodes.tokens_below[i] - nodes.tokens[i], "token")}`);
  parts.push(facts);
  const text = make("pre");
  text.tabIndex = 0;
  if (isRoot(i)) {
    text.append(nodes.text[i]);
  } else {
    const upper = [];
    for (let up = nodes.parent[i]; up >= 0 && !isRoot(up); up = nodes.parent[up]) upper.unshift(nodes.text[up]);
    const before = upper.join(data.has_text ? "" : " ");
    const above = before.length > ABOVE_SHOWN ? `…${before.slice(-ABOVE_SHOWN)}` : before;
    if (before) text.append(make("span", "above", above), data.has_text ? "" : " ");
    text.append(make("span", "own", nodes.text[i]));
  }
  parts.push(text);
  if (!isRoot(i) && data.has_text) {
    const shown = nodes.ids[i].split(" ").length;
    parts.push(make("p", "quiet small", shown < nodes.tokens[i] ? `First ${shown} token ids` : "Token ids"), make("pre", "", nodes.ids[i]));
  }
  pick("details").replaceChildren(...parts);
  const own = text.querySelector(".own");
  if (own) text.scrollTop = own.offsetTop - text.offsetTop - 48;
}

// A list that begins short; `item` makes one line of it.
function fillList(box, items, item, empty) {
  if (!items.length) return box.replaceChildren(make("p", "empty", empty));
  const list = make("ol");
  const next = make("button", "next");
  next.type = "button";
  const add = (number) => {
    const from = list.children.length;
    list.append(...items.slice(from, from + number).map(item));
    const left = items.length - list.children.length;
    next.textContent = `Show more (${count(left)})`;
    next.hidden = !left;
  };
  next.onclick = () => add(LISTED_MORE);
  add(LISTED);
  box.replaceChildren(list, next);
}

function drawLists() {
  const prefixes = [];
  for (let i = 0; i < numNodes; i++) if (!isRoot(i)) prefixes.push(i);
  // Before the first hit, what most prompts go through.
  const worth = (i) => nodes.spared[i] || (nodes.tokens[i] * (nodes.leaves[i] - 1)) / 1e9;
  prefixes.sort((a, b) => worth(b) - worth(a));
  fillList(pick("best"), prefixes.filter((i) => worth(i) > 0).slice(0, 200), (i) => {
    const link = make("button", "link", wordsElement(i));
    link.type = "button";
    link.onclick = () => { choose(i); pick("tree").focus(); pick("tree-title").scrollIntoView({ block: "start" }); };
    link.onpointermove = (event) => showTip(event.clientX, event.clientY, clip(nodes.text[i], 300), inWords(i));
    link.onpointerleave = hideTip;
    const ways = nodes.leaves[i] > 1 ? `, goes on in ${count(nodes.leaves[i])} ways` : "";
    const value = nodes.spared[i] ? [brief(nodes.spared[i]), " spared"] : [count(nodes.leaves[i]), " ways"];
    const spared = make("span", "", make("strong", "", value[0]), value[1]);
    const line = `${plural(nodes.tokens[i], "token")} from ${count(nodes.start[i])}, ${plural(nodes.hits[i], "hit")}${ways}`;
    return make("li", "", link, spared, make("span", "quiet small", line));
  }, "No prefix is shared or was reused yet.");

  // Calls that dropped everything stand between the runs that were evicted one by one.
  const why = { clear: "cleared", weights: "the weights had changed", pool: "the model was moved or cast" };
  const gone = data.runs.map((run) => ({ step: run.step, run }));
  for (const [step, , reason, tokens] of data.given_up) if (reason !== "room") gone.push({ step, reason, tokens });
  const manyNamespaces = new Set([...data.runs.map((run) => run.namespace), ...roots.map((i) => nodes.label[i])]).size > 1;
  gone.sort((a, b) => b.step - a.step);
  fillList(pick("gone"), gone, ({ step, run, reason, tokens }) => {
    const number = run ? run.tokens : tokens;
    const amount = make("span", "", make("strong", "", count(number)), number === 1 ? " token" : " tokens");
    if (!run) return make("li", "", `Everything not held: ${why[reason]}`, amount, make("span", "quiet small", when(step)));
    const where = manyNamespaces ? `, ${run.namespace}` : "";
    const line = `${when(step)}, from position ${count(run.start)}${where}`;
    const words = make("span", "words", oneLine(clip(run.text.trimStart(), 200)));
    words.onpointermove = (event) => showTip(event.clientX, event.clientY, run.text, line);
    words.onpointerleave = hideTip;
    return make("li", "", words, amount, make("span", "quiet small", line));
  }, "Nothing was evicted yet.");
}

function drawFigures() {
  const { stats } = data;
  const figure = (value, name, className = "") => {
    pick("figures").append(make("div", `figure ${className}`, make("b", "", value), make("span", "quiet", name)));
  };
  figure(percent(stats.cached_tokens, stats.prompt_tokens), `of ${plural(stats.prompt_tokens, "prompt token")} reused`, "main");
  figure(`${brief(stats.hits)} of ${brief(stats.requests)}`, "requests reused at least half");
  figure(brief(stats.tree_tokens), `tokens cached in ${plural(data.num_nodes, "node")}`);
  figure(brief(stats.evicted_tokens), "tokens evicted for want of room");
}

function drawTexts() {
  const { cache, written } = data;
  pick("facts").textContent = `${cache.dtype} on ${cache.device}, ${cache.backend} backend, eviction ${cache.eviction}`;
  pick("written").textContent = `${day(written)}, ${clock(written)}`;
  const all = data.num_nodes, shown = numNodes - roots.length;
  const spaces = roots.length < data.num_namespaces ? `${count(roots.length)} of ` : "";
  pick("tree-note").textContent = `${spaces}${plural(data.num_namespaces, "namespace")}, ` +
    (shown < all ? `${count(shown)} of ${plural(all, "node")}, those with the most tokens` : plural(all, "node"));
}

function start() {
  drawTexts();
  drawFigures();
  drawPool();
  drawTimeline();
  sortAll();
  openFirst();
  listRows();
  drawLists();
  watchTree();
  watchSearch();
  pick("details").append(make("p", "quiet", numNodes ? "Choose a prefix to see its text." : "The cache is empty."));
  pick("sort").onchange = (event) => {
    order = event.target.value;
    sortAll();
    listRows();
  };
  pick("unfold").onclick = () => {
    for (let i = 0; i < numNodes; i++) opened.add(i);
    listRows();
  };
  pick("fold").onclick = () => {
    opened.clear();
    pick("tree").scrollTop = 0;
    listRows();
  };
  let width = pick("timeline").clientWidth;
  new ResizeObserver(() => {
    if (pick("timeline").clientWidth !== width) {
      width = pick("timeline").clientWidth;
      drawTimeline();
    }
    paint();
  }).observe(document.body);
}
start();
