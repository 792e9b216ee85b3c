// Actions of an admin on a pod or a call. Each needs a confirmation that describes its effect.

import { isAdmin } from "./access.js";
import { el } from "./dom.js";
import { request } from "./api.js";
import { formatTime, formatRoundDuration } from "./format.js";

let drainTtl = null;

/** Sets the duration of a drain in seconds. */
export function setDrainTtl(seconds) {
  drainTtl = seconds ?? null;
}

function describeCalls(calls) {
  if (calls === 0) return "It has no calls now.";
  return calls === 1 ? "Its call continues." : `Its ${calls} calls continue.`;
}

function describeDrain(pod) {
  const time = drainTtl
    ? `for ${formatRoundDuration(drainTtl)}`
    : "for the time set by DRAINING_TTL (default 6 min)";
  return `${pod.pod_name} gets no new calls ${time}. ${describeCalls(pod.calls.length)}`;
}

function describeUndrain(pod) {
  if (pod.is_terminating) return `${pod.pod_name} is terminating and still gets no new calls.`;
  const quarantine = pod.is_quarantined ? " This also ends its quarantine." : "";
  return `${pod.pod_name} gets new calls immediately.${quarantine}`;
}

function describeRelease(call, pod, stream) {
  if (!pod) return [`${call} is waiting and leaves the queue.`];
  if (stream) {
    return [
      `The gateway closes both sides of the stream of ${call}.`,
      `The slot on ${pod} is free when the agent has closed its side, too.`,
    ];
  }
  return [
    `The slot of ${call} on ${pod} is freed and can be allocated to another call immediately.`,
    "The router does not hang up: if the call is still active, it continues without a lease.",
  ];
}

const drain = (pod) => ({
  title: `Drain ${pod.pod_name}?`,
  sentences: [describeDrain(pod)],
  action: "Drain",
  send: () => request("POST", "/drain", { pod_name: pod.pod_name }),
  done: ({ draining_until: until }) =>
    `${pod.pod_name} gets no new calls${until ? ` until ${formatTime(until * 1000)}` : ""}.`,
});

const undrain = (pod) => ({
  title: `Undrain ${pod.pod_name}?`,
  sentences: [describeUndrain(pod)],
  action: "Undrain",
  send: () => request("POST", "/undrain", { pod_name: pod.pod_name }),
  done: () => `${pod.pod_name} is no longer draining.`,
});

// The pod is sent with the request: a call that has moved to another pod must not be released.
const release = ({ call_sid, pod_name, stream }) => ({
  title: `Release ${call_sid}?`,
  sentences: describeRelease(call_sid, pod_name, stream),
  action: "Release",
  isDangerous: true,
  send: () => request("POST", "/release", pod_name ? { call_sid, pod_name } : { call_sid }),
  done: ({ ending }) =>
    ending ? `${call_sid} is ending: its stream is being closed.` : `${call_sid} is released.`,
});

function button(text, action, run, kind = null) {
  const element = el("button", { type: "button", class: kind }, text);
  element.addEventListener("click", () => run(action()));
  return element;
}

/** Buttons for a call or a pod; `run` gets the action of the pressed button. */
export function actionButtons(kind, data, run) {
  if (!isAdmin()) return [];
  if (kind === "call") {
    const hasEnded = !["live", "waiting"].includes(data.state) || data.stream?.is_ending;
    return hasEnded ? [] : [button("Release…", () => release(data), run, "danger")];
  }
  const { pod } = data;
  const canUndrain = Number.isFinite(pod.draining_until) || pod.is_quarantined;
  const buttons = [button("Drain…", () => drain(pod), run)];
  if (canUndrain) buttons.push(button("Undrain…", () => undrain(pod), run));
  return buttons;
}
