// Formats numbers, times and events as text. Nothing here touches the DOM.

export const formatNumber = (number) => Number(number ?? 0).toLocaleString("en");
export const plural = (number, one, many = `${one}s`) =>
  `${formatNumber(number)} ${number === 1 ? one : many}`;

/** A duration: `43 s`, `2 min 05 s`, `3 h 20 min`, `2 d 4 h`. */
export function formatDuration(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(s % 60).padStart(2, "0")} s`;
  if (s < 86400)
    return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** A duration in one unit: `43 s`, `14 min`, `3 h`, `5 d`. */
export function formatShortDuration(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 100) return `${s} s`;
  if (s < 6_000) return `${Math.floor(s / 60)} min`;
  if (s < 360_000) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} d`;
}

/** A duration without a trailing zero unit: `5 min` instead of `5 min 00 s`. */
export const formatRoundDuration = (seconds) =>
  formatDuration(seconds).replace(/ 0?0 (s|min)$/, "");

/** A duration from milliseconds; with tenths below ten seconds. */
export function formatMillis(milliseconds) {
  if (milliseconds < 1000) return `${Math.round(milliseconds)} ms`;
  const seconds = milliseconds / 1000;
  return seconds < 10 ? `${seconds.toFixed(1)} s` : formatDuration(seconds);
}

/** A number of bytes: `640 B`, `12.4 kB`, `3.1 MB`. */
export function formatBytes(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  const [size, unit] =
    [[1e9, "GB"], [1e6, "MB"]].find(([size]) => bytes >= size) ?? [1e3, "kB"];
  return `${(bytes / size).toFixed(1)} ${unit}`;
}

const twoDigits = (number) => String(number).padStart(2, "0");

/** Local time of day; with the date unless it is today. */
export function formatTime(milliseconds, withMillis = false) {
  const at = new Date(milliseconds);
  const time = [at.getHours(), at.getMinutes(), at.getSeconds()].map(twoDigits).join(":");
  const exact = withMillis ? `${time}.${String(at.getMilliseconds()).padStart(3, "0")}` : time;
  const isToday = at.toDateString() === new Date().toDateString();
  return isToday
    ? exact
    : `${at.getFullYear()}-${twoDigits(at.getMonth() + 1)}-${twoDigits(at.getDate())} ${exact}`;
}

export const STATES = [
  { state: "available", letter: "A", label: "available" },
  { state: "busy", letter: "B", label: "busy" },
  { state: "draining", letter: "D", label: "draining" },
  { state: "not_ready", letter: "N", label: "not ready" },
  { state: "terminating", letter: "T", label: "terminating" },
  { state: "quarantined", letter: "Q", label: "in quarantine" },
];

const stateOf = new Map(STATES.map((known) => [known.state, known]));

export const podState = (state) =>
  stateOf.get(state) ?? { state: "other", letter: "?", label: String(state) };

/** `pool:gold` as `gold`, `merchant:acme` as it is. */
export const poolName = (pool) => (pool ?? "").replace(/^pool:/, "");

/** Name of a pool of the state message, as in pods and calls. */
export const poolKey = (pool) => (pool.is_merchant ? `merchant:${pool.name}` : pool.name);

const SHORT_SKIP_REASONS = {
  at_capacity: "full",
  held: "held for dials",
  all_draining: "draining",
  empty: "empty",
  unknown: "unknown",
};
const SKIP_REASONS = {
  at_capacity: "at capacity",
  all_draining: "all draining",
  empty: "empty",
  unknown: "no such tier",
};

/** The path of a call through its chain: `gold full → basic`. */
export function formatPath(tried, pool) {
  const steps = (tried ?? []).map(
    ({ step, reason }) => `${poolName(step)} ${SHORT_SKIP_REASONS[reason] ?? reason}`,
  );
  return [...steps, ...(pool ? [poolName(pool)] : [])].join(" → ");
}

/** Skipped steps from an event's detail: `gold=at_capacity basic=empty`. */
function parseTried(text) {
  return (text ?? "")
    .split(" ")
    .filter((word) => word.includes("="))
    .map((word) => {
      const at = word.lastIndexOf("=");
      return { step: word.slice(0, at), reason: word.slice(at + 1) };
    });
}

export const describeSkip = ({ step, reason }) =>
  `skipped ${poolName(step)}: ${SKIP_REASONS[reason] ?? reason}`;

const REFUSALS = {
  no_pods: "no pod available",
  max_calls: "call limit of the merchant reached",
  max_rate: "rate limit of the merchant reached",
  queue_full: "queue full",
  time_over: "hold time over",
  over: "call already ended",
  spent: "no reconnects left",
};

const END_CAUSES = {
  agent: "released by the agent",
  provider: "ended by the provider",
  operator: "released by an operator",
  stream: "stream ended",
  broken: "stream disconnected",
  lease: "lease expired",
  unconfirmed: "stream never started",
  unattached: "no stream came in time",
  gateway: "its gateway stopped or was lost",
  unreachable: "the pod could not be connected",
  pod_lost: "the connection to the pod was lost",
  displaced: "the pod serves an earlier stream",
  abandoned: "hand-off not accepted",
  pod_gone: "pod removed",
};

