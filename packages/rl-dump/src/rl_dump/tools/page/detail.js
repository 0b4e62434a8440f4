// One sample: its facts, its prompt, and its response with a colour per token.
let colour = dump.strips.length ? dump.strips[0].name : null;
let shown = 0;

// How a number becomes a colour: [0, 1] for sizes, [-1, 1] for what has two directions.
function scale(strip) {
  if (strip.name === "loss_masks") return { at: (value) => (value ? 0 : 1), hue: () => "120, 125, 130", ends: ["trained", "not trained"] };
  if (strip.name === "log_prob_gap") {
    return { floor: "all below 1e-4", at: (value) => (value > 0 ? Math.min(1, Math.max(0, (Math.log10(value) + 4) / 4)) : 0), hue: () => "214, 40, 40", ends: ["1e-4", "1 nat"] };
  }
  if (strip.low < 0 && strip.high > 0) {
    const most = Math.max(-strip.low, strip.high);
    return { at: (value) => Math.abs(value) / most, hue: (value) => (value < 0 ? "33, 102, 200" : "224, 122, 20"), ends: [show(-most), show(most)], two: true };
  }
  if (strip.name === "kept_set_size") {
    const most = Math.log(Math.max(2, strip.high));
    return { at: (value) => (value > 0 ? Math.log(value) / most : 0), hue: () => "130, 60, 190", ends: ["1", show(strip.high)] };
  }
  const size = strip.high - strip.low || 1;
  const down = strip.high <= 0;
  return { at: (value) => (down ? strip.high - value : value - strip.low) / size, hue: () => "20, 130, 110",
    ends: down ? [show(strip.high), show(strip.low)] : [show(strip.low), show(strip.high)] };
}

function paint(rule, value) {
  if (!Number.isFinite(value)) return "rgb(255, 0, 200)";
  return `rgba(${rule.hue(value)}, ${(0.85 * Math.min(1, Math.max(0, rule.at(value)))).toFixed(3)})`;
}

function factList(row) {
  const names = [...table.columns, ...Object.keys(dump.facts).filter((name) => !table.columns.includes(name))];
  const list = element("dl", { className: "facts" }, ...names.map((name) => element("div", {},
    element("dt", { textContent: label(name), title: name }), element("span", { textContent: show(dump.facts[name][row]) }))));
  // On a narrow screen the texts come first: the list holds most of these already.
  return element("details", { className: "folded", open: innerWidth > 820 }, element("summary", { textContent: `${names.length} values` }), list);
}

function heading(row) {
  const parts = [`Row ${row}`, `position ${dump.facts.rollout_position[row]}`];
  if (dump.facts.group_ids) parts.push(`group ${show(dump.facts.group_ids[row])}`);
  return element("h2", { textContent: parts.join(" · ") });
}

function textBlock(title, ...content) {
  return [element("h2", { textContent: title }), element("div", { className: "text" }, ...content)];
}

function tokenSpans(sample, texts, from, to, rule, values) {
  const mask = sample.strips.loss_masks;
  return Array.from({ length: to - from }, (_, offset) => {
    const index = from + offset;
    const text = texts[index];
    const span = element("span", { textContent: text ?? (Number.isSafeInteger(sample.ids[index]) ? sample.ids[index] : show(sample.ids[index])), className: text === null ? "id" : "" });
    span.dataset.token = index;
    if (values) {
      span.style.background = paint(rule, values[index - sample.prompt]);
      if (mask && !mask[index - sample.prompt]) span.classList.add("off");
    }
    return span;
  });
}

function overview(sample, rule, values) {
  const canvas = element("canvas", { width: Math.min(2048, Math.max(1, values.length)), height: 1, title: "The whole response; click to go there" });
  const context = canvas.getContext("2d");
  const per = values.length / canvas.width;
  for (let x = 0; x < canvas.width; x += 1) {
    // The strongest of the tokens that share a pixel: an outlier must not vanish.
    let best = values[Math.floor(x * per)];
    for (let index = Math.floor(x * per); index < Math.min(values.length, (x + 1) * per); index += 1) {
      if (!Number.isFinite(values[index]) || rule.at(values[index]) > rule.at(best)) best = values[index];
    }
    context.fillStyle = paint(rule, best);
    context.fillRect(x, 0, 1, 1);
  }
  canvas.onclick = (event) => {
    const index = sample.prompt + Math.min(values.length - 1, Math.floor((event.offsetX / canvas.clientWidth) * values.length));
    const span = $("detail").querySelector(`[data-token="${index}"]`);
    document.querySelectorAll(".here").forEach((old) => old.classList.remove("here"));
    span.classList.add("here");
    span.scrollIntoView({ block: "center" });
  };
  return canvas;
}

