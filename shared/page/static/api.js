// The REST API. The token is kept for this browser tab only.

const KEY = "rlboost-token";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Take the token of a link `#token=...` and remove it from the address.
export function takeTokenOfLink() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) {
    setToken(token);
    history.replaceState(null, "", location.pathname + "#/");
  }
}

export const hasToken = () => sessionStorage.getItem(KEY) !== null;
export const setToken = (token) => sessionStorage.setItem(KEY, token);
export const forgetToken = () => sessionStorage.removeItem(KEY);

export const get = async (path, signal) => (await request("GET", path, { signal })).json();
export const post = async (path, body) => (await request("POST", path, { body })).json();

// Yield a job's events {id, kind, at, source, fields} until it has ended.
export async function* events(jobId, lastId, signal) {
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
