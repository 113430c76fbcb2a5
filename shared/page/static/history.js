// A job's past from its events, as pure functions. Times are milliseconds of the Unix epoch; steps count from 1.

import { workerName } from "./facts.js";

const OTHER_JOB = "other job";
const GONE = { worker_lost: "lost", worker_left: "left" };

// Return true if an event is not about a worker that served another job: every job is told of all workers.
const concerns = (job, { job_id: served }) => !served || served === job;

// The workers' lives: name -> {role, spans: [{state, from, to}], marks: [{at, text, end}]}. An open span has `to` null.
// A worker that serves another job has the state `other job`. One whose first event is not that it joined was there when
// the events begin. A demo's report has the events `worker_started` and `worker_killed` too: from its kill until its
// loss is detected, a worker is `silent`.
export function lives(events, job) {
  const workers = new Map();
  const change = (id, role, state, at) => {
    const name = workerName(id);
    const life = workers.get(name) ?? { role, spans: [], marks: [] };
    const last = life.spans.at(-1);
    if (last && last.to === null) last.to = at;
    if (state) life.spans.push({ state, from: at, to: null });
    life.role = role ?? life.role;
    workers.set(name, life);
    return life;
  };
  const stateOf = (id) => workers.get(workerName(id))?.spans.at(-1)?.state;
  for (const { kind, at: seconds, fields } of events) {
    const at = seconds * 1000;
    if (kind === "worker_joined") change(fields.worker, fields.role, "joining", at);
    else if (kind === "worker_started") change(fields.worker, "preemptible", "joining", at);
    else if (kind === "worker_killed") change(fields.worker, null, "silent", at).marks.push({ at, text: "killed", end: "lost" });
    else if (kind === "worker_state") {
      if (stateOf(fields.worker) === "silent") continue;
      if (!stateOf(fields.worker)) change(fields.worker, fields.role, fields.before, events[0].at * 1000);
      change(fields.worker, fields.role, concerns(job, fields) ? fields.state : OTHER_JOB, at);
    } else if (kind === "worker_reassigned") {
      change(fields.worker, null, concerns(job, fields) ? "pulling" : OTHER_JOB, at);
    } else if (kind === "worker_notice") {
      change(fields.worker, null, "draining", at).marks.push({ at, text: `preemption notice: ${fields.reason}` });
    } else if (kind in GONE) {
      const known = stateOf(fields.worker) === "silent";
      const life = change(fields.worker, null, null, at);
      if (!known) life.marks.push({ at, text: `${GONE[kind]}: ${fields.reason}`, end: GONE[kind] });
    }
  }
  return workers;
}

// Samples that changed workers: {start, at, from, to, cause, samples, tokens}; `at` is when the last of them resumed.
// Events name source and destination but not the samples, which are matched in order within a step.
export function migrations(events) {
  const found = [];
  let waiting = [];
  for (const { kind, at: seconds, fields } of events) {
    const at = seconds * 1000;
    if (kind === "seeding_started") waiting = [];
    else if (kind === "samples_unassigned") waiting.push({ ...fields, at, left: fields.samples, moves: new Map() });
    else if (kind === "samples_migrated") {
      for (let left = fields.samples; left && waiting.length; ) {
        const source = waiting[0], n = Math.min(left, source.left), to = workerName(fields.worker);
        let move = source.moves.get(to);
        if (!move) {
          move = { start: source.at, at, from: workerName(source.worker), to, cause: source.cause, samples: 0, tokens: 0 };
          source.moves.set(to, move);
          found.push(move);
        }
        move.at = at;
        move.samples += n;
        move.tokens += Math.round((n * fields.tokens) / fields.samples);
        left -= n;
        source.left -= n;
        if (!source.left) waiting.shift();
      }
    }
  }
  return found;
}

