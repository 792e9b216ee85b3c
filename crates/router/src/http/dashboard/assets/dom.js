// DOM helpers. Data becomes text nodes, never markup.

export const byId = (id) => document.getElementById(id);

/** Creates an element with attributes (null and false are omitted, true is empty) and children. */
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

/** Sets the text only if it differs, to avoid layout work. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** Sets the text of an element; hides the element if the text is empty. */
export function showText(element, text) {
  setText(element, text ?? "");
  element.hidden = !text;
}

export const callLink = (sid) => `#call/${encodeURIComponent(sid)}`;
export const podLink = (name) => `#pod/${encodeURIComponent(name)}`;

/** Nodes for parts of a sentence (texts, `{call}`, `{pod}`); calls and pods become links. */
export function partsToNodes(parts) {
  return parts.map((part) => {
    if (part.call) return el("a", { href: callLink(part.call) }, part.call);
    if (part.pod) return el("a", { href: podLink(part.pod) }, part.pod);
    return String(part);
  });
}

/** Reconciles the children of a list with `keys`: creates, reorders and removes by key. */
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
