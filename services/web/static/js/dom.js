// Elements from data. Text only ever enters as text nodes; nothing here, or anywhere on the page, parses HTML.

export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== undefined && child !== null && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Told to screen readers when it is complete: never token by token. */
export function announce(text) {
  const live = byId("live");
  live.textContent = "";
  requestAnimationFrame(() => (live.textContent = text));
}

/** A link where `source` is a web address, else plain text: a document must not bring a script along. */
export function sourceLabel(source) {
  const isWeb = /^https?:\/\//i.test(source) && URL.canParse(source);
  if (!isWeb) return el("span", { class: "source" }, source);
  return el("a", { class: "source", href: source, target: "_blank", rel: "noopener noreferrer" }, source);
}

export const seconds = (value) => (value < 10 ? `${value.toFixed(2)} s` : `${value.toFixed(1)} s`);

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

const moving = matchMedia("(prefers-reduced-motion: reduce)");
export const scrolling = () => (moving.matches ? "auto" : "smooth");
