// What the page says about a job, as pure functions of the API's answers. Times are milliseconds of the Unix epoch.

export const PARTS = [
  ["time/seeding_s", "reserved workers generate", "orange"],
  ["time/wait_s", "waiting for samples", "grey"],
  ["time/train_s", "training", "blue"],
  ["time/publish_s", "publishing weights", "green"],
];
export const STATE_COLORS = {
  joining: "grey", pulling: "orange", ready: "green", suspended: "sky", draining: "pink", silent: "red", "other job": "line",
};
export const CURVES = {
  reward: ["reward/mean", "perplexity", "rewards/accuracies", "loss"],
  evaluation: ["pass@1", "reward_mean", "perplexity", "rewards/accuracies", "loss"], // below eval/, or eval/ and a set's name
  length: ["completions/mean_length"],
  throughput: ["perf/tokens_per_s"],
};

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

// A count that fits a card: from a million on with three digits, such as 1.29M.
export const shortCount = (n) =>
  n >= 1e6 ? n.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 3 }) : number(n);

// The points [step, value] of the first of these metrics that the job reports. Training steps count from 1; an evaluation
// counts as of the steps before it.
export function curve(rows, names) {
  const name = names.find((one) => rows.some((row) => one in row)) ?? names[0];
  const first = name.startsWith("eval/") ? 0 : 1;
  return { name, points: rows.filter((row) => name in row).map((row) => [row.step + first, row[name]]) };
}

// The curve of each set of held-out rows that has the first of these metrics that any has; an empty one if there is none.
export function evaluations(rows, metrics = CURVES.evaluation) {
  const names = [...new Set(rows.flatMap(Object.keys))].filter((name) => name.startsWith("eval/"));
  const found = metrics.map((metric) => names.filter((name) => name.endsWith(`/${metric}`))).find((some) => some.length);
  return (found ?? [`eval/${metrics[0]}`]).map((name) => curve(rows, [name]));
}

// The rows of steps whose time is known; the row after the last step has only an evaluation.
export const timedSteps = (rows, job) => rows.filter((row) => row["time/step_s"] && row.step < (job.steps || Infinity));

// What a job does and what it waits for: what, why, since when, until when.
export function activityText(job, now) {
  const { phase, waiting: wait } = job, since = (one) => duration((now - Date.parse(one.since)) / 1000);
  if (!phase && !wait) return job.finished_at ? "" : job.state === "paused" ? "Paused." : "Not waiting.";
  const texts = [];
  if (phase && !(wait && phase.name === "paused")) {
    const last = phase.last_s ? ` (the last took ${duration(phase.last_s)})` : "", name = phaseName(phase);
    texts.push(`${name[0].toUpperCase()}${name.slice(1)}, for ${since(phase)}${last}.`);
  }
  if (wait) texts.push(`Waiting for ${wait.for}: ${wait.because} (for ${since(wait)}${wait.limit_s ? `; limit ${duration(wait.limit_s)}` : ""}).`);
  return texts.join(" ");
}

// What a job's trainer does, as 'rlboost top' says it.
export function phaseName({ name, step }) {
  if (name === "training") return `training step ${step + 1}`;
  return { publishing: "publishing weights", finishing: "saving the model" }[name] ?? name;
}