const describeCause = (cause) => END_CAUSES[cause] ?? cause ?? "";

/** The end of a call: `released by the agent, after 53 s`. */
function describeEnd(detail) {
  const [cause, lasted] = (detail ?? "").split(" ");
  const text = describeCause(cause);
  return lasted && Number.isFinite(Number(lasted))
    ? `${text}, after ${formatMillis(Number(lasted))}`
    : text;
}

/** The failover of a stream: ` from voice-agent-0: the connection to the pod was lost`. */
function describeFailover(detail) {
  const [cause, former] = (detail ?? "").split(" ");
  return former ? [" from ", { pod: former }, `: ${describeCause(cause)}`] : [];
}

function describeRefusal(detail) {
  const [reason] = (detail ?? "").split(" ");
  return REFUSALS[reason] ?? reason;
}

const bracketed = (tried) => (tried.length ? ` (${formatPath(tried)})` : "");
const throughGateway = ({ detail }) => (detail ? ` through ${detail}` : "");
const inPool = (event) => (event.pool ? ` in ${poolName(event.pool)}` : "");
const drainedUntil = (detail) =>
  Number(detail) > 0 ? ` until ${formatTime(Number(detail) * 1000)}` : "";

/** A changed decision: `12 10 forecast`. */
function describeDesired(detail) {
  const [desired, before, reason] = (detail ?? "").split(" ");
  return `${desired} pods desired instead of ${before} (${(reason ?? "?").replaceAll("_", " ")})`;
}

/** A prescale order: `40 1763280000 admin (token 2)`. */
function describeOrder(detail) {
  const [pods, until] = (detail ?? "").split(" ");
  return `at least ${pods} pods ordered until ${formatTime(Number(until) * 1000)}`;
}

/** The end of a reservation: `R5f3a09c2b1d4e687 unanswered 31000`. */
function describeReservation(detail) {
  const [id, cause, lasted] = (detail ?? "").split(" ");
  const seconds = Math.round(Number(lasted ?? 0) / 1000);
  return `reservation ${id} ended after ${seconds} s (${(cause ?? "?").replaceAll("_", " ")})`;
}

/** A change of a workload: `deployment/gold 2 5 forecast`, with `dry_run` at its end if not made. */
function describeScaling(detail) {
  const [workload, from, to, reason, mode] = (detail ?? "").split(" ");
  const verb = mode === "dry_run" ? "would be scaled" : "is scaled";
  return `${workload} ${verb} from ${from} to ${to} pods (${(reason ?? "?").replaceAll("_", " ")})`;
}

// Tone and sentence of each event kind. Sentences are lists of parts, so that calls and pods can
// become links.
const KINDS = {
  allocated: [
    "good",
    (e, call, pod) => [call, " was allocated ", pod, bracketed(parseTried(e.detail))],
  ],
  existing: ["plain", (e, call, pod) => [call, " was requested again and keeps ", pod]],
  handed: ["good", (e, call, pod) => [call, " was handed ", pod, " after waiting"]],
  fetched: ["good", (e, call, pod) => [call, " accepted ", pod]],
  waiting: ["wait", (e, call) => [call, " is waiting", bracketed(parseTried(e.detail))]],
  left: ["wait", (e, call) => [call, " left the queue"]],
  refused: [
    "bad",
    (e, call) => [call, " was refused: ", describeRefusal(e.detail), bracketed(parseTried(e.detail))],
  ],
  confirmed: ["plain", (e, call, pod) => [call, " is connected to ", pod]],
  attached: ["good", (e, call, pod) => [call, " opened its stream to ", pod, throughGateway(e)]],
  ending: ["wait", (e, call) => [call, " is ending: ", describeCause(e.detail)]],
  failed_over: [
    "wait",
    (e, call, pod) => [call, " moved to ", pod, ...describeFailover(e.detail)],
  ],
  pod_failed: ["bad", (e, call, pod) => [pod, " failed for ", call, ": ", e.detail ?? "?"]],
  ended: ["plain", (e, call, pod) => [call, " on ", pod, " ended: ", describeEnd(e.detail)]],
  drained: ["wait", (e, call, pod) => [pod, " is draining", drainedUntil(e.detail)]],
  undrained: ["plain", (e, call, pod) => [pod, " is no longer draining"]],
  joined: ["plain", (e, call, pod) => [pod, " joined", inPool(e)]],
  ready: ["plain", (e, call, pod) => [pod, " is ready"]],
  not_ready: ["wait", (e, call, pod) => [pod, " is not ready"]],
  terminating: ["wait", (e, call, pod) => [pod, " is terminating"]],
  gone: ["wait", (e, call, pod) => [pod, " was removed"]],
  moved: ["plain", (e, call, pod) => [pod, " moved to ", poolName(e.pool) || "no pool"]],
  quarantined: ["bad", (e, call, pod) => [pod, " is in quarantine after failed calls"]],
  restored: ["good", (e, call, pod) => [pod, " left quarantine"]],
  leader: ["plain", (e) => ["New leader", e.detail ? ` (epoch ${e.detail})` : ""]],
  origin: ["plain", (e) => [`New origin of the pods: ${e.detail ?? "?"}`]],
  tiers: ["plain", () => ["Tiers changed"]],
  merchant_set: ["plain", (e) => [`Merchant ${e.merchant_id ?? "?"} was saved`]],
  merchant_deleted: ["plain", (e) => [`Merchant ${e.merchant_id ?? "?"} was deleted`]],
  desired: ["plain", (e) => [`${poolName(e.pool)}: ${describeDesired(e.detail)}`]],
  scaled: ["plain", (e) => [`${poolName(e.pool)}: ${describeScaling(e.detail)}`]],
  prescale_set: ["plain", (e) => [`${poolName(e.pool)}: ${describeOrder(e.detail)}`]],
  prescale_deleted: ["plain", (e) => [`${poolName(e.pool)}: a prescale order was deleted`]],
  reserved: ["plain", (e) => [`${e.merchant_id ?? "?"} reserved a slot of ${poolName(e.pool)}`]],
  dialed: ["plain", (e, call) => [call, ` was dialed for ${e.merchant_id ?? "?"}`]],
  reservation_ended: ["plain", (e) => [`${e.merchant_id ?? "?"}: ${describeReservation(e.detail)}`]],
  number_set: ["plain", (e) => [`Lines of a number were limited: ${e.detail ?? "?"}`]],
  number_deleted: ["plain", (e) => [`The limit of a number was deleted: ${e.detail ?? "?"}`]],
  account_set: ["plain", (e) => [`Calls per second were limited: ${e.detail ?? "?"}`]],
  account_deleted: ["plain", (e) => [`The limit of an account was deleted: ${e.detail ?? "?"}`]],
};

