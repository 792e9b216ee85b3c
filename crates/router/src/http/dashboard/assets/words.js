// What the router says, in words. Nothing here touches the document.

export const count = (number) => Number(number ?? 0).toLocaleString("en");
export const plural = (number, one, many = `${one}s`) =>
  `${count(number)} ${number === 1 ? one : many}`;

/** A time span: `43 s`, `2 min 05 s`, `3 h 20 min`, `2 d 4 h`. */
export function span(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(s % 60).padStart(2, "0")} s`;
  if (s < 86400)
    return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** A time span in as little room as there is: `43 s`, `14 min`, `3 h`, `5 d`. */
export function shortSpan(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 100) return `${s} s`;
  if (s < 6_000) return `${Math.floor(s / 60)} min`;
  if (s < 360_000) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} d`;
}

/** A time span of which only the size matters: `5 min` and not `5 min 00 s`. */
export const roundSpan = (seconds) => span(seconds).replace(/ 0?0 (s|min)$/, "");

/** How long something took, from milliseconds: short ones with a tenth. */
export function took(milliseconds) {
  if (milliseconds < 1000) return `${Math.round(milliseconds)} ms`;
  return milliseconds < 10000 ? `${(milliseconds / 1000).toFixed(1)} s` : span(milliseconds / 1000);
}

const twoDigits = (number) => String(number).padStart(2, "0");

/** The time of day where the reader is; with the date if that is another day. */
export function clock(milliseconds, withMillis = false) {
  const at = new Date(milliseconds);
  const time = [at.getHours(), at.getMinutes(), at.getSeconds()].map(twoDigits).join(":");
  const exact = withMillis ? `${time}.${String(at.getMilliseconds()).padStart(3, "0")}` : time;
  const isToday = at.toDateString() === new Date().toDateString();
  return isToday
    ? exact
    : `${at.getFullYear()}-${twoDigits(at.getMonth() + 1)}-${twoDigits(at.getDate())} ${exact}`;
}

export const STATES = [
  { state: "available", letter: "A", word: "available" },
  { state: "busy", letter: "B", word: "busy" },
  { state: "draining", letter: "D", word: "draining" },
  { state: "not_ready", letter: "N", word: "not ready" },
  { state: "terminating", letter: "T", word: "terminating" },
  { state: "quarantined", letter: "Q", word: "in quarantine" },
];

const stateOf = new Map(STATES.map((known) => [known.state, known]));

export const podState = (state) =>
  stateOf.get(state) ?? { state: "other", letter: "?", word: String(state) };

/** `pool:gold` as `gold`, `merchant:acme` as it is. */
export const poolName = (pool) => (pool ?? "").replace(/^pool:/, "");

/** The name under which pods and calls know a pool of the state message. */
export const poolKey = (pool) => (pool.is_merchant ? `merchant:${pool.name}` : pool.name);

const SHORT_REASONS = {
  at_capacity: "full",
  all_draining: "draining",
  empty: "empty",
  unknown: "unknown",
};
const REASONS = {
  at_capacity: "at capacity",
  all_draining: "all draining",
  empty: "empty",
  unknown: "no such tier",
};

/** The way of a call through its chain: `gold full → basic`. */
export function pathWords(tried, pool) {
  const steps = (tried ?? []).map(
    ({ step, reason }) => `${poolName(step)} ${SHORT_REASONS[reason] ?? reason}`,
  );
  return [...steps, ...(pool ? [poolName(pool)] : [])].join(" → ");
}

/** Steps from an event's detail: `gold=at_capacity basic=empty`. */
function parseTried(text) {
  return (text ?? "")
    .split(" ")
    .filter((word) => word.includes("="))
    .map((word) => {
      const at = word.lastIndexOf("=");
      return { step: word.slice(0, at), reason: word.slice(at + 1) };
    });
}

export const triedStep = ({ step, reason }) =>
  `tried ${poolName(step)}: ${REASONS[reason] ?? reason}`;

const REFUSALS = {
  no_pods: "no pod was free",
  max_calls: "its merchant has as many calls as it may",
  max_rate: "its merchant begins more calls a second than it may",
  queue_full: "no more calls may wait",
  time_over: "its time to wait was over",
  over: "the call was over already",
  spent: "it has had all its second chances",
};

const CAUSES = {
  agent: "released by its agent",
  provider: "ended by the provider",
  operator: "released by hand",
  stream: "its stream stopped",
  broken: "its stream broke",
  lease: "its lease ran out",
  unconfirmed: "its stream never started",
  abandoned: "nobody came for its pod",
  pod_gone: "its pod is gone",
};

/** How an ended call ended: `released by its agent, after 53 s`. */
function endWords(detail) {
  const [cause, lasted] = (detail ?? "").split(" ");
  const words = CAUSES[cause] ?? cause;
  return lasted && Number.isFinite(Number(lasted))
    ? `${words}, after ${took(Number(lasted))}`
    : words;
}

function refusalWords(detail) {
  const [reason] = (detail ?? "").split(" ");
  return REFUSALS[reason] ?? reason;
}

const bracketed = (tried) => (tried.length ? ` (${pathWords(tried)})` : "");
const inPool = (event) => (event.pool ? ` in ${poolName(event.pool)}` : "");
const drainedUntil = (detail) =>
  Number(detail) > 0 ? ` until ${clock(Number(detail) * 1000)}` : "";

