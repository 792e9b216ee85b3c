// The feed of events, newest first. Rendering is throttled, and the number of rows is limited.

import { byId, el, partsToNodes, setText } from "./dom.js";
import { formatTime, formatNumber, eventSentence, eventTone } from "./format.js";

const MAX_ROWS = 200;
const RENDER_INTERVAL = 300;

// Events to be rendered, oldest first, and the number of skipped ones before them.
let pending = [];
let skippedCount = 0;
// Ids of the newest events: after a reconnect the router repeats some of them.
let recent = [];
let newCount = 0;
let timer = null;
let isPaused = false;
let isHovered = false;
let isOff = false;

const isHeld = () => isPaused || isHovered;

function eventRow(event) {
  const at = el("time", { datetime: new Date(event.at).toISOString() }, formatTime(event.at));
  const text = el("span", {}, ...partsToNodes(eventSentence(event)));
  return el("li", { "data-tone": eventTone(event), title: event.event }, at, text);
}

const gapRow = (number) => el("li", { class: "gap" }, `… ${formatNumber(number)} more`);

function show() {
  timer = null;
  if (isHeld()) return showState();
  const feed = byId("feed");
  const rows = pending.map(eventRow).reverse();
  if (skippedCount) rows.push(gapRow(skippedCount));
  const reuse = MAX_ROWS - rows.length;
  while (feed.childElementCount > Math.max(0, reuse)) feed.lastElementChild.remove();
  feed.prepend(...rows);
  pending = [];
  skippedCount = 0;
  newCount = 0;
  showState();
}

function showState() {
  const reason = isPaused ? "paused" : "paused while hovered";
  const text = newCount ? `${reason}, ${formatNumber(newCount)} new` : reason;
  setText(byId("feed-state"), isOff ? "disabled" : isHeld() ? text : "");
}

function schedule() {
  if (timer === null) timer = setTimeout(show, RENDER_INTERVAL);
}

function withoutRepeats(events) {
  const known = new Set(recent);
  const fresh = events.filter(({ id }) => !id || !known.has(id));
  recent = recent.concat(fresh.map(({ id }) => id)).slice(-2 * MAX_ROWS);
  return fresh;
}

export function addEvents({ events: received, skipped }) {
  const events = withoutRepeats(received);
  const all = pending.concat(events);
  const fits = MAX_ROWS - 1;
  skippedCount += (skipped ?? 0) + Math.max(0, all.length - fits);
  pending = all.slice(-fits);
  newCount += events.length + (skipped ?? 0);
  schedule();
}

/** Shows whether the router records events. */
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
    setText(button, isPaused ? "Resume" : "Pause");
    show();
  });
  // Rows stay in place while the pointer or the focus is on the feed, so that they can be clicked.
  const feed = byId("feed");
  const setHovered = (hovered) => {
    if (isHovered === hovered) return;
    isHovered = hovered;
    if (hovered) showState();
    else schedule();
  };
  feed.addEventListener(
    "pointerenter",
    (event) => event.pointerType === "mouse" && setHovered(true),
  );
  feed.addEventListener("pointerleave", () =>
    setHovered(feed.contains(document.activeElement) && document.activeElement !== feed),
  );
  feed.addEventListener("focusin", (event) => setHovered(event.target !== feed));
  feed.addEventListener("focusout", () => setHovered(feed.matches(":hover")));
}
