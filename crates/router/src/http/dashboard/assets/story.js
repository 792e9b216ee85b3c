// The story of one call or one pod, in a dialog that has an address (`#call/CA1`, `#pod/gold-1`).

import { isAdmin } from "./access.js";
import { actionButtons } from "./actions.js";
import { confirmChange } from "./confirm.js";
import { byId, callLink, el, partsToNodes, podLink, setText, showText } from "./dom.js";
import { ask } from "./net.js";
import { knownPod } from "./pods.js";
import { liveTime } from "./time.js";
import {
  callSteps,
  clock,
  eventParts,
  eventTone,
  pathWords,
  podState,
  poolName,
  took,
  triedStep,
} from "./words.js";

const REFRESH = 2_000;

let current = null;
let timer = null;
let onChange = () => {};

// Facts are pairs of a name and a text or node; those without a value are left out.
function factList(facts) {
  const items = facts.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el(
    "dl",
    { class: "story-facts" },
    ...items.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}

const at = (seconds) => (Number.isFinite(seconds) ? clock(seconds * 1000) : null);
const podNode = (name) => (name ? el("a", { href: podLink(name) }, name) : null);

function sinceNode(seconds) {
  return Number.isFinite(seconds)
    ? el("span", {}, `${at(seconds)}, `, liveTime("age", seconds), " ago")
    : null;
}

function untilNode(seconds) {
  return Number.isFinite(seconds)
    ? el("span", {}, `${at(seconds)}, in `, liveTime("left", seconds))
    : null;
}

const CALL_STATES = { live: "live", waiting: "waiting", ended: "ended", refused: "refused" };

function callFacts(call) {
  const state = CALL_STATES[call.state] ?? (call.pod_name ? "live" : "waiting");
  const remark =
    call.is_confirmed === false && state === "live" ? ", its stream has not started yet" : "";
  const handed = call.is_waiting && call.pod_name ? ", handed over and not fetched yet" : "";
  return [
    ["State", state + (handed || remark)],
    ["Pod", podNode(call.pod_name)],
    ["Pool", poolName(call.source_pool)],
    ["Merchant", call.merchant_id],
    ["Given", sinceNode(call.allocated_at)],
    ["Lease ends", state === "live" ? untilNode(call.lease_expires_at) : null],
    ["Waits since", sinceNode(call.waiting_since)],
    ["Waits until", state === "waiting" ? untilNode(call.waiting_until) : null],
    ["Path", pathWords(call.tried, call.source_pool)],
    ["Attempt", call.attempt > 1 ? String(call.attempt) : null],
  ];
}

// Without events (they are off, or too old) what the call itself knows has to do.
function stepsWithoutEvents(call) {
  const steps = (call.tried ?? []).map((step) => [triedStep(step)]);
  if (call.pod_name) steps.push(["given ", { pod: call.pod_name }]);
  const when = Number.isFinite(call.allocated_at) ? call.allocated_at * 1000 : null;
  return steps.map((parts) => ({ when, parts, tone: "plain" }));
}

function timeline(call) {
  const events = call.events ?? [];
  const steps = events.length
    ? events.flatMap((event) =>
        callSteps(event).map((parts) => ({ when: event.at, parts, tone: eventTone(event) })),
      )
    : stepsWithoutEvents(call);
  if (!steps.length) return el("p", { class: "soft" }, "Nothing more is known of it.");
  const first = steps[0].when;
  return el(
    "ol",
    { class: "timeline" },
    ...steps.map(({ when, parts, tone }) => {
      const offset =
        when !== null && when > first
          ? el("span", { class: "soft small" }, ` +${took(when - first)}`)
          : null;
      return el(
        "li",
        { "data-tone": tone },
        el("time", {}, when === null ? "" : clock(when, events.length > 0)),
        el("span", {}, ...partsToNodes(parts), offset),
      );
    }),
  );
}

const callBody = (call) => [
  factList(callFacts(call)),
  el("h3", {}, "What happened"),
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
  const { letter, word, state } = podState(stateOfPod(pod));
  const cap = knownPod(pod.pod_name)?.cap;
  const mark = el("span", { class: "tile-letter", "aria-hidden": "true" }, letter);
  return [
    ["State", el("span", { class: "pod-state", "data-state": state }, mark, ` ${word}`)],
    ["Pool", pod.tier || "none"],
    ["Address", pod.address],
    ["Calls", cap ? `${pod.calls.length} of ${cap}` : String(pod.calls.length)],
    ["Gets no calls until", untilNode(pod.draining_until)],
    ["In quarantine until", untilNode(pod.quarantined_until)],
    ["Ready", pod.is_ready === false ? "no" : null],
  ];
}

function podCalls(calls) {
  if (!calls.length) return el("p", { class: "soft" }, "It has no calls.");
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
        ", lease left ",
        liveTime("left", call.lease_expires_at),
      ),
    ),
  );
}

