// Small helpers for the document. Data only ever becomes text, never markup.

export const byId = (id) => document.getElementById(id);

/** An element with attributes (null and false are left out, true is empty) and children. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Writes text only where it differs: an unchanged node costs no layout. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** Shows a text in an element that is hidden while there is none. */
export function showText(element, text) {
  setText(element, text ?? "");
  element.hidden = !text;
}

export const callLink = (sid) => `#call/${encodeURIComponent(sid)}`;
export const podLink = (name) => `#pod/${encodeURIComponent(name)}`;

/** Parts of a sentence (texts, `{call}`, `{pod}`) as nodes; calls and pods are links to their stories. */
export function partsToNodes(parts) {
  return parts.map((part) => {
    if (part.call) return el("a", { href: callLink(part.call) }, part.call);
    if (part.pod) return el("a", { href: podLink(part.pod) }, part.pod);
    return String(part);
  });
}

/** Keeps a list's children in the order of `keys`: makes, keeps and removes by key. */
export function keyed(parent, known, keys, make) {
  const wanted = new Set(keys);
  for (const [key, item] of known) {
    if (wanted.has(key)) continue;
    item.element.remove();
    known.delete(key);
  }
  let at = parent.firstElementChild;
  for (const key of keys) {
    let item = known.get(key);
    if (!item) known.set(key, (item = make(key)));
    if (item.element === at) at = at.nextElementSibling;
    else parent.insertBefore(item.element, at);
  }
}
