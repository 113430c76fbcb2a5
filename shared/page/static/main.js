// The page: asks the API every two seconds, follows the job's events, and draws what it learns.

import { ApiError, events, forgetToken, get, hasToken, post, setToken, takeTokenOfLink } from "./api.js";
import { gantt, lineChart, stepBars } from "./charts.js";
import { el } from "./dom.js";
import { costText, curve, dollars, duration, fleetText, lives, number, preemptionText, stepText, waitingText, workerName } from "./facts.js";
import { showSamples } from "./samples.js";

const POLL_MS = 2000;
const EVENTS_SHOWN = 100;
const ENDED = ["completed", "failed", "cancelled"];
const ACTIONS = { pending: ["cancel"], running: ["pause", "cancel"], paused: ["resume", "cancel"] };

const $ = (id) => document.getElementById(id);
let view = null; // {jobId, rows, events, stop: AbortController}

// --- views -----------------------------------------------------------------------------------------------------------

function open() {
  view?.stop.abort();
  const show = (name) => $("view").replaceChildren($(name).content.cloneNode(true));
  $("logout").hidden = !hasToken();
  if (!hasToken()) {
    view = null;
    show("login-view");
    document.querySelector(".login").addEventListener("submit", login);
    return;
  }
  const jobId = decodeURIComponent(location.hash.match(/^#\/jobs\/([^/]+)$/)?.[1] ?? "");
  view = { jobId, rows: [], events: [], stop: new AbortController() };
  show(jobId ? "job-view" : "home-view");
  $("scale").addEventListener("submit", scale);
  document.title = jobId ? `${jobId} - RLBoost` : "RLBoost";
  if (jobId) {
    $("sample-load").addEventListener("click", loadSamples);
    for (const id of ["sample-order", "sample-step"]) $(id).addEventListener("change", loadSamples);
    $("span").addEventListener("change", drawGantt);
    follow(view);
  }
  poll(view);
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
      $("connection").textContent = error.message;
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
  const [job, rows, audit, cost] = await Promise.all([
    get(base, signal), get(`${base}/metrics?from_step=${next}`, signal), get(`${base}/audit`, signal), get(`${base}/cost`, signal)]);
  if (view !== mine) return;
  mine.rows.push(...rows);
  drawJob(job, mine.rows, fleet, audit, cost);
  if (rows.length && !$("sample-step").value && document.activeElement?.closest?.("#samples") === null) await loadSamples();
}

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
  table($("job-table"), ["job", "state", "step", "reward", "waiting for"], jobs.toReversed().map((job) => [
    el("a", { href: `#/jobs/${encodeURIComponent(job.id)}` }, job.id), job.state, `${job.step} of ${job.steps ?? "-"}`,
    number(job.latest?.["reward/mean"]), job.waiting?.for ?? ""]), "No job yet: 'rlboost run JOB.yaml' starts one.");
}

function drawWorkers(workers, fleet) {
  $("fleet-line").textContent = fleetText(fleet);
  $("scale").hidden = !fleet.autoscaling.pools.length;
  const present = workers.filter((worker) => !["lost", "left"].includes(worker.state));
  table($("worker-table"), ["worker", "kind", "state", "version", "running", "queued", "tokens/s", "$/h", ""], present.map((worker) => [
    workerName(worker.id), `${worker.role === "reserved" ? "reserved" : "spot"}, ${worker.kind}`, worker.state,
    number(worker.weight_version), number(worker.running), number(worker.pending), number(worker.tokens_per_s), number(worker.price_per_hour),
    el("button", { disabled: worker.state === "draining", onclick: () => act(`workers/${worker.id}/drain`,
      `Drain ${workerName(worker.id)}? It hands its samples to other workers and exits.`) }, "Drain")]),
  "No worker: 'rlboost worker join' starts one.");
}

function drawJob(job, rows, fleet, audit, cost) {
  const now = Date.now();
  $("name").textContent = job.name;
  $("state").textContent = job.state;
  $("state").className = `badge ${job.state}`;
  const actions = (ACTIONS[job.state] ?? []).join();
  if ($("actions").dataset.of !== actions) { // keep the focus on a button that stays
    $("actions").dataset.of = actions;
    $("actions").replaceChildren(...(ACTIONS[job.state] ?? []).map((action) => el("button", {
      class: action === "cancel" ? "danger" : null,
      onclick: () => act(`jobs/${job.id}/${action}`, action === "cancel" ? `Cancel ${job.id}? It cannot be resumed.` : null),
    }, action[0].toUpperCase() + action.slice(1))));
  }
  $("waiting").textContent = job.error ? `Error: ${job.error}` : waitingText(job, now);
  $("waiting").hidden = !$("waiting").textContent;
  $("waiting").classList.toggle("slow", Boolean(job.waiting) && now - Date.parse(job.waiting.since) > 30_000);
  $("warnings").replaceChildren(...(job.warnings ?? []).map((text) => el("p", { class: "warning" }, text)));
  drawCards(job, rows, fleet, audit, cost, now);
  lineChart($("reward"), curve(rows, ["reward/mean"]));
  lineChart($("evaluation"), curve(rows, ["eval/pass@1", "eval/reward_mean"]), "green");
  lineChart($("length"), curve(rows, ["completions/mean_length"]), "orange");
  lineChart($("throughput"), curve(rows, ["perf/tokens_per_s"]), "pink");
  $("step-line").textContent = stepText(rows.findLast((row) => row["time/step_s"]));
  stepBars($("steps"), rows);
  $("preemption-line").textContent = preemptionText(audit);
  $("cost-line").textContent = costText(cost);
  drawGantt();
  drawEvents();
}

function drawCards(job, rows, fleet, audit, cost, now) {
  const latest = (names) => curve(rows, names).points.at(-1)?.[1];
  const steps = rows.filter((row) => row["time/step_s"]).slice(-5);
  const left = steps.length ? ((job.steps - job.step) * steps.reduce((sum, row) => sum + row["time/step_s"], 0)) / steps.length : null;
  const end = job.finished_at ? Date.parse(job.finished_at) : now;
  const cards = [
    ["step", `${job.step} of ${job.steps}`],
    ["reward", number(latest(["reward/mean"]))],
    ["evaluation", number(latest(["eval/pass@1", "eval/reward_mean"]))],
    ["tokens/s now", ENDED.includes(job.state) ? "-" : number(fleet.tokens_per_s)],
    ["running for", job.started_at ? duration((end - Date.parse(job.started_at)) / 1000) : "-"],
    ["left, estimated", job.state === "running" && left !== null ? duration(left) : "-"],
    ["samples delivered", number(audit.delivered)],
    ["tokens kept by migration", number(audit.tokens_saved)],
    ...(cost.dollars ? [["cost", dollars(cost.dollars)]] : []),
  ];
  $("cards").replaceChildren(...cards.map(([label, value]) => el("div", { class: "card" }, el("b", {}, value), el("span", {}, label))));
}

function drawGantt() {
  const last = view.events.at(-1);
  const now = last?.kind === "job_state" && ENDED.includes(last.fields.state) ? last.at * 1000 : Date.now();
  gantt($("gantt"), lives(view.events), now - Number($("span").value) * 1000, now);
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
  if (!rows.length) return box.replaceChildren(el("p", { class: "muted" }, emptyText));
  if (box.contains(document.activeElement)) return; // keep the focus: the next answer draws it
  const right = columns.map((_, i) => typeof rows[0][i] === "string" && /^[\d.,-]+$/.test(rows[0][i]));
  const cells = (tag, row) => el("tr", {}, ...row.map((cell, i) => el(tag, { class: right[i] ? "n" : null }, cell)));
  box.replaceChildren(el("table", {}, el("thead", {}, cells("th", columns)), el("tbody", {}, ...rows.map((row) => cells("td", row)))));
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
addEventListener("hashchange", () => (takeTokenOfLink(), open()));
takeTokenOfLink();
open();
