// The drawings: a config's accuracy on a line, its figures over past runs, and how its answers are distributed.

import { el, number, svg, tip } from "./dom.js";

const W = 340;
const H = 150;
const PAD = { left: 44, right: 12, top: 12, bottom: 26 };

function scale(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

// About four round steps that hold both ends.
function ticks(low, high) {
  const rough = (high - low || Math.abs(high) || 1) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const first = Math.floor(low / step + 1e-9);
  const last = Math.max(first + 1, Math.ceil(high / step - 1e-9));
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}

const commitOf = (run) => (run.commit === "unknown" ? "unknown commit" : run.commit.slice(0, 9));

// Accuracy with its interval, the floor, and past runs as faint strokes, on one line of its own scale.
export function strip(facts, width = 220) {
  if (facts.accuracy === null) return null;
  const past = facts.history.slice(0, -1).filter((run) => run.accuracy !== null);
  const values = [facts.interval.low, facts.interval.high, facts.floor, ...past.map((run) => run.accuracy)];
  const margin = Math.max(0.01, (Math.max(...values) - Math.min(...values)) * 0.08);
  const [low, high] = [Math.max(0, Math.min(...values) - margin), Math.min(1, Math.max(...values) + margin)];
  const x = scale(low, high, 6, width - 6);
  const middle = 13;
  const at = x(facts.accuracy);
  const text = `accuracy ${facts.accuracy.toFixed(4)}, interval ${facts.interval.low.toFixed(4)} to ${facts.interval.high.toFixed(4)}, floor ${facts.floor}`;
  const figure = svg(
    "svg",
    { viewBox: `0 0 ${width} 26`, class: `strip-plot ${facts.verdict}`, role: "img", "aria-label": text },
    svg("line", { class: "rail", x1: 6, x2: width - 6, y1: middle, y2: middle }),
    past.map((run) => svg("line", { class: "past", x1: x(run.accuracy), x2: x(run.accuracy), y1: 4, y2: 22 })),
    svg("line", { class: "floor", x1: x(facts.floor), x2: x(facts.floor), y1: 1, y2: 25 }),
    svg("line", { class: "interval", x1: x(facts.interval.low), x2: x(facts.interval.high), y1: middle, y2: middle }),
    svg("circle", { class: "point", cx: at, cy: middle, r: 4.5 }),
  );
  const told = past.length ? [`${past.length} past runs: ${spread(past.map((run) => run.accuracy))}`] : ["no past runs"];
  return tip(figure, [...text.split(", "), ...told]);
}

function spread(values) {
  return `${Math.min(...values).toFixed(4)} to ${Math.max(...values).toFixed(4)}`;
}

function frame(title, marks, y, children) {
  const lines = marks.map((mark) => [
    svg("line", { class: "grid", x1: PAD.left, x2: W - PAD.right, y1: y(mark), y2: y(mark) }),
    svg("text", { class: "tick", x: PAD.left - 6, y: y(mark) + 3.5, "text-anchor": "end" }, number(mark, 4)),
  ]);
  const figure = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title }, lines.flat(), children);
  return el("figure", {}, el("figcaption", {}, title), figure);
}

// One figure over all runs, the last of them this one; null where fewer than two runs have it.
function overRuns(title, runs, read, { floor = null, digits = 2 } = {}) {
  const known = runs.map((run, i) => ({ run, i, ...read(run) })).filter(({ value }) => value !== null && value !== undefined);
  if (known.length < 2) return null;
  const values = known.flatMap(({ value, low, high }) => [value, low ?? value, high ?? value]);
  if (floor !== null) values.push(floor);
  const marks = ticks(Math.min(...values), Math.max(...values));
  const y = scale(marks[0], marks.at(-1), H - PAD.bottom, PAD.top);
  const x = scale(0, Math.max(1, runs.length - 1), PAD.left + 8, W - PAD.right - 8);
  const path = known.map(({ i, value }) => `${x(i)},${y(value)}`).join(" ");
  const points = known.map((point) => runPoint(point, x(point.i), y, point.i === runs.length - 1, title, digits));
  const ends = [0, runs.length - 1].map((i) =>
    svg("text", { class: "tick", x: x(i), y: H - 8, "text-anchor": i ? "end" : "start" }, commitOf(runs[i])),
  );
  const bar = floor === null ? [] : [svg("line", { class: "floor", x1: PAD.left, x2: W - PAD.right, y1: y(floor), y2: y(floor) })];
  return frame(title, marks, y, [...bar, svg("polyline", { class: "series", points: path }), ...points, ...ends]);
}

function runPoint({ run, value, low, high }, x, y, own, title, digits) {
  const whisker = low === undefined || low === null ? [] : [svg("line", { class: "whisker", x1: x, x2: x, y1: y(low), y2: y(high) })];
  const point = svg(
    "g",
    { class: `run ${run.verdict}${own ? " own" : ""}`, tabindex: -1 },
    whisker,
    svg("circle", { class: "target", cx: x, cy: y(value), r: 9 }),
    svg("circle", { class: "point", cx: x, cy: y(value), r: own ? 4.5 : 3 }),
  );
  const range = whisker.length ? ` (${low.toFixed(4)} to ${high.toFixed(4)})` : "";
  return tip(point, [`${title} ${number(value, digits)}${range}`, commitOf(run), run.started.slice(0, 16).replace("T", " "), `${run.run_id}: ${run.verdict}`]);
}

