// The sample browser: each part of a completion in the color of the worker and weight version that generated it.

import { report, samplesOf } from "./api.js";
import { color, el, PAINTS } from "./dom.js";
import { completionParts, number, workerName } from "./facts.js";

const SHOWN = 8; // of each order; a report has no others: rlboost/report/answers.py
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
  const turns = sample.turns ? `, ${sample.turns} turns` : "";
  const makers = sample.spans.map(([worker, version, n], span) =>
    el("li", {}, el("i", { style: { background: paint(sample, span) } }), `${workerName(worker)}, version ${version}: ${n} tokens`));
  const texts = completionParts(sample).map(({ text, span }) =>
    el("mark", span === null ? {} : { style: { borderColor: paint(sample, span) }, title: makers[span].textContent }, text));
  return el("article", { class: "sample" },
    el("p", {}, el("b", {}, scored), `, ${sample.n_tokens} tokens, finish ${sample.finish}${turns}`),
    el("pre", { class: "muted", "aria-label": "prompt" }, sample.prompt),
    el("pre", { "aria-label": "completion", tabindex: 0 }, ...texts),
    el("ul", { class: "legend" }, ...makers));
}

function paint(sample, span) {
  const makers = [...new Set(sample.spans.map(([worker, version]) => `${worker} ${version}`))];
  const [worker, version] = sample.spans[span];
  return color(PAINTS[makers.indexOf(`${worker} ${version}`) % PAINTS.length]);
}
