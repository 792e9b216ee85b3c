// Capacity of pools: calls, pods, the forecast for two hours, and prescale orders.

import { isAdmin } from "./access.js";
import { request } from "./api.js";
import { confirmChange } from "./confirm.js";
import { byId, el, keyed, setAttribute, setText, showText, svg } from "./dom.js";
import { formatNumber, formatShortDuration, formatTime, plural } from "./format.js";
import { storeNow } from "./time.js";

const INTERVAL = 5_000;
const WIDTH = 300;
const HEIGHT = 70;
const MAX_PODS = 1_000_000;

const REASONS = {
  forecast: "the forecast",
  reserve: "live calls, slots for dials and the inbound reserve",
  prescale: "a prescale order",
  min: "the lower bound",
  max: "the upper bound; demand is higher",
  keep: "surplus pods stay: the forecast needs them again soon",
  pods_not_ready: "starting pods do not become ready: one more is tried from time to time",
};

// Numbers of a card. Calls are those of the pool's demand: a call belongs to the first pool of its
// chain, wherever it is served.
const NUMBERS = [
  { key: "calls", of: (pool) => pool.live },
  { key: "waiting", of: (pool) => pool.waiting },
  { key: "ready", of: (pool) => pool.ready },
  { key: "starting", of: (pool) => pool.starting },
];

const cards = new Map();
const orderItems = new Map();

function makeCard(name) {
  const desired = el("span", { class: "tag" });
  const numbers = NUMBERS.map(({ key }) => ({ key, value: el("strong") }));
  const reason = el("p", { class: "small" });
  const band = svg("path", { class: "forecast-band" });
  const calls = svg("path", { class: "line", "data-line": "expected" });
  const pods = svg("path", { class: "line", "data-line": "needed" });
  const grid = svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT, y2: HEIGHT });
  const picture = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
    grid,
    band,
    calls,
    pods,
  );
  const top = el("span", { class: "chart-top" });
  const foot = el("p", { class: "soft small pool-foot" });
  const element = el(
    "li",
    { class: "card pool" },
    el("div", { class: "card-head" }, el("h3", {}, name), desired),
    el(
      "ul",
      { class: "numbers" },
      ...numbers.map(({ key, value }) => el("li", {}, value, ` ${key}`)),
    ),
    reason,
    el("div", { class: "chart-box" }, picture, top),
    el(
      "p",
      { class: "chart-axis", "aria-hidden": "true" },
      el("span", {}, "now"),
      el("span", {}, "forecast"),
      el("span", {}, "in 2 h"),
    ),
    foot,
  );
  return { element, desired, numbers, reason, picture, band, calls, pods, top, foot };
}

/** Points of a line: pods over the next two hours, from the present on. */
function points(values, top) {
  const step = WIDTH / Math.max(1, values.length - 1);
  return values.map((value, index) => [index * step, HEIGHT - (HEIGHT * value) / top]);
}

const pathOf = (line) =>
  line.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// The band reaches from the pods that the expected calls fill to those that the margin asks for.
function drawForecast(card, pool) {
  const perPod = Math.max(1, pool.calls_per_pod);
  const expected = [pool.live / perPod, ...pool.forecast.map(({ calls }) => calls / perPod)];
  const needed = [pool.needed, ...pool.forecast.map(({ pods }) => pods)];
  const most = Math.max(1, ...needed, ...expected);
  // The label is above the lines.
  const lower = points(expected, 1.25 * most);
  const upper = points(needed, 1.25 * most);
  card.calls.setAttribute("d", pathOf(lower));
  card.pods.setAttribute("d", pathOf(upper));
  card.band.setAttribute("d", `${pathOf(upper)}L${pathOf(lower.reverse()).slice(1)}Z`);
  setText(card.top, `up to ${plural(Math.ceil(most), "pod")}`);
  const last = pool.forecast.at(-1);
  setAttribute(
    card.picture,
    "aria-label",
    last
      ? `Forecast: in two hours ${plural(Math.round(last.calls), "call")}, which need ${plural(last.pods, "pod")}`
      : "No forecast yet",
  );
}

