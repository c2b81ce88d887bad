// The page: which config and which sample the address names, and light or dark.

import { el } from "./dom.js";
import { Explorer } from "./explorer.js";
import { listen } from "./keys.js";
import { histogram, histogramLegend, historyPlots, historyTable, strip } from "./plots.js";
import { Store } from "./store.js";

const THEME = "accuracy-gate-theme";

function titled(title, plots, legend = null) {
  if (!plots.length) return [];
  return [el("div", { class: "group" }, title, legend), el("div", { class: "grid-plots" }, plots)];
}

class Page {
  constructor() {
    this.sections = [...document.querySelectorAll("section.config")];
    const of = (verdict) => this.sections.find((section) => section.dataset.verdict === verdict);
    this.first = of("regression") ?? of("infrastructure") ?? this.sections[0];
    this.stores = new Map();
    this.explorers = new Map();
    this.explorer = null;
  }

  // The address: config, sample, pass and filter; what is not named is the default.
  read() {
    const address = new URLSearchParams(location.hash.slice(1));
    const chosen = this.sections.find((section) => section.dataset.id === address.get("config"));
    const whole = (name) => (/^\d+$/.test(address.get(name) ?? "") ? Number(address.get(name)) : null);
    return { section: chosen ?? this.first, show: address.get("show") ?? "all", sample: whole("sample"), pass: whole("pass") ?? 1 };
  }

  navigate(changes) {
    const address = new URLSearchParams(location.hash.slice(1));
    if (!address.has("config")) address.set("config", this.read().section?.dataset.id ?? "");
    for (const [name, value] of Object.entries(changes)) {
      if (value === null || value === "all") address.delete(name);
      else address.set(name, value);
    }
    const hash = `#${address}`;
    if (hash === location.hash) return;
    history.replaceState(null, "", hash); // a step through samples is no page to come back to
    this.render();
  }

  // Brings what the address names into sight: a sample's place in the list, else its config.
  show() {
    const { section, sample } = this.read();
    const place = sample === null ? section : this.explorer?.split;
    place?.scrollIntoView({ block: "start" });
  }

  turn(by) {
    const at = this.sections.indexOf(this.read().section) + by;
    if (this.sections[at]) location.hash = new URLSearchParams({ config: this.sections[at].dataset.id });
  }

  async store(number) {
    if (!this.stores.has(number)) this.stores.set(number, new Store(number).open());
    return this.stores.get(number);
  }

  async render() {
    const { section, show, sample, pass } = this.read();
    if (!section) return;
    const { config } = section.dataset;
    for (const one of this.sections) one.hidden = one !== section;
    for (const row of document.querySelectorAll("#configs [data-config]")) row.setAttribute("aria-current", String(row.dataset.config === config));
    const store = await this.store(config);
    if (!this.explorers.has(config)) this.build(section, store);
    if (this.read().section !== section) return;
    this.explorer = this.explorers.get(config);
    this.explorer.filter(show);
    await this.explorer.view(sample, pass);
    document.documentElement.dataset.ready = section.dataset.id;
  }

  build(section, store) {
    const { config } = section.dataset;
    const explorer = new Explorer(store, section.querySelector("[data-samples]"), (changes) => this.navigate(changes));
    this.explorers.set(config, explorer);
    const choose = (range) => explorer.narrow(range);
    const { history: runs } = store.facts;
    const spread = [
      histogram("answer length (tokens)", store.rows, "tokens", choose),
      histogram("latency (s)", store.rows, "latency", choose),
      histogram("value", store.rows, "value", choose),
    ].filter(Boolean);
    const past = historyPlots(store.facts);
    const place = section.querySelector("[data-plots]");
    const told = runs.length > 1 ? historyTable(runs) : el("p", { class: "nothing" }, "No past runs of this config are known here.");
    place.replaceChildren(...titled("Over past runs", past), told, ...titled("Answers", spread, histogramLegend(store.rows)));
  }

  async strips() {
    for (const cell of document.querySelectorAll("[data-strip]")) {
      const store = await this.store(cell.dataset.strip);
      cell.replaceChildren(strip(store.facts, "wide" in cell.dataset ? 720 : 240) ?? "");
    }
  }

  theme() {
    const dark = getComputedStyle(document.documentElement).colorScheme === "dark" || (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
    this.paint(dark ? "light" : "dark");
  }

  paint(theme) {
    if (theme !== "light" && theme !== "dark") return;
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem(THEME, theme);
    } catch {
      // a page from a disk may have no storage: then the choice lasts as long as the page
    }
  }

  async start() {
    try {
      this.paint(localStorage.getItem(THEME));
    } catch {
      // no storage: the system's choice holds
    }
    document.getElementById("theme").addEventListener("click", () => this.theme());
    document.querySelector("#configs tbody").addEventListener("click", (event) => {
      if (!event.target.closest("a")) event.target.closest("tr")?.querySelector("a")?.click();
    });
    window.addEventListener("hashchange", async () => {
      await this.render();
      this.show();
    });
    listen(this);
    await this.render();
    if (location.hash) this.show();
    await this.strips();
  }
}

new Page().start();
