// The store's clock, and texts that follow it.

import { el, setText } from "./dom.js";
import { formatDuration } from "./format.js";

let offset = 0;

/** Sets the store's clock from a message; the browser's clock may be wrong. */
export function setStoreTime(milliseconds) {
  offset = milliseconds - Date.now();
}

/** The store's time in seconds. */
export const storeNow = () => (Date.now() + offset) / 1000;

// Remaining seconds below which a time is highlighted.
const LOW_SECONDS = 10;

// Texts by kind, from the seconds until the time; negative for a past one.
const TEXTS = {
  age: (seconds) => formatDuration(-seconds),
  left: (seconds) => (seconds < 0 ? "expired" : formatDuration(seconds)),
  due: (seconds) =>
    seconds < 0 ? `${formatDuration(-seconds)} ago` : `in ${formatDuration(seconds)}`,
  lease: (seconds) =>
    seconds < 0 ? "lease expired" : `lease expires in ${formatDuration(seconds)}`,
};

function write(element) {
  const { kind, at } = element.dataset;
  const seconds = Number(at) - storeNow();
  setText(element, TEXTS[kind](seconds));
  if (kind !== "age") element.classList.toggle("low", seconds < LOW_SECONDS);
}

/**
 * A text that `tickTimes` updates: an age (`age`), a remaining time (`left`), a deadline
 * (`due`: `in 5 s`), or the end of a lease (`lease`).
 */
export function liveTime(kind, at) {
  if (!Number.isFinite(at)) return "–";
  const element = el("span", { class: "live-time", "data-kind": kind, "data-at": at });
  write(element);
  return element;
}

export function tickTimes() {
  document.querySelectorAll(".live-time").forEach(write);
}
