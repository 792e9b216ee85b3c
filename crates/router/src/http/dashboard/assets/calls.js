// The table of live or waiting calls, one page at a time. It refreshes while it is visible.

import { byId, callLink, el, keyed, podLink, setAttribute, setText, showText } from "./dom.js";
import { request } from "./api.js";
import { liveTime } from "./time.js";
import { formatPath, poolKey, poolName } from "./format.js";

const REFRESH_INTERVAL = 2_000;
const PAGE_SIZE = 50;
const TYPING_DELAY = 300;

const link = (href, text) => el("a", { href }, text);

const COLUMNS = {
  live: [
    ["Call", (call) => link(callLink(call.call_sid), call.call_sid), "id"],
    ["Pod", (call) => link(podLink(call.pod_name), call.pod_name), "id"],
    ["Pool", (call) => poolName(call.source_pool)],
    ["Merchant", (call) => call.merchant_id ?? "–"],
    ["Age", (call) => liveTime("age", call.allocated_at), "number"],
    ["Lease left", (call) => liveTime("left", call.lease_expires_at), "number"],
    ["Path", (call) => formatPath(call.tried, call.source_pool) + remarks(call)],
  ],
  waiting: [
    ["Call", (call) => link(callLink(call.call_sid), call.call_sid), "id"],
    ["Merchant", (call) => call.merchant_id ?? "–"],
    ["Waiting for", (call) => liveTime("age", call.waiting_since), "number"],
    ["Time left", (call) => liveTime("left", call.waiting_until), "number"],
    ["Skipped", (call) => formatPath(call.tried) || "–"],
  ],
};

function remarks(call) {
  const all = [];
  if (call.attempt > 1) all.push(`pod attempt ${call.attempt}`);
  if (call.stream?.is_ending) all.push("ending");
  if (call.is_waiting) all.push("hand-off not accepted yet");
  else if (call.is_confirmed === false) all.push("not connected yet");
  return all.length ? ` (${all.join(", ")})` : "";
}

const rows = new Map();
let shownState = null;
// Cursors of the pages up to the current one; the first page has none.
let cursors = [null];
let next = null;
let requestNumber = 0;
let isVisible = false;
let timer = null;

const filterOf = () => Object.fromEntries(new FormData(byId("calls-filter")));

function query() {
  const { state, pool, merchant, pod } = filterOf();
  const wanted = {
    limit: PAGE_SIZE,
    cursor: cursors.at(-1),
    state,
    pool,
    merchant: merchant.trim(),
    pod: pod.trim(),
  };
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(wanted)) if (value) parameters.set(name, value);
  return `/calls?${parameters}`;
}

function showHead(state) {
  if (state === shownState) return;
  shownState = state;
  rows.clear();
  byId("calls-rows").replaceChildren();
  const heads = COLUMNS[state].map(([title, , kind]) =>
    el("th", { role: "columnheader", scope: "col", class: kind ?? null }, title),
  );
  byId("calls-head").replaceChildren(...heads);
  setText(byId("calls-caption"), state === "live" ? "Live calls" : "Waiting calls");
}

function makeRow(columns) {
  const cells = columns.map(([title, , kind]) =>
    el("td", { role: "cell", class: kind ?? null, "data-title": title }),
  );
  return { element: el("tr", { role: "row" }, ...cells), cells, shown: "" };
}

function showRow(row, columns, call) {
  // Unchanged rows are not touched. They do not show the figures of a stream.
  const text = JSON.stringify(call, (key, value) => (key === "figures" ? null : value));
  if (row.shown === text) return;
  row.shown = text;
  columns.forEach(([, of], index) => {
    const value = of(call);
    const cell = row.cells[index];
    const old = cell.firstElementChild;
    if (typeof value === "string") setText(cell, value);
    // A link is updated in place, so that it keeps the focus.
    else if (old?.tagName === "A" && value.tagName === "A") {
      setAttribute(old, "href", value.getAttribute("href"));
      setText(old, value.textContent);
    } else cell.replaceChildren(value);
  });
}

function showCalls(state, calls) {
  showHead(state);
  const columns = COLUMNS[state];
  const known = new Map(calls.map((call) => [call.call_sid, call]));
  keyed(byId("calls-rows"), rows, [...known.keys()], () => makeRow(columns));
  for (const [sid, call] of known) showRow(rows.get(sid), columns, call);
  const { pool, merchant, pod } = filterOf();
  const which =
    pool || merchant || pod
      ? "No matching calls"
      : state === "live"
        ? "No live calls"
        : "No waiting calls";
  showText(
    byId("calls-none"),
    calls.length ? "" : `${which}${cursors.length > 1 ? " on this page" : ""}.`,
  );
  byId("calls-table").hidden = calls.length === 0;
}

function showPager() {
  const isOne = cursors.length === 1 && !next;
  byId("calls-previous").disabled = cursors.length === 1;
  byId("calls-next").disabled = !next;
  setText(byId("calls-page"), isOne ? "" : `Page ${cursors.length}`);
  byId("calls-previous").parentElement.hidden = isOne;
}

async function refresh() {
  clearTimeout(timer);
  const number = ++requestNumber;
  const { state } = filterOf();
  try {
    const page = await request("GET", query());
    // The filter or the page changed meanwhile: this response is outdated.
    if (number !== requestNumber) return;
    next = page.next ?? null;
    showCalls(state, page.calls);
    showText(byId("calls-error"), "");
  } catch (error) {
    if (number !== requestNumber) return;
    showText(byId("calls-error"), error.message);
    // After an invalid cursor the table returns to the first page.
    if (error.status === 400 && cursors.length > 1) cursors = [null];
  }
  showPager();
  if (isWatched()) timer = setTimeout(refresh, REFRESH_INTERVAL);
}

const isWatched = () => isVisible && document.visibilityState === "visible";

function watch() {
  clearTimeout(timer);
  if (isWatched()) refresh();
}

function fromStart() {
  cursors = [null];
  refresh();
}

/** Sets the pools of the filter. */
export function offerPools(pools) {
  const select = byId("calls-filter").elements.pool;
  const keys = pools.map(poolKey);
  const offered = [...select.options].slice(1).map((option) => option.value);
  if (keys.join() === offered.join()) return;
  const chosen = select.value;
  select.replaceChildren(
    el("option", { value: "" }, "all"),
    ...keys.map((key) => el("option", { value: key }, key)),
  );
  if (keys.includes(chosen)) select.value = chosen;
}

/** Refreshes immediately if the table is visible, after an action on this page. */
export const refreshCalls = watch;

export function startCalls() {
  showHead("live");
  const form = byId("calls-filter");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    fromStart();
  });
  form.addEventListener("change", fromStart);
  let typing;
  form.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(fromStart, TYPING_DELAY);
  });
  byId("calls-next").addEventListener("click", () => {
    if (next) cursors.push(next);
    refresh();
  });
  byId("calls-previous").addEventListener("click", () => {
    if (cursors.length > 1) cursors.pop();
    refresh();
  });
  new IntersectionObserver(
    ([entry]) => {
      isVisible = entry.isIntersecting;
      watch();
    },
    { rootMargin: "300px" },
  ).observe(byId("calls"));
  document.addEventListener("visibilitychange", watch);
  refresh();
}