function podEvents(events) {
  if (!events.length) return el("p", { class: "soft" }, "No events are known of it.");
  return el(
    "ol",
    { class: "timeline" },
    ...events.map((event) =>
      el(
        "li",
        { "data-tone": eventTone(event) },
        el("time", {}, clock(event.at)),
        el("span", {}, ...partsToNodes(eventParts(event))),
      ),
    ),
  );
}

function podBody({ pod, events }) {
  if (!pod) {
    return [
      el("p", { class: "soft" }, "It is gone; this is what happened to it."),
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

// A pod is worth showing when its events can't be had.
const eventsOf = (name) =>
  ask("GET", `/events?pod=${encodeURIComponent(name)}&limit=50`).then(
    (answer) => answer.events,
    () => [],
  );

const LOADERS = {
  // A call that is over is not found, and its story comes with that.
  call: (sid) =>
    ask("GET", `/calls/${encodeURIComponent(sid)}`).catch((error) => {
      if (error.details?.events) return error.details;
      throw error;
    }),
  pod: async (name) => {
    const events = await eventsOf(name);
    // One that is gone may still have a story.
    const pod = await ask("GET", `/pod/${encodeURIComponent(name)}`).catch((error) => {
      if (error.status === 404 && events.length) return null;
      throw error;
    });
    return { pod, events };
  },
};

async function change(question) {
  const asked = current;
  const answer = await confirmChange(question);
  if (!answer || current !== asked) return;
  showText(byId("story-note"), question.done(answer));
  onChange();
  load(asked);
}

// A link or button that had the focus has it again after it was made anew.
function keepFocus(dialog, render) {
  const before = dialog.contains(document.activeElement) ? document.activeElement : null;
  const [href, text] = [before?.getAttribute("href"), before?.textContent];
  render();
  if (!before || before.isConnected) return;
  const same = [...dialog.querySelectorAll("a, button")].find(
    (node) => node.getAttribute("href") === href && node.textContent === text,
  );
  (same ?? byId("story-close")).focus();
}

function show(asked, story) {
  // Shown again only if something is different; times go on by themselves.
  const text = JSON.stringify([story, isAdmin()]);
  if (asked.shown === text) return;
  asked.shown = text;
  const body = asked.kind === "call" ? callBody(story) : podBody(story);
  keepFocus(byId("story"), () => {
    byId("story-body").replaceChildren(...body);
    const isGone = asked.kind === "pod" && !story.pod;
    const buttons = isGone ? [] : actionButtons(asked.kind, story, change);
    byId("story-actions").replaceChildren(...buttons);
  });
}

function explain(asked, error) {
  if (error.status !== 404) return error.message;
  return asked.kind === "call"
    ? `No call ${asked.name} is known: ${error.message}.`
    : `No pod ${asked.name} is known: ${error.message}.`;
}

async function load(asked) {
  clearTimeout(timer);
  try {
    const story = await LOADERS[asked.kind](asked.name);
    if (current !== asked) return;
    show(asked, story);
    showText(byId("story-error"), "");
  } catch (error) {
    if (current !== asked) return;
    showText(byId("story-error"), explain(asked, error));
    if (!asked.shown) byId("story-body").replaceChildren();
    byId("story-actions").replaceChildren();
    asked.shown = asked.shown && "again";
  }
  timer = setTimeout(
    () => (document.visibilityState === "visible" ? load(asked) : waitForEyes(asked)),
    REFRESH,
  );
}

function waitForEyes(asked) {
  document.addEventListener("visibilitychange", () => current === asked && load(asked), {
    once: true,
  });
}

function open(kind, name) {
  current = { kind, name, shown: "" };
  setText(byId("story-title"), kind === "call" ? `Call ${name}` : `Pod ${name}`);
  showText(byId("story-error"), "");
  showText(byId("story-note"), "");
  byId("story-body").replaceChildren(el("p", { class: "soft" }, "Asking the router…"));
  byId("story-actions").replaceChildren();
  if (!byId("story").open) byId("story").showModal();
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

/** Opens or closes the dialog as the address says. */
export function followAddress() {
  const wanted = parseHash();
  if (wanted) open(wanted.kind, wanted.name);
  else if (byId("story").open) byId("story").close();
}

// The dialog's own padding is part of it; the backdrop is not.
function isBeside(dialog, { clientX, clientY }) {
  const { left, right, top, bottom } = dialog.getBoundingClientRect();
  return clientX < left || clientX > right || clientY < top || clientY > bottom;
}

/** Calls `changed` after a change that was made in the dialog. */
export function startStory(changed) {
  onChange = changed;
  const dialog = byId("story");
  byId("story-close").addEventListener("click", () => dialog.close());
  dialog.addEventListener(
    "click",
    (event) => event.target === dialog && isBeside(dialog, event) && dialog.close(),
  );
  dialog.addEventListener("close", () => {
    current = null;
    clearTimeout(timer);
    if (parseHash()) history.replaceState(null, "", location.pathname + location.search);
  });
  window.addEventListener("hashchange", followAddress);
}
