// Talks to the router: the token, single requests, and the stream of live messages.

const API = "/api/v1";
const TOKEN_KEY = "smart-router-token";
const REQUEST_TIMEOUT = 10_000;
const FIRST_WAIT = 500;
const LONGEST_WAIT = 5_000;
const LONGEST_SILENCE = 15_000;

export const token = {
  get: () => sessionStorage.getItem(TOKEN_KEY),
  set: (text) => sessionStorage.setItem(TOKEN_KEY, text),
  forget: () => sessionStorage.removeItem(TOKEN_KEY),
};

/** An answer that is an error, with the router's own words; status 0 if there was no answer. */
class RouterError extends Error {
  constructor(status, text, details) {
    super(text);
    this.status = status;
    this.details = details;
    this.isDenied = status === 401 || status === 403;
  }
}

let onDenied = () => {};

/** Who is told when a request is answered with 401 or 403. */
export function whenDenied(listener) {
  onDenied = listener;
}

// A token is pasted, and may hold what no header may: then it is no token of this router.
function authorized(withToken) {
  if (!withToken) return {};
  if (!/^[\x21-\x7e]+$/.test(withToken)) throw new RouterError(401, "this can't be a token");
  return { Authorization: `Bearer ${withToken}` };
}

async function errorOf(response) {
  const text = await response.text().catch(() => "");
  try {
    const answer = JSON.parse(text);
    if (answer.error) return new RouterError(response.status, describe(answer), answer.details);
  } catch {
    // Not from the router itself, but from a proxy before it: its status has to do.
  }
  return new RouterError(
    response.status,
    `The answer was ${response.status} ${response.statusText}`.trim(),
  );
}

function describe({ error, details }) {
  if (!details || details.events) return error;
  return `${error} (${typeof details === "string" ? details : JSON.stringify(details)})`;
}

async function send(method, path, body, withToken, tag) {
  const headers = authorized(withToken);
  if (tag) headers["If-Match"] = tag;
  else if (tag === NOTHING) headers["If-None-Match"] = "*";
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const response = await fetch(API + path, {
    method,
    headers,
    body: body === undefined || typeof body === "string" ? body : JSON.stringify(body),
    cache: "no-store",
    signal: AbortSignal.timeout(REQUEST_TIMEOUT),
  }).catch(() => {
    throw new RouterError(0, "The router did not answer");
  });
  if (!response.ok) throw await errorOf(response);
  const answer = await response.json().catch(() => {
    throw new RouterError(response.status, "The answer was cut off, or is not JSON");
  });
  return { answer, tag: response.headers.get("ETag") };
}

/** The tag of what is not there yet. */
export const NOTHING = "";

/** What there is, and the tag of this version of it. */
export async function look(path) {
  return tell("GET", path);
}

/**
 * One request; a body is an object, or JSON text that goes as it is. With a tag, it only changes
 * what still has this tag. Throws a `RouterError`.
 */
export async function ask(method, path, body, tag) {
  return (await tell(method, path, body, tag)).answer;
}

async function tell(method, path, body, tag) {
  try {
    return await send(method, path, body, token.get(), tag);
  } catch (error) {
    if (error.isDenied) onDenied(error);
    throw error;
  }
}

/** Who the router takes us for; with another token than the one that is kept, if given. */
export const whoami = async (withToken = token.get()) =>
  (await send("GET", "/whoami", undefined, withToken)).answer;

/** Cuts a stream of text into server-sent events; `onEvent` gets the name and the data. */
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
 * Follows the live messages and comes back after every break, later each time, until it is stopped
 * or denied. `status.heardAt` and `status.isOpen` tell how it goes.
 */
export class LiveStream {
  constructor(onMessage) {
    this.onMessage = onMessage;
    this.status = { isOpen: false, isDenied: false, heardAt: performance.now(), problem: "" };
    this.following = null;
    this.wake = () => {};
  }

  start() {
    this.stop();
    const following = { isStopped: false, abort: null };
    this.following = following;
    this.status.isDenied = false;
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

  /** Tries at once instead of after the wait: the page is looked at again, or the network is back. */
  hurry() {
    this.wake();
  }

  async #follow(following) {
    let wait = FIRST_WAIT;
    while (!following.isStopped) {
      try {
        await this.#read(following, () => (wait = FIRST_WAIT));
      } catch (error) {
        if (following.isStopped) return;
        this.status.problem = error instanceof RouterError ? error.message : "";
        if (error.isDenied) {
          Object.assign(this.status, { isOpen: false, isDenied: true });
          return onDenied(error);
        }
      }
      if (following.isStopped) return;
      this.status.isOpen = false;
      // A little chance keeps all the pages of a room from coming back in the same moment.
      await this.#pause(wait * (0.8 + Math.random() * 0.4));
      wait = Math.min(wait * 2, LONGEST_WAIT);
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
    let watch;
    const heard = () => {
      clearTimeout(watch);
      watch = setTimeout(() => abort.abort(), LONGEST_SILENCE);
    };
    heard();
    try {
      const headers = authorized(token.get());
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
        heard();
        this.status.heardAt = performance.now();
        this.status.isOpen = true;
        this.status.problem = "";
        parse(value);
      }
    } finally {
      clearTimeout(watch);
      // A reader that is given up, by an error in between too, must not leave its connection open.
      abort.abort();
    }
  }

  // One message that can't be shown must not end the stream.
  #deliver(name, data) {
    try {
      this.onMessage(name, JSON.parse(data));
    } catch (error) {
      console.error(`a message of the kind ${name} can't be shown`, error);
    }
  }
}