export function historyPlots(facts) {
  const runs = facts.history;
  const measures = [...new Set(runs.flatMap((run) => Object.keys(run.measures)))];
  const plots = [
    overRuns("accuracy", runs, (run) => ({ value: run.accuracy, low: run.low, high: run.high }), { floor: facts.floor, digits: 4 }),
    ...measures.map((name) => overRuns(name.replaceAll("_", " "), runs, (run) => ({ value: run.measures[name] }), { digits: 4 })),
    overRuns("output tokens/s", runs, (run) => ({ value: run.tokens_per_second }), { digits: 1 }),
    overRuns("acceptance length", runs, (run) => ({ value: run.acceptance_length }), { floor: facts.acceptance_floor, digits: 3 }),
    overRuns("start-up (s)", runs, (run) => ({ value: run.startup }), { digits: 1 }),
  ].filter(Boolean);
  return plots;
}

export function historyTable(runs) {
  const head = ["started", "commit", "verdict", "accuracy", "tokens/s", "acceptance", "start-up"];
  const cells = (run) => [run.started.slice(0, 16).replace("T", " "), commitOf(run), run.verdict, number(run.accuracy, 4), number(run.tokens_per_second, 0), number(run.acceptance_length, 3), number(run.startup, 1)];
  const rows = [...runs].reverse().map((run) => el("tr", { title: run.run_id }, cells(run).map((cell) => el("td", {}, cell))));
  const table = el("table", {}, el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))), el("tbody", {}, rows));
  return el("details", {}, el("summary", {}, `Past runs as a table (${runs.length})`), el("div", { class: "scroll" }, table));
}

const KINDS = ["right", "wrong", "scored", "truncated", "unanswered", "error"];

// What became of a question; "scored" where the task knows no right or wrong.
export function kindOf(row) {
  if (row.status !== "ok") return row.status;
  return row.correct === null ? "scored" : row.correct ? "right" : "wrong";
}

export function histogramLegend(rows) {
  const present = KINDS.filter((kind) => rows.some((row) => kindOf(row) === kind));
  return el("span", { class: "legend" }, present.map((kind) => [el("span", { class: `swatch ${kind === "error" ? "unanswered" : kind}` }), ` ${kind}`]).flat());
}

// Bars of answers by length or latency, stacked by what became of them; a bar narrows the list to its answers.
export function histogram(title, rows, field, choose) {
  const known = rows.filter((row) => typeof row[field] === "number");
  const values = known.map((row) => row[field]);
  if (new Set(values).size < 2) return null;
  const marks = ticks(Math.min(...values), Math.max(...values));
  const width = (marks.at(-1) - marks[0]) / 24;
  const bins = Array.from({ length: 24 }, () => []);
  for (const row of known) bins[Math.min(23, Math.floor((row[field] - marks[0]) / width))].push(row);
  const most = ticks(0, Math.max(...bins.map((bin) => bin.length)));
  const y = scale(0, most.at(-1), H - PAD.bottom, PAD.top);
  const x = scale(0, 24, PAD.left, W - PAD.right);
  const bars = bins.flatMap((bin, i) => {
    if (!bin.length) return [];
    const [from, to] = [marks[0] + i * width, marks[0] + (i + 1) * width];
    const last = i === 23;
    const label = `${title}: ${number(from)} to ${number(to)}`;
    const choice = { label, holds: (row) => typeof row[field] === "number" && row[field] >= from && (last || row[field] < to) };
    return [bar(bin, x(i), x(i + 1), y, label, () => choose(choice))];
  });
  const labels = marks.map((mark) => {
    const at = PAD.left + ((mark - marks[0]) / (marks.at(-1) - marks[0])) * (W - PAD.left - PAD.right);
    return svg("text", { class: "tick", x: at, y: H - 8, "text-anchor": "middle" }, number(mark, 3));
  });
  return frame(title, most.filter(Number.isInteger), y, [...bars, ...labels]);
}

function bar(bin, from, to, y, label, choose) {
  let below = 0;
  const parts = KINDS.flatMap((kind) => {
    const count = bin.filter((row) => kindOf(row) === kind).length;
    if (!count) return [];
    below += count;
    const box = { x: from + 0.75, width: to - from - 1.5, y: y(below), height: y(below - count) - y(below) };
    return [svg("rect", { class: `bar ${kind}`, ...box })];
  });
  const told = KINDS.map((kind) => [kind, bin.filter((row) => kindOf(row) === kind).length]).filter(([, count]) => count);
  const group = svg("g", { class: "bin", onclick: choose }, parts, svg("rect", { class: "target", x: from, width: to - from, y: PAD.top, height: H - PAD.bottom - PAD.top }));
  return tip(group, [label, ...told.map(([kind, count]) => `${count} ${kind}`), "click to list them"]);
}