// Why a step took as long as it did: its parts, how it differs from the ten steps before it, and what happened meanwhile.
export function stepText(rows, step, incidents) {
  const row = rows.find((one) => one.step === step - 1), total = row?.["time/step_s"];
  if (!total) return "";
  const partsOf = (one) => [...PARTS.map(([key, label]) => [label, one[key] ?? 0]), ["other", otherTime(one)]];
  const shares = partsOf(row).sort((a, b) => b[1] - a[1]).filter(([, s]) => s / total >= 0.01)
    .map(([label, s]) => `${label} ${duration(s)} (${Math.round((100 * s) / total)} %)`);
  let text = `Step ${step} took ${duration(total)}: ${shares.join(", ")}.`;
  const before = rows.filter((one) => one.step < row.step && one["time/step_s"]).slice(-10);
  if (before.length >= 3) {
    const usual = median(before.map((one) => one["time/step_s"])), delta = total - usual;
    if (Math.abs(delta) > 0.2 * usual) {
      const changes = partsOf(row).map(([label, s], i) => [label, s - median(before.map((one) => partsOf(one)[i][1]))]);
      const [label, most] = changes.reduce((a, b) => (Math.sign(delta) * b[1] > Math.sign(delta) * a[1] ? b : a));
      const word = delta > 0 ? "longer" : "less";
      text += ` That is ${duration(Math.abs(delta))} ${word} than the median of the ${before.length} steps before, ` +
        `mostly ${label} (${duration(Math.abs(most))} ${word}).`;
    }
    const lengths = before.map((one) => one["completions/mean_length"]), length = row["completions/mean_length"];
    if (length && lengths.every((one) => one)) {
      const ratio = length / median(lengths);
      if (Math.abs(ratio - 1) > 0.2) text += ` Completions were ${Math.round(100 * Math.abs(ratio - 1))} % ${ratio > 1 ? "longer" : "shorter"} than in the ${before.length} steps before.`;
    }
  }
  const { "turns/model_s": model, "turns/outside_s": outside } = row;
  if (model + outside > 0) text += ` A conversation spent ${duration(model)} in the model and ${duration(outside)} outside it (tools, sandboxes, its own code), on average.`;
  if (Object.keys(row).some((name) => name.startsWith("eval/"))) text += " It includes an evaluation.";
  return incidents.length ? `${text} During it ${incidents.join("; ")}.` : text;
}

export const otherTime = (row) => Math.max(0, row["time/step_s"] - PARTS.reduce((sum, [key]) => sum + (row[key] ?? 0), 0));

