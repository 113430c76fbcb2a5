// Charts as SVG: curves, bars of parts, and the workers over time. Each replaces the content of its box.

import { color, el, PAINTS, svg } from "./dom.js";
import { duration, number, otherTime, PARTS, STATE_COLORS } from "./facts.js";

const ROW = 20;
const STEPS_SHOWN = 100;
const MANY = 12; // workers: more have no legend
const PREEMPTION_MARKS = "▼ ✕ preemption with, without notice";

// Draw a curve, and points of a second one on the same axes if there is one; each is {name, points: [step, value]}. Next
// to the curve are the preemptions in each of its steps.
export function lineChart(box, { name, points }, paint = "blue", dots = { points: [] }, preempted = []) {
  if (!points.length && dots.points.length) return lineChart(box, dots, "green");
  if (!points.length) return empty(box, "No values yet.");
  const width = widthOf(box), height = 150, left = 46, right = 12, top = 16, bottom = 20;
  const steps = [...points, ...dots.points].map(([step]) => step), values = [...points, ...dots.points].map(([, value]) => value);
  const x0 = Math.min(...steps), x1 = Math.max(...steps, x0 + 1);
  let [y0, y1] = [Math.min(...values, 0), Math.max(...values)];
  if (y0 === y1) y1 = y0 + 1;
  const x = (step) => left + ((step - x0) / (x1 - x0)) * (width - left - right);
  const y = (value) => height - bottom - ((value - y0) / (y1 - y0)) * (height - top - bottom);
  const chart = canvas(width, height, `${name}: ${number(points.at(-1)[1])} at step ${points.at(-1)[0]}`);
  for (const value of [y0, (y0 + y1) / 2, y1]) {
    chart.append(line(left, y(value), width - right, y(value)), text(left - 6, y(value) + 4, number(value), "end"));
  }
  chart.append(text(left, height - 4, `step ${x0}`), text(width - right, height - 4, String(Math.max(...steps)), "end"));
  chart.append(svg("polyline", { class: "line", points: points.map(([s, v]) => `${x(s)},${y(v)}`).join(" "), style: { stroke: color(paint) } }));
  for (const [step, value] of dots.points) {
    chart.append(titled(svg("circle", { cx: x(step), cy: y(value), r: 3.5, style: { fill: color("green") } }),
      `${dots.name} ${number(value)} at step ${step}`));
  }
  for (const [step, value] of points) {
    const up = y(value) > height / 2;
    markPreemptions(chart, preempted, step, x(step), y(value) + (up ? -6 : 18), up);
  }
  const dot = svg("circle", { r: 3.5, style: { fill: color(paint) } });
  const label = text(0, 11, "", "end");
  label.setAttribute("class", "value");
  label.setAttribute("x", width - right);
  chart.append(dot, label);
  const select = ([step, value]) => {
    dot.setAttribute("cx", x(step));
    dot.setAttribute("cy", y(value));
    label.textContent = `${name} ${number(value)} at step ${step}`;
  };
  select(points.at(-1));
  chart.addEventListener("pointermove", (event) => {
    const at = event.offsetX * (width / widthOf(box));
    select(points.reduce((best, point) => (Math.abs(x(point[0]) - at) < Math.abs(x(best[0]) - at) ? point : best)));
  });
  chart.addEventListener("pointerleave", () => select(points.at(-1)));
  const names = dots.points.length ? [[name, paint], [dots.name, "green"]] : [];
  const marked = preempted.length ? PREEMPTION_MARKS : "";
  box.replaceChildren(chart, ...(names.length || marked ? [legend(names, marked)] : []));
}

