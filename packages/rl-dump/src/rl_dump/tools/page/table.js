// The list of samples: filtered, sorted, and drawn only where it is visible.
const ROW_HEIGHT = 26;
const FIRST = ["rollout_position", "group_ids", "rollout_ids", "step", "data_parallel_rank", "micro_batch", "raw_reward", "rewards", "response_lengths", "mean_log_prob_gap", "max_log_prob_gap",
  "mean_advantage", "mean_kept_set", "trained_fraction", "truncated", "finish_reason", "dataset"];
const LABELS = { rollout_position: "position", group_ids: "group", rollout_ids: "rollout", raw_reward: "raw reward", rewards: "reward",
  response_lengths: "tokens", mean_log_prob_gap: "mean gap", max_log_prob_gap: "max gap", mean_advantage: "advantage", mean_kept_set: "kept ids",
  trained_fraction: "trained", finish_reason: "finish", data_parallel_rank: "rank", micro_batch: "micro-batch" };
const label = (name) => (Object.hasOwn(LABELS, name) ? LABELS[name] : name.replaceAll("_", " "));
// Neither a missing value nor NaN is large or small: both stand last, in either direction.
const absent = (value) => value === null || Number.isNaN(value);
// What people type is the column's heading as well as the field's name; spaces, hyphens and underscores are one.
const plain = (name) => name.toLowerCase().replace(/[\s_-]+/g, "_");
const NAMES = new Map([...Object.keys(dump.facts).map((name) => [plain(label(name)), name]), ...Object.keys(dump.facts).map((name) => [plain(name), name])]);

const table = {
  columns: FIRST.filter((name) => name in dump.facts),
  order: [],
  sortBy: "row",
  descending: false,
  chosen: -1,
};

const widths = Object.fromEntries(Object.entries(dump.facts).map(([name, values]) => {
  const present = values.filter((value) => !absent(value));
  const kind = present.some((value) => typeof value === "string") ? 110 : present.every((value) => Number.isInteger(value) || typeof value !== "number") ? 64 : 84;
  return [name, Math.max(kind, 18 + 7 * label(name).length)];
}));
const width = (name) => widths[name];

