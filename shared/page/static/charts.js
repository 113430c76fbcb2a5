// Charts as SVG: a curve, bars of parts, and the workers over time. Each replaces the content of its box.

import { color, el, svg } from "./dom.js";
import { duration, number, PARTS, STATE_COLORS } from "./facts.js";

const ROW = 20;

export function lineChart(box, { name, points }, paint = "blue") {
  if (!points.length) return empty(box, "No values yet.");
  const width = box.clientWidth, height = 150, left = 46, right = 12, top = 16, bottom = 20;
  const [x0, x1] = [points[0][0], Math.max(points.at(-1)[0], points[0][0] + 1)];
  const values = points.map(([, value]) => value);
  let [y0, y1] = [Math.min(...values, 0), Math.max(...values)];
  if (y0 === y1) y1 = y0 + 1;
  const x = (step) => left + ((step - x0) / (x1 - x0)) * (width - left - right);
  const y = (value) => height - bottom - ((value - y0) / (y1 - y0)) * (height - top - bottom);
  const chart = canvas(width, height, `${name}: ${number(values.at(-1))} at step ${points.at(-1)[0]}`);
  for (const value of [y0, (y0 + y1) / 2, y1]) {
    chart.append(line(left, y(value), width - right, y(value)), text(left - 6, y(value) + 4, number(value), "end"));
  }
  chart.append(text(left, height - 4, `step ${x0}`), text(width - right, height - 4, String(points.at(-1)[0]), "end"));
  chart.append(svg("polyline", { class: "line", points: points.map(([s, v]) => `${x(s)},${y(v)}`).join(" "), style: { stroke: color(paint) } }));
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
    const at = event.offsetX * (width / box.clientWidth);
    select(points.reduce((best, point) => (Math.abs(x(point[0]) - at) < Math.abs(x(best[0]) - at) ? point : best)));
  });
  chart.addEventListener("pointerleave", () => select(points.at(-1)));
  box.replaceChildren(chart);
}

export function stepBars(box, rows, shown = 12) {
  const timed = rows.filter((row) => row["time/step_s"]).slice(-shown);
  if (!timed.length) return empty(box, "No step has ended yet.");
  const width = box.clientWidth, left = 46, right = 60;
  const longest = Math.max(...timed.map((row) => row["time/step_s"]));
  const chart = canvas(width, timed.length * ROW + 4, "Time of each step by part");
  timed.reverse().forEach((row, i) => {
    let x = left;
    const top = i * ROW + 3;
    chart.append(text(left - 6, top + 11, row.step + 1, "end"));
    const other = row["time/step_s"] - PARTS.reduce((sum, [key]) => sum + (row[key] ?? 0), 0);
    for (const [key, label, paint] of [...PARTS, ["other", "other", "line"]]) {
      const seconds = key === "other" ? Math.max(0, other) : row[key] ?? 0;
      const w = (seconds / longest) * (width - left - right);
      chart.append(bar(x, top, w, ROW - 6, paint, `step ${row.step + 1}: ${label} ${duration(seconds)}`));
      x += w;
    }
    chart.append(text(x + 6, top + 11, duration(row["time/step_s"])));
  });
  box.replaceChildren(chart, legend([...PARTS.map(([, label, paint]) => [label, paint]), ["other", "line"]]));
}

export function gantt(box, { workers, moves }, from, now) {
  const rows = [...workers].filter(([, life]) => life.spans.some((span) => (span.to ?? now) > from));
  if (!rows.length) return empty(box, "No worker has joined yet.");
  rows.sort((a, b) => (a[1].role === b[1].role ? a[0].localeCompare(b[0], "en", { numeric: true }) : a[1].role === "reserved" ? -1 : 1));
  const width = box.clientWidth, left = Math.min(130, width / 4), right = 8, height = rows.length * ROW + 22;
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
      chart.append(titled(svg("text", { x: x(at), y: top + 13, "text-anchor": "middle", style: { fill: color("red"), fontSize: "14px" } },
        end === "lost" ? "✕" : end ? "■" : "▼"), `${name} ${title}`));
    }
  });
  for (const move of moves.filter(({ at, from: a, to }) => at > start && a !== to && middle.has(a) && middle.has(to)).slice(-200)) {
    const arrow = svg("path", { d: `M${x(move.start)} ${middle.get(move.from)}L${x(move.at)} ${middle.get(move.to)}`,
      style: { stroke: "var(--ink)", strokeWidth: 1, opacity: 0.55 } });
    const tip = svg("circle", { cx: x(move.at), cy: middle.get(move.to), r: 2.5, style: { fill: "var(--ink)" } });
    chart.append(arrow, titled(tip, `${move.samples} samples moved from ${move.from} to ${move.to} with ${number(move.tokens)} tokens`));
  }
  chart.append(text(left, height - 4, `${duration((now - start) / 1000)} ago`), text(width - right, height - 4, "now", "end"));
  const marks = el("li", {}, "▼ preemption notice  ✕ lost  ■ left  ╲● samples moved");
  const list = legend(Object.entries(STATE_COLORS));
  list.append(marks);
  box.replaceChildren(chart, list);
}

function legend(items) {
  return el("ul", { class: "legend" }, ...items.map(([label, paint]) => el("li", {}, el("i", { style: { background: color(paint) } }), label)));
}

const empty = (box, why) => box.replaceChildren(el("p", { class: "muted" }, why));
const canvas = (width, height, label) => svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": label });
const line = (x1, y1, x2, y2) => svg("line", { class: "axis", x1, y1, x2, y2 });
const text = (x, y, content, anchor = "start") => svg("text", { x, y, "text-anchor": anchor }, String(content));
const titled = (element, title) => (element.append(svg("title", {}, title)), element);
const bar = (x, y, width, height, paint, title) => titled(svg("rect", { x, y, width, height, rx: 1.5, style: { fill: color(paint) } }), title);
