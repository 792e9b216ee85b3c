// Pods as tiles, grouped by pool. Only tiles of changed pods are updated.

import { byId, el, keyed, setAttribute, setText } from "./dom.js";
import { storeNow } from "./time.js";
import { STATES, formatNumber, plural, podState, formatShortDuration } from "./format.js";

// Number of pods from which tiles are small and have no names.
const DENSE_LAYOUT_PODS = 150;
// Steps of a lease bar; few steps mean few updates.
const BAR_STEPS = 20;
// Tiles rendered at a time; the page stays responsive in between.
const BATCH_SIZE = 200;

const collator = new Intl.Collator("en", { numeric: true });
const byName = (a, b) => collator.compare(a, b);

const tiles = new Map();
const groups = new Map();
// Received pods that are not rendered yet, by name.
const pending = new Map();
let poolOrder = [];
// The longest lease seen; full length of the lease bars, because messages do not contain LEASE_TTL.
let maxLease = 1;

export const knownPod = (name) => tiles.get(name)?.pod;

/** Up to `limit` pod names and call ids that contain a text. */
export function namesLike(text, limit = 8) {
  const wanted = text.toLowerCase();
  const found = [];
  for (const { pod } of tiles.values()) {
    for (const name of [pod.pod_name, ...pod.calls.map((call) => call.call_sid)]) {
      if (name.toLowerCase().includes(wanted)) found.push(name);
      if (found.length === limit) return found;
    }
  }
  return found;
}

function makeTile(pod) {
  const letter = el("span", { class: "tile-letter", "aria-hidden": "true" });
  const name = el("span", { class: "tile-name" }, el("bdi", {}, pod.pod_name));
  const load = el("span", { class: "tile-load" });
  const left = el("span", { class: "tile-left" });
  const bar = el("span", { class: "tile-lease", "aria-hidden": "true" });
  const button = el(
    "button",
    { type: "button", class: "tile", tabindex: "-1", "data-pod": pod.pod_name },
    letter,
    " ",
    name,
    " ",
    load,
    " ",
    left,
    bar,
  );
  const tile = { pod, element: button, letter, load, left, bar, step: -1, tier: null };
  visibility.observe(button);
  // Titles are set on demand: they list calls, of which there may be thousands.
  button.addEventListener("pointerenter", () => showTitle(tile));
  return tile;
}

// Only tiles in the viewport update their lease every second; others when they enter it.
const visible = new Set();
const visibility = new IntersectionObserver((entries) => {
  const now = storeNow();
  for (const { target, isIntersecting } of entries) {
    const tile = tiles.get(target.dataset.pod);
    // The tile may have been removed or replaced.
    if (tile?.element !== target) continue;
    if (isIntersecting) {
      visible.add(tile);
      showLease(tile, now);
    } else {
      visible.delete(tile);
    }
  }
});

function showTitle({ pod, element }) {
  const calls = pod.calls.slice(0, 10).map(({ call_sid, lease_expires_at }) => {
    const until = new Date(lease_expires_at * 1000).toLocaleTimeString("en", { hour12: false });
    return `${call_sid}, lease until ${until}`;
  });
  setAttribute(element, "title", [element.getAttribute("aria-label"), ...calls].join("\n"));
}

function firstLeaseEnd(pod) {
  let end = Infinity;
  for (const call of pod.calls) if (call.lease_expires_at < end) end = call.lease_expires_at;
  return end;
}

function showTile(tile, now) {
  const { pod } = tile;
  const { state, letter, label } = podState(pod.state);
  const load = `${pod.calls.length}/${pod.cap}`;
  setAttribute(tile.element, "data-state", state);
  setAttribute(tile.letter, "data-letter", letter);
  setText(tile.load, load);
  tile.label = label;
  tile.leaseEnd = firstLeaseEnd(pod);
  showLease(tile, now);
  showLabel(tile);
}

// Accessible name of a tile: its visible text in the same order, and the state in words.
function showLabel({ element, pod, load, left, label }) {
  const lease = left.textContent && `${left.textContent} of its lease left, `;
  setAttribute(element, "aria-label", `${pod.pod_name} ${load.textContent} ${lease}${label}`);
}

function showLease(tile, now) {
  const hasLease = tile.leaseEnd !== Infinity;
  const left = hasLease ? Math.max(0, tile.leaseEnd - now) : 0;
  setText(tile.left, hasLease ? formatShortDuration(left) : "");
  // A screen reader would announce each change of the focused tile's name.
  if (tile.element !== document.activeElement) showLabel(tile);
  const step = Math.ceil(Math.min(1, left / maxLease) * BAR_STEPS);
  if (step === tile.step) return;
  tile.step = step;
  tile.bar.style.setProperty("--left", step / BAR_STEPS);
  tile.element.classList.toggle("low", hasLease && step <= 2);
}

function groupOf(tier) {
  let group = groups.get(tier);
  if (group) return group;
  const title = el("h3", {}, tier || "no pool");
  const size = el("span", { class: "soft small" });
  const grid = el("div", {
    class: "tiles",
    role: "group",
    "aria-label": `Pods of ${tier || "no pool"}`,
    "aria-describedby": "pods-help",
  });
  const element = el(
    "details",
    { class: "pod-group", open: true },
    el("summary", {}, title, " ", size),
    grid,
  );
  group = { element, grid, size, names: new Set(), isDirty: true };
  groups.set(tier, group);
  return group;
}

function assignGroup(tile) {
  const tier = tile.pod.tier ?? "";
  if (tile.tier === tier) return;
  leaveGroup(tile);
  tile.tier = tier;
  const group = groupOf(tier);
  group.names.add(tile.pod.pod_name);
  group.isDirty = true;
}

