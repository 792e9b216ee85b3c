// Authentication: the token, the token dialog, and the role.

import { byId, setText, showText } from "./dom.js";
import { token, whoami } from "./api.js";

let role = null;
// After a click on "Not now" the dialog opens only by its button.
let isDeclined = false;
let onAccepted = () => {};

export const isAdmin = () => role === "admin";

/** Whether the router requires a token, or one with another role. */
export const isLocked = () => role === null && !byId("token-enter").hidden;

function setRole(newRole) {
  role = newRole;
  setText(byId("fact-role"), role ?? "–");
  byId("edit").hidden = !isAdmin();
  byId("token-forget").hidden = !token.get();
  if (role) byId("token-enter").hidden = true;
}

function open(message) {
  const dialog = byId("token");
  showText(byId("token-error"), message);
  if (dialog.open) return;
  byId("token-text").value = "";
  dialog.showModal();
}

/** Opens the token dialog after a response with 401 or 403, unless the user declined. */
export function askForToken(error) {
  byId("token-enter").hidden = false;
  if (error.status === 401) setRole(null);
  if (isDeclined) return;
  open(
    error.status === 403
      ? `This token has too few permissions: ${error.message}`
      : token.get()
        ? "Unknown token."
        : "",
  );
}

/** Loads the role of the token; throws the router's error. */
export async function loadRole() {
  const { role: given } = await whoami();
  setRole(given);
}

async function tryToken(text) {
  const button = byId("token-form").querySelector("[type=submit]");
  button.disabled = true;
  try {
    const { role: given } = await whoami(text);
    if (given === "agent")
      return showText(
        byId("token-error"),
        "This token has role agent, which cannot use the dashboard. Use a token with role viewer or admin.",
      );
    token.set(text);
    isDeclined = false;
    setRole(given);
    byId("token").close("accepted");
    onAccepted();
  } catch (error) {
    const isUnknown = error.status === 401 || error.status === 403;
    showText(
      byId("token-error"),
      isUnknown ? "Unknown token." : error.message,
    );
  } finally {
    button.disabled = false;
  }
}

/** Calls `accepted` after each accepted token. */
export function startAccess(accepted) {
  onAccepted = accepted;
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    tryToken(byId("token-text").value.trim());
  });
  byId("token-cancel").addEventListener("click", () => byId("token").close());
  byId("token").addEventListener("close", () => {
    byId("token-text").value = "";
    isDeclined = byId("token").returnValue !== "accepted";
    byId("token").returnValue = "";
  });
  byId("token-enter").addEventListener("click", () => open(""));
  // Reloading removes all data that the token gave access to.
  byId("token-forget").addEventListener("click", () => {
    token.clear();
    location.replace(location.pathname);
  });
}
