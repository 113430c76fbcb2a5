// The sample browser: each part of a completion in the color of the worker and weight version that generated it.

import { report, samplesOf } from "./api.js";
import { color, el, PAINTS } from "./dom.js";
import { completionParts, number, turns, turnsText, workerName } from "./facts.js";

const SHOWN = 8; // of each order; a report has no others: rlboost/report.py
const ORDERS = {
  best: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  worst: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  moved: (a, b) => b.spans.length - a.spans.length,
};

export async function showSamples(box, jobId, step, order) {
  const found = (await samplesOf(jobId, step)).filter((sample) => !sample.is_eval);
  if (!found.length) {
    const others = report ? ` This report has those of the steps ${Object.keys(report.samples).join(", ") || "-"}.` : "";
    return box.replaceChildren(el("p", { class: "muted" }, `No samples of step ${step} are retained.${others}`));
  }
  const rows = found.sort(ORDERS[order]).slice(0, SHOWN);
  box.replaceChildren(
    el("p", { class: "muted" }, `${rows.length}${report ? "" : ` of ${found.length}`} sample${found.length > 1 ? "s" : ""} of step ${step}.`), ...rows.map(sampleView));
}

function sampleView(sample) {
  const scored = sample.reward === null ? `not scored (${sample.reason || "unknown"})` : `reward ${number(sample.reward)}`;
  const length = sample.turns ? `, ${turnsText(sample)}` : "";
  const makers = sample.spans.map(([worker, version, n], span) =>
    el("li", {}, el("i", { style: { background: paint(sample, span) } }), `${workerName(worker)}, version ${version}: ${n} tokens`));
  const texts = sample.messages ? [] : completionParts(sample).map(({ text, span }) =>
    el("mark", span === null ? {} : { style: { borderColor: paint(sample, span) }, title: makers[span].textContent }, text));
  return el("article", { class: "sample" },
    el("p", {}, el("b", {}, scored), `, ${sample.n_tokens} tokens, finish ${sample.finish}${length}`),
    el("pre", { class: "muted", "aria-label": "prompt" }, sample.prompt),
    sample.messages ? el("ol", { class: "turns", "aria-label": "conversation" }, ...turns(sample).map(turnView))
      : el("pre", { "aria-label": "completion", tabindex: 0 }, ...texts),
    sample.messages ? null : el("ul", { class: "legend" }, ...makers));

  function turnView({ who, text, calls, note, spans, bar }) {
    const painted = new Map(spans.map(([worker, version]) => [`${workerName(worker)}, version ${version}`, paintOf(sample, worker, version)]));
    const of = [...painted].map(([name, background]) => el("span", {}, el("i", { style: { background } }), name));
    const [start, end] = bar ?? [], share = (part) => `${(100 * part).toFixed(2)}%`;
    return el("li", {}, el("p", {}, el("b", {}, who), note ? ` ${note}` : "", ...of),
      bar && el("div", { class: "time", title: note }, el("i", { style: { marginLeft: share(start), width: share(end - start) } })),
      text || !(calls.length || note) ? el("pre", { class: spans.length ? null : "answer" }, text || "(empty)") : null,
      ...calls.map((call) => el("pre", { class: "call" }, call)));
  }
}

const paint = (sample, span) => paintOf(sample, ...sample.spans[span]);

function paintOf(sample, worker, version) {
  const makers = [...new Set(sample.spans.map(([of, at]) => `${of} ${at}`))];
  return color(PAINTS[makers.indexOf(`${worker} ${version}`) % PAINTS.length]);
}
