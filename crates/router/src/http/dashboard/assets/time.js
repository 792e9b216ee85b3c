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

function write(element) {
  const { kind, at } = element.dataset;
  const seconds = kind === "age" ? storeNow() - Number(at) : Number(at) - storeNow();
  setText(element, kind === "left" && seconds < 0 ? "expired" : formatDuration(seconds));
  if (kind === "left") element.classList.toggle("low", seconds < LOW_SECONDS);
}

/** A text with the age (`age`) or remaining time (`left`), updated by `tickTimes`. */
export function liveTime(kind, at) {
  if (!Number.isFinite(at)) return "–";
  const element = el("span", { class: "live-time", "data-kind": kind, "data-at": at });
  write(element);
  return element;
}

export function tickTimes() {
  document.querySelectorAll(".live-time").forEach(write);
}
