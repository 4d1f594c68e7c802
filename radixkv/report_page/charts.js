// The pool as stacked bars.
function drawPool() {
  const { stats, cache } = data;
  const perBlock = (blocks) => `${count(blocks)} (${bytes(blocks * cache.block_bytes)})`;
  const bar = (label, parts, total) => {
    const box = make("div", "bar");
    const svg = draw(pick("timeline").firstElementChild, "svg", { role: "img" });
    svg.setAttribute("aria-label", `${label}: ${parts.map(([name, blocks]) => `${count(blocks)} ${name}`).join(", ")}`);
    let before = 0;
    for (const [name, blocks] of parts) {
      if (blocks) draw(svg, "rect", { class: name, x: `${(100 * before) / total}%`, width: `${(100 * blocks) / total}%`, height: "100%" });
      before += blocks;
    }
    const list = make("ul", "legend");
    for (const [name, blocks] of parts) list.append(make("li", `key ${name}`, `${name} ${perBlock(blocks)}, ${percent(blocks, total)}`));
    box.append(svg, list);
    return box;
  };
  const pinned = stats.blocks_pinned;
  const parts = [["cached", stats.blocks_cached], ["leased", stats.blocks_leased - pinned], ["pinned", pinned], ["free", stats.blocks_free]];
  pick("pool").append(bar("Blocks of the pool", parts, cache.num_blocks));
  if (cache.host_blocks) {
    const held = [["host", stats.blocks_host], ["free", cache.host_blocks - stats.blocks_host]];
    pick("pool").append(bar("Blocks in host memory", held, cache.host_blocks));
  }
  pick("pool-note").textContent =
    `${plural(cache.num_blocks, "block")} of ${cache.block_size} tokens, ${bytes(cache.num_blocks * cache.block_bytes)}`;
}

// Requests side by side in bins, and what was evicted between them.
function binned(width) {
  const requests = [];
  for (const [step, seconds, isNew, tokens, reused] of data.log) {
    if (isNew || !requests.length) {
      requests.push({ step, seconds, tokens, reused });
    } else {  // a further piece of the prompt before
      requests[requests.length - 1].tokens += tokens;
      requests[requests.length - 1].reused += reused;
    }
  }
  const perBin = Math.max(1, Math.ceil(requests.length / Math.max(1, Math.floor(width / 6))));
  const bins = [];
  const nothing = { requests: 0, tokens: 0, reused: 0, hits: 0, evicted: 0, dropped: 0 };
  const fresh = (step, seconds) => ({ step, first: seconds, last: seconds, ...nothing });
  requests.forEach((request, i) => {
    if (i % perBin === 0) bins.push(fresh(request.step, request.seconds));
    const bin = bins[bins.length - 1];
    bin.last = request.seconds;
    bin.requests += 1;
    bin.tokens += request.tokens;
    bin.reused += request.reused;
    bin.hits += 2 * request.reused >= Math.max(1, request.tokens) ? 1 : 0;
  });
  if (!bins.length) data.given_up.forEach(([step, seconds]) => bins.push(fresh(step, seconds)));
  let at = 0;
  for (const [step, , reason, tokens] of data.given_up) {
    while (at + 1 < bins.length && bins[at + 1].step <= step) at++;
    if (bins.length && step >= bins[0].step) bins[at][reason === "room" ? "evicted" : "dropped"] += tokens;
  }
  return bins;
}

function niceCeiling(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(1, value)));
  return [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10].map((factor) => Math.round(factor * unit)).find((nice) => nice >= value);
}

