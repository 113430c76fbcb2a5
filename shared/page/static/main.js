// The page: asks the API every two seconds, follows the job's events, and draws what it learns. A report of a job is the
// page with the answers in it, drawn once.

import { ApiError, events, forgetToken, get, hasToken, isReadOnly, post, present, report, setToken, takeTokenOfLink } from "./api.js";
import { areas, gantt, lineChart, stepBars } from "./charts.js";
import { el } from "./dom.js";
import { activityText, auditRows, cheaperTexts, costText, CURVES, curve, dollars, duration, evaluations, fleetText, forecastText, keptWorth, number, phaseName, preemptionCost, preemptionCostText, preemptionText, shortCount, stepText, timedSteps, workerName } from "./facts.js";
import { lives, migrations, preemptions, speeds, stepIncidents } from "./history.js";
import { showSamples } from "./samples.js";

const POLL_MS = 2000;
const EVENTS_SHOWN = 100;
const PREEMPTIONS_SHOWN = 10;
const TITLES = { "reward/mean": "Reward", perplexity: "Perplexity", "rewards/accuracies": "Accuracy of preferences", loss: "Loss" };
const ENDED = ["completed", "failed", "cancelled"];
const ACTIONS = { pending: ["cancel"], running: ["pause", "cancel"], paused: ["resume", "cancel"] };

const $ = (id) => document.getElementById(id);
let view = null; // {jobId, rows, events, step, moves, preempted, answers, stop: AbortController}; step: the selected one, null: the newest

// --- views -----------------------------------------------------------------------------------------------------------