function leaveGroup(tile) {
  const group = groups.get(tile.tier);
  if (!group) return;
  group.names.delete(tile.pod.pod_name);
  group.isDirty = true;
}

function remove(name) {
  pending.delete(name);
  const tile = tiles.get(name);
  if (!tile) return;
  leaveGroup(tile);
  visibility.unobserve(tile.element);
  visible.delete(tile);
  tile.element.remove();
  tiles.delete(name);
}

/** Handles a message with all pods, or with changed and removed pods. */
export function updatePods(message) {
  const now = storeNow();
  if (message.is_full) {
    maxLease = 1;
    const names = new Set(message.pods.map((pod) => pod.pod_name));
    pending.clear();
    for (const name of [...tiles.keys()]) if (!names.has(name)) remove(name);
  }
  for (const name of message.gone ?? []) remove(name);
  for (const pod of message.pods) {
    for (const call of pod.calls) maxLease = Math.max(maxLease, call.lease_expires_at - now);
  }
  for (const pod of message.pods) pending.set(pod.pod_name, pod);
  renderPending();
}

let timer = null;

function renderPending() {
  clearTimeout(timer);
  const now = storeNow();
  let left = BATCH_SIZE;
  for (const [name, pod] of pending) {
    if (left-- === 0) break;
    pending.delete(name);
    let tile = tiles.get(name);
    if (!tile) tiles.set(name, (tile = makeTile(pod)));
    tile.pod = pod;
    showTile(tile, now);
    assignGroup(tile);
  }
  arrangeAll();
  showLegend();
  if (pending.size) timer = setTimeout(renderPending);
}

/** Orders the groups like the pools. */
export function orderPools(keys) {
  if (keys.join() === poolOrder.join()) return;
  poolOrder = keys;
  arrangeGroups();
}

function arrangeGroups() {
  const rank = (tier) =>
    poolOrder.includes(tier) ? poolOrder.indexOf(tier) : poolOrder.length + (tier === "");
  const order = [...groups.keys()].sort((a, b) => rank(a) - rank(b) || byName(a, b));
  keyed(byId("pods"), groups, order, groupOf);
}

function arrangeAll() {
  let isChanged = false;
  for (const [tier, group] of groups) {
    if (!group.isDirty) continue;
    group.isDirty = false;
    if (group.names.size === 0) {
      group.element.remove();
      groups.delete(tier);
    } else {
      arrangeTiles(group);
    }
    isChanged = true;
  }
  if (!isChanged) return;
  byId("pods").classList.toggle("dense", tiles.size + pending.size >= DENSE_LAYOUT_PODS);
  arrangeGroups();
}

function arrangeTiles(group) {
  let at = group.grid.firstElementChild;
  let longest = 3;
  for (const name of [...group.names].sort(byName)) {
    const { element, pod } = tiles.get(name);
    longest = Math.max(longest, `${pod.cap}/${pod.cap}`.length);
    if (element === at) at = at.nextElementSibling;
    else group.grid.insertBefore(element, at);
  }
  // Small tiles fit the longest load text.
  group.grid.style.setProperty("--longest", longest);
  setText(group.size, plural(group.names.size, "pod"));
  if (!group.grid.querySelector('[tabindex="0"]')) group.grid.firstElementChild.tabIndex = 0;
}

function showLegend() {
  const counts = new Map();
  for (const { pod } of tiles.values()) counts.set(pod.state, (counts.get(pod.state) ?? 0) + 1);
  for (const item of legend) setText(item.number, formatNumber(counts.get(item.state)));
}

let legend = [];

function makeLegend() {
  legend = STATES.map(({ state, letter, label }) => {
    const number = el("strong", {}, "0");
    const mark = el("span", { class: "tile-letter", "aria-hidden": "true" }, letter);
    byId("legend").append(el("li", { "data-state": state }, mark, ` ${label} `, number));
    return { state, number };
  });
}

/** Updates the remaining lease times; called every second. */
export function tickLeases(now) {
  for (const tile of visible) showLease(tile, now);
}

// Roving tabindex: Tab reaches one tile of each pool, arrow keys the others.
function focusTile(from, to) {
  if (!to) return;
  from.tabIndex = -1;
  to.tabIndex = 0;
  to.focus();
}

function tileBelow(tile, direction) {
  const { offsetLeft, offsetTop } = tile;
  let next = tile;
  while ((next = direction > 0 ? next.nextElementSibling : next.previousElementSibling)) {
    if (next.offsetLeft === offsetLeft && next.offsetTop !== offsetTop) return next;
  }
  return null;
}

const MOVES = {
  ArrowRight: (tile) => tile.nextElementSibling,
  ArrowLeft: (tile) => tile.previousElementSibling,
  ArrowDown: (tile) => tileBelow(tile, 1),
  ArrowUp: (tile) => tileBelow(tile, -1),
  Home: (tile) => tile.parentElement.firstElementChild,
  End: (tile) => tile.parentElement.lastElementChild,
};

/** Calls `onOpen` with the pod name of a clicked tile. */
export function startPods(onOpen) {
  makeLegend();
  const area = byId("pods");
  area.addEventListener("click", (event) => {
    const tile = event.target.closest(".tile");
    if (tile) onOpen(tile.dataset.pod);
  });
  area.addEventListener("focusin", (event) => {
    const tile = event.target.closest(".tile");
    if (!tile) return;
    showTile(tiles.get(tile.dataset.pod), storeNow());
    if (tile.tabIndex === 0) return;
    const before = tile.parentElement.querySelector('[tabindex="0"]');
    if (before) before.tabIndex = -1;
    tile.tabIndex = 0;
  });
  area.addEventListener("keydown", (event) => {
    const tile = event.target.closest(".tile");
    if (!tile || !MOVES[event.key] || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    focusTile(tile, MOVES[event.key](tile));
  });
}
