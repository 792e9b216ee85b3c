// Entry point of the dashboard: connects its parts to the live stream.

import { askForToken, isLocked, loadRole, startAccess } from "./access.js";
import { setDrainTtl } from "./actions.js";
import { offerPools, refreshCalls, startCalls } from "./calls.js";
import { startCapacity } from "./capacity.js";
import { addToCharts, fillCharts, startCharts } from "./charts.js";
import { byId, callLink, el, podLink, setAttribute, setText, showText } from "./dom.js";
import { startEdit } from "./edit.js";
import { addEvents, showEventsOff, startFeed } from "./feed.js";
import { LiveStream, onUnauthorized, request } from "./api.js";
import { knownPod, namesLike, orderPools, startPods, tickLeases, updatePods } from "./pods.js";
import { showHeader, showPools, showWarnings } from "./pools.js";
import { openFromHash, startDetail } from "./detail.js";
import { setStoreTime, storeNow, tickTimes } from "./time.js";
import { poolKey, formatDuration } from "./format.js";

// Seconds without a message until the connection counts as lost; the router sends every second.
const SILENCE_SECONDS = 6;
// Seconds of an interruption until its duration is shown.
const SHORT_INTERRUPTION_SECONDS = 5;
const MIN_BACKOFF = 500;
const MAX_BACKOFF = 5_000;
// A hidden tab closes its connection after this time: browsers limit connections per host.
const HIDDEN_TIMEOUT = 120_000;

let version = null;
let hasState = false;
let wasOpen = false;

const HANDLERS = {
  state(state) {
    setStoreTime(state.at);
    hasState = true;
    showHeader(state);
    showWarnings(state.warnings ?? []);
    // During a store outage the last known pools stay visible.
    if (state.pools) updatePools(state.pools);
    addToCharts(state);
    showEventsOff(state.events === "off");
    setDrainTtl(state.router.draining_ttl);
    checkVersion(state.router.version);
  },
  history: fillCharts,
  pods: updatePods,
  events: addEvents,
};

function updatePools(pools) {
  showPools(pools);
  orderPools(pools.map(poolKey));
  offerPools(pools);
}

const live = new LiveStream((name, message) => {
  HANDLERS[name]?.(message);
  showConnection();
});

function checkVersion(current) {
  version ??= current;
  if (current !== version) setAttribute(document.body, "data-outdated", current);
}

function connectionState() {
  const { isOpen, receivedAt } = live.status;
  const silent = Math.floor((performance.now() - receivedAt) / 1000);
  if (isOpen && silent < SILENCE_SECONDS) return { state: "live", text: "live", silent };
  if (live.status.isUnauthorized || isLocked())
    return { state: "lost", text: "token required", silent };
  if (silent <= SHORT_INTERRUPTION_SECONDS)
    return { state: "reconnecting", text: hasState ? "reconnecting…" : "connecting…", silent };
  return { state: "lost", text: `disconnected for ${formatDuration(silent)}`, silent };
}

function staleText({ state, silent }) {
  if (state === "live") {
    const outdated = document.body.dataset.outdated;
    return outdated
      ? `The router now runs version ${outdated}. Reload this page to update it.`
      : "";
  }
  const error = live.status.error ? ` Error: ${live.status.error}.` : "";
  if (!hasState) return error.trim();
  return `The data is ${formatDuration(silent)} old. Reconnecting…${error}`;
}

function showConnection() {
  const connection = connectionState();
  setAttribute(byId("connection"), "data-state", connection.state);
  setText(byId("connection-text"), connection.text);
  // Screen readers get the text without the seconds, which would be announced again each time.
  setText(
    byId("connection-announcement"),
    hasState ? `Connection: ${connection.text.replace(/ for .*/, "")}` : "",
  );
  document.body.classList.toggle("is-stale", connection.state !== "live" && hasState);
  // A short interruption shows no note: one that appears and disappears would shift the layout.
  showText(byId("stale"), connection.state === "reconnecting" ? "" : staleText(connection));
  // After a restart of the router the token may have another role, or none.
  const { isOpen } = live.status;
  if (isOpen && !wasOpen) loadRole().catch((error) => error.isUnauthorized && askForToken(error));
  wasOpen = isOpen;
}

function everySecond() {
  showConnection();
  if (document.visibilityState !== "visible") return;
  tickTimes();
  tickLeases(storeNow());
}

// The 404 of an ended call carries its events.
const exists = (path, isFound = () => true) =>
  request("GET", path).then(isFound, (error) => {
    if (error.details?.events) return true;
    if (error.status === 404 || error.status === 400) return false;
    throw error;
  });

async function find(text) {
  if (knownPod(text)) return podLink(text);
  const name = encodeURIComponent(text);
  if (await exists(`/calls/${name}`)) return callLink(text);
  if (await exists(`/pod/${name}`)) return podLink(text);
  const hasEvents = await exists(`/events?pod=${name}&limit=1`, ({ events }) => events.length > 0);
  if (hasEvents) return podLink(text);
  throw new Error(`No call or pod named ${text}.`);
}

function startSearch() {
  const input = byId("search-text");
  byId("search").addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = input.value.trim();
    if (!text) return;
    showText(byId("search-error"), "");
    try {
      location.hash = await find(text);
    } catch (error) {
      showText(byId("search-error"), error.message);
    }
  });
  input.addEventListener("input", () => {
    showText(byId("search-error"), "");
    const names = input.value.trim() ? namesLike(input.value.trim()) : [];
    byId("search-known").replaceChildren(...names.map((name) => el("option", { value: name })));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest("input, textarea, select, dialog")) return;
    event.preventDefault();
    input.focus();
    input.select();
  });
}

let isStarted = false;

// Runs once the token is accepted; requests before would only be rejected.
function startLive() {
  live.start();
  if (!isStarted) {
    startCalls();
    startCapacity();
  }
  isStarted = true;
  refreshCalls();
  openFromHash();
}

async function start() {
  for (let backoff = MIN_BACKOFF; ; backoff = Math.min(backoff * 2, MAX_BACKOFF)) {
    try {
      await loadRole();
      return startLive();
    } catch (error) {
      if (error.isUnauthorized) return askForToken(error);
      live.status.error = error.status ? error.message : "";
      await new Promise((resolve) => setTimeout(resolve, backoff));
    }
  }
}

onUnauthorized(askForToken);
startAccess(startLive);
startCharts();
startFeed();
startPods((name) => (location.hash = podLink(name)));
startDetail(refreshCalls);
startEdit();
startSearch();
setInterval(everySecond, 1_000);
window.addEventListener("online", () => live.retryNow());
let hiddenTimer;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (document.visibilityState !== "visible") {
    hiddenTimer = setTimeout(() => live.stop(), HIDDEN_TIMEOUT);
    return;
  }
  if (isStarted && !live.following && !isLocked()) live.start();
  live.retryNow();
  everySecond();
});
start();
