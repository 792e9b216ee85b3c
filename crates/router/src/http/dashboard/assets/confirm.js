// Nothing is changed without a question that says what will happen.

import { byId, el, setText, showText } from "./dom.js";

/**
 * Asks, then sends. Resolves with the router's answer, or null if the reader thought better of it.
 * An error of the router stays in the dialog, in its own words.
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
    let answer = null;
    yes.onclick = async () => {
      yes.disabled = true;
      showText(byId("confirm-error"), "");
      try {
        answer = await send();
        dialog.close();
      } catch (error) {
        showText(byId("confirm-error"), error.message);
        yes.disabled = false;
      }
    };
    no.onclick = () => dialog.close();
    dialog.onclose = () => resolve(answer);
    dialog.showModal();
    no.focus();
  });
}
