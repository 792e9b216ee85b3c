// Charts of the last three minutes, from the history message and later state messages.

import { byId, el, setText, svg } from "./dom.js";

const PERIOD = 180_000;
// Points further apart are not connected.
const MAX_GAP = 5_000;
const WIDTH = 300;
const HEIGHT = 80;

const perSecond = (value) =>
  value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
const millis = (value) =>
  `${value >= 100 ? Math.round(value) : value >= 10 ? value.toFixed(1) : value.toFixed(2)} ms`;

// Lines differ by dash pattern as well as by colour.
const CHARTS = [
  {
    title: "Calls per second",
    format: perSecond,
    lines: [
      { name: "allocated", of: (state) => state.rates?.allocated },
      { name: "ended", of: (state) => state.rates?.ended },
      { name: "refused", of: (state) => state.rates?.refused },
      { name: "expired", of: (state) => state.rates?.expired },
    ],
  },
  latencyChart("Allocate latency", "allocate"),
  latencyChart("Release latency", "release"),
];

function latencyChart(title, operation) {
  const line = (name) => ({ name, of: (state) => state.latency_ms?.[operation]?.[name] });
  return { title, format: millis, lines: [line("p50"), line("p99")] };
}

let points = [];
let charts = [];

function makeChart({ title, format, lines }) {
  const picture = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    preserveAspectRatio: "none",
    "aria-hidden": "true",
  });
  for (const share of [0, 0.5, 1]) {
    picture.append(
      svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: HEIGHT * share, y2: HEIGHT * share }),
    );
  }
  const cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT });
  const legend = el("ul", { class: "chart-legend" });
  const drawn = lines.map(({ name, of }) => {
    const path = svg("path", { class: "line", "data-line": name });
    const value = el("strong", {}, "–");
    const sample = svg(
      "svg",
      { viewBox: "0 0 24 6", class: "sample", "aria-hidden": "true" },
      svg("path", { class: "line", "data-line": name, d: "M0 3H24" }),
    );
    picture.append(path);
    legend.append(el("li", {}, sample, `${name} `, value));
    return { of, path, value };
  });
  picture.append(cursor);
  const top = el("span", { class: "chart-top" });
  const when = el("span", { class: "chart-when" }, "now");
  const box = el("div", { class: "chart-box" }, picture, top);
  const axis = el(
    "p",
    { class: "chart-axis", "aria-hidden": "true" },
    el("span", {}, "3 min ago"),
    when,
  );
  const element = el(
    "figure",
    { class: "card chart" },
    el("figcaption", {}, title),
    legend,
    box,
    axis,
  );
  const chart = { element, format, drawn, top, cursor, when, box, pointed: null };
  box.addEventListener("pointermove", (event) => point(chart, event));
  box.addEventListener("pointerleave", () => point(chart, null));
  return chart;
}

/** Rounds up to 1, 2 or 5 times a power of ten. */
function roundAbove(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((round) => round >= value * 0.999);
}

function pathOf(values, end, top) {
  let path = "";
  let before = -Infinity;
  for (const { at, value } of values) {
    const x = (WIDTH * (at - end + PERIOD)) / PERIOD;
    const y = HEIGHT - (HEIGHT * value) / top;
    path += `${at - before > MAX_GAP ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`;
    before = at;
  }
  return path;
}

function draw(chart) {
  const end = points.at(-1).at;
  const all = chart.drawn.map(({ of }) =>
    points
      .map(({ at, state }) => ({ at, value: of(state) }))
      .filter(({ value }) => Number.isFinite(value)),
  );
  const top = roundAbove(Math.max(...all.flat().map(({ value }) => value)));
  chart.drawn.forEach(({ path }, index) => path.setAttribute("d", pathOf(all[index], end, top)));
  setText(chart.top, chart.format(top));
  showValues(chart);
}

// Shows the current values, or those at the pointer.
function showValues(chart) {
  const end = points.at(-1).at;
  const wanted = chart.pointed === null ? end : end - PERIOD * (1 - chart.pointed);
  const nearest = points.reduce((best, next) =>
    Math.abs(next.at - wanted) < Math.abs(best.at - wanted) ? next : best,
  );
  for (const { of, value } of chart.drawn) {
    const number = of(nearest.state);
    setText(value, Number.isFinite(number) ? chart.format(number) : "–");
  }
  const x = (WIDTH * (nearest.at - end + PERIOD)) / PERIOD;
  chart.cursor.classList.toggle("shown", chart.pointed !== null);
  chart.cursor.setAttribute("x1", x);
  chart.cursor.setAttribute("x2", x);
  const ago = Math.round((end - nearest.at) / 1000);
  setText(chart.when, chart.pointed === null || ago === 0 ? "now" : `${ago} s ago`);
}

function point(chart, event) {
  if (!points.length) return;
  const box = chart.box.getBoundingClientRect();
  chart.pointed = event ? Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) : null;
  showValues(chart);
}

/** Adds the rates and latencies of a state message. */
export function addToCharts({ at, rates, latency_ms }) {
  // After the clock goes back (another router or store) lines would run backwards.
  if (points.length && at < points.at(-1).at) points = [];
  points.push({ at, state: { rates, latency_ms } });
  while (points[0].at < at - PERIOD) points.shift();
  if (document.visibilityState === "visible") charts.forEach(draw);
}

/** Merges the history message; points that this page received itself take precedence. */
export function fillCharts({ points: received }) {
  const past = received.map(({ at, rates, latency_ms }) => ({ at, state: { rates, latency_ms } }));
  const byTime = new Map([...past, ...points].map((each) => [each.at, each]));
  points = [...byTime.values()].sort((a, b) => a.at - b.at);
}

export function startCharts() {
  charts = CHARTS.map(makeChart);
  byId("charts").append(...charts.map(({ element }) => element));
}
