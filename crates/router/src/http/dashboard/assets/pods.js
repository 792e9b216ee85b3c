// Every pod as a tile, grouped by pool. Only tiles of pods that changed are touched.

import { byId, el, keyed, setAttribute, setText } from "./dom.js";
import { storeNow } from "./time.js";
import { STATES, count, plural, podState, shortSpan } from "./words.js";

// Beyond so many pods tiles have no names, so that all are seen at a glance.
const DENSE_FROM = 150;
// Lease bars move in so many steps: most tiles need no change in most seconds.
const BAR_STEPS = 20;
// So many tiles are made or changed in one go; the page can draw and be used in between.
const AT_ONCE = 200;

const collator = new Intl.Collator("en", { numeric: true });
const byName = (a, b) => collator.compare(a, b);

const tiles = new Map();
const groups = new Map();
// Pods that were told of and are not shown yet, by name.
const queue = new Map();
let poolOrder = [];
// The longest lease seen is taken for a whole one: no message says how long leases are.
let wholeLease = 1;

export const knownPod = (name) => tiles.get(name)?.pod;

/** Names of pods and ids of calls on them that contain a text, a few of them. */
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
  inView.observe(button);
  // (there are thousands of calls, and one tile is looked at)
  button.addEventListener("pointerenter", () => showTitle(tile));
  return tile;
}

// Leases run down in the tiles that are in view; the others are told when they come into it.
const seen = new Set();
const inView = new IntersectionObserver((entries) => {
  const now = storeNow();
  for (const { target, isIntersecting } of entries) {
    const tile = tiles.get(target.dataset.pod);
    // (it may be gone, or another of its name)
    if (tile?.element !== target) continue;
    if (isIntersecting) {
      seen.add(tile);
      showLease(tile, now);
    } else {
      seen.delete(tile);
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
  const { state, letter, word } = podState(pod.state);
  const load = `${pod.calls.length}/${pod.cap}`;
  setAttribute(tile.element, "data-state", state);
  setAttribute(tile.letter, "data-letter", letter);
  setText(tile.load, load);
  tile.word = word;
  tile.leaseEnd = firstLeaseEnd(pod);
  showLease(tile, now);
  showLabel(tile);
}

// What is said aloud of a tile: what can be read there, in that order, and its state as a word.
function showLabel({ element, pod, load, left, word }) {
  const lease = left.textContent && `${left.textContent} of its lease left, `;
  setAttribute(element, "aria-label", `${pod.pod_name} ${load.textContent} ${lease}${word}`);
}

function showLease(tile, now) {
  const hasLease = tile.leaseEnd !== Infinity;
  const left = hasLease ? Math.max(0, tile.leaseEnd - now) : 0;
  setText(tile.left, hasLease ? shortSpan(left) : "");
  // A name that changes while its tile has the focus would be said anew every second.
  if (tile.element !== document.activeElement) showLabel(tile);
  const step = Math.ceil(Math.min(1, left / wholeLease) * BAR_STEPS);
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

function place(tile) {
  const tier = tile.pod.tier ?? "";
  if (tile.tier === tier) return;
  leave(tile);
  tile.tier = tier;
  const group = groupOf(tier);
  group.names.add(tile.pod.pod_name);
  group.isDirty = true;
}

function leave(tile) {
  const group = groups.get(tile.tier);
  if (!group) return;
  group.names.delete(tile.pod.pod_name);
  group.isDirty = true;
}

function remove(name) {
  queue.delete(name);
  const tile = tiles.get(name);
  if (!tile) return;
  leave(tile);
  inView.unobserve(tile.element);
  seen.delete(tile);
  tile.element.remove();
  tiles.delete(name);
}

/** Takes a message: all pods, or those that changed and those that are gone. */
export function updatePods(message) {
  const now = storeNow();
  if (message.is_full) {
    wholeLease = 1;
    const there = new Set(message.pods.map((pod) => pod.pod_name));
    queue.clear();
    for (const name of [...tiles.keys()]) if (!there.has(name)) remove(name);
  }
  for (const name of message.gone ?? []) remove(name);
  for (const pod of message.pods) {
    for (const call of pod.calls) wholeLease = Math.max(wholeLease, call.lease_expires_at - now);
  }
  for (const pod of message.pods) queue.set(pod.pod_name, pod);
  showQueue();
}

let later = null;

function showQueue() {
  clearTimeout(later);
  const now = storeNow();
  let left = AT_ONCE;
  for (const [name, pod] of queue) {
    if (left-- === 0) break;
    queue.delete(name);
    let tile = tiles.get(name);
    if (!tile) tiles.set(name, (tile = makeTile(pod)));
    tile.pod = pod;
    showTile(tile, now);
    place(tile);
  }
  arrange();
  showLegend();
  if (queue.size) later = setTimeout(showQueue);
}

/** The order of the groups is that of the pools. */
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

function arrange() {
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
  byId("pods").classList.toggle("dense", tiles.size + queue.size >= DENSE_FROM);
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
  // Small tiles are as wide as the longest number of calls needs.
  group.grid.style.setProperty("--longest", longest);
  setText(group.size, plural(group.names.size, "pod"));
  if (!group.grid.querySelector('[tabindex="0"]')) group.grid.firstElementChild.tabIndex = 0;
}

function showLegend() {
  const counts = new Map();
  for (const { pod } of tiles.values()) counts.set(pod.state, (counts.get(pod.state) ?? 0) + 1);
  for (const item of legend) setText(item.number, count(counts.get(item.state)));
}

let legend = [];

function makeLegend() {
  legend = STATES.map(({ state, letter, word }) => {
    const number = el("strong", {}, "0");
    const mark = el("span", { class: "tile-letter", "aria-hidden": "true" }, letter);
    byId("legend").append(el("li", { "data-state": state }, mark, ` ${word} `, number));
    return { state, number };
  });
}

/** Once a second: leases run down without a word from the router. */
export function tickLeases(now) {
  for (const tile of seen) showLease(tile, now);
}

// Tab reaches one tile of a pool, arrows the others: a thousand stops would be none.
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

/** Calls `onOpen` with the name of a pod whose tile is chosen. */
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
