// The list of a config's samples: filters, search, and the sample that is open.

import { el, number, visible } from "./dom.js";
import { kindOf } from "./plots.js";
import { sampleView } from "./detail.js";

export const FILTERS = {
  all: () => true,
  wrong: (row) => kindOf(row) === "wrong",
  flipped: (row) => row.changed !== null,
  truncated: (row) => row.status === "truncated",
  unanswered: (row) => row.status === "unanswered",
  error: (row) => row.status === "error",
};
const PAGE = 150;

export class Explorer {
  constructor(store, place, navigate) {
    this.store = store;
    this.navigate = navigate;
    this.show = "all";
    this.words = [];
    this.found = null;
    this.range = null;
    this.open = null;
    this.build(place);
  }

  build(place) {
    this.buttons = Object.entries(FILTERS).map(([name, holds], i) => {
      const count = this.store.rows.filter(holds).length;
      return el("button", { type: "button", "data-show": name, title: `Key ${i + 1}`, onclick: () => this.navigate({ show: name }) }, name, el("span", { class: "count" }, String(count)));
    });
    this.input = el("input", { type: "search", placeholder: "Search prompts, replies, gold  ( / )", "aria-label": "Search the samples", oninput: () => this.search() });
    this.told = el("p", { class: "told", role: "status" });
    this.chip = el("button", { type: "button", class: "chip", hidden: true, title: "Show the others again", onclick: () => this.narrow(null) });
    this.body = el("tbody", { onclick: (event) => this.clicked(event) });
    this.more = el("button", { type: "button", class: "more", onclick: () => this.extend() });
    this.list = el("div", { class: "list", tabindex: 0, "aria-label": "Samples" }, this.table(), this.more);
    this.detail = el("article", { class: "sample", "aria-live": "polite" });
    this.split = el("div", { class: "split" }, this.list, this.detail);
    const bar = el("div", { class: "bar-line", hidden: !this.store.rows.length }, el("div", { class: "filters", role: "group", "aria-label": "Which samples" }, this.buttons), this.input);
    place.replaceChildren(el("h3", {}, "Samples"), bar, el("div", { class: "told-line" }, this.chip, this.told), this.split);
    new IntersectionObserver((seen) => seen.some((entry) => entry.isIntersecting) && this.extend(), { root: this.list, rootMargin: "300px" }).observe(this.more);
    this.refresh();
  }

  // Columns that any sample fills.
  table() {
    const has = (name) => this.store.rows.some((row) => row[name] !== null && row[name] !== "" && row[name] !== 0);
    const columns = [
      ["#", "num", (row) => (row.pass > 1 ? `${row.index}·${row.pass}` : String(row.index))],
      ["result", "nowrap", (row) => this.result(row)],
      has("extracted") && ["answer", "mono short", (row) => visible(row.extracted ?? "–")],
      has("gold") && ["gold", "mono short", (row) => visible(row.gold ?? "–")],
      has("value") && ["value", "num", (row) => number(row.value, 4)],
      has("tokens") && ["tokens", "num", (row) => number(row.tokens, 0)],
      has("latency") && ["s", "num", (row) => number(row.latency, 1)],
      ["question", "excerpt", (row) => visible(row.excerpt ?? "")],
    ];
    this.columns = columns.filter(Boolean);
    const head = this.columns.map(([name, form]) => el("th", { scope: "col", class: form === "num" ? form : null }, name));
    return el("table", { class: "rows" }, el("thead", {}, el("tr", {}, head)), this.body);
  }

  result(row) {
    const kind = kindOf(row);
    const flip = row.changed ? el("span", { class: `turn ${row.changed === "to wrong" ? "wrong" : "right"}`, title: `flipped ${row.changed}` }, "⇄") : null;
    return [el("span", { class: `dot ${kind}` }), ` ${kind}`, flip];
  }

  // Rows that are to be listed now, in order.
  matching() {
    const holds = FILTERS[this.show] ?? FILTERS.all;
    return this.store.rows.filter((row) => holds(row) && (!this.range || this.range.holds(row)) && (!this.words.length || this.found.has(row) || this.quick(row)));
  }

  quick(row) {
    const text = [`#${row.index}`, row.extracted, row.gold, row.excerpt].join("\n").toLowerCase();
    return this.words.every((word) => text.includes(word));
  }

