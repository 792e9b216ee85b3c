// Checks the dashboard in a real browser. node browser.mjs <check> <url> [<url of another replica>]
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import assert from "node:assert/strict";

const require = createRequire(process.env.CHECKERS + "/");
const { chromium } = require("playwright-core");
const axeSource = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

const [name, url, other] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ["--no-sandbox"] });

/** Opens a page that records script errors and requests to other hosts. */
async function open(address, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1400, height: 900 }, ...options });
  const page = await context.newPage();
  page.errors = [];
  page.on("pageerror", (error) => page.errors.push(error.stack));
  page.on("console", (message) => {
    const text = message.text();
    // A refused request is not an error of the page.
    if (message.type() === "error" && !text.startsWith("Failed to load resource")) page.errors.push(text);
  });
  page.on("request", (request) => {
    if (!request.url().startsWith(url) && !request.url().startsWith("data:")) {
      page.errors.push(`request to another host: ${request.url()}`);
    }
  });
  await page.addInitScript(() => {
    window.longTasks = [];
    new PerformanceObserver((list) => {
      for (const entry of list.getEntries()) window.longTasks.push(Math.round(entry.duration));
    }).observe({ type: "longtask", buffered: true });
  });
  await page.goto(address);
  return page;
}

async function api(method, path, body, base = other ?? url) {
  const headers = { "content-type": "application/json" };
  if (process.env.TOKEN) headers.authorization = `Bearer ${process.env.TOKEN}`;
  const response = await fetch(base + "/api/v1" + path, { method, headers, body: body && JSON.stringify(body) });
  return { status: response.status, body: await response.json() };
}

const text = (page, selector) => page.locator(selector).first().innerText();

