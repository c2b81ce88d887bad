// One sample: prompt, reply and gold side by side, with the answer that was read marked in them.

import { el, marked, number, visible } from "./dom.js";
import { kindOf } from "./plots.js";

function panel(name, title, body, note = null) {
  return el("section", { class: `panel ${name}` }, el("h4", {}, title, note ? el("small", {}, note) : null), body);
}

function block(text, span, missing) {
  if (text === null || text === undefined || text === "") return el("p", { class: "nothing" }, missing);
  return el("pre", { class: "text", dir: "ltr" }, marked(text, span));
}

function folded(title, text) {
  return el("details", {}, el("summary", {}, title), block(text, null, "nothing"));
}

function replyNote(row, detail) {
  if (kindOf(row) === "scored") return null;
  if (detail.extracted === null || detail.extracted === undefined) return "no answer was read";
  const how = detail.found_by ? ` (${detail.found_by.replaceAll("_", " ")})` : "";
  return `read as ${detail.extracted}${how}`;
}

function shown(value) {
  return typeof value === "number" ? number(value, 4) : typeof value === "string" ? value : JSON.stringify(value);
}

// Measures that come in lists, such as a score for every choice, as a table of one row an item.
function measureTable(measures) {
  const lists = Object.entries(measures ?? {}).filter(([, value]) => Array.isArray(value) && value.length > 1);
  const length = Math.max(0, ...lists.map(([, list]) => list.length));
  const columns = lists.filter(([, list]) => list.length === length);
  if (!columns.length) return null;
  const head = el("tr", {}, columns.map(([name]) => el("th", { scope: "col" }, visible(name))));
  const rows = Array.from({ length }, (_, i) => el("tr", {}, columns.map(([, list]) => el("td", {}, visible(shown(list[i]))))));
  return el("div", { class: "scroll" }, el("table", { class: "measures" }, el("thead", {}, head), el("tbody", {}, rows)));
}

function facts(row, detail) {
  const scores = Object.entries(detail.scores ?? {}).map(([name, right]) => `${name}: ${right ? "right" : "wrong"}`);
  const measures = Object.entries(detail.measures ?? {}).filter(([, value]) => !Array.isArray(value)).map(([name, value]) => `${name}: ${shown(value)}`);
  const pairs = [
    ["scorers", scores.join(", ")],
    ["measures", measures.join(", ")],
    ["value", row.value === null ? "" : number(row.value, 5)],
    ["finish", detail.finish_reason ?? ""],
    ["tokens", row.tokens === null ? "" : `${number(row.tokens)} out, ${number(detail.prompt_tokens)} in`],
    ["latency", row.latency === null ? "" : `${number(row.latency)} s`],
    ["prompt tokens cut", detail.prompt_tokens_cut ? number(detail.prompt_tokens_cut) : ""],
    ["attempts", detail.attempts > 1 ? String(detail.attempts) : ""],
    ["unanswered because", detail.unanswered_because ?? ""],
    ["prompt", detail.prompt_sha256 ? detail.prompt_sha256.slice(0, 12) : ""],
  ];
  const told = pairs.filter(([, value]) => value);
  return el("dl", { class: "sample-facts" }, told.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, visible(value)))));
}

function baselinePanel(row, detail) {
  if (!detail.baseline) return null;
  const { right, runs, text } = detail.baseline;
  const note = `right in ${number(right)} of ${runs} ${runs === 1 ? "run" : "runs"}`;
  return panel("baseline", "Baseline’s reply", block(text, null, "The baseline keeps no text."), note);
}

export function sampleView(store, row, detail, { link, step, close }) {
  const kind = kindOf(row);
  const title = el(
    "header",
    { class: "sample-head" },
    el("h3", {}, `Sample ${row.index}`, row.pass > 1 ? el("small", {}, ` pass ${row.pass}`) : null),
    el("span", { class: `badge kind ${kind}` }, kind),
    row.changed ? el("span", { class: `badge flip ${row.changed === "to wrong" ? "wrong" : "right"}` }, `flipped ${row.changed}`) : null,
    el(
      "span",
      { class: "steps" },
      el("button", { type: "button", onclick: () => step(-1), title: "Previous (k)", "aria-label": "Previous sample" }, "↑"),
      el("button", { type: "button", onclick: () => step(1), title: "Next (j)", "aria-label": "Next sample" }, "↓"),
      el("a", { href: link, class: "permalink", title: "This sample's own address (c copies it)" }, "link"),
      el("button", { type: "button", onclick: close, title: "Close (Esc)", "aria-label": "Close the sample" }, "×"),
    ),
  );
  const before = store.facts.before ? [folded("What stands before it in the prompt", store.facts.before)] : [];
  const fault = detail.error ? [panel("fault", "Error", block(JSON.stringify(detail.error, null, 2), null, ""))] : [];
  const missing = kind === "error" ? "No reply: the request failed." : kind === "scored" ? "Nothing was generated." : "The reply is empty.";
  return [
    title,
    facts(row, detail),
    measureTable(detail.measures),
    ...fault,
    el(
      "div",
      { class: detail.baseline ? "panels four" : "panels" },
      panel("prompt", "Prompt", [block(detail.question, null, "The record keeps no prompt."), ...before]),
      panel("reply", "Reply", block(detail.text, detail.mark, missing), replyNote(row, detail)),
      panel("gold", "Gold", block(detail.gold, detail.gold_mark, "The record keeps no gold answer.")),
      baselinePanel(row, detail),
    ),
    detail.reasoning ? folded("Reasoning", detail.reasoning) : null,
  ].filter(Boolean);
}
