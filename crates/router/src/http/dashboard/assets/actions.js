// What an admin can do with a pod or a call. Each asks first, and says what will happen.

import { isAdmin } from "./access.js";
import { el } from "./dom.js";
import { ask } from "./net.js";
import { clock, roundSpan } from "./words.js";

let drainTime = null;

/** How long a drain lasts, in seconds, if the router says so. */
export function setDrainTime(seconds) {
  drainTime = seconds ?? null;
}

function goOn(calls) {
  if (calls === 0) return "It has no calls now.";
  return calls === 1 ? "Its call goes on." : `Its ${calls} calls go on.`;
}

function drainWords(pod) {
  const time = drainTime
    ? `for ${roundSpan(drainTime)}`
    : "for as long as DRAINING_TTL says (6 min if it is not set)";
  return `${pod.pod_name} gets no new calls ${time}. ${goOn(pod.calls.length)}`;
}

function undrainWords(pod) {
  if (pod.is_terminating)
    return `${pod.pod_name} is terminating: it gets no new calls all the same.`;
  const quarantine = pod.is_quarantined ? " It is taken out of quarantine." : "";
  return `${pod.pod_name} gets new calls again at once.${quarantine}`;
}

function releaseWords(call, pod) {
  if (!pod) return [`${call} waits, and loses its place.`];
  return [
    `${call} gives its place on ${pod} back; another call can have it at once.`,
    "The router does not hang up: if somebody still talks there, the call goes on without a lease.",
  ];
}

// Questions, and what is said when the router has done it.

const drain = (pod) => ({
  title: `Drain ${pod.pod_name}?`,
  sentences: [drainWords(pod)],
  action: "Drain",
  send: () => ask("POST", "/drain", { pod_name: pod.pod_name }),
  done: ({ draining_until: until }) =>
    `${pod.pod_name} gets no new calls${until ? ` until ${clock(until * 1000)}` : ""}.`,
});

const undrain = (pod) => ({
  title: `Undrain ${pod.pod_name}?`,
  sentences: [undrainWords(pod)],
  action: "Undrain",
  send: () => ask("POST", "/undrain", { pod_name: pod.pod_name }),
  done: () => `${pod.pod_name} is not drained any more.`,
});

// With its pod: a call that is on another one by now is not the one that was asked about.
const release = ({ call_sid, pod_name }) => ({
  title: `Release ${call_sid}?`,
  sentences: releaseWords(call_sid, pod_name),
  action: "Release",
  isDangerous: true,
  send: () => ask("POST", "/release", pod_name ? { call_sid, pod_name } : { call_sid }),
  done: () => `${call_sid} was released.`,
});

function button(text, question, change, kind = null) {
  const element = el("button", { type: "button", class: kind }, text);
  element.addEventListener("click", () => change(question()));
  return element;
}

/** The buttons for a call or a pod; `change` gets the question of the one that is pressed. */
export function actionButtons(kind, story, change) {
  if (!isAdmin()) return [];
  if (kind === "call") {
    const isOver = !["live", "waiting"].includes(story.state);
    return isOver ? [] : [button("Release…", () => release(story), change, "danger")];
  }
  const { pod } = story;
  const isHeldBack = Number.isFinite(pod.draining_until) || pod.is_quarantined;
  const buttons = [button("Drain…", () => drain(pod), change)];
  if (isHeldBack) buttons.push(button("Undrain…", () => undrain(pod), change));
  return buttons;
}
