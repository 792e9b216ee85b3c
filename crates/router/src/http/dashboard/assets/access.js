// Who we are for the router: the token, the dialog that asks for it, and the role it gives.

import { byId, setText, showText } from "./dom.js";
import { token, whoami } from "./net.js";

let role = null;
// Whoever said "not now" is not asked again until they ask for it.
let isDeclined = false;
let onEntered = () => {};

export const isAdmin = () => role === "admin";

/** Whether the router lets us see nothing without a (better) token. */
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

/** Asks for a token because an answer was 401 or 403, unless the reader does not want to give one. */
export function askForToken(error) {
  byId("token-enter").hidden = false;
  if (error.status === 401) setRole(null);
  if (isDeclined) return;
  open(
    error.status === 403
      ? `This token is not enough: ${error.message}`
      : token.get()
        ? "The router does not know this token."
        : "",
  );
}

/** Learns our role; throws what the router said if it does not let us in. */
export async function learnRole() {
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
        "This token has the role agent, which may not look at the router. Use one of the role viewer or admin.",
      );
    token.set(text);
    isDeclined = false;
    setRole(given);
    byId("token").close("given");
    onEntered();
  } catch (error) {
    const isUnknown = error.status === 401 || error.status === 403;
    showText(
      byId("token-error"),
      isUnknown ? "The router does not know this token." : error.message,
    );
  } finally {
    button.disabled = false;
  }
}

/** Calls `entered` whenever a token was accepted. */
export function startAccess(entered) {
  onEntered = entered;
  byId("token-form").addEventListener("submit", (event) => {
    event.preventDefault();
    tryToken(byId("token-text").value.trim());
  });
  byId("token-cancel").addEventListener("click", () => byId("token").close());
  byId("token").addEventListener("close", () => {
    byId("token-text").value = "";
    isDeclined = byId("token").returnValue !== "given";
    byId("token").returnValue = "";
  });
  byId("token-enter").addEventListener("click", () => open(""));
  // A fresh page holds nothing of what the token let us see.
  byId("token-forget").addEventListener("click", () => {
    token.forget();
    location.replace(location.pathname);
  });
}