// Each kind: a tone for the eye, and a sentence in parts. Calls and pods are parts of their own,
// so that they can become links.
const KINDS = {
  allocated: [
    "good",
    (e, call, pod) => [call, " was given ", pod, bracketed(parseTried(e.detail))],
  ],
  existing: ["plain", (e, call, pod) => [call, " asked again and has ", pod, " still"]],
  handed: ["good", (e, call, pod) => [call, " waited and was handed ", pod]],
  fetched: ["good", (e, call, pod) => [call, " came for ", pod]],
  waiting: ["wait", (e, call) => [call, " waits", bracketed(parseTried(e.detail))]],
  left: ["wait", (e, call) => [call, " gave up waiting"]],
  refused: [
    "bad",
    (e, call) => [call, " was refused: ", refusalWords(e.detail), bracketed(parseTried(e.detail))],
  ],
  confirmed: ["plain", (e, call, pod) => [call, " is connected to ", pod]],
  ended: ["plain", (e, call, pod) => [call, " on ", pod, " ended: ", endWords(e.detail)]],
  drained: ["wait", (e, call, pod) => [pod, " gets no new calls", drainedUntil(e.detail)]],
  undrained: ["plain", (e, call, pod) => [pod, " gets calls again"]],
  joined: ["plain", (e, call, pod) => [pod, " joined", inPool(e)]],
  ready: ["plain", (e, call, pod) => [pod, " is ready"]],
  not_ready: ["wait", (e, call, pod) => [pod, " is not ready"]],
  terminating: ["wait", (e, call, pod) => [pod, " is terminating"]],
  gone: ["wait", (e, call, pod) => [pod, " is gone"]],
  moved: ["plain", (e, call, pod) => [pod, " moved to ", poolName(e.pool) || "no pool"]],
  quarantined: ["bad", (e, call, pod) => [pod, " is in quarantine: calls on it failed"]],
  restored: ["good", (e, call, pod) => [pod, " is out of quarantine"]],
  leader: ["plain", (e) => ["A leader took over", e.detail ? ` (epoch ${e.detail})` : ""]],
  tiers: ["plain", () => ["New tiers are in force"]],
  merchant_set: ["plain", (e) => [`Merchant ${e.merchant_id ?? "?"} was set`]],
  merchant_deleted: ["plain", (e) => [`Merchant ${e.merchant_id ?? "?"} was deleted`]],
};

// Causes of an end that nobody wanted: worth a second look.
const SUDDEN = new Set(["broken", "lease", "unconfirmed", "abandoned", "pod_gone"]);

/** `good`, `wait`, `bad` or `plain`: how an event looks. */
export function eventTone(event) {
  if (event.event === "ended" && SUDDEN.has((event.detail ?? "").split(" ")[0])) return "bad";
  return KINDS[event.event]?.[0] ?? "plain";
}

/** An event as a sentence; a kind that this page does not know is shown as it is. */
export function eventParts(event) {
  const call = event.call_sid ? { call: event.call_sid } : "a call";
  const pod = event.pod_name ? { pod: event.pod_name } : "a pod";
  const known = Object.hasOwn(KINDS, event.event) ? KINDS[event.event] : null;
  if (known) return known[1](event, call, pod).filter((part) => part !== "");
  const rest = [
    event.call_sid && call,
    event.pod_name && pod,
    event.pool,
    event.merchant_id,
    event.detail,
  ];
  return [event.event, ...rest.filter(Boolean).flatMap((part) => [" ", part])];
}

// The same events told as the steps of one call, which needs no name in each of them.
const STEPS = {
  allocated: (e, pod) => [...tried(e), ["given ", pod]],
  existing: (e, pod) => [["asked again, has ", pod, " still"]],
  handed: (e, pod) => [["handed ", pod, " after waiting"]],
  fetched: (e, pod) => [["came for ", pod]],
  waiting: (e) => [...tried(e), ["began to wait"]],
  left: () => [["gave up waiting"]],
  refused: (e) => [...tried(e), ["refused: ", refusalWords(e.detail)]],
  confirmed: (e, pod) => [["connected to ", pod]],
  ended: (e) => [["ended: ", endWords(e.detail)]],
};

const tried = (event) => parseTried(event.detail).map((step) => [triedStep(step)]);

/** The steps that an event was for its call, oldest first, each in parts. */
export function callSteps(event) {
  const pod = event.pod_name ? { pod: event.pod_name } : "a pod";
  return Object.hasOwn(STEPS, event.event) ? STEPS[event.event](event, pod) : [eventParts(event)];
}

/** What the calls of a merchant do by its document: `try acme, then gold; …`. */
export function merchantWords(document) {
  const first = document.pool ? [document.pool] : [];
  const then = document.fallback?.length ? document.fallback : ["the default chain"];
  const words = [
    `try ${[...first, ...(document.dedicated_only ? [] : then)].join(", then ") || "nothing"}`,
  ];
  if (Number.isFinite(document.max_calls))
    words.push(`at most ${plural(document.max_calls, "call")} at the same time`);
  if (Number.isFinite(document.max_rate))
    words.push(`at most ${count(document.max_rate)} new in a second`);
  if (document.priority) words.push(`priority ${document.priority}`);
  return words.join("; ");
}
