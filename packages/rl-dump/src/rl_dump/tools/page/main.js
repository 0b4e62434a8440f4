// Putting it together: title, alarms, tabs, keys.
function selectTab(chosen) {
  unpin();
  for (const name of ["samples", "layout", "summary"]) {
    $(`view-${name}`).hidden = name !== chosen;
    $(`tab-${name}`).setAttribute("aria-selected", name === chosen);
  }
  if (chosen === "layout") drawLayout();
}

function drawTitle() {
  const tokens = dump.facts.response_lengths?.reduce((sum, length) => sum + Number(length), 0);
  document.title = `${dump.file} · rl-dump`;
  $("title").append(dump.file, element("small", {
    textContent: `${dump.contract} · batch ${dump.batch} · ${show(dump.samples)} samples` + (tokens === undefined ? "" : ` · ${show(tokens)} response tokens`)
      + (dump.dropped.length ? ` · ${show(dump.dropped.length)} dropped` : "") + ` · ${dump.producer.distribution} ${dump.producer.version}`,
  }));
}

function drawAlarms() {
  $("alarms").append(...dump.alarms.map(({ code, message, row }) => {
    const line = element("li", {}, element("strong", { textContent: `${code}: ` }), message);
    if (row !== null) line.append(element("button", { textContent: `row ${row}`, onclick: () => { selectTab("samples"); choose(row); } }));
    return line;
  }));
}

function drawSummary() {
  const head = ["field", "values", "lowest", "mean", "highest", "not finite", "samples without"];
  const body = dump.summary.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", { textContent: show(cell) }))));
  const parts = [element("h2", { textContent: "Fields, over trained tokens where a field has one value per response token" }),
    element("table", {}, element("thead", {}, element("tr", {}, ...head.map((name) => element("th", { textContent: name })))), element("tbody", {}, ...body))];
  if (dump.dropped.length) {
    parts.push(element("h2", { textContent: "Generated, but not trained on" }), element("table", {}, ...dump.dropped.map((entry) => element("tr", {},
      element("td", { textContent: `position ${show(entry.rollout_position)}, index ${show(entry.sample_index)}` }), element("td", { textContent: entry.reason })))));
  }
  $("view-summary").append(...parts);
}

function onKey(event) {
  if (event.target === $("filter")) {
    if (event.key === "Escape") $("filter").blur();
    return;
  }
  if (moveToken(event)) {
    event.preventDefault();
    return;
  }
  const moves = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: 20, PageUp: -20 };
  if (event.key === "/") $("filter").focus();
  else if (event.key in moves && !$("view-samples").hidden && !event.ctrlKey && !event.metaKey) step(moves[event.key]);
  else return;
  event.preventDefault();
}

function start() {
  drawTitle();
  drawAlarms();
  drawSummary();
  drawHead();
  drawChooser();
  arrange();
  for (const name of ["samples", "layout", "summary"]) $(`tab-${name}`).onclick = () => selectTab(name);
  $("table").onscroll = draw;
  $("rows").onclick = (event) => {
    const line = event.target.closest("[data-row]");
    if (line) choose(Number(line.dataset.row));
  };
  let waiting = 0;
  $("filter").oninput = () => {
    clearTimeout(waiting);
    waiting = setTimeout(arrange, 120);
  };
  document.onkeydown = onKey;
  onresize = () => { draw(); if (!$("view-layout").hidden) drawLayout(); };
  const asked = Number(new URLSearchParams(location.hash.slice(1)).get("row") ?? table.order[0]);
  if (asked in allRows) choose(asked);
}
start();