const ABNORMAL_CAUSES = new Set([
  "broken",
  "lease",
  "unconfirmed",
  "unattached",
  "gateway",
  "unreachable",
  "pod_lost",
  "displaced",
  "abandoned",
  "pod_gone",
]);

/** Visual tone of an event: `good`, `wait`, `bad` or `plain`. */
export function eventTone(event) {
  if (event.event === "ended" && ABNORMAL_CAUSES.has((event.detail ?? "").split(" ")[0])) return "bad";
  return KINDS[event.event]?.[0] ?? "plain";
}

/** An event as a sentence in parts; unknown kinds are shown with their raw fields. */
export function eventSentence(event) {
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

// Entries in the timeline of one call, which do not repeat its id.
const TIMELINE = {
  allocated: (e, pod) => [...skipped(e), ["allocated ", pod]],
  existing: (e, pod) => [["requested again, keeps ", pod]],
  handed: (e, pod) => [["handed ", pod, " after waiting"]],
  fetched: (e, pod) => [["accepted ", pod]],
  waiting: (e) => [...skipped(e), ["started waiting"]],
  left: () => [["left the queue"]],
  refused: (e) => [...skipped(e), ["refused: ", describeRefusal(e.detail)]],
  confirmed: (e, pod) => [["connected to ", pod]],
  attached: (e, pod) => [["opened its stream to ", pod, throughGateway(e)]],
  ending: (e) => [["ending, its stream is being closed: ", describeCause(e.detail)]],
  failed_over: (e, pod) => [["moved to ", pod, ...describeFailover(e.detail)]],
  pod_failed: (e, pod) => [[pod, " failed: ", e.detail ?? "?"]],
  ended: (e) => [["ended: ", describeEnd(e.detail)]],
};

const skipped = (event) => parseTried(event.detail).map((step) => [describeSkip(step)]);

/** Timeline entries of an event of one call, oldest first, each in parts. */
export function callTimeline(event) {
  const pod = event.pod_name ? { pod: event.pod_name } : "a pod";
  const entries = Object.hasOwn(TIMELINE, event.event) ? TIMELINE[event.event] : null;
  return entries ? entries(event, pod) : [eventSentence(event)];
}

/** Summary of a merchant document: `use acme, then gold; …`. */
export function describeMerchant(document) {
  const first = document.pool ? [document.pool] : [];
  const then = document.fallback?.length ? document.fallback : ["the default chain"];
  const parts = [
    `use ${[...first, ...(document.dedicated_only ? [] : then)].join(", then ") || "no pool"}`,
  ];
  if (Number.isFinite(document.max_calls))
    parts.push(`at most ${plural(document.max_calls, "concurrent call")}`);
  if (Number.isFinite(document.max_rate))
    parts.push(`at most ${plural(document.max_rate, "new call")} per second`);
  if (document.priority) parts.push(`priority ${document.priority}`);
  return parts.join("; ");
}
