// Client of the router's API: the token, requests, and the live stream.

const API = "/api/v1";
const TOKEN_KEY = "smart-router-token";
const REQUEST_TIMEOUT = 10_000;
const MIN_BACKOFF = 500;
const MAX_BACKOFF = 5_000;
const SILENCE_TIMEOUT = 15_000;

export const token = {
  get: () => sessionStorage.getItem(TOKEN_KEY),
  set: (text) => sessionStorage.setItem(TOKEN_KEY, text),
  clear: () => sessionStorage.removeItem(TOKEN_KEY),
};

/** An error response with the router's message; status 0 if there was no response. */
class RouterError extends Error {
  constructor(status, text, details) {
    super(text);
    this.status = status;
    this.details = details;
    this.isUnauthorized = status === 401 || status === 403;
  }
}

let unauthorizedListener = () => {};

/** Sets the listener for responses with 401 or 403. */
export function onUnauthorized(listener) {
  unauthorizedListener = listener;
}

// A pasted token may contain characters that a header must not contain.
function authorization(bearer) {
  if (!bearer) return {};
  if (!/^[\x21-\x7e]+$/.test(bearer)) throw new RouterError(401, "invalid characters in the token");
  return { Authorization: `Bearer ${bearer}` };
}

async function errorOf(response) {
  const text = await response.text().catch(() => "");
  try {
    const body = JSON.parse(text);
    if (body.error) return new RouterError(response.status, describe(body), body.details);
  } catch {
    // The response of a proxy, without the router's error format.
  }
  return new RouterError(
    response.status,
    `The router responded with ${response.status} ${response.statusText}`.trim(),
  );
}

function describe({ error, details }) {
  if (!details || details.events) return error;
  return `${error} (${typeof details === "string" ? details : JSON.stringify(details)})`;
}

async function send(method, path, body, bearer, tag) {
  const headers = authorization(bearer);
  if (tag) headers["If-Match"] = tag;
  else if (tag === NO_DOCUMENT) headers["If-None-Match"] = "*";
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(API + path, {
    method,
    headers,
    body: body === undefined || typeof body === "string" ? body : JSON.stringify(body),
    cache: "no-store",
    signal: AbortSignal.timeout(REQUEST_TIMEOUT),
  }).catch(() => {
    throw new RouterError(0, "The router did not respond");
  });
  if (!response.ok) throw await errorOf(response);
  const result = await response.json().catch(() => {
    throw new RouterError(response.status, "The response is incomplete or not JSON");
  });
  return { result, tag: response.headers.get("ETag") };
}

/** Tag of a document that must not exist yet. */
export const NO_DOCUMENT = "";

/** Fetches a document with its `ETag`. */
export async function fetchWithTag(path) {
  return sendWithToken("GET", path);
}

/**
 * Sends a request and returns the parsed response. A body is an object or JSON text. A tag makes
 * the change conditional on that version. Throws a `RouterError`.
 */
export async function request(method, path, body, tag) {
  return (await sendWithToken(method, path, body, tag)).result;
}

async function sendWithToken(method, path, body, tag) {
  try {
    return await send(method, path, body, token.get(), tag);
  } catch (error) {
    if (error.isUnauthorized) unauthorizedListener(error);
    throw error;
  }
}

/** The role of a token, by default of the stored one. */
export const whoami = async (bearer = token.get()) =>
  (await send("GET", "/whoami", undefined, bearer)).result;

/** Parses server-sent events from chunks of text; `onEvent` gets the name and the data. */
function eventParser(onEvent) {
  let rest = "";
  let name = "message";
  let data = [];
  const line = (text) => {
    if (text === "") {
      if (data.length) onEvent(name, data.join("\n"));
      name = "message";
      data = [];
      return;
    }
    const colon = text.indexOf(":");
    const field = colon < 0 ? text : text.slice(0, colon);
    const value = colon < 0 ? "" : text.slice(colon + 1).replace(/^ /, "");
    if (field === "event") name = value;
    else if (field === "data") data.push(value);
  };
  return (chunk) => {
    const lines = (rest + chunk).split("\n");
    rest = lines.pop();
    for (const text of lines) line(text.endsWith("\r") ? text.slice(0, -1) : text);
  };
}

/**
 * Reads the live stream and reconnects with exponential backoff, until it is stopped or
 * unauthorized. `status` has the state of the connection.
 */
export class LiveStream {
  constructor(onMessage) {
    this.onMessage = onMessage;
    this.status = {
      isOpen: false,
      isUnauthorized: false,
      receivedAt: performance.now(),
      error: "",
    };
    this.following = null;
    this.wake = () => {};
  }

  start() {
    this.stop();
    const following = { isStopped: false, abort: null };
    this.following = following;
    this.status.isUnauthorized = false;
    this.#follow(following);
  }

  stop() {
    if (!this.following) return;
    this.following.isStopped = true;
    this.following.abort?.abort();
    this.following = null;
    this.status.isOpen = false;
    this.wake();
  }

  /** Reconnects without waiting for the backoff: the tab is visible or the network is back. */
  retryNow() {
    this.wake();
  }

  async #follow(following) {
    let backoff = MIN_BACKOFF;
    while (!following.isStopped) {
      try {
        await this.#read(following, () => (backoff = MIN_BACKOFF));
      } catch (error) {
        if (following.isStopped) return;
        this.status.error = error instanceof RouterError ? error.message : "";
        if (error.isUnauthorized) {
          Object.assign(this.status, { isOpen: false, isUnauthorized: true });
          return unauthorizedListener(error);
        }
      }
      if (following.isStopped) return;
      this.status.isOpen = false;
      // Jitter keeps pages from reconnecting at the same moment.
      await this.#pause(backoff * (0.8 + Math.random() * 0.4));
      backoff = Math.min(backoff * 2, MAX_BACKOFF);
    }
  }

  #pause(milliseconds) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, milliseconds);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  async #read(following, onFirst) {
    const abort = (following.abort = new AbortController());
    let timeout;
    const resetTimeout = () => {
      clearTimeout(timeout);
      timeout = setTimeout(() => abort.abort(), SILENCE_TIMEOUT);
    };
    resetTimeout();
    try {
      const headers = authorization(token.get());
      const response = await fetch(`${API}/live`, {
        headers,
        cache: "no-store",
        signal: abort.signal,
      });
      if (!response.ok) throw await errorOf(response);
      const parse = eventParser((name, data) => {
        onFirst();
        this.#deliver(name, data);
      });
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      for (;;) {
        const { value, done } = await reader.read();
        if (done || following.isStopped) return;
        resetTimeout();
        this.status.receivedAt = performance.now();
        this.status.isOpen = true;
        this.status.error = "";
        parse(value);
      }
    } finally {
      clearTimeout(timeout);
      // An error must not leave the connection open.
      abort.abort();
    }
  }

  // An error in a handler must not end the stream.
  #deliver(name, data) {
    try {
      this.onMessage(name, JSON.parse(data));
    } catch (error) {
      console.error(`handling a ${name} message failed`, error);
    }
  }
}