function open() {
  view?.stop.abort();
  const show = (name) => $("view").replaceChildren($(name).content.cloneNode(true));
  $("logout").hidden = !hasToken() || report !== null;
  document.body.classList.toggle("read-only", isReadOnly());
  if (!hasToken()) {
    view = null;
    show("login-view");
    document.querySelector(".login").addEventListener("submit", login);
    return;
  }
  const jobId = decodeURIComponent(location.hash.match(/^#\/jobs\/([^/]+)$/)?.[1] ?? report?.job ?? "");
  view = { jobId, rows: [], events: [], step: null, moves: [], preempted: [], answers: null, stop: new AbortController() };
  show(jobId ? "job-view" : "home-view");
  $("scale").addEventListener("submit", scale);
  document.title = jobId ? `${jobId} - RLBoost` : "RLBoost";
  if (jobId) {
    $("sample-load").addEventListener("click", loadSamples);
    for (const id of ["sample-order", "sample-step"]) $(id).addEventListener("change", loadSamples);
    $("span").addEventListener("change", drawGantt);
    $("steps").addEventListener("keydown", selectByKey);
    $("steps").addEventListener("pointerleave", () => view.answers && selectStep(null));
    if (report) showReport();
    else follow(view);
  }
  if (report) showAnswers(view);
  else poll(view);
}

// What a report has and a running job's page has not.
function showReport() {
  view.events = report.events;
  $("span").value = "Infinity";
  $("report-text").textContent = report.text;
  $("report-text").hidden = false;
  $("fleet").hidden = true;
  const mark = (cell) => (/^[✓✗]/.test(cell) ? el("span", { class: cell[0] === "✓" ? "good" : "bad" }, cell) : cell);
  for (const { title, rows, place } of report.tables) {
    const box = el("div", { class: "scroll" });
    table(box, null, rows.map((row) => row.map(mark)), "");
    $(place).append(el("section", { class: "panel" }, el("h2", {}, title), box));
  }
  const moved = Object.keys(report.samples).findLast((step) => report.samples[step].some(({ spans }) => spans.length > 1));
  if (moved) [$("sample-step").value, $("sample-order").value] = [moved, "moved"];
}

async function showAnswers(mine) {
  await refresh(mine);
  await loadSamples();
}

async function login(event) {
  event.preventDefault();
  setToken($("token").value.trim());
  try {
    await get("jobs");
    open();
  } catch (error) {
    forgetToken();
    document.querySelector(".login .error").textContent = error.message;
  }
}

// --- reading ---------------------------------------------------------------------------------------------------------

async function poll(mine) {
  while (view === mine) {
    try {
      await refresh(mine);
      $("connection").textContent = "";
    } catch (error) {
      if (error.name === "AbortError" || view !== mine) return;
      if (error.status === 401) {
        forgetToken();
        open();
        document.querySelector(".login .error").textContent = error.message;
        return;
      }
      if (!(error instanceof ApiError)) console.error(error);
      $("connection").textContent = error.message.replace(/: try again$/, "; trying again.");
    }
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

async function refresh(mine) {
  const signal = mine.stop.signal;
  const [jobs, workers, fleet] = await Promise.all([get("jobs", signal), get("workers", signal), get("fleet", signal)]);
  if (view !== mine) return;
  drawJobLinks(jobs);
  drawWorkers(workers, fleet);
  if (!mine.jobId) return drawJobs(jobs);
  const base = `jobs/${mine.jobId}`, next = mine.rows.length ? mine.rows.at(-1).step + 1 : 0;
  const [job, rows, audit, cost, spec] = await Promise.all([
    get(base, signal), get(`${base}/metrics?from_step=${next}`, signal), get(`${base}/audit`, signal), get(`${base}/cost`, signal),
    mine.answers?.spec ?? get(`${base}/spec`, signal).catch(nullOn(409))]);
  if (view !== mine) return;
  mine.rows.push(...rows);
  mine.answers = { job, fleet, audit, cost, spec };
  drawJob(mine);
  if (!report && rows.length && !$("sample-step").value && document.activeElement?.closest?.("#samples") === null) await loadSamples();
}

const nullOn = (status) => (error) => {
  if (error.status === status) return null;
  throw error;
};

async function follow(mine) {
  for (let lastId; view === mine; await new Promise((resolve) => setTimeout(resolve, POLL_MS))) {
    try {
      for await (const event of events(mine.jobId, lastId, mine.stop.signal)) {
        lastId = event.id;
        mine.events.push(event);
      }
      return; // the job has ended
    } catch (error) {
      if (error.name === "AbortError") return; // otherwise the connection was lost: follow from the last event
    }
  }
}

// --- drawing ---------------------------------------------------------------------------------------------------------

function drawJobLinks(jobs) {
  $("jobs").replaceChildren(...jobs.slice(-12).reverse().map((job) =>
    el("a", { href: `#/jobs/${encodeURIComponent(job.id)}`, "aria-current": job.id === view.jobId ? "page" : null }, job.id)));
}

function drawJobs(jobs) {
  table($("job-table"), ["job", "state", "step", "reward", "now"], jobs.toReversed().map((job) => [
    el("a", { href: `#/jobs/${encodeURIComponent(job.id)}` }, job.id), job.state, `${job.step} of ${job.steps || "-"}`,
    number(job.latest?.["reward/mean"]), job.waiting ? `waiting for ${job.waiting.for}` : job.phase ? phaseName(job.phase) : ""]), "No job yet: 'rlboost run JOB.yaml' starts one.");
}

function drawWorkers(workers, fleet) {
  if (report) return;
  $("fleet-line").textContent = fleetText(fleet);
  $("scale").hidden = !fleet.autoscaling.pools.length;
  const present = workers.filter((worker) => !["lost", "left"].includes(worker.state));
  table($("worker-table"), ["worker", "kind", "state", "version", "running", "queued", "tokens/s", "$/h", "waits for", ""], present.map((worker) => [
    workerName(worker.id), `${worker.role === "reserved" ? "reserved" : "spot"}, ${worker.kind}`, worker.state,
    number(worker.weight_version), number(worker.running), number(worker.pending), number(worker.tokens_per_s),
    worker.price_per_hour ? dollars(worker.price_per_hour) : "-",
    worker.waiting ? `${worker.waiting.for} (${duration((Date.now() - Date.parse(worker.waiting.since)) / 1000)}): ${worker.waiting.because}` : "",
    el("button", { class: "act", disabled: worker.state === "draining", onclick: () => act(`workers/${worker.id}/drain`,
      `Drain ${workerName(worker.id)}? It hands its samples to other workers and exits.`) }, "Drain")]),
  "No worker: 'rlboost worker join' starts one.");
}

function drawJob({ rows, events: past, answers: { job, fleet, audit, cost, spec } }) {
  const now = present();
  $("name").textContent = job.name;
  $("state").textContent = job.state;
  $("state").className = `badge ${job.state}`;
  drawActions(job);
  $("waiting").textContent = job.error ? `Error: ${job.error}` : activityText(job, now);
  $("waiting").hidden = !$("waiting").textContent;
  $("waiting").classList.toggle("slow", Boolean(job.waiting) && now - Date.parse(job.waiting.since) > 30_000);
  $("warnings").replaceChildren(...(job.warnings ?? []).map((text) => el("p", { class: "warning" }, text)));
  view.moves = migrations(past);
  const preempted = (view.preempted = preemptions(past, view.moves, job.id));
  const main = curve(rows, CURVES.reward);
  $("reward-title").textContent = TITLES[main.name];
  lineChart($("reward"), main, "blue", undefined, preempted);
  const evaluated = evaluations(rows), boxes = evaluated.map(() => el("div"));
  $("evaluation").replaceChildren(...boxes);
  evaluated.forEach((one, i) => lineChart(boxes[i], one, "green"));
  lineChart($("length"), curve(rows, CURVES.length), "orange", evaluations(rows, ["mean_length"])[0]);
  lineChart($("throughput"), curve(timedSteps(rows, job), CURVES.throughput), "pink");
  drawCards(job, rows, fleet, audit, cost, preempted, now);
  stepBars($("steps"), timedSteps(rows, job), preempted, selectStep);
  selectStep(view.step);
  $("preemption-line").textContent = preemptionText(audit, preempted);
  table($("preemption-table"), ["at", "step", "worker", "notice", "samples migrated", "tokens preserved", "samples resumed within",
    ...(cost?.dollars ? ["cost at most", "value of preserved tokens"] : [])],
    preempted.slice(-PREEMPTIONS_SHOWN).reverse().map((one) => [new Date(one.at).toLocaleTimeString(), number(one.step), one.worker,
      one.noticed ? "yes" : "none", number(one.samples), number(one.tokens),
      one.resumed_s === null ? "-" : duration(one.resumed_s),
      ...(cost?.dollars ? [dollars(preemptionCost(one, job, cost, now)), dollars(keptWorth(one, cost))] : [])]), "");
  $("preemption-cost").textContent = preemptionCostText(preempted, job, cost, now);
  $("cost-line").textContent = `${costText(cost)} ${forecastText(job, cost, now)}`.trim() || "Nothing in this job has a price: with RLBOOST_MANAGER_PRICE_FILE, dollars are shown here.";
  $("cheaper").replaceChildren(...cheaperTexts(job, rows, fleet, cost).map((text) => el("li", {}, text)));
  table($("audit"), null, audit ? auditRows(audit) : [], "None.");
  table($("metrics"), null, Object.entries(job.latest ?? {}).map(([name, value]) => [name, number(value)]), "None yet.");
  $("spec").textContent = spec ? JSON.stringify(spec, null, 2) : "It is not in this report, or it cannot be read.";
  drawGantt();
  drawEvents();
}

function drawActions(job) {
  const actions = report ? [] : ACTIONS[job.state] ?? [];
  if ($("actions").dataset.of === actions.join()) return; // keep the focus on a button that stays
  $("actions").dataset.of = actions.join();
  $("actions").replaceChildren(...actions.map((action) => el("button", {
    class: action === "cancel" ? "danger" : null,
    onclick: () => act(`jobs/${job.id}/${action}`, action === "cancel" ? `Cancel ${job.id}? It cannot be resumed.` : null),
  }, action[0].toUpperCase() + action.slice(1))));
}

// Say why a step took as long as it did, the newest one if `step` is null.
function selectStep(step) {
  view.step = step;
  const steps = timedSteps(view.rows, view.answers.job), shown = step ?? (steps.at(-1)?.step ?? -1) + 1;
  $("step-line").textContent = stepText(steps, shown, stepIncidents(view.events, view.preempted, shown, view.jobId));
}

function selectByKey(event) {
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], steps = view.answers ? timedSteps(view.rows, view.answers.job).map((row) => row.step + 1) : [];
  if (!move || !steps.length) return;
  event.preventDefault();
  selectStep(Math.max(steps[0], Math.min(steps.at(-1), (view.step ?? steps.at(-1)) + move)));
}

function drawCards(job, rows, fleet, audit, cost, preempted, now) {
  const latest = (names) => curve(rows, names).points.at(-1)?.[1];
  const steps = timedSteps(rows, job).slice(-5), evaluated = evaluations(rows)[0].points;
  const left = steps.length && job.steps ? ((job.steps - job.step) * steps.reduce((sum, row) => sum + row["time/step_s"], 0)) / steps.length : null;
  const end = job.finished_at ? Date.parse(job.finished_at) : now, saved = preempted.reduce((total, one) => total + one.tokens, 0);
  const cards = [
    ["step", job.steps ? `${job.step} of ${job.steps}` : number(job.step)],
    [TITLES[curve(rows, CURVES.reward).name].toLowerCase(), number(latest(CURVES.reward))],
    [`evaluation${evaluated.length > 1 ? `, from ${number(evaluated[0][1])}` : ""}`, number(evaluated.at(-1)?.[1])],
    ...(ENDED.includes(job.state) ? [["tokens/s", number(curve(timedSteps(rows, job), CURVES.throughput).points.at(-1)?.[1])]] : [["tokens/s now", number(fleet?.tokens_per_s)]]),
    ["running for", job.started_at ? duration((end - Date.parse(job.started_at)) / 1000) : "-"],
    ...(ENDED.includes(job.state) ? [] : [["left, estimated", job.state === "running" && left !== null ? duration(left) : "-"]]),
    ["samples delivered", shortCount(audit?.delivered)],
    [`tokens preserved by migration${saved ? `, ${shortCount(saved)} at preemptions` : ""}`, shortCount(audit?.tokens_saved)],
    ...(cost?.dollars ? [["cost", dollars(cost.dollars)]] : []),
  ];
  $("cards").replaceChildren(...cards.map(([label, value]) => el("div", { class: "card" }, el("b", {}, value), el("span", {}, label))));
}

function drawGantt() {
  const last = view.events.at(-1);
  const now = last?.kind === "job_state_changed" && ENDED.includes(last.fields.state) ? last.at * 1000 : present();
  const moves = view.moves.filter(({ from, to }) => from !== to);
  const start = gantt($("gantt"), lives(view.events, view.jobId), moves, now - Number($("span").value) * 1000, now);
  areas($("speeds"), speeds(view.events), start ?? now, now);
}

function drawEvents() {
  const lines = view.events.slice(-EVENTS_SHOWN).reverse().map(({ kind, at, source, fields }) => {
    const told = Object.entries(fields).map(([name, value]) => `${name}=${typeof value === "object" ? JSON.stringify(value) : value}`);
    return el("li", {}, el("time", {}, new Date(at * 1000).toLocaleTimeString()), `${source} ${kind} ${told.join(" ")}`);
  });
  $("events").replaceChildren(...lines);
}

async function loadSamples() {
  const mine = view, step = Number($("sample-step").value) || (mine.rows.findLast((row) => "reward/mean" in row)?.step ?? -1) + 1;
  if (!step) return;
  try {
    await showSamples($("samples"), mine.jobId, step, $("sample-order").value);
  } catch (error) {
    if (view === mine) $("connection").textContent = error.message;
  }
}

function table(box, columns, rows, emptyText) {
  if (!rows.length) return box.replaceChildren(emptyText ? el("p", { class: "muted" }, emptyText) : "");
  if (box.contains(document.activeElement)) return; // keep the focus: the next answer draws it
  const right = rows[0].map((cell) => typeof cell === "string" && /^\$?[\d.,-]+( s)?$/.test(cell));
  const kind = (cell, i) => (right[i] ? "n" : typeof cell === "string" && cell.length > 24 ? "text" : null);
  const cells = (tag, row) => el("tr", {}, ...row.map((cell, i) => el(tag, { class: kind(cell, i) }, cell)));
  const head = columns ? el("thead", {}, cells("th", columns)) : null;
  box.replaceChildren(el("table", {}, head, el("tbody", {}, ...rows.map((row) => cells("td", row)))));
}

// --- acting ----------------------------------------------------------------------------------------------------------

function scale(event) {
  event.preventDefault();
  const workers = $("scale-workers").value === "" ? "auto" : Number($("scale-workers").value);
  act("fleet/scale", null, { workers });
}

async function act(path, question, body) {
  if (question && !(await confirmed(question))) return;
  document.activeElement?.blur();
  try {
    await post(path, body);
    await refresh(view);
  } catch (error) {
    $("connection").textContent = error.message;
  }
}

function confirmed(question) {
  const dialog = $("confirm");
  dialog.querySelector("p").textContent = question;
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true }));
}

$("logout").addEventListener("click", () => (forgetToken(), open()));
addEventListener("resize", () => view?.answers && drawJob(view));
addEventListener("hashchange", () => (takeTokenOfLink(), open()));
takeTokenOfLink();
open();
