"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const specs = JSON.parse(document.getElementById("specs").textContent);
  const $ = id => document.getElementById(id);
  const GIB = 2 ** 30;
  const gib = n => (n / GIB).toLocaleString("en-US", {minimumFractionDigits: 2, maximumFractionDigits: 2}) + " GiB";
  const count = n => n.toLocaleString("en-US");
  const digits = v => v >= 100 ? count(Math.round(v)) : v >= 1 ? v.toFixed(1) : v.toPrecision(2);
  const rate = r => r[0] === null ? "?" : `${digits(r[0])} (${digits(r[1])} to ${digits(r[2])})`;
  const verdict = (codes, limit) => data.verdicts[Number(codes[limit])];
  const dark = matchMedia("(prefers-color-scheme: dark)");

  function element(name, text, attributes = {}) {
    const made = document.createElement(name);
    if (text !== null) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }
  function options(select, values, texts) {
    const before = select.value;
    select.replaceChildren(...values.map((v, i) => element("option", String((texts || values)[i]), {value: v})));
    if (values.map(String).includes(before)) select.value = before;
  }
  const config = () => dark.matches
    ? {background: null, style: {"guide-label": {fill: "#ccc"}, "guide-title": {fill: "#ddd"}, "group-title": {fill: "#ddd"}}, title: {color: "#ddd"}, header: {labelColor: "#ddd"}, axis: {gridColor: "#444", domainColor: "#888", tickColor: "#888"}, view: {stroke: "#444"}}
    : {background: null};
  function draw(id, spec) {
    return vegaEmbed(`#plot-${id}`, spec, {actions: false, renderer: "svg", config: config()});
  }

  // The map
  const limitOf = machine => Math.min(Number($("map-limit").value), machine.limits.length - 1);
  function drawMap() {
    const machine = data.machines[$("map-machine").value];
    const context = Number($("map-context").value), words = $("map-name").value.toLowerCase();
    $("map-limit").max = machine.limits.length - 1;
    const limit = limitOf(machine), at = machine.limits[limit];
    $("map-limit-text").textContent = (at.wired_limit_mb === null ? "as it is" : `iogpu.wired_limit_mb=${at.wired_limit_mb}`)
      + `: budget ${gib(at.budget_bytes)}, ${gib(at.left_bytes)} left to the system`;
    $("map-table").tHead.replaceChildren(element("tr", null));
    const head = $("map-table").tHead.rows[0];
    for (const title of ["Model", ...data.widths.map(bits => `${bits} bits`)]) head.append(element("th", title, {scope: "col"}));
    const rows = [];
    for (const [name, cells] of machine.rows) {
      if (!name.toLowerCase().includes(words)) continue;
      const row = element("tr", null);
      row.append(element("th", name, {scope: "row"}));
      let some = false;
      for (const bits of data.widths) {
        const cell = cells.find(c => c[0] === bits), here = cell && cell[3].find(a => a[0] === context);
        const box = element("td", "");
        if (here) {
          const told = verdict(here[1], limit);
          some = some || told === "fits" || told === "tight";
          box.textContent = `${told}, ${gib(here[2])}` + (here[4] === null ? "" : `, ${digits(here[4])}/s`);
          box.className = `v-${told}`;
          box.title = `${cell[1]}: ${gib(here[2])} of ${gib(machine.limits[0].budget_bytes)} as it is, headroom ${gib(here[3])}; weights ${gib(cell[2])}; ${rate(here.slice(4))} tokens/s`;
        }
        row.append(box);
      }
      if (some || !$("map-verdict").value) rows.push(row);
    }
    rows.reverse();
    $("map-table").tBodies[0].replaceChildren(...rows);
    $("map-count").textContent = `${rows.length} of ${machine.rows.length} models`;
  }

  // One model
  const POINT = {bits: 0, kv: 1, batch: 2, context: 3};
  function choices(points, name, fixed) {
    const able = points.filter(p => Object.entries(fixed).every(([key, value]) => p[POINT[key]] === value));
    return [...new Set(able.map(p => p[POINT[name]]))];
  }
  function drawOne() {
    const machine = data.machines[$("one-machine").value];
    options($("one-model"), machine.models.map((_, i) => i), machine.models.map(m => m.name));
    const model = machine.models[$("one-model").value];
    const answer = $("one-answer"), body = $("one-terms").tBodies[0];
    body.replaceChildren();
    if (model.reason !== null) { answer.replaceChildren(element("p", model.reason)); return; }
    const fixed = {};
    for (const name of ["bits", "kv", "batch", "context"]) {
      const select = $(`one-${name}`), fresh = !select.value;
      const able = choices(model.points, name, fixed);
      options(select, able, able.map(count));
      if (fresh) select.value = {bits: 4, kv: 16, batch: 1, context: 8192}[name];
      if (!select.value) select.selectedIndex = 0;
      fixed[name] = Number(select.value);
    }
    const point = model.points.find(p => Object.entries(fixed).every(([key, value]) => p[POINT[key]] === value));
    const limit = machine.limits[0];
    const told = verdict(point[4], 0);
    answer.replaceChildren(
      element("p", `${told}: ${gib(point[5])} of ${gib(limit.budget_bytes)}, headroom ${gib(point[6])}; the ${point[7]} phase needs most.`, {class: `v-${told}`, id: "one-verdict", "data-total": point[5]}),
      element("p", `Decode ${rate(point[8])} tokens/s of each sequence, prompt ${rate(point[9])} tokens/s.`, {id: "one-speed"}));
    for (const [index, size] of point[10]) {
      const [name, basis, source] = data.terms[index];
      const row = element("tr", null);
      row.append(element("th", name, {scope: "row"}), element("td", gib(size)), element("td", basis), element("td", source));
      body.append(row);
    }
    const line = model.points.filter(p => p[0] === fixed.bits && p[1] === fixed.kv && p[2] === fixed.batch)
      .map(p => ({context: p[3], GiB: p[5] / GIB, verdict: verdict(p[4], 0)}));
    draw("one", {
      $schema: "https://vega.github.io/schema/vega-lite/v6.json", width: "container", height: 260,
      layer: [
        {data: {values: line}, mark: {type: "line", point: true}, encoding: {
          x: {field: "context", type: "quantitative", title: "tokens of context"},
          y: {field: "GiB", type: "quantitative"},
          tooltip: [{field: "context", format: ","}, {field: "GiB", format: ",.2f"}, {field: "verdict"}]}},
        {data: {values: [{line: "budget", GiB: limit.budget_bytes / GIB}, {line: "limit", GiB: limit.limit_bytes / GIB}]},
          mark: {type: "rule", strokeDash: [6, 4], tooltip: true}, encoding: {y: {field: "GiB", type: "quantitative"}, tooltip: [{field: "line"}, {field: "GiB", format: ",.2f"}]}}],
    });
  }

  const machines = data.machines.map((_, i) => i), names = data.machines.map(m => m.name);
  options($("map-machine"), machines, names);
  const detailed = $("one-machine") !== null;
  if (detailed) options($("one-machine"), machines, names);
  options($("map-context"), data.contexts, data.contexts.map(n => `${count(n)} tokens`));
  for (const id of ["map-machine", "map-context", "map-name", "map-verdict", "map-limit"]) $(id).addEventListener("input", drawMap);
  if (detailed) for (const id of ["one-machine", "one-model", "one-bits", "one-kv", "one-batch", "one-context"]) $(id).addEventListener("input", drawOne);
  function drawAll() {
    for (const [name, spec] of Object.entries(specs)) draw(name, spec);
    drawMap();
    if (detailed) drawOne();
  }
  dark.addEventListener("change", drawAll);
  drawAll();
})();