function legend(rule, values) {
  const finite = Array.from(values).filter(Number.isFinite);
  if (rule.floor && finite.length && finite.every((value) => rule.at(value) === 0)) return element("div", { className: "legend", textContent: rule.floor });
  const bar = element("i");
  bar.style.background = rule.two
    ? "linear-gradient(90deg, rgba(33, 102, 200, .85), rgba(33, 102, 200, 0), rgba(224, 122, 20, .85))"
    : `linear-gradient(90deg, rgba(${rule.hue(0)}, 0), rgba(${rule.hue(0)}, .85))`;
  return element("div", { className: "legend" }, rule.ends[0], bar, rule.ends[1], element("span", { textContent: "· dotted: not trained · pink: not finite" }));
}

function colourButtons(row) {
  return element("div", { className: "colours" }, ...dump.strips.map(({ name }) => {
    const button = element("button", { textContent: name.replaceAll("_", " ") });
    button.setAttribute("aria-pressed", name === colour);
    button.onclick = () => {
      colour = name;
      drawDetail(row);
    };
    return button;
  }));
}

async function drawDetail(row) {
  const ticket = (shown += 1);
  unpin();
  const sample = await tokensOf(row);
  // A later choice has overtaken this one.
  if (ticket !== shown) return;
  const parts = [heading(row), factList(row)];
  for (const [name, values] of Object.entries(dump.texts)) {
    const whole = sample && Object.keys(dump.vocabulary).length && name !== "label";
    if (values[row] !== null && !whole) parts.push(...textBlock(`${name} (text)`, values[row]));
  }
  if (sample) parts.push(...tokenParts(row, sample));
  else parts.push(element("p", { className: "hint", textContent: "The tokens of this sample were left out to keep the page small." }));
  $("detail").replaceChildren(...parts);
  const first = $("detail").querySelector("[data-token]");
  if (first) first.tabIndex = 0;
  focused = sample;
  const at = (event) => event.target.closest?.("[data-token]");
  $("detail").onmousemove = (event) => { if (!pinned) tip(at(event), sample, event.clientX, event.clientY); };
  $("detail").onmouseleave = () => { if (!pinned) $("tip").hidden = true; };
  $("detail").onclick = (event) => {
    const span = at(event);
    const again = span === pinned;
    unpin();
    if (!span || again) return;
    pinned = span;
    span.classList.add("pinned");
    tipBelow(span, sample);
  };
}

// The sample whose tokens can have the focus.
let focused = null;
$("detail").addEventListener("focusin", (event) => { if (!pinned) tipBelow(event.target.closest("[data-token]"), focused); });

// The token whose values stay on the screen, after a click or a tap.
let pinned = null;

function unpin() {
  pinned?.classList.remove("pinned");
  pinned = null;
  $("tip").hidden = true;
}

// Arrow keys walk from token to token once one has the focus; Enter pins its values, Escape lets them go.
function moveToken(event) {
  if (event.key === "Escape" && !$("tip").hidden) return unpin() ?? true;
  const from = event.target.closest?.("[data-token]");
  if (!from) return false;
  if (event.key === "Enter" || event.key === " ") return from.click() ?? true;
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const next = by && $("detail").querySelector(`[data-token="${Number(from.dataset.token) + by}"]`);
  if (!next) return false;
  unpin();
  from.removeAttribute("tabindex");
  next.tabIndex = 0;
  next.focus();
  tipBelow(next, focused);
  return true;
}

function tokenParts(row, sample) {
  const texts = tokenTexts(sample.ids);
  const prompt = element("div", { className: "text prompt" }, ...tokenSpans(sample, texts, 0, sample.prompt));
  const parts = [element("h2", { textContent: `Prompt, ${show(sample.prompt)} tokens` }), prompt];
  parts.push(element("h2", { textContent: `Response, ${show(sample.ids.length - sample.prompt)} tokens` }));
  const strip = dump.strips.find(({ name }) => name === colour);
  const values = strip && sample.strips[colour];
  const rule = strip && scale(strip);
  if (values) parts.push(colourButtons(row), legend(rule, values), overview(sample, rule, values));
  parts.push(element("div", { className: "text" }, ...tokenSpans(sample, texts, sample.prompt, sample.ids.length, rule, values)));
  return parts;
}

function tipBelow(span, sample) {
  const box = span?.getBoundingClientRect();
  tip(span, sample, box?.left ?? 0, box?.bottom ?? 0);
}

function tip(span, sample, x, y) {
  $("tip").hidden = !span || !sample;
  if (!span || !sample) return;
  const index = Number(span.dataset.token);
  const rows = [["token", index], ["id", sample.ids[index]]];
  if (index >= sample.prompt) for (const [name, values] of Object.entries(sample.strips)) rows.push([name.replaceAll("_", " "), values[index - sample.prompt]]);
  $("tip").replaceChildren(element("b", { textContent: JSON.stringify(span.textContent) }),
    element("table", {}, ...rows.map(([name, value]) => element("tr", {}, element("td", { textContent: name }), element("td", { textContent: show(value) })))));
  $("tip").style.left = `${Math.max(4, Math.min(x + 14, innerWidth - 350))}px`;
  const height = $("tip").offsetHeight;
  $("tip").style.top = `${Math.max(4, Math.min(y + 24 + height > innerHeight ? y - height - 30 : y + 18, innerHeight - height - 4))}px`;
}
