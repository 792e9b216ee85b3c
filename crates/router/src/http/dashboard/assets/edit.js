// Editor of tiers and merchants, for admins.

import { confirmChange } from "./confirm.js";
import { byId, el, setText, showText } from "./dom.js";
import { NO_DOCUMENT, fetchWithTag, request } from "./api.js";
import { describeMerchant, plural, poolName } from "./format.js";

// Pod names listed for a move; further pods are counted.
const MAX_POD_NAMES = 12;

const pretty = (value) => JSON.stringify(value, null, 2);

let loadedTiers = "";
// The checked text and its result; any other text must be checked before it is applied.
let checkedTiers = null;

async function loadTiers() {
  try {
    const tiers = await request("GET", "/tiers");
    loadedTiers = pretty(tiers);
    byId("tiers-text").value = loadedTiers;
    resetCheck();
    if (tiers.managed_by) {
      const note = `Managed by ${tiers.managed_by}: change them there.`;
      byId("tiers-result").replaceChildren(el("p", { class: "note" }, note));
    }
    return true;
  } catch (error) {
    showText(byId("tiers-error"), error.message);
    return false;
  }
}

function resetCheck() {
  checkedTiers = null;
  byId("tiers-apply").disabled = true;
  byId("tiers-result").replaceChildren();
  showText(byId("tiers-error"), "");
}

