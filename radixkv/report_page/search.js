// Looks for text, or for token ids where only numbers are asked for.
function find(asked) {
  const word = asked.trim().toLowerCase();
  if (!word) return stopFinding();
  const ids = /^\d+(\s+\d+)*$/.test(word) ? ` ${word.replace(/\s+/g, " ")} ` : null;
  hits = new Set();
  above = new Set();
  for (let i = 0; i < numNodes; i++) {
    if (oneLine(nodes.text[i]).toLowerCase().includes(word) || (ids && ` ${nodes.ids[i]} `.includes(ids))) hits.add(i);
  }
  hits.word = word;
  for (const i of hits) {
    for (let up = i; up >= 0 && !above.has(up); up = nodes.parent[up]) above.add(up);
  }
  for (const i of above) if (!hits.has(i)) opened.add(i);
  pick("found").textContent = hits.size ? `in ${plural(hits.size, "node")}` : "nowhere in what is shown";
  pick("tree").scrollTop = 0;
  listRows();
}

function stopFinding() {
  hits = above = null;
  pick("find").value = "";
  pick("found").textContent = "";
  listRows();
}

function chooseNextFound() {
  const found = rows.filter((row) => hits.has(row.node)).map((row) => row.node);
  if (found.length) choose(found[(found.indexOf(chosen) + 1) % found.length]);
}

function watchSearch() {
  const field = pick("find");
  let timer = 0;
  field.addEventListener("input", () => {
    clearTimeout(timer);
    if (field.value) timer = setTimeout(() => find(field.value), numNodes > 2000 ? 120 : 0); else stopFinding();
  });
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stopFinding();
    if (event.key === "ArrowDown") pick("tree").focus();
    if (event.key === "Enter") {
      clearTimeout(timer);
      if (!hits || hits.word !== field.value.trim().toLowerCase()) find(field.value);
      if (hits) chooseNextFound();
    }
  });
  addEventListener("keydown", (event) => {
    if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    field.focus();
    event.preventDefault();
  });
}
