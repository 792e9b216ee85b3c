// Details of a call or a pod, in a dialog with its own URL (`#call/CA1`, `#pod/gold-1`).

import { isAdmin } from "./access.js";
import { actionButtons } from "./actions.js";
import { confirmChange } from "./confirm.js";
import { byId, callLink, el, partsToNodes, podLink, setText, showText } from "./dom.js";
import { request } from "./api.js";
import { knownPod } from "./pods.js";
import { liveTime } from "./time.js";
import {
  callTimeline,
  formatBytes,
  formatTime,
  eventSentence,
  eventTone,
  formatPath,
  podState,
  poolName,
  formatMillis,
  describeSkip,
  plural,
} from "./format.js";

const REFRESH_INTERVAL = 2_000;

let current = null;
let timer = null;
let onChange = () => {};

// Facts are pairs of a name and a text or node; empty ones are omitted.
function factList(facts) {
  const items = facts.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el(
    "dl",
    { class: "detail-facts" },
    ...items.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}

const timeOf = (seconds) => (Number.isFinite(seconds) ? formatTime(seconds * 1000) : null);
const podNode = (name) => (name ? el("a", { href: podLink(name) }, name) : null);

function sinceNode(seconds) {
  return Number.isFinite(seconds)
    ? el("span", {}, `${timeOf(seconds)}, `, liveTime("age", seconds), " ago")
    : null;
}

function untilNode(seconds) {
  return Number.isFinite(seconds)
    ? el("span", {}, `${timeOf(seconds)}, `, liveTime("due", seconds))
    : null;
}

const CALL_STATES = { live: "live", waiting: "waiting", ended: "ended", refused: "refused" };

function callFacts(call) {
  const state = CALL_STATES[call.state] ?? (call.pod_name ? "live" : "waiting");
  const remark =
    call.is_confirmed === false && state === "live" ? ", stream not started yet" : "";
  const handed = call.is_waiting && call.pod_name ? ", hand-off not accepted yet" : "";
  const ending = call.stream?.is_ending ? ", ending: its stream is being closed" : "";
  return [
    ["State", state + (ending || handed || remark)],
    ["Pod", podNode(call.pod_name)],
    ["Pool", poolName(call.source_pool)],
    ["Merchant", call.merchant_id],
    ["Allocated", sinceNode(call.allocated_at)],
    ["Lease expires", state === "live" ? untilNode(call.lease_expires_at) : null],
    ["Waiting since", sinceNode(call.waiting_since)],
    ["Waiting until", state === "waiting" ? untilNode(call.waiting_until) : null],
    ["Path", formatPath(call.tried, call.source_pool)],
    ["Pod attempt", call.attempt > 1 ? String(call.attempt) : null],
  ];
}

const describeSide = ({ frames, bytes, longest_gap_ms: gap }) =>
  `${plural(frames, "frame")}, ${formatBytes(bytes)}, longest gap ${formatMillis(gap)}`;

// Figures of a stream with their titles and texts.
const FIGURES = [
  ["Provider", ({ provider }) => provider],
  ["From the provider", ({ from_provider }) => describeSide(from_provider)],
  ["From the agent", ({ from_agent }) => describeSide(from_agent)],
];

function streamSection({ stream }) {
  if (!stream) return [];
  const facts = [
    ["Gateway", stream.gateway],
    ["Attached", sinceNode(stream.since)],
  ];
  const title = el("h3", {}, "Stream");
  if (!stream.figures) {
    const note = "Another router relays this stream; its figures follow in a few seconds.";
    return [title, factList(facts), el("p", { class: "soft small" }, note)];
  }
  const figures = FIGURES.map(([name]) => [name, el("span", { "data-figure": name })]);
  return [title, factList([...facts, ...figures])];
}

// Figures change all the time: only their texts are updated, so that a selection in the rest of
// the dialog stays.
function showFigures(figures) {
  const texts = new Map(FIGURES.map(([name, text]) => [name, text(figures)]));
  for (const element of byId("detail-body").querySelectorAll("[data-figure]"))
    setText(element, texts.get(element.dataset.figure));
}

// A replacer of `JSON.stringify` that keeps only whether there are figures.
const withoutFigures = (key, value) => (key === "figures" ? Boolean(value) : value);

// Timeline from the call's own fields, if its events are disabled or no longer retained.
function stepsWithoutEvents(call) {
  const steps = (call.tried ?? []).map((step) => [describeSkip(step)]);
  if (call.pod_name) steps.push(["allocated ", { pod: call.pod_name }]);
  const when = Number.isFinite(call.allocated_at) ? call.allocated_at * 1000 : null;
  return steps.map((parts) => ({ when, parts, tone: "plain" }));
}

function timeline(call) {
  const events = call.events ?? [];
  const steps = events.length
    ? events.flatMap((event) =>
        callTimeline(event).map((parts) => ({ when: event.at, parts, tone: eventTone(event) })),
      )
    : stepsWithoutEvents(call);
  if (!steps.length) return el("p", { class: "soft" }, "No events.");
  const first = steps[0].when;
  return el(
    "ol",
    { class: "timeline" },
    ...steps.map(({ when, parts, tone }) => {
      const offset =
        when !== null && when > first
          ? el("span", { class: "soft small" }, ` +${formatMillis(when - first)}`)
          : null;
      return el(
        "li",
        { "data-tone": tone },
        el("time", {}, when === null ? "" : formatTime(when, events.length > 0)),
        el("span", {}, ...partsToNodes(parts), offset),
      );
    }),
  );
}

const callBody = (call) => [
  factList(callFacts(call)),
  ...streamSection(call),
  el("h3", {}, "Timeline"),
  timeline(call),
];

function stateOfPod(pod) {
  if (pod.is_terminating) return "terminating";
  if (pod.is_draining) return "draining";
  if (pod.is_ready === false) return "not_ready";
  if (pod.is_quarantined) return "quarantined";
  return knownPod(pod.pod_name)?.state ?? (pod.calls.length ? "busy" : "available");
}

function podFacts(pod) {
  const { letter, label, state } = podState(stateOfPod(pod));
  const cap = knownPod(pod.pod_name)?.cap;
  const mark = el("span", { class: "tile-letter", "aria-hidden": "true" }, letter);
  return [
    ["State", el("span", { class: "pod-state", "data-state": state }, mark, ` ${label}`)],
    ["Pool", pod.tier || "none"],
    ["Address", pod.address],
    ["Calls", cap ? `${pod.calls.length} of ${cap}` : String(pod.calls.length)],
    ["Draining until", untilNode(pod.draining_until)],
    ["Quarantined until", untilNode(pod.quarantined_until)],
    ["Ready", pod.is_ready === false ? "no" : null],
    ["At risk", pod.is_at_risk ? "yes: its node is cordoned, or its eviction is announced" : null],
  ];
}

function podCalls(calls) {
  if (!calls.length) return el("p", { class: "soft" }, "No calls.");
  return el(
    "ul",
    { class: "pod-calls" },
    ...calls.map((call) =>
      el(
        "li",
        {},
        el("a", { href: callLink(call.call_sid) }, call.call_sid),
        " for ",
        liveTime("age", call.allocated_at),
        ", ",
        liveTime("lease", call.lease_expires_at),
      ),
    ),
  );
}

function podEvents(events) {
  if (!events.length) return el("p", { class: "soft" }, "No events.");
  return el(
    "ol",
    { class: "timeline" },
    ...events.map((event) =>
      el(
        "li",
        { "data-tone": eventTone(event) },
        el("time", {}, formatTime(event.at)),
        el("span", {}, ...partsToNodes(eventSentence(event))),
      ),
    ),
  );
}

function podBody({ pod, events }) {
  if (!pod) {
    return [
      el("p", { class: "soft" }, "This pod was removed. Its events are still available."),
      el("h3", {}, "Events, newest first"),
      podEvents(events),
    ];
  }
  return [
    factList(podFacts(pod)),
    el("h3", {}, "Calls"),
    podCalls(pod.calls),
    el("h3", {}, "Events, newest first"),
    podEvents(events),
  ];
}

// The pod is shown even if its events cannot be loaded.
const eventsOf = (name) =>
  request("GET", `/events?pod=${encodeURIComponent(name)}&limit=50`).then(
    ({ events }) => events,
    () => [],
  );

const LOADERS = {
  // The 404 of an ended call carries its events.
  call: (sid) =>
    request("GET", `/calls/${encodeURIComponent(sid)}`).catch((error) => {
      if (error.details?.events) return error.details;
      throw error;
    }),
  pod: async (name) => {
    const events = await eventsOf(name);
    // A removed pod may still have events.
    const pod = await request("GET", `/pod/${encodeURIComponent(name)}`).catch((error) => {
      if (error.status === 404 && events.length) return null;
      throw error;
    });
    return { pod, events };
  },
};

async function run(action) {
  const target = current;
  const result = await confirmChange(action);
  if (!result || current !== target) return;
  showText(byId("detail-note"), action.done(result));
  onChange();
  load(target);
}

// Restores the focus of a link or button that was rendered again.
function keepFocus(dialog, render) {
  const before = dialog.contains(document.activeElement) ? document.activeElement : null;
  const [href, text] = [before?.getAttribute("href"), before?.textContent];
  render();
  if (!before || before.isConnected) return;
  const same = [...dialog.querySelectorAll("a, button")].find(
    (node) => node.getAttribute("href") === href && node.textContent === text,
  );
  (same ?? byId("detail-close")).focus();
}

function show(target, data) {
  // Rendered again only if the data changed; times update by themselves.
  const text = JSON.stringify([data, isAdmin()], withoutFigures);
  if (target.shown !== text) render(target, data, text);
  if (data.stream?.figures) showFigures(data.stream.figures);
}

function render(target, data, text) {
  target.shown = text;
  const body = target.kind === "call" ? callBody(data) : podBody(data);
  keepFocus(byId("detail"), () => {
    byId("detail-body").replaceChildren(...body);
    const isRemoved = target.kind === "pod" && !data.pod;
    const buttons = isRemoved ? [] : actionButtons(target.kind, data, run);
    byId("detail-actions").replaceChildren(...buttons);
  });
}

function describeError(target, error) {
  if (error.status !== 404) return error.message;
  return `${target.name}: ${error.message}`;
}

async function load(target) {
  clearTimeout(timer);
  try {
    const data = await LOADERS[target.kind](target.name);
    if (current !== target) return;
    show(target, data);
    showText(byId("detail-error"), "");
  } catch (error) {
    if (current !== target) return;
    showText(byId("detail-error"), describeError(target, error));
    if (!target.shown) byId("detail-body").replaceChildren();
    byId("detail-actions").replaceChildren();
    target.shown = target.shown && "outdated";
  }
  timer = setTimeout(
    () => (document.visibilityState === "visible" ? load(target) : loadWhenVisible(target)),
    REFRESH_INTERVAL,
  );
}

function loadWhenVisible(target) {
  document.addEventListener("visibilitychange", () => current === target && load(target), {
    once: true,
  });
}

function open(kind, name) {
  current = { kind, name, shown: "" };
  setText(byId("detail-title"), kind === "call" ? `Call ${name}` : `Pod ${name}`);
  showText(byId("detail-error"), "");
  showText(byId("detail-note"), "");
  byId("detail-body").replaceChildren(el("p", { class: "soft" }, "Loading…"));
  byId("detail-actions").replaceChildren();
  if (!byId("detail").open) byId("detail").showModal();
  load(current);
}

function parseHash() {
  const match = /^#(call|pod)\/(.+)$/.exec(location.hash);
  if (!match) return null;
  try {
    return { kind: match[1], name: decodeURIComponent(match[2]) };
  } catch {
    return null;
  }
}

/** Opens or closes the dialog according to the URL. */
export function openFromHash() {
  const wanted = parseHash();
  if (wanted) open(wanted.kind, wanted.name);
  else if (byId("detail").open) byId("detail").close();
}

// Clicks on the padding are inside the dialog; clicks on the backdrop are outside.
function isOutside(dialog, { clientX, clientY }) {
  const { left, right, top, bottom } = dialog.getBoundingClientRect();
  return clientX < left || clientX > right || clientY < top || clientY > bottom;
}

/** Calls `changed` after an action in the dialog. */
export function startDetail(changed) {
  onChange = changed;
  const dialog = byId("detail");
  byId("detail-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener(
    "click",
    (event) => event.target === dialog && isOutside(dialog, event) && dialog.close(),
  );
  dialog.addEventListener("close", () => {
    current = null;
    clearTimeout(timer);
    if (parseHash()) history.replaceState(null, "", location.pathname + location.search);
  });
  window.addEventListener("hashchange", openFromHash);
}
