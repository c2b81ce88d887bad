// What is packed in the page: each config's rows, and the long texts, unpacked when somebody looks at them.

const KEPT = 6;

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64.trim()), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Chunks stand behind this script, so that a large page can be used before all of it is read.
const loaded = new Promise((resolve) => {
  if (document.readyState !== "loading") resolve();
  else document.addEventListener("DOMContentLoaded", resolve, { once: true });
});

export class Store {
  constructor(number) {
    this.number = number;
    this.chunks = new Map();
  }

  async open() {
    const packed = await unpack(document.getElementById(`index-${this.number}`).textContent);
    const { columns, rows, ...facts } = packed;
    this.facts = facts;
    this.rows = rows.map((row) => Object.fromEntries(columns.map((name, i) => [name, row[i]])));
    return this;
  }

  async chunk(index) {
    const name = `c${this.number}-${index}`;
    const kept = this.chunks.get(index) ?? this.#read(name);
    this.chunks.delete(index);
    this.chunks.set(index, kept);
    if (this.chunks.size > KEPT) this.chunks.delete(this.chunks.keys().next().value);
    return kept;
  }

  async #read(name) {
    if (!document.getElementById(name)) await loaded;
    return unpack(document.getElementById(name).textContent);
  }

  async detail(row) {
    const detail = (await this.chunk(row.chunk))[row.place];
    if (!detail.baseline) return detail;
    const { chunk, place } = detail.baseline;
    const text = (await this.chunk(chunk))[place].baseline;
    return { ...detail, baseline: { ...detail.baseline, text } };
  }

  // Looks through all texts, a chunk at a time and without keeping any; `found` is told each chunk's rows.
  async search(words, found, signal) {
    for (const [index, rows] of byChunk(this.rows)) {
      const name = `c${this.number}-${index}`;
      const texts = await (this.chunks.get(index) ?? this.#read(name));
      if (signal.aborted) return;
      found(rows.filter((row) => holds(texts[row.place], words)));
    }
  }
}

function byChunk(rows) {
  const groups = new Map();
  for (const row of rows) {
    if (!groups.has(row.chunk)) groups.set(row.chunk, []);
    groups.get(row.chunk).push(row);
  }
  return groups;
}

function holds(detail, words) {
  const text = [detail.question, detail.gold, detail.text, detail.reasoning].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}
