// What the page says about a job, as pure functions of the API's answers. Times are milliseconds of the Unix epoch.

export const PARTS = [
  ["time/seeding_s", "reserved workers generate", "orange"],
  ["time/wait_s", "waiting for samples", "grey"],
  ["time/train_s", "training", "blue"],
  ["time/publish_s", "publishing weights", "green"],
];
export const STATE_COLORS = {
  joining: "grey", pulling: "orange", ready: "green", suspended: "sky", draining: "pink",
};
const GONE = { worker_lost: "lost", worker_left: "left" };

export const workerName = (id) => id.replace(/-[^-]*$/, "") || id;

export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (Number.isInteger(value) || Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return value.toPrecision(3);
}

// The points [step from 1, value] of the first of these metrics that the job reports.
export function curve(rows, names) {
  const name = names.find((one) => rows.some((row) => one in row)) ?? names[0];
  return { name, points: rows.filter((row) => name in row).map((row) => [row.step + 1, row[name]]) };
}

// One sentence on what a job waits for: what, why, since when, until when.
export function waitingText(job, now) {
  const wait = job.waiting;
  if (!wait) return job.finished_at ? "" : job.state === "paused" ? "Paused." : "Not waiting.";
  const since = duration((now - Date.parse(wait.since)) / 1000);
  const limit = wait.limit_s ? `; limit ${duration(wait.limit_s)}` : "";
  return `Waiting for ${wait.for}: ${wait.because} (for ${since}${limit}).`;
}

// One sentence on where the time of a step went.
export function stepText(row) {
  if (!row || !row["time/step_s"]) return "";
  const parts = PARTS.map(([key, label]) => [label, row[key] ?? 0]).sort((a, b) => b[1] - a[1]);
  const shares = parts.filter(([, s]) => s / row["time/step_s"] >= 0.01)
    .map(([label, s]) => `${label} ${Math.round((100 * s) / row["time/step_s"])} %`);
  return `Step ${row.step + 1} took ${duration(row["time/step_s"])}: ${shares.join(", ")}.`;
}

// What preemptions cost, from the audit.
export function preemptionText(audit) {
  const sum = (counts) => Object.values(counts).reduce((total, n) => total + n, 0);
  const n = sum(audit.preemptions), lost = sum(audit.tokens_regenerated);
  const kinds = Object.entries(audit.preemptions).map(([kind, count]) => `${count} ${kind.replaceAll("_", " ")}`).join(", ");
  const share = audit.tokens_generated ? ((100 * lost) / audit.tokens_generated).toFixed(2) : "0";
  return `${n ? `${n} preemption${n > 1 ? "s" : ""} (${kinds})` : "No preemption so far"}. ` +
    `${number(audit.migrations)} samples moved to another worker and kept ${number(audit.tokens_saved)} tokens; ` +
    `${number(lost)} tokens (${share} %) were generated again. ` +
    `${number(audit.requested)} samples requested, ${number(audit.delivered)} delivered, ${number(audit.duplicates)} duplicates, ` +
    `${number(sum(audit.dropped))} dropped.`;
}

// What a job cost, from GET /cost, as 'rlboost status' says it; empty without prices.
export function costText(cost) {
  if (!cost.dollars) return "";
  const kinds = cost.workers.map(({ role, kind, hours, dollars: d }) => `${role} ${kind} ${dollars(d)} for ${hours.toFixed(2)} h`);
  const limit = cost.max_dollars ? ` of at most ${dollars(cost.max_dollars)}` : "";
  return `${dollars(cost.dollars)}${limit}: ${kinds.join(", ")}. ${dollars(cost.dollars_per_step)} a step, ` +
    `${dollars(cost.dollars_per_1000_samples)} per 1,000 samples. Migration saved ${dollars(cost.dollars_saved_by_migration)} of tokens; ` +
    `${dollars(cost.dollars_regenerated)} were regenerated.`;
}

