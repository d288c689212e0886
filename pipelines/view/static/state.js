// What is shown, kept in the address after "#": opening it again shows exactly this.

const LISTS = ["cols", "lanes"];
const NUMBERS = ["t", "from", "to"];
const listeners = [];

export let state = read();

function read() {
  const found = {};
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (LISTS.includes(name)) found[name] = value ? value.split("\u001f") : [];
    else if (NUMBERS.includes(name)) {
      const number = Number(value);
      if (Number.isInteger(number) && number >= 0) found[name] = number;
    } else found[name] = value;
  }
  return found;
}

export function hashOf(values) {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    if (value === undefined || value === null || value === "") continue;
    given.set(name, Array.isArray(value) ? value.join("\u001f") : value);
  }
  return `#${given}`;
}

/** Change some of the state; undefined removes. `quiet`: the page shows it already. */
export function update(changes, { replace = false, quiet = false } = {}) {
  state = { ...state, ...changes };
  const url = hashOf(state);
  if (url !== location.hash) history[replace ? "replaceState" : "pushState"](null, "", url);
  if (!quiet) notify();
}

export function onChange(listener) {
  listeners.push(listener);
}

function notify() {
  for (const listener of listeners) listener(state);
}

window.addEventListener("popstate", () => {
  state = read();
  notify();
});
window.addEventListener("hashchange", () => {
  if (hashOf(read()) !== hashOf(state)) {
    state = read();
    notify();
  }
});
