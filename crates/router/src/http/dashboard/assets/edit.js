// Tiers and merchants, for admins.

import { confirmChange } from "./confirm.js";
import { byId, el, setText, showText } from "./dom.js";
import { ask, look, NOTHING } from "./net.js";
import { merchantWords, plural, poolName } from "./words.js";

// So many names of pods are listed; the rest is counted.
const MOST_NAMES = 12;

const pretty = (value) => JSON.stringify(value, null, 2);

let tiersLoaded = "";
// The text that was checked and what came of it; any other text has to be checked first.
let tiersChecked = null;

async function loadTiers() {
  try {
    const tiers = await ask("GET", "/tiers");
    tiersLoaded = pretty(tiers);
    byId("tiers-text").value = tiersLoaded;
    forgetCheck();
    return true;
  } catch (error) {
    showText(byId("tiers-error"), error.message);
    return false;
  }
}

function forgetCheck() {
  tiersChecked = null;
  byId("tiers-apply").disabled = true;
  byId("tiers-answer").replaceChildren();
  showText(byId("tiers-error"), "");
}

/** Moves told by where from and where to: one sentence for each such pair. */
function moveSentences(moves) {
  const groups = groupBy(moves, ({ from, to }) => `${from} ${to}`);
  return [...groups.values()].map((group) => {
    const names = group
      .slice(0, MOST_NAMES)
      .map((move) => move.pod_name)
      .join(", ");
    const rest = group.length > MOST_NAMES ? ` and ${group.length - MOST_NAMES} more` : "";
    const busy = group.filter((move) => move.is_busy).length;
    const later =
      busy === 0
        ? ""
        : busy === group.length
          ? ", when their calls end"
          : `, ${busy} of them when their calls end`;
    const [{ from, to }] = group;
    return `${poolName(from) || "no pool"} → ${poolName(to) || "no pool"}: ${plural(group.length, "pod")}${later} (${names}${rest})`;
  });
}

function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) groups.set(keyOf(item), [...(groups.get(keyOf(item)) ?? []), item]);
  return groups;
}

const bullets = (texts) => el("ul", {}, ...texts.map((text) => el("li", {}, text)));

function showCheck({ warnings = [], moves = [] }) {
  const parts = [
    el("p", {}, moves.length ? `${plural(moves.length, "pod")} would move:` : "No pod would move."),
  ];
  if (moves.length) parts.push(bullets(moveSentences(moves)));
  if (warnings.length) parts.push(el("p", {}, "Warnings:"), bullets(warnings));
  byId("tiers-answer").replaceChildren(...parts);
}

async function checkTiers() {
  const text = byId("tiers-text").value;
  forgetCheck();
  try {
    const answer = await ask("PUT", "/tiers?dry_run=true", text);
    // It was typed on meanwhile: this is not the answer to what stands there now.
    if (byId("tiers-text").value !== text) return;
    tiersChecked = { text, answer };
    byId("tiers-apply").disabled = false;
    showCheck(answer);
  } catch (error) {
    showText(byId("tiers-error"), error.message);
  }
}

// Somebody else may have changed the tiers since they were loaded here.
async function changedSince() {
  const { answer, tag } = await look("/tiers");
  const sentences =
    pretty(answer) === tiersLoaded
      ? []
      : ["The tiers in force have changed since you loaded them here. This replaces them too."];
  return { sentences, tag };
}

async function applyTiers() {
  const { text, answer } = tiersChecked;
  const { moves = [], warnings = [] } = answer;
  try {
    const changed = await changedSince();
    const sentences = [
      "These tiers come into force at once. Calls go on.",
      ...(moves.length ? moveSentences(moves) : ["No pod moves."]),
      ...warnings.map((warning) => `Warning: ${warning}`),
      ...changed.sentences,
    ];
    const applied = await confirmChange({
      title: "Apply these tiers?",
      sentences,
      action: "Apply",
      send: () => ask("PUT", "/tiers", text, changed.tag),
    });
    if (applied) showApplied(applied);
  } catch (error) {
    showText(byId("tiers-error"), error.message);
  }
}

function showApplied({ tiers, warnings = [] }) {
  tiersLoaded = pretty(tiers);
  byId("tiers-text").value = tiersLoaded;
  forgetCheck();
  byId("tiers-answer").replaceChildren(
    el("p", { class: "note" }, "These tiers are in force."),
    ...(warnings.length ? [bullets(warnings)] : []),
  );
}

let merchantsNext = null;

async function loadMerchants(cursor = null) {
  try {
    const answer = await ask(
      "GET",
      `/merchants${cursor ? `?cursor=${encodeURIComponent(cursor)}` : ""}`,
    );
    merchantsNext = answer.next ?? null;
    const items = answer.merchants.map(merchantItem);
    if (cursor) byId("merchants").append(...items);
    else byId("merchants").replaceChildren(...items);
    byId("merchants-more").hidden = !merchantsNext;
    showText(byId("merchants-error"), "");
    if (!cursor && !items.length) setText(byId("merchants-note"), "There are no merchants.");
    return true;
  } catch (error) {
    showText(byId("merchants-error"), error.message);
    return false;
  }
}

