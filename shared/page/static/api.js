// The REST API. The token is kept for this browser tab only. A report of a job (rlboost/report.py) is this page with
// the API's answers in it: {at, job, text, answers: {path: answer}, events, samples, tables}, `at` in seconds.

const KEY = "rlboost-token", READ_ONLY = "rlboost-read-only";

export const report = JSON.parse(document.getElementById("report")?.textContent ?? "null");
export const present = () => (report ? report.at * 1000 : Date.now());

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Take the token of a link `#token=...` and remove it from the address. With `&read-only` buttons that act are hidden;
// it is the token's scope that refuses them.
export function takeTokenOfLink() {
  const link = new URLSearchParams(location.hash.slice(1)), token = link.get("token");
  if (token) {
    setToken(token);
    if (link.has("read-only")) sessionStorage.setItem(READ_ONLY, "1");
    history.replaceState(null, "", location.pathname + "#/");
  }
}

export const hasToken = () => report !== null || sessionStorage.getItem(KEY) !== null;
export const isReadOnly = () => report !== null || sessionStorage.getItem(READ_ONLY) !== null;
export const setToken = (token) => (forgetToken(), sessionStorage.setItem(KEY, token));
export const forgetToken = () => [KEY, READ_ONLY].forEach((key) => sessionStorage.removeItem(key));

// Return an answer as JSON; in a report null where it has none.
export async function get(path, signal) {
  if (report) return report.answers[path.split("?")[0]] ?? null;
  return (await request("GET", path, { signal })).json();
}

// Return the samples of a step, counted from 1.
export async function samplesOf(jobId, step) {
  if (report) return report.samples[step] ?? [];
  return get(`jobs/${jobId}/samples?step=${step - 1}`);
}

export const post = async (path, body) => (await request("POST", path, { body })).json();

// Yield a job's events {id, kind, at, source, fields} until it has ended.
export async function* events(jobId, lastId, signal) {
  if (report) return yield* report.events;
  const headers = lastId ? { "Last-Event-ID": lastId } : {};
  const response = await request("GET", `jobs/${jobId}/events`, { headers, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const lines = Object.fromEntries(part.split("\n").map((line) => line.split(/: (.*)/s, 2)));
      if (lines.data) yield { id: lines.id, ...JSON.parse(lines.data) };
    }
  }
}

async function request(method, path, { headers = {}, signal, body } = {}) {
  let response;
  try {
    const json = body && { "Content-Type": "application/json" };
    const all = { Authorization: `Bearer ${sessionStorage.getItem(KEY)}`, ...json, ...headers };
    response = await fetch(`v1/${path}`, { method, headers: all, signal, body: body && JSON.stringify(body), redirect: "manual" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The manager does not answer; trying again.");
  }
  if (response.type === "opaqueredirect") throw new ApiError(307, await leaderText());
  if (!response.ok) throw new ApiError(response.status, await detail(response));
  return response;
}

async function detail(response) {
  try {
    const problem = await response.json();
    return problem.detail ?? problem.error?.message ?? response.statusText;
  } catch {
    return response.statusText;
  }
}

async function leaderText() {
  const ready = await fetch("readyz").then((response) => response.json(), () => ({}));
  return `This manager is a standby (${ready.missing ?? "another one leads"}): open the leader's page.`;
}