function median(values) {
  const sorted = [...values].sort((a, b) => a - b), middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

// What preemptions cost, from the audit and the `preemptions` of the events. Samples change workers for other reasons too.
export function preemptionText(audit, preempted) {
  if (!audit) return "";
  const n = sum(audit.preemptions), lost = sum(audit.tokens_regenerated);
  const moved = Math.min(audit.migrations, preempted.reduce((total, one) => total + one.samples, 0)), others = audit.migrations - moved;
  const kinds = Object.entries(audit.preemptions).map(([kind, count]) => `${count} ${kind.replaceAll("_", " ")}`).join(", ");
  const share = audit.tokens_generated ? ((100 * lost) / audit.tokens_generated).toFixed(2) : "0";
  return `${n ? `${n} preemption${n > 1 ? "s" : ""} (${kinds}) migrated ${number(moved)} samples to other workers` : "No preemption so far"}. ` +
    (others ? `Samples migrated ${number(others)} times for other reasons: reserved workers began to train, workers were drained, or load was balanced. ` : "") +
    `All migrated samples preserved ${number(audit.tokens_saved)} tokens; ` +
    `${number(lost)} tokens (${share} %) were regenerated. ` +
    `${number(audit.requested)} samples requested, ${number(audit.delivered)} delivered, ${number(audit.duplicates)} duplicates, ` +
    `${number(sum(audit.dropped))} dropped.`;
}

const sum = (counts) => Object.values(counts).reduce((total, n) => total + n, 0);

const CAUSES = {
  late: "regenerated: arrived after the sample had migrated",
  sample_over: "discarded: arrived after the sample was complete",
  gap: "regenerated: arrived after lost tokens",
  dropped: "generated for a sample that was dropped",
};

// Every counter of the audit as [name, value].
export function auditRows(audit) {
  return [
    ["samples requested", audit.requested], ["samples delivered", audit.delivered],
    ...Object.entries(audit.dropped).map(([reason, n]) => [`samples dropped: ${reason}`, n]),
    ["samples in flight", audit.in_flight],
    ["tokens generated", audit.tokens_generated], ["tokens delivered", audit.tokens_delivered],
    ...Object.entries(audit.tokens_regenerated).map(([cause, n]) => [`tokens ${CAUSES[cause] ?? cause}`, n]),
    ["tokens preserved by migrated samples", audit.tokens_saved], ["migrations", audit.migrations],
    ["frames sent twice, cut", audit.duplicates],
    ["preemptions with notice", audit.preemptions.with_notice ?? 0],
    ["preemptions without notice", audit.preemptions.without_notice ?? 0],
  ].map(([name, n]) => [name, number(n)]);
}

// What the preemptions cost together, and what the columns of their table mean; empty without prices.
export function preemptionCostText(preempted, job, cost, now) {
  const costs = preempted.map((one) => preemptionCost(one, job, cost, now)).filter((value) => value !== null);
  if (!costs.length) return "";
  return `${costs.length > 1 ? "Together they" : "It"} cost at most ${dollars(costs.reduce((total, value) => total + value, 0))}: what the ` +
    "whole job costs until the last sample has resumed. The value of the preserved tokens is what generating them again would have cost.";
}

// What the time of one preemption cost at most, in dollars: its samples resumed after `resumed_s`, and the step ends no
// later than that; in that time the job costs what it costs on average. Null while unknown.
export function preemptionCost({ resumed_s: delay }, job, cost, now) {
  return delay === null || !cost?.dollars || !job.started_at ? null : (delay / 3600) * dollarsPerHour(job, cost, now);
}

// What a job that has started has cost per hour on average.
const dollarsPerHour = (job, cost, now) =>
  (3.6e6 * cost.dollars) / ((job.finished_at ? Date.parse(job.finished_at) : now) - Date.parse(job.started_at));

// What the preserved tokens of a preempted worker's samples would have cost again, in dollars; null while unknown.
export const keptWorth = ({ tokens }, cost) =>
  cost?.dollars_per_million_tokens ? (tokens * cost.dollars_per_million_tokens) / 1e6 : null;

// What a job cost, from GET /cost, as 'rlboost status' says it; empty without prices.
export function costText(cost) {
  if (!cost?.dollars) return "";
  const payees = cost.workers.map(({ role, kind, hours, dollars: d }) =>
    `${`${role === "preemptible" ? "spot" : role} ${kind}`.trimEnd()} ${dollars(d)} for ${hours.toFixed(2)} h`);
  const limit = cost.max_dollars ? ` of at most ${dollars(cost.max_dollars)}` : "";
  return `${dollars(cost.dollars)}${limit}: ${payees.join(", ")}. ${dollars(cost.dollars_per_step)} a step, ` +
    `${dollars(cost.dollars_per_1000_samples)} per 1,000 samples, ${dollars(cost.dollars_per_million_tokens)} per million tokens. ` +
    `Migration saved ${dollars(cost.dollars_saved_by_migration)} of tokens; ${dollars(cost.dollars_regenerated)} were regenerated.`;
}

// What a running job costs per hour and will have cost at its end, at what it has cost so far; empty while unknown.
export function forecastText(job, cost, now) {
  if (!cost?.dollars || job.finished_at || !job.started_at || !job.step || !job.steps) return "";
  return `So far the job costs ${dollars(dollarsPerHour(job, cost, now))} per hour in all; all ${number(job.steps)} steps will cost about ` +
    `${dollars((cost.dollars / job.step) * job.steps)}.`;
}

// What the job would have cost without spot workers, and what was generated in vain, as 'rlboost status' says it.
export function costDetails(cost) {
  const texts = [], only = cost?.reserved_only;
  if (only) {
    const saved = 1 - cost.dollars / only.dollars, price = only.break_even_price_per_hour;
    texts.push(`The reserved workers alone would have taken about ${(only.seconds / 3600).toFixed(2)} h and cost ${dollars(only.dollars)} ` +
      `so far: with spot workers the job is ${(100 * Math.abs(saved)).toFixed(0)} % ${saved >= 0 ? "cheaper" : "more expensive"}.` +
      breakEvenText(price));
  }
  for (const [cause, spent] of Object.entries(cost?.dollars_regenerated_by_cause ?? {})) {
    if (spent) texts.push(`Tokens ${CAUSES[cause] ?? cause}: ${dollars(spent)}.`);
  }
  return texts;
}

function breakEvenText(pricePerHour) {
  if (pricePerHour === null) return "";
  if (!pricePerHour) return " They do not make it cheaper at any price.";
  return ` They make it cheaper while each costs less than ${dollars(pricePerHour)} per hour.`;
}

// What would make the job cheaper, one sentence each.
export function cheaperTexts(job, rows, fleet, cost) {
  const texts = [], worth = fleet?.worth_of_one_more;
  if (worth?.job_id === job.id) {
    const value = worth.dollars_per_hour ? `, worth ${dollars(worth.dollars_per_hour)} per hour at what tokens cost now` : "";
    const verdict = worth.dollars_per_hour > worth.price_per_hour ? "cheaper" : "more expensive";
    const price = worth.price_per_hour ? `. It costs ${dollars(worth.price_per_hour)} per hour: tokens would become ${verdict}` : "";
    texts.push(worth.tokens_per_hour < 1 ? "One more spot worker would not shorten the steps." :
      `With one more spot worker the job would get about ${number(Number(worth.tokens_per_hour.toPrecision(3)))} more tokens per hour${value}${price}.`);
    const idle = fleet.present - Math.ceil(fleet.target_workers ?? Infinity);
    if (idle > 0) texts.push(`${idle} of the ${fleet.present} spot workers do not shorten the steps: without them the job costs less.`);
  }
  texts.push(...costDetails(cost));
  const equal = rows.findLast((row) => "frac_reward_zero_std" in row)?.frac_reward_zero_std ?? 0;
  if (equal >= 0.3) {
    texts.push(`In the last step ${Math.round(100 * equal)} % of the groups had equal rewards, from which GRPO learns nothing: ` +
      "prompts that the model sometimes solves (data.curriculum) use more of what is generated.");
  }
  return texts;
}

// An amount as the command line prints it: to the cent, below a dollar to two significant digits.
export function dollars(value) {
  if (value === null) return "-";
  if (value > 0 && value < 1e-6) return "< $0.000001";
  return `$${value >= 0.995 || value === 0 ? value.toFixed(2) : value.toPrecision(2)}`;
}

export function fleetText(fleet) {
  if (!fleet) return "";
  const wanted = fleet.target_workers;
  const worth = wanted === null ? "" :
    wanted > fleet.present ? `; up to ${wanted} spot workers would shorten the steps` :
    wanted ? `; more than ${wanted} spot worker${wanted > 1 ? "s" : ""} would not shorten the steps` :
    "; spot workers would not shorten the steps";
  return `${fleet.present} spot and ${fleet.reserved} reserved workers generate ${number(fleet.tokens_per_s)} tokens/s${worth}.` +
    scalingText(fleet.autoscaling);
}

// What the fleet costs and what autoscaling does; empty without prices and pools.
function scalingText({ workers, limited_by: limit, reason, dollars_per_hour: price, max_dollars_per_hour: most, pools }) {
  const cost = price || most !== null ? ` All workers cost ${dollars(price)} per hour${most === null ? "" : ` of at most ${dollars(most)}`}.` : "";
  if (!pools.length) return cost;
  const kinds = pools.map((pool) => `${pool.target ?? "-"} of at most ${pool.max_workers} ${pool.kind}`);
  const errors = pools.filter((pool) => pool.error).map((pool) => ` Provider: ${pool.error}`);
  const why = reason && pools.length > 1 ? ` ${reason}.` : "";
  return `${cost} Autoscaling (${workers}): ${kinds.join(", ")}${limit ? `; limited by ${limit}` : ""}.${why}${errors.join("")}`;
}

// A conversation's messages as {who, text, calls, note, spans, bar}; `calls` are like `calls add(a=1, b=2)`, and `bar` is
// when the turn was generated, as fractions [start, end] of the conversation's duration, null where it is not known.
export function turns(sample) {
  let turn = 0;
  return sample.messages.map(({ role, content, tool_calls: calls = [], spans = [], reward, over, time }) => {
    const bar = time && sample.duration_s ? time.map((at) => at / sample.duration_s) : null;
    if (role === "assistant") return { who: `model, turn ${++turn}`, text: content, calls: calls.map(callText), note: bar ? timesText(time) : "", spans, bar };
    const ended = { done: "ended the conversation", cut: "cut: a limit was reached" }[over];
    const note = [reward ? `reward ${number(reward)}` : "", ended ?? ""].filter(Boolean).join(", ");
    return { who: "environment", text: content, calls: [], note, spans, bar: null };
  });
}

const timesText = ([start, end]) => `from ${duration(start)} for ${duration(end - start)}`;

// How many turns a conversation has, and where its time went.
export function turnsText({ turns: n, duration_s: whole, outside_s: outside }) {
  if (!whole) return `${n} turns`;
  return `${n} turns in ${duration(whole)}, ${duration(outside)} of it outside the model (tools, sandbox, the code's own)`;
}

// A tool call as the model wrote it, in Python's form if it is one.
function callText(call) {
  try {
    const { name, arguments: given } = JSON.parse(call);
    if (typeof name !== "string") return `malformed call: ${call}`;
    return `calls ${name}(${Object.entries(given ?? {}).map(([key, value]) => `${key}=${JSON.stringify(value)}`).join(", ")})`;
  } catch {
    return `malformed call: ${call}`;
  }
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
