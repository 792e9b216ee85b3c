// The page of the router: puts its parts together and keeps them true to the live messages.

import { askForToken, isLocked, learnRole, startAccess } from "./access.js";
import { setDrainTime } from "./actions.js";
import { offerPools, refreshCalls, startCalls } from "./calls.js";
import { addToCharts, fillCharts, startCharts } from "./charts.js";
import { byId, callLink, el, podLink, setAttribute, setText, showText } from "./dom.js";
import { startEdit } from "./edit.js";
import { addEvents, showEventsOff, startFeed } from "./feed.js";
import { LiveStream, ask, whenDenied } from "./net.js";
import { knownPod, namesLike, orderPools, startPods, tickLeases, updatePods } from "./pods.js";
import { showHeader, showPools, showWarnings } from "./pools.js";
import { followAddress, startStory } from "./story.js";
import { setStoreTime, storeNow, tickTimes } from "./time.js";
import { poolKey, span } from "./words.js";

// The router speaks every second: after so much silence something is wrong.
const QUIET = 6;
// A break that is over sooner is not worth a number.
const SHORT_BREAK = 5;
const FIRST_WAIT = 500;
const LONGEST_WAIT = 5_000;
// A tab that nobody looks at gives its connection back after a while: browsers have few for a host.
const UNSEEN = 120_000;

let version = null;
let hasState = false;
let wasOpen = false;

const HANDLERS = {
  state(state) {
    setStoreTime(state.at);
    hasState = true;
    showHeader(state);
    showWarnings(state.warnings ?? []);
    // Without its store the router may not know its pools: what was there stays.
    if (state.pools) takePools(state.pools);
    addToCharts(state);
    showEventsOff(state.events === "off");
    setDrainTime(state.router.draining_ttl);
    noteVersion(state.router.version);
  },
  history: fillCharts,
  pods: updatePods,
  events: addEvents,
};

function takePools(pools) {
  showPools(pools);
  orderPools(pools.map(poolKey));
  offerPools(pools);
}

const live = new LiveStream((name, message) => {
  HANDLERS[name]?.(message);
  showConnection();
});

function noteVersion(now) {
  version ??= now;
  if (now !== version) setAttribute(document.body, "data-outdated", now);
}

function connectionState() {
  const { isOpen, heardAt } = live.status;
  const silent = Math.floor((performance.now() - heardAt) / 1000);
  if (isOpen && silent < QUIET) return { state: "live", text: "live", silent };
  if (live.status.isDenied || isLocked()) return { state: "out", text: "needs a token", silent };
  if (silent <= SHORT_BREAK)
    return { state: "reconnecting", text: hasState ? "reconnecting…" : "connecting…", silent };
  return { state: "out", text: `no answer for ${span(silent)}`, silent };
}

function staleText({ state, silent }) {
  if (state === "live") {
    const outdated = document.body.dataset.outdated;
    return outdated
      ? `The router is ${outdated} now. Load this page again to have the page that belongs to it.`
      : "";
  }
  const problem = live.status.problem ? ` The router says: ${live.status.problem}.` : "";
  if (!hasState) return problem.trim();
  return `What you see is ${span(silent)} old. The page goes on trying.${problem}`;
}

function showConnection() {
  const connection = connectionState();
  setAttribute(byId("connection"), "data-state", connection.state);
  setText(byId("connection-text"), connection.text);
  // Said aloud without the seconds, which would be said anew each time.
  setText(
    byId("connection-said"),
    hasState ? `Connection: ${connection.text.replace(/ for .*/, "")}` : "",
  );
  document.body.classList.toggle("is-stale", connection.state !== "live" && hasState);
  // A short break only says "reconnecting…": a note that comes and goes would move the page.
  showText(byId("stale"), connection.state === "reconnecting" ? "" : staleText(connection));
  // After a restart the same token may have another role, or none.
  const { isOpen } = live.status;
  if (isOpen && !wasOpen) learnRole().catch((error) => error.isDenied && askForToken(error));
  wasOpen = isOpen;
}

function everySecond() {
  showConnection();
  if (document.visibilityState !== "visible") return;
  tickTimes();
  tickLeases(storeNow());
}

// What is over is not found, and its story comes with that.
const exists = (path, isThere = () => true) =>
  ask("GET", path).then(isThere, (error) => {
    if (error.details?.events) return true;
    if (error.status === 404 || error.status === 400) return false;
    throw error;
  });

async function find(text) {
  if (knownPod(text)) return podLink(text);
  const name = encodeURIComponent(text);
  if (await exists(`/calls/${name}`)) return callLink(text);
  if (await exists(`/pod/${name}`)) return podLink(text);
  const wasThere = await exists(`/events?pod=${name}&limit=1`, ({ events }) => events.length > 0);
  if (wasThere) return podLink(text);
  throw new Error(`No call and no pod is called ${text}.`);
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

// Once the router has let us in. Before, every request would only be denied.
function enter() {
  live.start();
  if (!isStarted) startCalls();
  isStarted = true;
  refreshCalls();
  followAddress();
}

async function begin() {
  for (let wait = FIRST_WAIT; ; wait = Math.min(wait * 2, LONGEST_WAIT)) {
    try {
      await learnRole();
      return enter();
    } catch (error) {
      if (error.isDenied) return askForToken(error);
      live.status.problem = error.status ? error.message : "";
      await new Promise((resolve) => setTimeout(resolve, wait));
    }
  }
}

whenDenied(askForToken);
startAccess(enter);
startCharts();
startFeed();
startPods((name) => (location.hash = podLink(name)));
startStory(refreshCalls);
startEdit();
startSearch();
setInterval(everySecond, 1_000);
window.addEventListener("online", () => live.hurry());
let unseen;
document.addEventListener("visibilitychange", () => {
  clearTimeout(unseen);
  if (document.visibilityState !== "visible") {
    unseen = setTimeout(() => live.stop(), UNSEEN);
    return;
  }
  if (isStarted && !live.following && !isLocked()) live.start();
  live.hurry();
  everySecond();
});
begin();
