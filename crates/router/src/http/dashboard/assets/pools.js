// Pool cards, the facts in the header, and warnings.

import { byId, el, keyed, setAttribute, setText } from "./dom.js";
import { formatNumber, plural, poolKey, formatDuration } from "./format.js";

// Used and free are counted in calls, the others in pods.
const PARTS = [
  { key: "used", of: (pool) => pool.active_calls, shareOf: usedShare },
  { key: "free", of: (pool) => pool.free_slots, shareOf: (pool) => pool.free_slots },
  {
    key: "draining",
    of: (pool) => pool.draining,
    shareOf: (pool) => pool.draining * widthOf(pool),
  },
  {
    key: "not ready",
    of: (pool) => pool.not_ready,
    shareOf: (pool) => pool.not_ready * widthOf(pool),
  },
  {
    key: "quarantined",
    of: (pool) => pool.quarantined,
    shareOf: (pool) => pool.quarantined * widthOf(pool),
  },
];

// In the bar, a pod is as wide as its maximum number of calls.
function widthOf(pool) {
  return pool.type === "shared" ? (pool.max_concurrent ?? 1) : 1;
}

// Calls on draining pods are counted as used, but draining pods have their own part of the bar.
function usedShare(pool) {
  const inService = pool.assigned - pool.draining - pool.not_ready - pool.quarantined;
  return Math.max(0, inService * widthOf(pool) - pool.free_slots);
}

const cards = new Map();

function makeCard() {
  const name = el("h3");
  const kind = el("span", { class: "tag" });
  const bar = el("div", { class: "bar", role: "img" });
  const numbers = el("ul", { class: "numbers" });
  const parts = PARTS.map(({ key }) => {
    const segment = el("span", { "data-part": key });
    const number = el("strong");
    const item = el(
      "li",
      { "data-part": key },
      el("span", { class: "swatch", "aria-hidden": "true" }),
      number,
      ` ${key}`,
    );
    bar.append(segment);
    numbers.append(item);
    return { segment, number, item };
  });
  const size = el("span");
  const waiting = el("span", { class: "pool-waiting" });
  const foot = el("p", { class: "soft small pool-foot" }, size, waiting);
  const element = el(
    "li",
    { class: "card pool" },
    el("div", { class: "card-head" }, name, kind),
    bar,
    numbers,
    foot,
  );
  return { element, name, kind, bar, parts, size, waiting };
}

function describeKind(pool) {
  if (pool.type === "shared" && pool.max_concurrent)
    return `shared, ${plural(pool.max_concurrent, "call")} per pod`;
  return pool.type;
}

// Outstanding dials of diallers, the slots that are held for them, and the learned answer rate.
function describeDials({ dials, held, answer_rate }) {
  if (!dials) return "";
  const rate = `answer rate ${Math.round(100 * answer_rate)} %`;
  return `, ${plural(dials, "dial")} with ${formatNumber(held)} held, ${rate}`;
}

function showCard(card, pool) {
  setText(card.name, poolKey(pool));
  setText(card.kind, describeKind(pool));
  setAttribute(card.kind, "data-kind", pool.type);
  PARTS.forEach(({ of, shareOf }, index) => {
    const { segment, number, item } = card.parts[index];
    const value = of(pool) ?? 0;
    const share = shareOf(pool) || 0;
    segment.style.setProperty("--share", share);
    segment.hidden = share === 0;
    setText(number, formatNumber(value));
    item.classList.toggle("zero", value === 0);
  });
  setAttribute(
    card.bar,
    "aria-label",
    PARTS.map(({ key, of }) => `${formatNumber(of(pool))} ${key}`).join(", "),
  );
  setText(card.size, `${plural(pool.assigned, "pod")}, target ${formatNumber(pool.target)}`);
  setText(card.waiting, `${formatNumber(pool.waiting)} waiting${describeDials(pool)}`);
  card.element.classList.toggle("below", pool.assigned < pool.target);
  card.waiting.classList.toggle("some", pool.waiting > 0);
}

export function showPools(pools) {
  const known = new Map(pools.map((pool) => [poolKey(pool), pool]));
  keyed(byId("pools"), cards, [...known.keys()], makeCard);
  for (const [key, pool] of known) showCard(cards.get(key), pool);
  setText(byId("pools-none"), "No pools.");
  byId("pools-none").hidden = pools.length > 0;
}

function showFact(id, text, isBad = false) {
  setText(byId(id), text);
  byId(id).classList.toggle("bad", isBad);
}

const total = (number) => (Number.isFinite(number) ? formatNumber(number) : "–");

function describeLeader({ is_leader, name, epoch }, store, cluster) {
  if (!is_leader) return name ?? "unknown";
  // Without a cluster there is no Lease, and every router acts as leader.
  if (!cluster.is_used && store.kind === "redis") return "every router";
  return epoch ? `this router, epoch ${epoch}` : "this router";
}

export function showHeader({ at, router, store, leader, cluster, active_calls, waiting, streams }) {
  setText(byId("total-calls"), total(active_calls));
  setText(byId("total-waiting"), total(waiting));
  byId("total-waiting").classList.toggle("some", waiting > 0);
  // Without a media gateway there is no number.
  setText(byId("total-streams"), total(streams));
  byId("streams").hidden = !Number.isFinite(streams);
  setText(
    byId("router"),
    `${router.name} ${router.version}, up ${formatDuration(at / 1000 - router.started_at)}`,
  );
  const kind = store.kind === "redis" ? "Redis" : store.kind;
  const outage = store.reason ? `down (${store.reason})` : "down";
  showFact("fact-store", `${kind}, ${store.is_up ? "up" : outage}`, !store.is_up);
  showFact("fact-leader", describeLeader(leader, store, cluster));
  showFact(
    "fact-cluster",
    !cluster.is_used ? "none" : cluster.is_connected ? "connected" : "disconnected",
    cluster.is_used && !cluster.is_connected,
  );
}

const warnings = new Map();

// The text of a warning contains a running duration. Screen readers announce a warning once.
const withoutNumbers = (text) => text.replace(/\d+/g, "#");

function makeWarning() {
  const mark = el("span", { class: "mark", "aria-hidden": "true" });
  const level = el("strong");
  const text = el("span");
  return { element: el("li", {}, mark, level, " ", text), mark, level, text };
}

export function showWarnings(list) {
  const known = new Map(list.map((warning) => [withoutNumbers(warning.text), warning]));
  const fresh = [...known.keys()].filter((key) => !warnings.has(key));
  keyed(byId("warnings"), warnings, [...known.keys()], makeWarning);
  for (const [key, { level, text }] of known) {
    const item = warnings.get(key);
    setAttribute(item.element, "data-level", level);
    setText(item.mark, level === "error" ? "✕" : "!");
    setText(item.level, level === "error" ? "Error" : "Warning");
    setText(item.text, text);
  }
  byId("warnings-none").hidden = list.length > 0;
  if (fresh.length)
    setText(byId("warnings-announcement"), fresh.map((key) => known.get(key).text).join(". "));
  else if (!list.length) setText(byId("warnings-announcement"), "");
}
