// The feed of events, newest on top. However many come, few rows are made, and not often.

import { byId, el, partsToNodes, setText } from "./dom.js";
import { clock, count, eventParts, eventTone } from "./words.js";

const MOST_ROWS = 200;
const SHOW_EVERY = 300;

// Rows to be shown, oldest first, and how many were left out before them.
let pending = [];
let leftOut = 0;
// Ids of the newest events: after a break the router may tell some of them again.
let recent = [];
let since = 0;
let timer = null;
let isPaused = false;
let isPointedAt = false;
let isOff = false;

const isHeld = () => isPaused || isPointedAt;

function eventRow(event) {
  const at = el("time", { datetime: new Date(event.at).toISOString() }, clock(event.at));
  const text = el("span", {}, ...partsToNodes(eventParts(event)));
  return el("li", { "data-tone": eventTone(event), title: event.event }, at, text);
}

const gapRow = (number) => el("li", { class: "gap" }, `… ${count(number)} more`);

function show() {
  timer = null;
  if (isHeld()) return showState();
  const feed = byId("feed");
  const rows = pending.map(eventRow).reverse();
  if (leftOut) rows.push(gapRow(leftOut));
  const reuse = MOST_ROWS - rows.length;
  while (feed.childElementCount > Math.max(0, reuse)) feed.lastElementChild.remove();
  feed.prepend(...rows);
  pending = [];
  leftOut = 0;
  since = 0;
  showState();
}

function showState() {
  const why = isPaused ? "paused" : "held while pointed at";
  setText(
    byId("feed-state"),
    isOff ? "off on this router" : !isHeld() ? "" : since ? `${why}, ${count(since)} new` : why,
  );
}

function schedule() {
  if (timer === null) timer = setTimeout(show, SHOW_EVERY);
}

function withoutRepeats(events) {
  const known = new Set(recent);
  const fresh = events.filter(({ id }) => !id || !known.has(id));
  recent = recent.concat(fresh.map(({ id }) => id)).slice(-2 * MOST_ROWS);
  return fresh;
}

export function addEvents({ events: told, skipped }) {
  const events = withoutRepeats(told);
  const all = pending.concat(events);
  const fits = MOST_ROWS - 1;
  leftOut += (skipped ?? 0) + Math.max(0, all.length - fits);
  pending = all.slice(-fits);
  since += events.length + (skipped ?? 0);
  schedule();
}

/** Tells that the router keeps no events, or does. */
export function showEventsOff(off) {
  if (off === isOff) return;
  isOff = off;
  byId("feed-pause").hidden = off;
  showState();
}

export function startFeed() {
  const button = byId("feed-pause");
  button.addEventListener("click", () => {
    isPaused = !isPaused;
    button.setAttribute("aria-pressed", String(isPaused));
    setText(button, isPaused ? "Go on" : "Pause");
    show();
  });
  // Rows that move away can't be clicked: they stay while a mouse or the keyboard is among them.
  const feed = byId("feed");
  const point = (pointed) => {
    if (isPointedAt === pointed) return;
    isPointedAt = pointed;
    if (pointed) showState();
    else schedule();
  };
  feed.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && point(true));
  feed.addEventListener("pointerleave", () =>
    point(feed.contains(document.activeElement) && document.activeElement !== feed),
  );
  feed.addEventListener("focusin", (event) => point(event.target !== feed));
  feed.addEventListener("focusout", () => point(feed.matches(":hover")));
}
