// Where samples ran: one lane per rank, one block per micro-batch, as wide as its tokens.
function places() {
  const { step, data_parallel_rank: rank, micro_batch: slot, total_lengths: lengths } = dump.facts;
  if (!step || !rank || !slot) return null;
  const found = new Map();
  allRows.forEach((row) => {
    const key = `${step[row]} ${rank[row]} ${slot[row]}`;
    const block = found.get(key) ?? { samples: 0, tokens: 0 };
    block.samples += 1;
    block.tokens += lengths ? Number(lengths[row]) : 1;
    found.set(key, block);
  });
  return found;
}

function drawLayout() {
  const view = $("view-layout");
  const found = places();
  if (!found) {
    view.replaceChildren(element("p", { className: "hint", textContent: "This dump does not say where its samples ran." }));
    return;
  }
  const steps = [...new Set(dump.facts.step)].sort((a, b) => a - b);
  const ranks = [...new Set([...dump.facts.data_parallel_rank, ...dump.shards.map((shard) => shard.data_parallel_rank)])].filter((rank) => rank !== null).sort((a, b) => a - b);
  const parts = [element("p", { className: "hint", textContent: "Each block is a micro-batch, as wide as its tokens; blocks in one column run side by side. Click one to see its samples." })];
  for (const step of steps) parts.push(...drawStep(step, ranks, found));
  view.replaceChildren(...parts);
}

function drawStep(step, ranks, found) {
  const noted = dump.shards.map((shard) => shard.num_microbatches?.[step] ?? 0);
  const used = allRows.filter((row) => dump.facts.step[row] === step).map((row) => Number(dump.facts.micro_batch[row]) + 1);
  const slots = Array.from({ length: Math.max(0, ...noted, ...used) }, (_, slot) => slot);
  const widest = slots.map((slot) => Math.max(1, ...ranks.map((rank) => found.get(`${step} ${rank} ${slot}`)?.tokens ?? 0)));
  const pixels = Math.max(300, innerWidth - 140) / widest.reduce((sum, tokens) => sum + tokens, 0);
  const totals = ranks.map((rank) => slots.reduce((sum, slot) => sum + (found.get(`${step} ${rank} ${slot}`)?.tokens ?? 0), 0));
  const mean = totals.reduce((sum, tokens) => sum + tokens, 0) / totals.length;
  const title = element("h2", { textContent: `Step ${step}` });
  title.append(element("small", { className: "hint", textContent: mean ? `  ${show(Math.round(mean))} tokens per rank, the fullest has ${(Math.max(...totals) / mean).toFixed(2)} times that` : "" }));
  const lanes = ranks.map((rank) => element("div", { className: "lane" }, element("b", { textContent: `rank ${rank}` }),
    ...slots.map((slot) => drawSlot(step, rank, slot, found.get(`${step} ${rank} ${slot}`), widest[slot] * pixels, pixels))));
  return [title, ...lanes];
}

function drawSlot(step, rank, slot, block, room, pixels) {
  const button = element("button", { textContent: block ? block.samples : "", className: block ? "" : "filler" });
  button.style.width = `${Math.max(4, block ? block.tokens * pixels - 2 : room - 2)}px`;
  button.title = block ? `step ${step}, rank ${rank}, micro-batch ${slot}: ${block.samples} samples, ${show(block.tokens)} tokens` : "filler: no samples";
  button.disabled = !block;
  button.onclick = () => {
    $("filter").value = `step=${step} rank=${rank} micro-batch=${slot}`;
    selectTab("samples");
    arrange();
    if (table.order.length) choose(table.order[0]);
  };
  const box = element("div", { className: "slot" }, button);
  box.style.width = `${room}px`;
  return box;
}