/** Describes moves: one sentence for each pair of source and target pool. */
function moveSentences(moves) {
  const groups = groupBy(moves, ({ from, to }) => `${from} ${to}`);
  return [...groups.values()].map((group) => {
    const names = group
      .slice(0, MAX_POD_NAMES)
      .map((move) => move.pod_name)
      .join(", ");
    const rest = group.length > MAX_POD_NAMES ? ` and ${group.length - MAX_POD_NAMES} more` : "";
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
  byId("tiers-result").replaceChildren(...parts);
}

async function checkTiers() {
  const text = byId("tiers-text").value;
  resetCheck();
  try {
    const result = await request("PUT", "/tiers?dry_run=true", text);
    // The text was edited meanwhile: this result is outdated.
    if (byId("tiers-text").value !== text) return;
    checkedTiers = { text, result };
    byId("tiers-apply").disabled = false;
    showCheck(result);
  } catch (error) {
    showText(byId("tiers-error"), error.message);
  }
}

// Detects changes of the tiers since they were loaded here.
async function checkForChanges() {
  const { result, tag } = await fetchWithTag("/tiers");
  const sentences =
    pretty(result) === loadedTiers
      ? []
      : ["The tiers have changed since you loaded them. Applying replaces those changes."];
  return { sentences, tag };
}

async function applyTiers() {
  const { text, result } = checkedTiers;
  const { moves = [], warnings = [] } = result;
  try {
    const changed = await checkForChanges();
    const sentences = [
      "These tiers take effect immediately. Live calls continue.",
      ...(moves.length ? moveSentences(moves) : ["No pod moves."]),
      ...warnings.map((warning) => `Warning: ${warning}`),
      ...changed.sentences,
    ];
    const applied = await confirmChange({
      title: "Apply these tiers?",
      sentences,
      action: "Apply",
      send: () => request("PUT", "/tiers", text, changed.tag),
    });
    if (applied) showApplied(applied);
  } catch (error) {
    showText(byId("tiers-error"), error.message);
  }
}

function showApplied({ tiers, warnings = [] }) {
  loadedTiers = pretty(tiers);
  byId("tiers-text").value = loadedTiers;
  resetCheck();
  byId("tiers-result").replaceChildren(
    el("p", { class: "note" }, "Tiers applied."),
    ...(warnings.length ? [bullets(warnings)] : []),
  );
}

let nextMerchants = null;

async function loadMerchants(cursor = null) {
  try {
    const result = await request(
      "GET",
      `/merchants${cursor ? `?cursor=${encodeURIComponent(cursor)}` : ""}`,
    );
    nextMerchants = result.next ?? null;
    const items = result.merchants.map(merchantItem);
    if (cursor) byId("merchants").append(...items);
    else byId("merchants").replaceChildren(...items);
    byId("merchants-more").hidden = !nextMerchants;
    showText(byId("merchants-error"), "");
    byId("merchants-none").hidden = byId("merchants").childElementCount > 0;
    return true;
  } catch (error) {
    showText(byId("merchants-error"), error.message);
    return false;
  }
}

function merchantItem({ merchant_id: id, document }) {
  const act = (text, name) =>
    el("button", { type: "button", "data-act": name, "aria-label": `${text} ${id}` }, text);
  const words = el("span", { class: "soft small" }, `calls ${describeMerchant(document ?? {})}`);
  const owner = document?.managed_by;
  const buttons = owner
    ? el("span", { class: "soft small" }, `managed by ${owner}`)
    : el("div", { class: "buttons" }, act("Edit", "edit"), act("Delete…", "delete"));
  return el(
    "li",
    { "data-merchant": id },
    el("div", {}, el("strong", {}, id), " ", words),
    buttons,
  );
}

const merchantPath = (id) => `/merchants/${encodeURIComponent(id)}`;

// `ETag` of the edited version: a concurrent change is not overwritten.
let formTag = NO_DOCUMENT;

function openForm(id, text, tag) {
  formTag = tag;
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

// Edits the current version, not the one in the list.
async function editMerchant(id) {
  try {
    const { result, tag } = await fetchWithTag(merchantPath(id));
    openForm(id, pretty(result), tag);
    showText(byId("merchants-error"), "");
  } catch (error) {
    showText(byId("merchants-error"), error.message);
  }
}

async function deleteMerchant(id) {
  const found = await fetchWithTag(merchantPath(id)).catch((error) => {
    showText(byId("merchants-error"), error.message);
  });
  if (!found) return;
  const sentences = [
    `New calls of ${id} currently ${describeMerchant(found.result ?? {})}.`,
    "After the deletion they use the default chain without limits. Live calls continue.",
  ];
  const result = await confirmChange({
    title: `Delete merchant ${id}?`,
    sentences,
    action: "Delete",
    isDangerous: true,
    send: () => request("DELETE", merchantPath(id), undefined, found.tag),
  });
  if (result) afterChange(`${id} is deleted.`);
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
    return showText(byId("merchant-error"), `Not valid JSON: ${error.message}`);
  }
  try {
    const tag = formTag;
    const before = tag
      ? `This replaces the current document of ${id}.`
      : `This creates the document of ${id}.`;
    const sentences = [`New calls of ${id} ${describeMerchant(document ?? {})}.`, before];
    const result = await confirmChange({
      title: `Save merchant ${id}?`,
      sentences,
      action: "Save",
      send: () => request("PUT", merchantPath(id), text, tag),
    });
    if (!result) return;
    closeForm();
    const warnings = (result.warnings ?? []).map((warning) => ` Warning: ${warning}.`);
    afterChange(`${id} is saved.${warnings.join("")}`);
  } catch (error) {
    showText(byId("merchant-error"), error.message);
  }
}

export function startEdit() {
  const isLoaded = { tiers: false, merchants: false };
  // After a failed load, opening the section again retries.
  byId("edit-details").addEventListener("toggle", async () => {
    if (!byId("edit-details").open) return;
    if (!isLoaded.tiers) isLoaded.tiers = await loadTiers();
    if (!isLoaded.merchants) isLoaded.merchants = await loadMerchants();
  });
  byId("tiers-text").addEventListener("input", resetCheck);
  byId("tiers-check").addEventListener("click", checkTiers);
  byId("tiers-apply").addEventListener("click", applyTiers);
  byId("tiers-reload").addEventListener("click", loadTiers);
  byId("merchants-more").addEventListener("click", () => loadMerchants(nextMerchants));
  byId("merchants-new").addEventListener("click", () =>
    openForm("", pretty({ fallback: ["gold"], dedicated_only: false, max_calls: 50 }), NO_DOCUMENT),
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