function drawTimeline() {
  const box = pick("timeline");
  const svg = box.querySelector("svg");
  const width = box.clientWidth, height = svg.clientHeight, left = 46, right = 44;
  svg.replaceChildren();
  if (width <= left + right) return;  // not in sight; drawn again when it has its size
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const plot = width - left - right, upper = { top: 14, bottom: height - 84 }, lower = { top: height - 62, bottom: height - 22 };
  const bins = binned(plot);
  svg.classList.toggle("none", !bins.length);
  if (!bins.length) {
    svg.setAttribute("aria-label", "No request yet.");
    draw(svg, "text", { x: width / 2, y: 32, "text-anchor": "middle" }, "No request yet.");
    return;
  }
  const step = Math.min(plot / bins.length, 64), gap = step > 4 ? Math.min(step * 0.22, 6) : 0;
  const most = niceCeiling(Math.max(...bins.map((bin) => bin.tokens / Math.max(1, bin.requests))));
  const mostGone = niceCeiling(Math.max(1, ...bins.map((bin) => bin.evicted + bin.dropped)));
  const x = (i) => left + i * step;
  const y = (tokens) => upper.bottom - ((upper.bottom - upper.top) * tokens) / most;
  for (const part of [0, 0.5, 1]) {
    const line = y(part * most);
    draw(svg, "line", { class: "grid", x1: left, x2: left + plot, y1: line, y2: line });
    draw(svg, "text", { x: left - 8, y: line + 4, "text-anchor": "end" }, brief(part * most));
    draw(svg, "text", { x: left + plot + 8, y: line + 4 }, `${100 * part} %`);
  }
  draw(svg, "line", { class: "grid", x1: left, x2: left + plot, y1: lower.bottom, y2: lower.bottom });
  draw(svg, "text", { x: left - 8, y: lower.top + 8, "text-anchor": "end" }, brief(mostGone));
  draw(svg, "text", { x: left - 8, y: lower.bottom + 4, "text-anchor": "end" }, "0");
  const points = [];
  bins.forEach((bin, i) => {
    const place = { x: x(i) + gap / 2, width: Math.max(0.5, step - gap) };
    if (bin.requests) {
      const reused = bin.reused / bin.requests, all = bin.tokens / bin.requests;
      draw(svg, "rect", { class: "reused", ...place, y: y(reused), height: upper.bottom - y(reused) });
      draw(svg, "rect", { class: "computed", ...place, y: y(all), height: y(reused) - y(all) });
      points.push([x(i) + step / 2, upper.bottom - ((upper.bottom - upper.top) * bin.reused) / Math.max(1, bin.tokens)]);
    }
    const tall = (tokens) => ((lower.bottom - lower.top) * tokens) / mostGone;
    if (bin.evicted) draw(svg, "rect", { class: "evicted", ...place, y: lower.bottom - tall(bin.evicted), height: tall(bin.evicted) });
    if (bin.dropped) {
      draw(svg, "rect", { class: "dropped", ...place, y: lower.bottom - tall(bin.evicted + bin.dropped), height: tall(bin.dropped) });
    }
  });
  if (points.length > 1) draw(svg, "polyline", { class: "rate", points: points.map((point) => point.join(",")).join(" ") });
  if (points.length <= 60) points.forEach(([cx, cy]) => draw(svg, "circle", { class: "rate-dot", cx, cy, r: 3 }));
  const first = bins[0], last = bins[bins.length - 1];
  draw(svg, "text", { x: left, y: height - 4 }, clock(first.first));
  if (bins.length > 1 && step * bins.length > 130) {
    draw(svg, "text", { x: left + step * bins.length, y: height - 4, "text-anchor": "end" }, clock(last.last));
  }
  const sum = (name) => bins.reduce((total, bin) => total + bin[name], 0);
  const gone = sum("evicted"), requests = sum("requests");
  svg.setAttribute("aria-label", `${plural(requests, "request")}: ${percent(sum("reused"), sum("tokens"))} of the prompt tokens reused, ` +
    `${plural(gone, "token")} evicted`);
  const each = bins.reduce((size, bin) => Math.max(size, bin.requests), 0);
  pick("time-note").textContent = `The last ${plural(requests, "request")}, ` +
    (each > 1 ? `up to ${each} to a bar, mean tokens of a prompt. ` : "one to a bar, tokens of its prompt. ") +
    "Below: the tokens that the cache gave up meanwhile.";
  const cursor = draw(svg, "rect", { class: "cursor", y: upper.top, height: lower.bottom - upper.top, width: step, visibility: "hidden" });
  svg.onpointermove = (event) => {
    const i = Math.floor((event.clientX - svg.getBoundingClientRect().left - left) / step);
    const bin = bins[i];
    cursor.setAttribute("visibility", bin ? "visible" : "hidden");
    if (!bin) return hideTip();
    cursor.setAttribute("x", x(i));
    const lines = [];
    if (bin.requests) {
      lines.push(`${plural(bin.requests, "request")}${bin.requests > 1 ? `, ${plural(bin.hits, "hit")}` : bin.hits ? ", a hit" : ""}: ` +
        `${count(bin.reused)} of ${plural(bin.tokens, "prompt token")} reused (${percent(bin.reused, bin.tokens)})`);
    }
    if (bin.evicted) lines.push(`${plural(bin.evicted, "token")} evicted`);
    if (bin.dropped) lines.push(`${plural(bin.dropped, "token")} dropped at once`);
    showTip(event.clientX, event.clientY, "", `${clock(bin.first)}: ${lines.join("; ") || "nothing given up"}`);
  };
  svg.onpointerleave = () => { cursor.setAttribute("visibility", "hidden"); hideTip(); };
}