// The preemptions of a job's workers, oldest first: {at, step, worker, noticed, samples, tokens, resumed_s}; `moves` are
// the `migrations`. `samples` were handed over with `tokens`; the last that resumed did so after `resumed_s` (null: none
// did), with the time in which a lost worker was silent. `step` is null where it is not known.
export function preemptions(events, moves, job) {
  const found = [], handedOver = new Map(), began = stepBegins(events);
  for (const { kind, at: seconds, fields } of events) {
    const at = seconds * 1000;
    if (kind === "samples_unassigned" && fields.cause !== "suspended") handedOver.set(fields.worker, { ...fields, at });
    else if (kind in GONE && fields.preempted && concerns(job, fields)) {
      const { samples = 0, tokens = 0, at: start } = handedOver.get(fields.worker) ?? {};
      const worker = workerName(fields.worker);
      const mine = moves.filter((move) => move.from === worker && move.start === start);
      const resumed = Math.max(...mine.map((move) => move.at));
      found.push({ at, step: stepAt(began, at), worker, noticed: fields.preempted === "with_notice", samples, tokens,
        resumed_s: mine.length ? (fields.silent_s ?? 0) + (resumed - start) / 1000 : null });
    }
  }
  return found;
}

// Tokens/s of each worker in each step: [time, {worker: tokens/s}] at the beginning and the end of a step. A step's
// samples count, though some of their tokens may be from the step before.
export function speeds(events) {
  return events.filter(({ kind }) => kind === "step_ended").flatMap(({ at, fields: { step_s: took, tokens } }) => {
    const of = {}; // a worker that restarted has several ids
    for (const [id, n] of Object.entries(tokens)) of[workerName(id)] = (of[workerName(id)] ?? 0) + n / took;
    return [[(at - took) * 1000, of], [at * 1000, of]];
  });
}

// When each step began, as [step, time], as far as events say so.
export function stepBegins(events) {
  const began = new Map();
  for (const { kind, at, fields } of events) {
    if (kind === "seeding_started" && !began.has(fields.step + 1)) began.set(fields.step + 1, at * 1000);
  }
  return [...began];
}

// What happened during a step that can explain its time, as texts; `preempted` are the `preemptions`.
export function stepIncidents(events, preempted, step, job) {
  const began = stepBegins(events), from = began.find(([one]) => one === step)?.[1];
  if (from === undefined) return [];
  const to = began.find(([one]) => one > step)?.[1] ?? Infinity, texts = [];
  let unfinished = 0;
  for (const one of preempted.filter(({ at }) => at >= from && at < to)) {
    const moved = one.samples ? `; ${one.samples} samples migrated` : "";
    texts.push(`${one.worker} was preempted ${one.noticed ? "with" : "without"} notice${moved}`);
  }
  for (const { kind, at: seconds, fields } of events) {
    const at = seconds * 1000;
    if (at < from || at >= to) continue;
    if (kind === "samples_unassigned" && fields.cause === "suspended") unfinished += fields.samples;
    else if (kind === "worker_reassigned") texts.push(concerns(job, fields) ? `${workerName(fields.worker)} came from another job` :
      fields.before === job ? `${workerName(fields.worker)} was given to another job` : "");
    else if (!concerns(job, fields)) continue;
    else if (kind === "worker_lost" && !fields.preempted) texts.push(`${workerName(fields.worker)} was lost (${fields.reason})`);
    else if (kind === "worker_joined") texts.push(`${workerName(fields.worker)} joined`);
    else if (kind === "worker_drained") texts.push(`${workerName(fields.worker)} was drained (${fields.reason})`);
    else if (kind === "seeding_reopened") texts.push("too few spot workers were left, so the reserved workers generated as well");
    else if (kind === "disk_full") texts.push(`a disk was full (${fields.what})`);
    else if (kind === "weights_refused") texts.push(`${workerName(fields.worker ?? "a worker")} could not load version ${fields.version}`);
    else if (kind === "weights_unavailable") texts.push(`${workerName(fields.worker ?? "a worker")} could not get its weights`);
    else if (kind === "conversation_lost") texts.push(`a conversation was lost (${fields.reason})`);
    else if (kind === "group_dropped") texts.push(`a group was dropped (${fields.reason})`);
  }
  if (unfinished) texts.push(`the reserved workers began to train with ${unfinished} samples unfinished, which other workers completed`);
  const counted = new Map();
  for (const text of texts.filter(Boolean)) counted.set(text, (counted.get(text) ?? 0) + 1);
  return [...counted].map(([text, n]) => (n > 1 ? `${text} (${n} times)` : text));
}

const stepAt = (began, at) => began.findLast(([, from]) => from <= at)?.[0] ?? null;