  refresh() {
    this.rows = this.matching();
    this.listed = 0;
    this.body.replaceChildren();
    this.extend();
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.dataset.show === this.show));
    this.tell();
  }

  tell(progress = "") {
    this.told.textContent = this.store.rows.length ? `${number(this.rows.length)} of ${number(this.store.rows.length)} samples${progress}` : "The record holds no samples of this config.";
    this.split.hidden = !this.store.rows.length;
  }

  extend() {
    const next = this.rows.slice(this.listed, this.listed + PAGE);
    this.body.append(...next.map((row, i) => this.line(row, this.listed + i)));
    this.listed += next.length;
    this.more.hidden = this.listed >= this.rows.length;
    this.more.textContent = `${number(this.rows.length - this.listed)} more`;
  }

  line(row, at) {
    const cells = this.columns.map(([, form, read]) => el("td", { class: form }, read(row)));
    return el("tr", { "data-at": at, "aria-selected": String(this.open === row) }, cells);
  }

  clicked(event) {
    const line = event.target.closest("tr");
    if (line) this.go(this.rows[Number(line.dataset.at)]);
  }

  go(row) {
    this.navigate({ sample: row.index, pass: row.pass > 1 ? row.pass : null });
  }

  step(by) {
    const at = this.rows.indexOf(this.open);
    const next = at < 0 ? (by > 0 ? 0 : this.rows.length - 1) : Math.min(this.rows.length - 1, Math.max(0, at + by));
    if (!this.rows[next]) return;
    this.go(this.rows[next]);
    this.split.scrollIntoView({ block: "nearest" });
  }

  filter(show) {
    if (show === this.show) return;
    this.show = show in FILTERS ? show : "all";
    this.refresh();
  }

  narrow(range) {
    this.range = range;
    this.chip.hidden = !range;
    this.chip.textContent = range ? `${range.label}  ×` : "";
    this.refresh();
    if (range) this.list.scrollIntoView({ block: "center" });
  }

  async search() {
    this.running?.abort();
    this.running = new AbortController();
    const { signal } = this.running;
    this.words = this.input.value.toLowerCase().split(/\s+/).filter(Boolean);
    this.found = new Set();
    this.refresh();
    if (!this.words.length) return;
    await new Promise((resolve) => setTimeout(resolve, 200)); // a word is being typed: look once it is
    if (signal.aborted) return;
    let seen = 0;
    let shown = this.rows.length;
    await this.store.search(this.words, (rows) => {
      for (const row of rows) this.found.add(row);
      seen += 1;
      if (seen % 8 === 0) this.tell(", looking through the replies …");
    }, signal);
    if (signal.aborted) return;
    if (this.matching().length !== shown) this.refresh();
    this.tell();
  }

  // Opens the sample of an address, or closes the one that is open.
  async view(index, pass) {
    const row = index === null ? null : this.store.rows.find((one) => one.index === index && one.pass === pass);
    this.open = row ?? null;
    this.split.classList.toggle("opened", index !== null);
    this.select();
    if (index === null) return this.detail.replaceChildren(el("p", { class: "nothing" }, "Choose a sample, or press j."));
    if (!row) return this.detail.replaceChildren(el("p", { class: "nothing" }, `This run has no sample ${index}.`));
    const detail = await this.store.detail(row);
    if (this.open !== row) return undefined;
    const close = () => this.navigate({ sample: null, pass: null });
    this.detail.replaceChildren(...sampleView(this.store, row, detail, { link: location.hash, step: (by) => this.step(by), close }));
    this.detail.scrollTop = 0;
    for (const mark of this.detail.querySelectorAll("pre mark")) {
      const text = mark.closest("pre"); // a long reply is shown from its answer, which mostly stands at its end
      text.scrollTop = mark.offsetTop - text.clientHeight + 60;
    }
    return undefined;
  }

  select() {
    for (const line of this.body.querySelectorAll("[aria-selected=true]")) line.setAttribute("aria-selected", "false");
    const at = this.open ? this.rows.indexOf(this.open) : -1;
    while (at >= this.listed) this.extend();
    const line = this.body.children[at];
    if (!line) return;
    line.setAttribute("aria-selected", "true");
    const [top, bottom] = [line.offsetTop - 40, line.offsetTop + line.offsetHeight];
    if (top < this.list.scrollTop) this.list.scrollTop = top;
    else if (bottom > this.list.scrollTop + this.list.clientHeight) this.list.scrollTop = bottom - this.list.clientHeight;
  }
}