function merchantItem({ merchant_id: id, document }) {
  const act = (text, name) =>
    el("button", { type: "button", "data-act": name, "aria-label": `${text} ${id}` }, text);
  const words = el("span", { class: "soft small" }, `calls ${merchantWords(document ?? {})}`);
  return el(
    "li",
    { "data-merchant": id },
    el("div", {}, el("strong", {}, id), " ", words),
    el("div", { class: "buttons" }, act("Edit", "edit"), act("Delete…", "delete")),
  );
}

const merchantPath = (id) => `/merchants/${encodeURIComponent(id)}`;

// The tag of what is being edited: nobody else's change is replaced unseen.
let editedTag = NOTHING;

function openForm(id, text, tag) {
  editedTag = tag;
  const form = byId("merchant-form");
  form.hidden = false;
  byId("merchant-id").value = id;
  byId("merchant-id").readOnly = id !== "";
  byId("merchant-text").value = text;
  showText(byId("merchant-error"), "");
  byId(id ? "merchant-text" : "merchant-id").focus();
}

function closeForm() {
  byId("merchant-form").hidden = true;
  byId("merchants-new").focus();
}

// The list may be old; what is edited is what the router has now.
async function editMerchant(id) {
  try {
    const { answer, tag } = await look(merchantPath(id));
    openForm(id, pretty(answer), tag);
    showText(byId("merchants-error"), "");
  } catch (error) {
    showText(byId("merchants-error"), error.message);
  }
}

async function deleteMerchant(id) {
  const found = await look(merchantPath(id)).catch((error) => {
    showText(byId("merchants-error"), error.message);
  });
  if (!found) return;
  const sentences = [
    `New calls of ${id} ${merchantWords(found.answer ?? {})}. That document is deleted: they take the default chain, without limits of their own; its live calls go on.`,
  ];
  const answer = await confirmChange({
    title: `Delete merchant ${id}?`,
    sentences,
    action: "Delete",
    isDangerous: true,
    send: () => ask("DELETE", merchantPath(id), undefined, found.tag),
  });
  if (answer) afterChange(`${id} was deleted.`);
}

function afterChange(text) {
  setText(byId("merchants-note"), text);
  loadMerchants();
}

async function saveMerchant() {
  const id = byId("merchant-id").value.trim();
  const text = byId("merchant-text").value;
  let document;
  try {
    document = JSON.parse(text);
  } catch (error) {
    return showText(byId("merchant-error"), `This is not JSON: ${error.message}`);
  }
  try {
    const tag = editedTag;
    const before = tag
      ? `The document that ${id} has now is replaced.`
      : `${id} has no document yet.`;
    const sentences = [`New calls of ${id} ${merchantWords(document ?? {})}.`, before];
    const answer = await confirmChange({
      title: `Save merchant ${id}?`,
      sentences,
      action: "Save",
      send: () => ask("PUT", merchantPath(id), text, tag),
    });
    if (!answer) return;
    closeForm();
    const warnings = (answer.warnings ?? []).map((warning) => ` Warning: ${warning}.`);
    afterChange(`${id} was saved.${warnings.join("")}`);
  } catch (error) {
    showText(byId("merchant-error"), error.message);
  }
}

export function startEdit() {
  const isLoaded = { tiers: false, merchants: false };
  // What could not be had is asked for again when it is opened again.
  byId("edit-details").addEventListener("toggle", async () => {
    if (!byId("edit-details").open) return;
    if (!isLoaded.tiers) isLoaded.tiers = await loadTiers();
    if (!isLoaded.merchants) isLoaded.merchants = await loadMerchants();
  });
  byId("tiers-text").addEventListener("input", forgetCheck);
  byId("tiers-check").addEventListener("click", checkTiers);
  byId("tiers-apply").addEventListener("click", applyTiers);
  byId("tiers-reload").addEventListener("click", loadTiers);
  byId("merchants-more").addEventListener("click", () => loadMerchants(merchantsNext));
  byId("merchants-new").addEventListener("click", () =>
    openForm("", pretty({ fallback: ["gold"], dedicated_only: false, max_calls: 50 }), NOTHING),
  );
  byId("merchant-cancel").addEventListener("click", closeForm);
  byId("merchant-form").addEventListener("submit", (event) => {
    event.preventDefault();
    saveMerchant();
  });
  byId("merchants").addEventListener("click", (event) => {
    const act = event.target.closest("[data-act]")?.dataset.act;
    const id = event.target.closest("[data-merchant]")?.dataset.merchant;
    if (act === "edit") editMerchant(id);
    if (act === "delete") deleteMerchant(id);
  });
}
