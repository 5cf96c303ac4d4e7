// The service over HTTP. Every failure leaves here as one `Failure`, whatever it was.

import { eventData } from "./sse.js";

const KEY = "ragspec.key";

/** kind: unauthorized, busy, gone, absent, too_long, stopped or refused. */
export class Failure extends Error {
  constructor(kind, message, { retryAfterS = 0, requestId = "" } = {}) {
    super(message);
    this.kind = kind;
    this.retryAfterS = retryAfterS;
    this.requestId = requestId;
  }
}

/** The key of this tab: from `#key=...` of the address, which is then cleared, or what was entered. `onKey`: it is another one. */
export function takeKeyFromAddress(onKey = () => undefined) {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given === null) return;
  history.replaceState(null, "", location.pathname + location.search);
  setKey(given);
  onKey();
}

export const setKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));
export const key = () => sessionStorage.getItem(KEY);

/** JSON in, JSON out. `body` may be a FormData. */
export async function call(method, path, body = undefined) {
  const response = await send(method, path, body, undefined);
  try {
    return await response.json();
  } catch {
    throw new Failure("refused", "The answer of the server is not what this page expects.");
  }
}

/** A page of the service as its markup. */
export async function page(path) {
  return (await send("GET", path, undefined, undefined)).text();
}

/** The pages of a list of the service. */
export async function* pages(path, limit = 100, query = "") {
  for (let after = ""; ;) {
    const page = await call("GET", `${path}?limit=${limit}${query}${after && `&after=${encodeURIComponent(after)}`}`);
    yield page;
    if (!page.has_more || !page.data.length) return;
    after = page.data.at(-1).id;
  }
}

/** Everything that a list of the service has. */
export async function all(...list) {
  const found = [];
  for await (const page of pages(...list)) found.push(...page.data);
  return found;
}

/** The chunks of a streamed answer. Without its end mark it was cut off, and that is a failure. */
export async function* stream(path, body, signal) {
  const response = await send("POST", path, body, signal);
  try {
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw failureOf(response, chunk);
      yield chunk;
    }
  } catch (cause) {
    if (cause instanceof Failure) throw cause;
    throw signal?.aborted ? stopped() : cutOff();
  }
  throw signal?.aborted ? stopped() : cutOff();
}

export const stopped = () => new Failure("stopped", "Stopped.");
const cutOff = () => new Failure("gone", "The connection broke off before the answer was complete.");

async function send(method, path, body, signal) {
  const headers = { Accept: "application/json" };
  if (key() && !/^[\x21-\x7e]+$/.test(key())) throw new Failure("unauthorized", "This is no key.");
  if (key()) headers.Authorization = `Bearer ${key()}`;
  const plain = body instanceof FormData;
  if (body !== undefined && !plain) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, {
      method, headers, signal, cache: "no-store", credentials: "same-origin",
      body: body === undefined || plain ? body : JSON.stringify(body),
    });
  } catch {
    throw signal?.aborted ? stopped() : new Failure("gone", "The server does not answer.");
  }
  if (response.ok) return response;
  throw failureOf(response, await response.json().catch(() => ({})));
}

function failureOf(response, body) {
  const error = body?.error ?? {};
  const retryAfterS = Math.min(Math.ceil(Number(response.headers.get("Retry-After"))) || 0, 3600);
  const requestId = response.headers.get("X-Request-Id") ?? "";
  const message = typeof error.message === "string" ? error.message : `The server refused (${response.status}).`;
  return new Failure(kindOf(response.status, error), message, { retryAfterS, requestId });
}

function kindOf(status, error) {
  if (error.code === "context_length_exceeded") return "too_long";
  if (status === 401) return "unauthorized";
  if (status === 429) return "busy";
  if (status === 404) return "absent";
  return status >= 500 || error.type === "server_error" ? "gone" : "refused";
}