// Draw the newest steps as bars of their parts, with the preemptions in each; `select` is called with the step under
// the pointer, counted from 1.
export function stepBars(box, rows, preempted, select) {
  const timed = rows.slice(-STEPS_SHOWN);
  if (!timed.length) return empty(box, "No step has ended yet.");
  const width = widthOf(box), height = 190, left = 46, right = 8, top = 26, bottom = 20;
  const longest = Math.max(...timed.map((row) => row["time/step_s"]));
  const slot = (width - left - right) / timed.length, y = (s) => height - bottom - (s / longest) * (height - top - bottom);
  const chart = canvas(width, height, `Time of ${timed.length} steps by part: the last took ${duration(timed.at(-1)["time/step_s"])}`);
  for (const value of [0, longest / 2, longest]) {
    chart.append(line(left, y(value), width - right, y(value)), text(left - 6, y(value) + 4, duration(value), "end"));
  }
  timed.forEach((row, i) => {
    let below = 0;
    const step = row.step + 1, x = left + i * slot, gap = Math.min(3, slot / 5);
    for (const [key, label, paint] of [...PARTS, ["other", "other", "line"]]) {
      const seconds = key === "other" ? otherTime(row) : row[key] ?? 0;
      chart.append(bar(x, y(below + seconds), slot - gap, y(below) - y(below + seconds), paint, `step ${step}: ${label} ${duration(seconds)}`));
      below += seconds;
    }
    markPreemptions(chart, preempted, step, x + slot / 2, y(row["time/step_s"]) - 4);
  });
  const every = Math.ceil(timed.length / Math.max(1, Math.floor((width - left) / 44)));
  timed.forEach((row, i) => i % every || chart.append(text(left + (i + 0.5) * slot, height - 5, row.step + 1, "middle")));
  const at = (i) => select(timed[Math.max(0, Math.min(timed.length - 1, i))].step + 1);
  chart.addEventListener("pointermove", (event) => at(Math.floor((event.offsetX * (width / widthOf(box)) - left) / slot)));
  box.replaceChildren(chart, legend([...PARTS.map(([, label, paint]) => [label, paint]), ["other", "line"]], PREEMPTION_MARKS));
}

// Draw the workers' lives and the moves between them; return when the chart begins, null if it is empty.
export function gantt(box, workers, moves, from, now) {
  const rows = [...workers].filter(([, life]) => life.spans.some((span) => (span.to ?? now) > from));
  if (!rows.length) return empty(box, "No worker has joined yet.") ?? null;
  rows.sort((a, b) => (a[1].role === b[1].role ? a[0].localeCompare(b[0], "en", { numeric: true }) : a[1].role === "reserved" ? -1 : 1));
  const width = widthOf(box), left = timeLeft(width), right = 8, height = rows.length * ROW + 22;
  const start = Math.max(from, Math.min(...rows.map(([, life]) => life.spans[0].from)));
  const x = (at) => left + ((Math.max(at, start) - start) / Math.max(1, now - start)) * (width - left - right);
  const chart = canvas(width, height, `${rows.length} workers over ${duration((now - start) / 1000)}`);
  const middle = new Map();
  rows.forEach(([name, life], i) => {
    const top = i * ROW + 2;
    middle.set(name, top + ROW / 2 - 2);
    chart.append(text(left - 6, top + 12, name.length > 18 ? `${name.slice(0, 17)}…` : name, "end"));
    for (const { state, from: a, to } of life.spans) {
      if ((to ?? now) > start) chart.append(bar(x(a), top, Math.max(1, x(to ?? now) - x(a)), ROW - 5, STATE_COLORS[state] ?? "grey",
        `${name} (${life.role}): ${state} for ${duration(((to ?? now) - a) / 1000)}`));
    }
    for (const { at, text: title, end } of life.marks.filter((mark) => mark.at > start)) {
      chart.append(mark(x(at), top + 13, end === "lost" ? "✕" : end ? "■" : "▼", `${name} ${title}`));
    }
  });
  for (const move of moves.filter(({ at, from: a, to }) => at > start && a !== to && middle.has(a) && middle.has(to)).slice(-200)) {
    const arrow = svg("path", { d: `M${x(move.start)} ${middle.get(move.from)}L${x(move.at)} ${middle.get(move.to)}`,
      style: { stroke: "var(--ink)", strokeWidth: 1, opacity: 0.55 } });
    const tip = svg("circle", { cx: x(move.at), cy: middle.get(move.to), r: 2.5, style: { fill: "var(--ink)" } });
    chart.append(arrow, titled(tip, `${move.samples} samples migrated from ${move.from} to ${move.to} with ${number(move.tokens)} tokens`));
  }
  chart.append(text(left, height - 4, clock(start)), text(width - right, height - 4, clock(now), "end"));
  const states = new Set(rows.flatMap(([, life]) => life.spans.map((span) => span.state)));
  const meaning = (state) => (state === "suspended" ? "suspended: its device trains" : state);
  box.replaceChildren(chart, legend(Object.entries(STATE_COLORS).filter(([state]) => states.has(state)).map(([state, paint]) => [meaning(state), paint]),
    "▼ preemption notice  ✕ lost  ■ left  ╲● samples migrated"));
  return start;
}