function showCard(card, pool) {
  setText(card.desired, `${plural(pool.desired, "pod")} desired`);
  card.numbers.forEach(({ value }, index) =>
    setText(value, formatNumber(NUMBERS[index].of(pool))),
  );
  const held = pool.desired > pool.policy ? ` Surplus pods are still busy: ${pool.policy} are enough.` : "";
  // What keeps the workload from being scaled, in the words of the leader.
  const blocked = pool.scaling?.conflict ?? pool.scaling?.error;
  const scaling = blocked ? ` Scaling: ${blocked}.` : "";
  setText(card.reason, `Reason: ${REASONS[pool.reason] ?? pool.reason}.${held}${scaling}`);
  const isBad = blocked !== undefined || ["max", "pods_not_ready"].includes(pool.reason);
  card.reason.classList.toggle("bad", isBad);
  drawForecast(card, pool);
  setText(
    card.foot,
    `start-up ${formatShortDuration(Math.round(pool.start_up))}, ` +
      `${formatNumber(pool.idle_pod_hours)} idle pod-hours in the last day`,
  );
}

function showCapacity({ pools }) {
  const known = new Map(Object.entries(pools));
  keyed(byId("capacity"), cards, [...known.keys()], makeCard);
  for (const [name, pool] of known) showCard(cards.get(name), pool);
  const select = byId("prescale-pool");
  const names = [...known.keys()];
  if (select.dataset.names !== names.join(" ")) {
    select.dataset.names = names.join(" ");
    select.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  }
}

function makeOrder(id) {
  const text = el("span");
  const remove = el("button", { type: "button", class: "danger" }, "Delete…");
  const item = { element: el("li", {}, text, remove), text, remove, order: null };
  remove.addEventListener("click", () => deleteOrder(id, item.order));
  return item;
}

const orderText = ({ pool, pods, until }) =>
  `${pool}: at least ${plural(pods, "pod")} until ${formatTime(until * 1000)} (${formatShortDuration(Math.max(0, until - storeNow()))} left)`;

function showOrders({ orders }) {
  const known = new Map(orders.map((order) => [order.id, order]));
  keyed(byId("prescale-orders"), orderItems, [...known.keys()], makeOrder);
  for (const [id, order] of known) {
    const item = orderItems.get(id);
    item.order = order;
    setText(item.text, orderText(order));
    item.remove.hidden = !isAdmin();
  }
  byId("prescale-none").hidden = orders.length > 0;
  byId("prescale-form").hidden = !isAdmin();
}

async function deleteOrder(id, order) {
  const deleted = await confirmChange({
    title: "Delete this prescale order?",
    sentences: [`${orderText(order)}.`, "The policy decides by its forecast again."],
    action: "Delete",
    isDangerous: true,
    send: () => request("DELETE", `/prescale/${encodeURIComponent(id)}`),
  });
  if (deleted) refresh();
}

async function placeOrder(event) {
  event.preventDefault();
  const pool = byId("prescale-pool").value;
  const pods = Number(byId("prescale-pods").value);
  const time = byId("prescale-for").value.trim();
  showText(byId("prescale-error"), "");
  if (!Number.isInteger(pods) || pods < 1 || pods > MAX_PODS)
    return showText(byId("prescale-error"), "Pods: a whole number above 0.");
  const placed = await confirmChange({
    title: `Order ${plural(pods, "pod")} in ${pool}?`,
    sentences: [
      `The policy asks for at least ${plural(pods, "pod")} in ${pool} for ${time}.`,
      "An autoscaler that follows it starts them, and they cost money while they idle.",
    ],
    action: "Order",
    send: () => request("POST", "/prescale", { pool, pods, for: time }),
  });
  if (!placed) return;
  showText(byId("prescale-error"), (placed.warnings ?? []).join(" "));
  refresh();
}

async function refresh() {
  try {
    const [capacity, orders] = await Promise.all([
      request("GET", "/capacity"),
      request("GET", "/prescale"),
    ]);
    showCapacity(capacity);
    showOrders(orders);
    showText(byId("capacity-note"), "");
  } catch (error) {
    // The last decisions stay visible, with the reason why they are old.
    if (!error.isUnauthorized) showText(byId("capacity-note"), error.message);
  }
}

export function startCapacity() {
  byId("prescale-form").addEventListener("submit", placeOrder);
  refresh();
  setInterval(() => {
    if (document.visibilityState === "visible") refresh();
  }, INTERVAL);
}
