// The time of the store, and texts on the page that go on with it.

import { el, setText } from "./dom.js";
import { span } from "./words.js";

let ahead = 0;

/** Takes the store's clock from a message: the reader's own may be wrong. */
export function setStoreTime(milliseconds) {
  ahead = milliseconds - Date.now();
}

/** The time of the store, in seconds. */
export const storeNow = () => (Date.now() + ahead) / 1000;

// Below this a lease is worth a look.
const LOW = 10;

function write(element) {
  const { kind, at } = element.dataset;
  const seconds = kind === "age" ? storeNow() - Number(at) : Number(at) - storeNow();
  setText(element, kind === "left" && seconds < 0 ? "over" : span(seconds));
  if (kind === "left") element.classList.toggle("low", seconds < LOW);
}

/** A text that says how old something is (`age`) or how long it has (`left`), kept true by `tickTimes`. */
export function liveTime(kind, at) {
  if (!Number.isFinite(at)) return "–";
  const element = el("span", { class: "live-time", "data-kind": kind, "data-at": at });
  write(element);
  return element;
}

export function tickTimes() {
  document.querySelectorAll(".live-time").forEach(write);
}