// Draw tokens/s of each worker over time, stacked: points [time in ms, {worker: tokens/s}].
export function areas(box, points, from, now) {
  const shown = points.filter((_, i) => (points[i + 1] ?? points[i])[0] >= from).map(([at, of]) => [Math.max(at, from), of]);
  const names = [...new Set(shown.flatMap(([, speeds]) => Object.keys(speeds)))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  if (shown.length < 2 || !names.length) return box.replaceChildren();
  const width = widthOf(box), height = 110, left = timeLeft(width), right = 8, top = 12, bottom = 8;
  const most = Math.max(1, ...shown.map(([, speeds]) => Object.values(speeds).reduce((sum, speed) => sum + speed, 0)));
  const x = (at) => left + ((at - from) / Math.max(1, now - from)) * (width - left - right);
  const y = (speed) => height - bottom - (speed / most) * (height - top - bottom);
  const chart = canvas(width, height, `tokens/s by worker, at most ${number(most)}`);
  for (const value of [0, most / 2, most]) {
    chart.append(line(left, y(value), width - right, y(value)), text(left - 6, y(value) + 4, number(value), "end"));
  }
  const below = shown.map(() => 0);
  names.forEach((name, n) => {
    const lower = shown.map(([at], i) => `${x(at)},${y(below[i])}`).reverse();
    const upper = shown.map(([at, speeds], i) => `${x(at)},${y((below[i] += speeds[name] ?? 0))}`);
    chart.append(titled(svg("polygon", { points: [...upper, ...lower].join(" "), style: { fill: color(PAINTS[n % PAINTS.length]) } }), name));
  });
  box.replaceChildren(el("p", { class: "muted" }, "Tokens/s by worker"), chart,
    ...(names.length <= MANY ? [legend(names.map((name, n) => [name, PAINTS[n % PAINTS.length]]))] : []));
}

// Mark the preemptions in a step, from `y` up, or down.
function markPreemptions(chart, preempted, step, x, y, up = true) {
  preempted.filter((one) => one.step === step).forEach(({ worker, noticed }, n) => chart.append(mark(
    x, up ? y - 12 * n : y + 12 * n, noticed ? "▼" : "✕", `step ${step}: ${worker} preempted ${noticed ? "with" : "without"} notice`)));
}

function legend(items, marks = "") {
  const entries = items.map(([label, paint]) => el("li", {}, el("i", { style: { background: color(paint) } }), label));
  return el("ul", { class: "legend" }, ...entries, marks ? el("li", {}, marks) : null);
}

const widthOf = (box) => Math.max(200, box.clientWidth); // before its first layout it has none
const timeLeft = (width) => Math.min(130, width / 4);
const clock = (at) => new Date(at).toLocaleTimeString();
const mark = (x, y, sign, title) =>
  titled(svg("text", { x, y, "text-anchor": "middle", style: { fill: "var(--ink)", fontSize: "14px" } }, sign), title);
const empty = (box, why) => box.replaceChildren(el("p", { class: "muted" }, why));
const canvas = (width, height, label) => svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
const line = (x1, y1, x2, y2) => svg("line", { class: "axis", x1, y1, x2, y2 });
const text = (x, y, content, anchor = "start") => svg("text", { x, y, "text-anchor": anchor }, String(content));
const titled = (element, title) => (element.append(svg("title", {}, title)), element);
const bar = (x, y, width, height, paint, title) => titled(svg("rect", { x, y, width, height, rx: 1.5, style: { fill: color(paint) } }), title);