/** Waits for a condition. The usual time is ample on an idle machine; the timeout is ten times that. */
async function until(condition, holds, usual = 5000) {
  const within = 10 * usual;
  const end = Date.now() + within;
  while (!(await holds())) {
    assert.ok(Date.now() < end, `not within ${within} ms: ${condition}`);
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
}

async function axe(page, where) {
  await page.evaluate(axeSource);
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const serious = violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
  assert.deepEqual(serious.map(({ id, nodes }) => `${where}: ${id} ${nodes[0].target}`), []);
}

async function shot(page, name) {
  if (process.env.SCREENSHOTS) await page.screenshot({ path: `${process.env.SCREENSHOTS}/${name}.png` });
}

/** Another request changes the tiers while the confirmation is open. */
async function tiersConflict(page) {
  const tiers = (await api("GET", "/tiers")).body;
  const [tier] = Object.keys(tiers.tiers);
  const withTarget = (target) => {
    const changed = structuredClone(tiers);
    changed.tiers[tier].target = target;
    return changed;
  };
  await page.fill("#tiers-text", JSON.stringify(withTarget(41)));
  await page.click("#tiers-check");
  await page.click("#tiers-apply:not([disabled])");
  await until("the confirmation opens", () => page.locator("#confirm").evaluate((dialog) => dialog.open));
  assert.equal((await api("PUT", "/tiers", withTarget(42))).status, 200);
  await page.click("#confirm-yes");
  await until("the conflict is shown", async () => /changed by another request/.test(await text(page, "#confirm-error")));
  assert.equal((await api("GET", "/tiers")).body.tiers[tier].target, 42, "the other change stays");
  await page.click("#confirm-no");
  await page.click("#tiers-apply");
  await until("the warning about the conflict is shown", async () => /have changed since you loaded/.test(await text(page, "#confirm-text")));
  await page.click("#confirm-yes");
  await until("the confirmed change is applied", async () => (await api("GET", "/tiers")).body.tiers[tier].target === 41);
}

/** Another request changes a merchant after its form was opened. */
async function merchantConflict(page) {
  await page.click("#merchants-new");
  await page.fill("#merchant-id", "acme");
  await page.fill("#merchant-text", '{"max_calls": 1}');
  await page.click("#merchant-form button[type=submit]");
  await page.click("#confirm-yes");
  await page.click('[data-merchant="acme"] [data-act="edit"]');
  await until("the merchant form", async () => (await page.inputValue("#merchant-text")).includes("max_calls"));
  assert.equal((await api("PUT", "/merchants/acme", { max_calls: 2 })).status, 200);
  await page.fill("#merchant-text", '{"max_calls": 3}');
  await page.click("#merchant-form button[type=submit]");
  await page.click("#confirm-yes");
  await until("the conflict is shown", async () => /changed by another request/.test(await text(page, "#confirm-error")));
  await page.click("#confirm-no");
  assert.equal((await api("GET", "/merchants/acme")).body.max_calls, 2, "the other change stays");
  await page.click("#merchant-cancel");
  // The note stays when the last merchant is deleted.
  await page.click('[data-merchant="acme"] [data-act="delete"]');
  await page.click("#confirm-yes");
  await until("the list is empty", () => page.locator("#merchants-none").isVisible());
  assert.equal(await text(page, "#merchants-note"), "acme is deleted.");
}

const checks = {
  /** A call that another replica allocates appears with its history. */
  async calls() {
    const page = await open(url);
    await page.waitForSelector(".tile");
    await until("live", async () => (await text(page, "#connection-text")) === "live");
    const before = await text(page, "#total-calls");
    assert.equal(before, "0");
    const { body } = await api("POST", "/allocate", { call_sid: "CAseen1" });
    const requestedAt = Date.now();
    await until("the tile is busy", async () => {
      const tile = page.locator(`.tile[data-pod="${body.pod_name}"]`);
      return /busy/i.test((await tile.getAttribute("aria-label")) ?? (await tile.innerText()));
    }, 1000);
    await until("the feed shows the call", async () => (await text(page, "#feed")).includes("CAseen1"), 1000);
    console.log(`on the page after ${Date.now() - requestedAt} ms`);
    await until("the table shows the call", async () => (await page.locator("#calls-rows").innerText()).includes("CAseen1"), 4000);
    await page.keyboard.press("/");
    await page.keyboard.type("CAseen1");
    await page.keyboard.press("Enter");
    await until("the history of the call", async () => (await text(page, "#detail-title")) === "Call CAseen1");
    await until("the allocation", async () => (await text(page, "#detail-body")).includes("allocated"));
    await axe(page, "the history of a call");
    await shot(page, "call");
    await api("POST", "/release", { call_sid: "CAseen1" });
    await until("the end of the call", async () => (await text(page, "#detail-body")).includes("ended"), 6000);
    await page.keyboard.press("Escape");
    assert.deepEqual(page.errors, []);
  },

  /** The capacity panel shows the decisions; an admin places and deletes a prescale order. */
  async capacity() {
    const page = await open(url);
    await until("a card per pool", async () => (await page.locator("#capacity li.pool").count()) === 2, 10_000);
    const gold = page.locator("#capacity li.pool", { hasText: "gold" });
    assert.match(await gold.innerText(), /pods? desired/);
    assert.match(await gold.innerText(), /idle pod-hours/);
    const line = gold.locator('[data-line="needed"]');
    assert.equal(((await line.getAttribute("d")) ?? "").match(/[ML]/g)?.length, 25, "two hours in steps of 5 minutes");
    await axe(page, "the capacity panel");
    await page.locator("#prescale-pool").selectOption("gold");
    await page.locator("#prescale-pods").fill("40");
    await page.locator("#prescale-form button").click();
    await page.locator("#confirm-yes").click();
    await until("the order", async () => (await text(page, "#prescale-orders")).includes("at least 40 pods"));
    await until("its effect", async () => (await gold.innerText()).includes("40 pods desired"), 20_000);
    await shot(page, "capacity");
    await page.locator("#prescale-orders button").click();
    await page.locator("#confirm-yes").click();
    await until("no order", async () => page.locator("#prescale-none").isVisible());
    assert.deepEqual(page.errors, []);
  },

  /** A new page shows the last minutes at once, also a second one. */
  async history() {
    const lineOf = async (page) => {
      const line = page.locator('.chart-box [data-line="allocated"]').first();
      return (await line.getAttribute("d")) ?? "";
    };
    const isFilled = async (page) => {
      const points = (await lineOf(page)).match(/[ML][\d.-]+/g) ?? [];
      return points.length > 150 && Number(points[0].slice(1)) < 10;
    };
    const page = await open(url);
    await page.waitForSelector(".tile");
    await until("the chart is filled", () => isFilled(page), 1500);
    for (let second = 0; second < 2; second += 1) {
      const before = await lineOf(page);
      await until("the chart has another point", async () => (await lineOf(page)) !== before, 2500);
    }
    const another = await open(url);
    await another.waitForSelector(".tile");
    await until("the chart of the second page is filled", () => isFilled(another), 1500);
    assert.deepEqual([...page.errors, ...another.errors], []);
  },

  /** The latency charts include calls from before the page, without new calls. */
  async latencies() {
    for (let number = 0; number < 20; number += 1) {
      assert.equal((await api("POST", "/allocate", { call_sid: `CA${number}` })).status, 200);
      assert.equal((await api("POST", "/release", { call_sid: `CA${number}` })).status, 200);
    }
    const page = await open(url);
    for (const chart of [1, 2]) {
      for (const name of ["p50", "p99"]) {
        const line = page.locator(".chart-box").nth(chart).locator(`[data-line="${name}"]`);
        await until(`the line of ${name}`, async () => /L/.test((await line.getAttribute("d")) ?? ""));
      }
    }
    assert.deepEqual(page.errors, []);
  },

  /** A tile shows and announces the remaining lease time without moving. */
  async leases() {
    const page = await open(url, { viewport: { width: 360, height: 740 } });
    const { body } = await api("POST", "/allocate", { call_sid: "CAlease" });
    const tile = page.locator(`.tile[data-pod="${body.pod_name}"]`);
    await tile.scrollIntoViewIfNeeded();
    const left = async () => Number(/^(\d+) s$/.exec(await tile.locator(".tile-left").innerText())?.[1]);
    await until("the remaining time is shown", async () => (await left()) > 0);
    const [before, box] = [await left(), await tile.boundingBox()];
    assert.ok(before <= 30, `${before} s`);
    await until("the remaining time decreases", async () => (await left()) <= before - 2, 3500);
    assert.deepEqual(await tile.boundingBox(), box, "the tile does not move");
    assert.match(await tile.getAttribute("aria-label"), / 1\/1 \d+ s of its lease left, busy$/);
    await axe(page, "leases on a phone");
    // The focused tile does not change its label every second.
    await tile.focus();
    const [label, now] = [await tile.getAttribute("aria-label"), await left()];
    await until("the remaining time decreases", async () => (await left()) < now, 2500);
    assert.equal(await tile.getAttribute("aria-label"), label);
    await api("POST", "/release", { call_sid: "CAlease" });
    await until("no remaining time is shown", async () => (await tile.locator(".tile-left").innerText()) === "");
    assert.deepEqual(page.errors, []);
  },

  /** The timelines of a call and of a pod say why the pod could not be used. */
  async failure() {
    const page = await open(url);
    const body = () => text(page, "#detail-body");
    for (const detail of ["call/CAfailed", "pod/agent-0"]) {
      await page.evaluate((hash) => (location.hash = hash), detail);
      const reason = /agent-0 failed(?: for CAfailed)?: the agent answered 200 instead of 101/;
      await until(`the reason in ${detail}`, async () => reason.test(await body()));
    }
    await axe(page, "a pod that failed");
    assert.deepEqual(page.errors, []);
  },

  /** The panel of a call shows its open stream, and ends it. */
  async stream() {
    const page = await open(url);
    await until("the number of streams", async () => (await text(page, "#total-streams")) === "1");
    await page.evaluate(() => (location.hash = "call/CAstream"));
    const body = () => text(page, "#detail-body");
    await until("the stream", async () => /Gateway\s+\S+-[0-9a-f]{8}/.test(await body()));
    await until("the provider", async () => /Provider\s+twilio/.test(await body()));
    const frames = async (side) => {
      const figure = await text(page, `[data-figure="From the ${side}"]`);
      const found = /^([\d,]+) frames, [\d.]+ k?B, longest gap [\d.]+ m?s$/.exec(figure);
      return Number(found?.[1].replaceAll(",", ""));
    };
    for (const side of ["provider", "agent"]) {
      await until(`frames from the ${side}`, async () => (await frames(side)) > 10);
    }
    // New figures leave the rest of the panel as it is.
    const entry = await page.locator("#detail-body .timeline li").first().elementHandle();
    const before = await frames("provider");
    await until("more frames", async () => (await frames("provider")) > before);
    assert.ok(await entry.evaluate((node) => node.isConnected), "the timeline is not rendered again");
    assert.match(await body(), /opened its stream to \S+ through \S+/);
    await axe(page, "a call with its stream");
    await shot(page, "stream");
    await page.click("#detail-actions >> text=Release");
    assert.match(await text(page, "#confirm-text"), /closes both sides/);
    await page.click("#confirm-yes");
    const note = "CAstream is ending: its stream is being closed.";
    await until("the note", async () => (await text(page, "#detail-note")) === note);
    await until("the end", async () => /ended: released by/.test(await body()));
    assert.match(await body(), /ending, its stream is being closed: released by/);
    await until("no stream is left", async () => (await text(page, "#total-streams")) === "0");
    // A deadline that has passed.
    const texts = await page.evaluate(async () => {
      const { liveTime, storeNow } = await import("/page/time.js");
      const late = storeNow() - 5.5;
      return ["due", "lease", "left"].map((kind) => liveTime(kind, late).textContent);
    });
    assert.deepEqual(texts, ["5 s ago", "lease expired", "expired"]);
    assert.deepEqual(page.errors, []);
  },

  /** The page of a follower shows the leader. */
  async leader() {
    const page = await open(url);
    await until("the leader is shown", async () => (await text(page, "#fact-leader")) === process.env.LEADER);
    assert.deepEqual(page.errors, []);
  },

  /** An admin drains a pod by click; a wrong token and a viewer cannot. */
  async roles() {
    const page = await open(url);
    await until("the token dialog opens", () => page.locator("#token").evaluate((dialog) => dialog.open));
    await axe(page, "the token dialog");
    await page.fill("#token-text", "wrong");
    await page.keyboard.press("Enter");
    await until("a wrong token is refused", async () => /Unknown token/.test(await text(page, "#token-error")));
    await page.fill("#token-text", "viewer-token");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".tile");
    assert.equal(await page.locator("#edit").isVisible(), false, "a viewer cannot edit");
    assert.equal(await page.evaluate(() => localStorage.length), 0, "the token is stored for the tab only");
    const pod = await page.locator(".tile").first().getAttribute("data-pod");
    await page.evaluate((pod) => (location.hash = `pod/${pod}`), pod);
    await until("the history of the pod", async () => (await text(page, "#detail-title")) === `Pod ${pod}`);
    assert.equal(await page.locator("#detail-actions button").count(), 0, "a viewer has no buttons");
    await page.keyboard.press("Escape");
    await page.click("#token-forget");
    await page.fill("#token-text", "admin-token");
    await page.keyboard.press("Enter");
    await page.waitForSelector(".tile");
    await page.evaluate((pod) => (location.hash = `pod/${pod}`), pod);
    await page.click("#detail-actions >> text=Drain");
    assert.match(await text(page, "#confirm-text"), /no new calls/);
    await axe(page, "the confirmation dialog");
    assert.equal((await api("GET", `/pod/${pod}`)).body.is_draining, false, "no change before the confirmation");
    await page.click("#confirm-yes");
    await until("the pod is draining", async () => (await api("GET", `/pod/${pod}`)).body.is_draining);
    await page.click("#detail-actions >> text=Undrain");
    await page.click("#confirm-yes");
    await until("the pod is not draining", async () => !(await api("GET", `/pod/${pod}`)).body.is_draining);
    // Escape closes the dialog on top, which is the confirmation until its request is answered.
    await until("the confirmation is closed", () => page.locator("#confirm").evaluate((dialog) => !dialog.open));
    await page.keyboard.press("Escape");
    await page.click("#edit-details summary");
    await until("the tiers", async () => (await page.inputValue("#tiers-text")).includes("gold"));
    await page.fill("#tiers-text", '{"gold": 1, "plati');
    await page.click("#tiers-check");
    await until("the error is shown", () => page.locator("#tiers-error").isVisible());
    await shot(page, "edit");
    await tiersConflict(page);
    await merchantConflict(page);
    assert.deepEqual(page.errors, []);
  },

  /** 1,000 pods and 5,000 calls, in light and dark, on a phone. */
  async many() {
    const page = await open(url, { bypassCSP: true });
    await page.waitForSelector(".tile");
    await until("all pods", async () => (await page.locator(".tile").count()) === 1000, 10000);
    await until("all calls", async () => /5.?000/.test(await text(page, "#total-calls")), 10000);
    // Calls start and end continuously.
    const end = Date.now() + 4000;
    let number = 0;
    while (Date.now() < end) {
      await api("POST", "/release", { call_sid: `CA${number}` });
      await api("POST", "/allocate", { call_sid: `CAnew${number}` });
      number += 1;
    }
    const painted = await page.evaluate(() => performance.getEntriesByName("first-contentful-paint")[0].startTime);
    const longest = Math.max(0, ...(await page.evaluate(() => window.longTasks)));
    console.log(`first paint ${Math.round(painted)} ms, longest task ${longest} ms, ${number} calls started and ended`);
    const last = page.locator(".tile").last();
    await last.evaluate((tile) => tile.scrollIntoView());
    const left = () => last.locator(".tile-left").innerText();
    await until("a tile that comes into view shows the remaining time", async () => /^\d+ (s|min)$/.test(await left()));
    await page.evaluate(() => {
      document.querySelectorAll(".tiles").forEach((tiles) => tiles.scrollTo(0, 0));
      scrollTo(0, 0);
    });
    await axe(page, "light");
    await shot(page, "many");
    await page.emulateMedia({ colorScheme: "dark" });
    await axe(page, "dark");
    await page.setViewportSize({ width: 360, height: 740 });
    await axe(page, "phone");
    const wide = await page.evaluate(() => document.documentElement.scrollWidth);
    assert.ok(wide <= 360, `the page is ${wide} wide on a phone`);
    await shot(page, "phone");
    assert.deepEqual(page.errors, []);
  },

  /** The page stays responsive during a flood of events and shows the last one. */
  async flood() {
    const page = await open(url);
    await page.waitForSelector(".tile");
    await until("live", async () => (await text(page, "#connection-text")) === "live");
    console.log("ready");
    await until("the flood is on the page", async () => (await text(page, "#feed")).includes("flood-"), 10000);
    await until("the last event is on the page", async () => (await text(page, "#feed")).includes("CAlast"), 20000);
    const longest = Math.max(0, ...(await page.evaluate(() => window.longTasks)));
    console.log(`longest task ${longest} ms`);
    assert.ok((await page.locator("#feed > *").count()) < 1000, "the feed is bounded");
    assert.deepEqual(page.errors, []);
  },

  /** The page keeps its content while the router restarts, and reconnects. */
  async restart() {
    const page = await open(url);
    await page.waitForSelector(".tile");
    console.log("ready");
    await until("the disconnect is shown", async () => (await text(page, "#connection-text")) !== "live", 15000);
    assert.ok((await page.locator(".tile").count()) > 0, "the content is still shown");
    console.log("noticed");
    await until("the page is live again", async () => (await text(page, "#connection-text")) === "live", 20000);
    assert.deepEqual(page.errors, []);
  },

  /** Takes the screenshots of the documentation. */
  async pictures() {
    const page = await open(url, { colorScheme: "light" });
    await page.waitForSelector(".tile");
    await new Promise((resolve) => setTimeout(resolve, 12000));
    await shot(page, "dashboard-light");
    // A call that tried other pools first.
    const { body } = await api("GET", "/calls?pool=basic");
    await page.evaluate((call) => (location.hash = `call/${call}`), body.calls.at(-1).call_sid);
    await until("the history of the call", async () => (await text(page, "#detail-body")).includes("allocated"));
    await shot(page.locator("#detail"), "call");
    const phone = await open(url, { colorScheme: "dark", viewport: { width: 390, height: 844 }, deviceScaleFactor: 1.5 });
    await phone.waitForSelector(".tile");
    await new Promise((resolve) => setTimeout(resolve, 2000));
    await phone.evaluate(() => document.getElementById("pods-title").scrollIntoView());
    await new Promise((resolve) => setTimeout(resolve, 1000));
    await shot(phone, "phone");
  },
};

try {
  await checks[name]();
} finally {
  await browser.close();
}
