"use strict";
// The page shows what is embedded: it chooses rows and writes numbers, and computes none.
(() => {
  const read = id => JSON.parse(document.getElementById(id).textContent);
  const data = read("data"), plots = read("plots");
  const $ = id => document.getElementById(id);
  const all = query => [...document.querySelectorAll(query)];
  const detailed = $("one-machine") !== null;

  // Words
  const GIB = 2 ** 30;
  const count = n => n.toLocaleString("en-US");
  const size = n => (n / GIB).toLocaleString("en-US", {minimumFractionDigits: 2, maximumFractionDigits: 2});
  const gib = n => `${size(n)} GiB`;
  const digits = v => v >= 100 ? count(Math.round(v)) : v >= 1 ? v.toFixed(1) : v.toPrecision(2);
  const rate = r => r === null ? "?" : `${digits(r[0])} (${digits(r[1])} to ${digits(r[2])})`;
  const verdict = (codes, limit) => data.verdicts[Number(codes[limit])];

  // Elements
  function element(name, text, attributes = {}) {
    const made = document.createElement(name);
    if (text !== null) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }
  function options(select, values, texts = values) {
    const before = select.value;
    select.replaceChildren(...values.map((v, i) => element("option", String(texts[i]), {value: v})));
    if (values.map(String).includes(before)) select.value = before;
  }
  function row(first, cells) {
    const made = element("tr", null);
    made.append(element("th", first, {scope: "row"}));
    made.append(...cells.map(cell => cell instanceof Node ? cell : element("td", cell, {class: "n"})));
    return made;
  }
  function head(table, titles) {
    const made = element("tr", null);
    made.append(...titles.map((title, i) => element("th", title, {scope: "col", ...(i ? {class: "n"} : {})})));
    table.tHead.replaceChildren(made);
  }
  function fill(id, caption, titles, rows) {
    const table = $(id);
    table.caption.textContent = caption;
    head(table, titles);
    table.tBodies[0].replaceChildren(...rows);
  }

  // Plots. Words and rules take the colour of the page's text, so that they suit paper too.
  const narrow = () => innerWidth < 600;
  const config = () => ({
    background: null,
    view: {stroke: "#8886"},
    style: {"guide-label": {fill: "currentColor"}, "guide-title": {fill: "currentColor"}},
    axis: {gridColor: "#8884", domainColor: "#888", tickColor: "#888", labelLimit: narrow() ? 110 : 200},
    legend: {orient: "bottom", columns: narrow() ? 1 : 4, labelLimit: 300, symbolLimit: 30},
    rule: {color: "currentColor"}, text: {color: "currentColor"},
  });
  const off = new Set();
  const shown = row => row.machine === undefined || !off.has(row.machine);
  function follows(plot) {
    const chosen = {machine: machine().name, model: detailed ? chosenModel().name : null};
    return row => plot.follows.every(key => row[key] === chosen[key]) && (plot.follows.includes("machine") || shown(row));
  }
  function draw(name, datasets) {
    const plot = plots[name];
    const values = key => Math.max(1, new Set(datasets.rows.map(row => row[key])).size);
    const height = plot.by.reduce((product, key) => product * values(key), plot.step);
    const spec = {...plot.chart, height, datasets};
    return vegaEmbed(`#plot-${name}`, spec, {actions: false, renderer: "svg", config: config(), tooltip: {theme: matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"}});
  }
  function drawPlots() {
    for (const [name, plot] of Object.entries(plots)) {
      if (name !== "one") draw(name, {rows: plot.rows.filter(follows(plot))});
    }
  }

  // What is chosen: the machine and its limit are one choice in all sections.
  const choice = {machine: 0, limit: 0};
  const machine = () => data.machines[choice.machine];
  function limitText() {
    const at = machine().limits[choice.limit];
    const name = at.wired_limit_mb === null ? "As it is" : `iogpu.wired_limit_mb=${at.wired_limit_mb}`;
    return `${name}: budget ${gib(at.budget_bytes)}, ${gib(at.left_bytes)} left to the system.`;
  }
  function choose(values) {
    Object.assign(choice, values);
    for (const select of all("select.machine")) select.value = choice.machine;
    for (const slider of all("input.limit")) {
      slider.max = machine().limits.length - 1;
      slider.disabled = machine().limits.length === 1;
      slider.value = choice.limit;
      slider.setAttribute("aria-valuetext", limitText());
      $(`${slider.id}-text`).textContent = limitText();
    }
    drawAll();
  }

  // The map
  function cell(held, at, name, bits) {  // bits: null where the model is stored in them
    if (!held || !at) return element("td", "", {tabindex: -1});
    const [codes, total, headroom, speed] = at, told = verdict(codes, choice.limit);
    const box = element("td", size(total), {class: `v-${told}`, tabindex: -1});
    box.append(element("small", told + (speed === null || told === "exceeds" ? "" : `, ${digits(speed[0])}/s`)));
    const context = $("map-context").value, now = machine().limits[0];
    box.dataset.detail = `${name} in ${held[0]}: ${told}, ${gib(total)}, of which weights are ${gib(held[1])}. `
      + `As it is the budget is ${gib(now.budget_bytes)} and the headroom ${gib(headroom)}. ${rate(speed)} tokens/s. `
      + `All terms: uma estimate ${name} --machine ${machine().name}${bits === null ? "" : ` --bits ${bits}`} -c ${context}`;
    box.title = box.dataset.detail;
    return box;
  }
  function mapRow([name, parameters, cells]) {
    const place = 2 + data.contexts.indexOf(Number($("map-context").value));
    const stored = cells.findIndex(held => held !== null);
    const made = row(name, cells.map((held, i) => cell(held, held && held[place], name, i && i === stored ? null : data.widths[i])));
    if (parameters) made.firstChild.append(element("small", `${digits(parameters / 1e9)}B`));
    return made;
  }
  const runs = made => made.querySelector(".v-fits, .v-tight") !== null;
  function drawMap() {
    const words = $("map-name").value.toLowerCase(), kind = $("map-kind").value;
    const named = machine().rows.filter(([name]) => name.toLowerCase().includes(words) && (!kind || data.models[name].includes(kind)));
    const rows = named.map(mapRow), running = rows.filter(runs);
    const rest = $("map-verdict").value ? [] : rows.filter(made => !runs(made));
    head($("map-table"), ["Model and parameters", ...data.widths.map(bits => `${bits} bits, GiB`)]);
    $("map-table").tBodies[0].replaceChildren(...running, ...rest);
    const first = $("map-table").querySelector("td");
    if (first) first.tabIndex = 0;
    $("map-count").textContent = `${running.length + rest.length} of ${machine().rows.length} models.`;
  }
  function detail(event) {
    const box = event.target.closest("td");
    if (box) $("map-detail").textContent = box.dataset.detail || "There is no such form.";
  }
  function step(event) {
    const box = event.target.closest("td");
    const [down, right] = {ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1]}[event.key] || [0, 0];
    if (!box || !(down || right)) return;
    event.preventDefault();
    const line = $("map-table").rows[box.parentNode.rowIndex + down];
    const next = line && line.cells[box.cellIndex + right];
    if (next && next.tagName === "TD") next.focus();
  }

  // One model
  const POINT = {bits: 0, kv: 1, batch: 2, context: 3};
  const wished = {bits: 4, kv: 16, batch: 1, context: data.contexts[0]};  // also where a model has it not
  const matching = (points, fixed) => points.filter(p => Object.entries(fixed).every(([key, value]) => p[POINT[key]] === value));
  const chosenModel = () => machine().models[$("one-model").value] || machine().models[0];
  function chosenPoint(points) {
    const fixed = {};
    for (const name of Object.keys(POINT)) {
      const select = $(`one-${name}`), able = [...new Set(matching(points, fixed).map(p => p[POINT[name]]))];
      options(select, able, able.map(count));
      fixed[name] = Math.max(...able.filter(v => v <= wished[name]));
      if (!able.includes(fixed[name])) fixed[name] = Math.min(...able);
      select.value = fixed[name];
    }
    return matching(points, fixed)[0];
  }
  const arithmetic = p => p[10].map(([term, bytes]) => `${data.terms[term][0]} ${size(bytes)}`).join(" + ") + ` = ${gib(p[5])}`;
  function drawOne() {
    options($("one-model"), machine().models.map((_, i) => i), machine().models.map(m => m.name));
    const model = chosenModel();
    if (model.reason !== null) {
      $("one-answer").replaceChildren(element("p", model.reason));
      for (const id of ["one-terms", "one-longest", "speed-table", "sequences-table"]) fill(id, "", [], []);
      draw("one", {rows: [], lines: []});
      return;
    }
    const point = chosenPoint(model.points), told = verdict(point[4], choice.limit), at = machine().limits[choice.limit];
    const now = machine().limits[0];
    $("one-answer").replaceChildren(
      element("p", `${told}: ${gib(point[5])} of a budget of ${gib(at.budget_bytes)}. ${choice.limit ? `With the limit as it is: ${verdict(point[4], 0)}, h` : "H"}eadroom ${gib(point[6])}. The ${point[7]} phase needs most.`, {class: `v-${told}`, id: "one-verdict", "data-total": point[5]}),
      element("p", `Decode ${rate(point[8])} tokens/s of each sequence, prompt ${rate(point[9])} tokens/s.`, {id: "one-speed"}));
    drawTerms(point);
    drawOver(model, point, [["budget", at.budget_bytes], ["limit", at.limit_bytes]]);
    drawTables(model);
  }
  function drawTerms(point) {
    const rows = point[10].map(([index, bytes]) => {
      const [name, basis, source] = data.terms[index];
      return row(name, [element("td", gib(bytes), {class: "n", "data-bytes": bytes}), element("td", basis), element("td", source)]);
    });
    const total = row("total", [gib(point[5]), element("td", ""), element("td", "the largest phase")]);
    total.className = "strong";
    fill("one-terms", `Terms of the ${point[7]} phase, which sum to the total`, ["Term", "Size", "Basis", "Source"], [...rows, total]);
    for (const title of [...$("one-terms").tHead.rows[0].cells].slice(2)) title.className = "";
  }
  function drawOver(model, point, levels) {
    const rows = model.points.filter(p => p[0] === point[0] && p[2] === point[2]).map(p => ({
      context: p[3], GiB: p[5] / GIB, cache: `${p[1]}-bit cache`, verdict: verdict(p[4], choice.limit), arithmetic: arithmetic(p), chosen: p === point}));
    const lines = levels.map(([name, bytes]) => ({line: `${name} ${gib(bytes)}`, GiB: bytes / GIB}));
    draw("one", {rows, lines: levels[0][1] === levels[1][1] ? [{...lines[0], line: `budget and limit ${gib(levels[0][1])}`}] : lines});
  }
  function drawTables(model) {
    const title = `${model.name} on ${machine().name}`;
    const kvs = [...new Set(model.longest.map(l => l[1]))], widths = [...new Set(model.longest.map(l => l[0]))];
    const longest = (bits, kv) => {
      const found = model.longest.find(l => l[0] === bits && l[1] === kv);
      if (!found || found[3] === null) return "none";
      if (found[2] === found[3]) return count(found[2]);
      return `${found[2] === null ? "none" : count(found[2])} (tight ${count(found[3])})`;
    };
    fill("one-longest", `${title}: largest context in tokens of one sequence within the budget, and within the limit where that is more, both as they are`,
      ["Weights", ...kvs.map(kv => `${kv}-bit cache`)], widths.map(bits => row(`${bits} bits`, kvs.map(kv => longest(bits, kv)))));
    const single = model.points.filter(p => p[1] === 16 && p[2] === 1 && data.contexts.includes(p[3]));
    fill("speed-table", `${title}, tokens/s`, ["Weights", "Context", "Decode", "Prompt", "Verdict"],
      single.map(p => row(`${p[0]} bits`, [count(p[3]), rate(p[8]), rate(p[9]), verdict(p[4], 0)])));
    fill("sequences-table", title, ["Weights", "Context of each", "Contiguous", "Paged", "Cache of one", "Tokens/s of each"],
      model.sequences.map(s => row(`${s[0]} bits`, [count(s[1]), s[2] ? count(s[2]) : "none", s[3] ? count(s[3]) : "none", gib(s[4]), rate(s[5])])));
  }

  function drawAll() {
    drawMap();
    if (detailed) drawOne();
    drawPlots();
  }
  function listen(ids, heard) {
    for (const id of ids) $(id).addEventListener("input", heard);
  }
  const places = data.machines.map((_, i) => i), names = data.machines.map(m => m.name);
  for (const select of all("select.machine")) {
    options(select, places, names);
    select.addEventListener("input", () => choose({machine: Number(select.value), limit: 0}));
  }
  for (const slider of all("input.limit")) slider.addEventListener("input", () => choose({limit: Number(slider.value)}));
  options($("map-context"), data.contexts, data.contexts.map(n => `${count(n)} tokens`));
  const kinds = [...new Set(Object.values(data.models).flat())].sort();
  options($("map-kind"), ["", ...kinds], ["all", ...kinds]);
  listen(["map-context", "map-name", "map-kind", "map-verdict"], drawMap);
  for (const name of ["click", "focusin"]) $("map-table").addEventListener(name, detail);
  $("map-table").addEventListener("keydown", step);
  if (detailed) {
    for (const name of Object.keys(POINT)) listen([`one-${name}`], () => { wished[name] = Number($(`one-${name}`).value); drawOne(); });
    listen(["one-model"], drawAll);
  }
  for (const box of all("#shown input")) box.addEventListener("input", () => {
    if (box.checked) off.delete(box.value); else off.add(box.value);
    for (const part of all("[data-machine]")) part.hidden = off.has(part.dataset.machine);
    drawPlots();
  });
  choose({});
})();
