// Elements from data. Text goes in as text nodes only: what a lake contains is never parsed as HTML.

export const find = (id) => document.getElementById(id);

/** Return an element with properties, attributes (names with "-", and role), handlers (on...) and children. */
export function make(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else if (key.includes("-") || key === "role" || key === "for" || key === "scope") element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const replace = (element, ...children) => element.replaceChildren(...children.flat().filter((child) => child !== null));

export function show(element, visible) {
  element.hidden = !visible;
}

/** Say something to those who cannot see the page. */
export function say(text) {
  find("said").textContent = text;
}
