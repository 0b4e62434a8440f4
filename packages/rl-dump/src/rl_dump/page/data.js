// The document, and what is read from it: facts per sample, tokens on demand.
const dump = JSON.parse(document.getElementById("document").textContent);
const $ = (id) => document.getElementById(id);

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function show(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en-US", { useGrouping: Math.abs(value) >= 10000 });
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e6) ? value.toExponential(2) : value.toFixed(size < 10 ? 4 : 2);
}

// Unpack one sample: ids, then each strip; four-byte strips lie before one-byte ones, as typed arrays need.
async function tokensOf(row) {
  const span = dump.spans[row];
  if (!span) return null;
  const [start, size, total, response] = span;
  const packed = atob($("tokens").firstChild.data.slice(start, start + size));
  const bytes = Uint8Array.from(packed, (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const found = { ids: new Int32Array(buffer, 0, total), prompt: total - response, strips: {} };
  let at = 4 * total;
  for (const width of [4, 1]) {
    for (const { name, dtype } of dump.strips) {
      const kind = { f4: Float32Array, i4: Int32Array, u1: Uint8Array }[dtype];
      if (kind.BYTES_PER_ELEMENT !== width) continue;
      found.strips[name] = new kind(buffer, at, response);
      at += width * response;
    }
  }
  return found;
}

// A token may end inside a character: its text then appears with the token that completes it.
function tokenTexts(ids) {
  const decoder = new TextDecoder("utf-8");
  return Array.from(ids, (id) => {
    const raw = dump.vocabulary[id];
    if (raw === undefined) return null;
    return decoder.decode(Uint8Array.from(raw, (char) => char.charCodeAt(0)), { stream: true });
  });
}