// A filter is parts that must all hold: `mean gap > 0`, `truncated`, `!truncated`, a word or "several words" of the texts.
const KNOWN = [...NAMES.keys()].sort((a, b) => b.length - a.length).map((name) => name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&").replaceAll("_", "[\\s_-]+")).join("|");
const COMPARED = "\\s*(>=|<=|!=|=|>|<)\\s*(\"[^\"]*\"|\\S+)";
const PART = new RegExp(`"([^"]+)"|(!?)(${KNOWN})(?:${COMPARED}|(?=\\s|$))|([^\\s<>=!]+)${COMPARED}|(\\S+)`, "gi");

function conditions(text) {
  return [...text.matchAll(PART)].map(([, quoted, not, known, operator, value, unknown, , , word]) => {
    if (unknown !== undefined) throw new Error(`No column “${unknown}”. Columns: ${Object.keys(dump.facts).map(label).join(", ")}.`);
    if (known === undefined) return contains((quoted ?? word).toLowerCase());
    const values = dump.facts[NAMES.get(plain(known))];
    return operator === undefined ? (row) => Boolean(values[row]) !== (not === "!") : compared(values, operator, value.replace(/^"(.*)"$/, "$1"));
  });
}

function contains(needle) {
  const texts = [...Object.values(dump.texts), ...Object.values(dump.facts).filter((values) => values.some((value) => typeof value === "string"))];
  return (row) => texts.some((values) => values[row] !== null && String(values[row]).toLowerCase().includes(needle));
}

function compared(values, operator, text) {
  const words = { yes: 1, no: 0, true: 1, false: 0, ...WORDS };
  const number = Object.hasOwn(words, text) ? words[text] : Number(text);
  const wanted = Number.isNaN(number) && text !== "nan" ? text : Number.isInteger(number) && !Number.isSafeInteger(number) && /^-?\d+$/.test(text) ? BigInt(text) : number;
  const value = (row) => (typeof values[row] === "boolean" ? Number(values[row]) : values[row]);
  const same = (x) => String(x) === text || (typeof x !== "string" && x == wanted) || (Number.isNaN(x) && Number.isNaN(wanted));
  return {
    "=": (row) => same(value(row)), "!=": (row) => !same(value(row)),
    ">": (row) => value(row) !== null && value(row) > wanted, "<": (row) => value(row) !== null && value(row) < wanted,
    ">=": (row) => value(row) !== null && value(row) >= wanted, "<=": (row) => value(row) !== null && value(row) <= wanted,
  }[operator];
}

function arrange() {
  let parts = [];
  let problem = "";
  try {
    parts = conditions($("filter").value);
  } catch (error) {
    problem = error.message;
  }
  $("filter").classList.toggle("wrong", problem !== "");
  $("problem").hidden = problem === "";
  $("problem").textContent = problem;
  const rows = allRows.filter((row) => parts.every((holds) => holds(row)));
  const values = dump.facts[table.sortBy];
  const sign = table.descending ? -1 : 1;
  rows.sort((a, b) => {
    const [x, y] = [values[a], values[b]];
    if (x === y) return a - b;
    if (absent(x) || absent(y)) return absent(x) - absent(y) || (x === null) - (y === null) || a - b;
    return (x < y ? -1 : 1) * sign;
  });
  table.order = rows;
  $("count").textContent = rows.length === dump.samples ? `${show(rows.length)} samples` : `${show(rows.length)} of ${show(dump.samples)}`;
  $("body").style.height = `${rows.length * ROW_HEIGHT}px`;
  draw();
}

function draw() {
  const box = $("table");
  const first = Math.max(0, Math.floor(box.scrollTop / ROW_HEIGHT) - 10);
  const last = Math.min(table.order.length, Math.ceil((box.scrollTop + box.clientHeight) / ROW_HEIGHT) + 10);
  $("rows").style.transform = `translateY(${first * ROW_HEIGHT}px)`;
  $("rows").replaceChildren(...table.order.slice(first, last).map((row, offset) => {
    const line = element("div", { className: "row" });
    line.setAttribute("role", "row");
    line.setAttribute("aria-rowindex", first + offset + 2);
    line.setAttribute("aria-selected", row === table.chosen);
    line.dataset.row = row;
    for (const name of table.columns) {
      const value = dump.facts[name][row];
      const cell = element("span", { textContent: show(value), className: typeof value === "string" ? "word" : "" });
      cell.setAttribute("role", "gridcell");
      cell.style.width = `${width(name)}px`;
      line.append(cell);
    }
    return line;
  }));
}

function drawHead() {
  $("head").replaceChildren(...table.columns.map((name) => {
    const sorted = name === table.sortBy;
    const button = element("button", { textContent: label(name) + (sorted ? (table.descending ? " ↓" : " ↑") : ""), title: name });
    button.classList.toggle("sorted", sorted);
    button.setAttribute("role", "columnheader");
    button.setAttribute("aria-sort", sorted ? (table.descending ? "descending" : "ascending") : "none");
    button.style.width = `${width(name)}px`;
    button.onclick = () => {
      table.descending = sorted ? !table.descending : dump.numbers.includes(name) && name !== "rollout_position";
      table.sortBy = name;
      drawHead();
      arrange();
    };
    return button;
  }));
}

function drawChooser() {
  $("choices").replaceChildren(...Object.keys(dump.facts).map((name) => {
    const box = element("input", { type: "checkbox", checked: table.columns.includes(name) });
    box.onchange = () => {
      table.columns = box.checked ? [...table.columns, name] : table.columns.filter((other) => other !== name);
      drawHead();
      draw();
    };
    return element("label", {}, box, ` ${label(name)}`);
  }));
}

function choose(row) {
  table.chosen = row;
  const at = table.order.indexOf(row);
  const box = $("table");
  const visible = box.clientHeight - $("head").offsetHeight;
  if (at >= 0 && (at * ROW_HEIGHT < box.scrollTop || (at + 1) * ROW_HEIGHT > box.scrollTop + visible)) {
    box.scrollTop = Math.max(0, at * ROW_HEIGHT - visible / 2);
  }
  draw();
  history.replaceState(null, "", `#row=${row}`);
  return drawDetail(row);
}

function step(by) {
  const at = table.order.indexOf(table.chosen);
  const next = table.order[Math.min(table.order.length - 1, Math.max(0, at + by))];
  if (next !== undefined) choose(next);
}
