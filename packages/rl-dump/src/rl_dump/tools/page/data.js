// The document, and what is read from it: facts per sample, tokens on demand.
const dump = JSON.parse(document.getElementById("document").textContent);
const $ = (id) => document.getElementById(id);

// JSON has no NaN, no infinity and no exact whole number beyond 2**53: in columns of numbers they come as words.
const WORDS = { nan: NaN, inf: Infinity, "-inf": -Infinity };
for (const name of dump.numbers) dump.facts[name] = dump.facts[name].map((value) => (typeof value === "string" ? WORDS[value] ?? BigInt(value) : value));
const allRows = Array.from({ length: dump.samples }, (_, row) => row);

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function show(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
  if (Number.isInteger(value) && !Number.isSafeInteger(value)) return `≈ ${value.toExponential(6)}`;
  if (Number.isInteger(value)) return value.toLocaleString("en-US", { useGrouping: Math.abs(value) >= 10000 });
  const size = Math.abs(value);
  return size !== 0 && (size < 0.001 || size >= 1e6) ? value.toExponential(2) : value.toFixed(size < 10 ? 4 : 2);
}

// Unpack one sample: its ids and each strip, the widest first, as typed arrays need.
async function tokensOf(row) {
  const span = dump.spans[row];
  if (!span) return null;
  const [start, size, total, response] = span;
  const packed = atob($("tokens").firstChild.data.slice(start, start + size));
  const bytes = Uint8Array.from(packed, (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const buffer = await new Response(stream).arrayBuffer();
  const found = { ids: null, prompt: total - response, strips: {} };
  let at = 0;
  for (const width of [8, 4, 1]) {
    for (const { name, dtype } of [{ name: null, dtype: dump.ids }, ...dump.strips]) {
      const kind = { f8: Float64Array, f4: Float32Array, i4: Int32Array, u1: Uint8Array }[dtype];
      if (kind.BYTES_PER_ELEMENT !== width) continue;
      const values = new kind(buffer, at, name === null ? total : response);
      if (name === null) found.ids = values;
      else found.strips[name] = values;
      at += values.byteLength;
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