export function dollars(value) {
  if (value === null) return "-";
  return `$${value >= 1 || value === 0 ? value.toFixed(2) : value.toPrecision(2)}`;
}

export function fleetText(fleet) {
  const wanted = fleet.target_workers;
  const worth = wanted === null ? "" :
    wanted > fleet.present ? `; up to ${wanted} would shorten the steps` : `; more than ${wanted} would not shorten the steps`;
  return `${fleet.present} spot and ${fleet.reserved} reserved workers generate ${number(fleet.tokens_per_s)} tokens/s${worth}.` +
    scalingText(fleet.autoscaling);
}

// What the fleet costs and what autoscaling does; empty without prices and pools.
function scalingText({ workers, limited_by: limit, dollars_per_hour: price, max_dollars_per_hour: most, pools }) {
  const cost = price || most !== null ? ` It costs ${dollars(price)} per hour${most === null ? "" : ` of at most ${dollars(most)}`}.` : "";
  if (!pools.length) return cost;
  const kinds = pools.map((pool) => `${pool.target ?? "-"} of at most ${pool.max_workers} ${pool.kind}`);
  const errors = pools.filter((pool) => pool.error).map((pool) => ` Provider: ${pool.error}`);
  return `${cost} Autoscaling (${workers}): ${kinds.join(", ")}${limit ? `; limited by ${limit}` : ""}.${errors.join("")}`;
}

// The workers' lives: name -> {role, spans: [{state, from, to}], marks: [{at, text, end}]}, and the moves between them.
// A worker whose first event is not that it joined was there when the events begin. An open span has `to` null.
export function lives(events) {
  const workers = new Map(), moves = [];
  let source = null;
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
  for (const { kind, at: seconds, fields } of events) {
    const at = seconds * 1000;
    if (kind === "worker_joined") change(fields.worker, fields.role, "joining", at);
    else if (kind === "worker_state") {
      const life = workers.get(workerName(fields.worker));
      if (!life) change(fields.worker, fields.role, fields.before, events[0].at * 1000);
      change(fields.worker, fields.role, fields.state, at);
    } else if (kind === "worker_notice") {
      change(fields.worker, null, "draining", at).marks.push({ at, text: `preemption notice: ${fields.reason}` });
    } else if (kind in GONE) {
      change(fields.worker, null, null, at).marks.push({ at, text: `${GONE[kind]}: ${fields.reason}`, end: GONE[kind] });
    } else if (kind === "samples_unassigned") source = { at, worker: workerName(fields.worker) };
    else if (kind === "samples_migrated" && source && at - source.at < 5000) {
      moves.push({ from: source.worker, start: source.at, to: workerName(fields.worker), at, samples: fields.samples, tokens: fields.tokens });
    }
  }
  return { workers, moves };
}

// A completion as parts {text, span}: span indexes `sample.spans`, null where its worker is not known.
export function completionParts(sample) {
  const text = sample.completion, lengths = sample.span_characters;
  if (sample.spans.length === 1) return [{ text, span: 0 }];
  if (!lengths) return [{ text, span: null }];
  const total = lengths.reduce((sum, n) => sum + n, 0);
  const cut = total !== text.length ? text.match(/\n\[[\d,]+ characters cut\]\n/) : null;
  const parts = [];
  const add = (from, to, offset) => {
    let start = 0;
    lengths.forEach((n, span) => {
      const [a, b] = [Math.max(from, start), Math.min(to, start + n)];
      if (a < b) parts.push({ text: text.slice(a - offset, b - offset), span });
      start += n;
    });
  };
  if (!cut) add(0, total, 0);
  else {
    const end = cut.index + cut[0].length, missing = total - (text.length - cut[0].length);
    add(0, cut.index, 0);
    parts.push({ text: cut[0], span: null });
    add(cut.index + missing, total, cut.index + missing - end);
  }
  return parts;
}
