// Confirmation dialog for every change.

import { byId, el, setText, showText } from "./dom.js";

/**
 * Asks for confirmation, then sends. Resolves with the response, or null if cancelled. An error of
 * the router is shown in the dialog, which stays open.
 */
export function confirmChange({ title, sentences, action, isDangerous = false, send }) {
  const dialog = byId("confirm");
  const [yes, no] = [byId("confirm-yes"), byId("confirm-no")];
  setText(byId("confirm-title"), title);
  byId("confirm-text").replaceChildren(...sentences.map((sentence) => el("p", {}, sentence)));
  showText(byId("confirm-error"), "");
  setText(yes, action);
  yes.classList.toggle("danger", isDangerous);
  yes.disabled = false;

  return new Promise((resolve) => {
    let result = null;
    yes.onclick = async () => {
      yes.disabled = true;
      showText(byId("confirm-error"), "");
      try {
        result = await send();
        dialog.close();
      } catch (error) {
        showText(byId("confirm-error"), error.message);
        yes.disabled = false;
      }
    };
    no.onclick = () => dialog.close();
    dialog.onclose = () => resolve(result);
    dialog.showModal();
    no.focus();
  });
}
