// The sample browser: each part of a completion in the color of the worker and weight version that generated it.

import { get } from "./api.js";
import { color, el } from "./dom.js";
import { completionParts, number, workerName } from "./facts.js";

const COLORS = ["blue", "orange", "green", "pink", "red", "sky"];
const SHOWN = 8;
const ORDERS = {
  best: (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  worst: (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity),
  moved: (a, b) => b.spans.length - a.spans.length,
};

export async function showSamples(box, jobId, step, order) {
  const found = (await get(`jobs/${jobId}/samples?step=${step - 1}`)).filter((sample) => !sample.is_eval);
  if (!found.length) return box.replaceChildren(el("p", { class: "muted" }, `No samples of step ${step} are retained.`));
  const rows = found.sort(ORDERS[order]).slice(0, SHOWN);
  box.replaceChildren(
    el("p", { class: "muted" }, `${rows.length} of ${found.length} samples of step ${step}.`), ...rows.map(sampleView));
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
  return color(COLORS[makers.indexOf(`${worker} ${version}`) % COLORS.length]);
}
