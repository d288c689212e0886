// The table of trajectories: filtered and sorted by the server, a page at a time.

import { get, givenUp } from "./api.js";
import { find, make, replace, say, show } from "./dom.js";
import { ago, count, number, plain, short, time, version } from "./format.js";
import * as overview from "./overview.js";
import { hashOf, state, update } from "./state.js";

const SHOWN = ["uid", "env", "task", "return", "length", "success", "attempts", "policy_version", "relabel_method", "t_commit"];
const NARROW = ["uid", "task", "return", "length", "success", "policy_version"];
const NAMES = { t_commit: "written", t_start: "began", t_end: "ended", policy_version: "policy version", relabel_method: "relabelled by", base_uid: "derived from" };
const RIGHT = new Set(["return", "length", "policy_version", "epsilon", "seed", "row0", "base_offset"]);
const TIMES = new Set(["t_commit", "t_start", "t_end"]);
const ROWS = 100;
const EXAMPLES = ["success", "return > 0 and length < 50", "relabel_method is not null", "policy_version = (select max(policy_version) from trajectories)"];

let page = null;
let orders = new Set();
let shownFor = "";
let counted = "";
let known = new Set();

export const order = () => state.order || "-t_commit";
export const uids = () => (page ? page.uids : []);

export function start(about) {
  orders = new Set(about.orders);
  const form = find("filter");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    update({ where: find("where").value.trim(), after: undefined, before: undefined });
    if (find("where-error").hidden) say("filtered");
  });
  find("clear").addEventListener("click", () => {
    find("where").value = "";
    update({ where: undefined, after: undefined, before: undefined });
  });
  replace(find("hints"), "e.g. ", EXAMPLES.flatMap((text, place) => [
    place ? " · " : "",
    make("button", { type: "button", class: "hint", onclick: () => {
      find("where").value = text;
      form.requestSubmit();
    } }, text),
  ]));
  find("first").addEventListener("click", () => update({ after: undefined, before: undefined }));
  find("next").addEventListener("click", () => update({ after: page.uids.at(-1), before: undefined }));
  find("previous").addEventListener("click", () => update({ before: page.uids[0], after: undefined }));
  find("fresh").addEventListener("click", () => {
    update({ order: undefined, after: undefined, before: undefined }, { quiet: true });
    load({ force: true });
  });
  const picker = find("columns").querySelector("fieldset");
  for (const name of [...about.orders, "attempts", "tags"]) {
    const box = make("input", { type: "checkbox", value: name, onchange: () => {
      const chosen = [...picker.querySelectorAll("input:checked")].map((each) => each.value);
      update({ cols: chosen.length ? chosen : undefined }, { quiet: true });
      draw();
    } });
    picker.append(make("label", {}, box, ` ${NAMES[name] ?? name}`));
  }
}

const columns = () => {
  const wanted = state.cols ?? (innerWidth < 700 ? NARROW : SHOWN);
  const has = (name) => page.rows.some((row) => row[name] !== null && row[name] !== "");
  const envs = new Set(page.rows.map((row) => row.env));
  const optional = { relabel_method: has("relabel_method"), attempts: page.rows.some((row) => row.attempts?.length), env: envs.size > 1, task: has("task"), success: has("success") };
  return state.cols ? wanted : wanted.filter((name) => optional[name] ?? true);
};

/** Fetch the page of the state, unless it is shown already. */
export async function load({ force = false } = {}) {
  const { where = "", after = "", before = "" } = state;
  if (document.activeElement !== find("where")) find("where").value = where;
  const key = JSON.stringify([where, order(), after, before]);
  if (key === shownFor && !force) return draw();
  const table = find("table");
  table.setAttribute("aria-busy", "true");
  try {
    const found = await get("trajectories", { where, order: order(), after, before, rows: ROWS }, { only: "page" });
    const rows = found.rows.map((row) => Object.fromEntries(found.columns.map((name, place) => [name, row[place]])));
    const fresh = force && page ? new Set(rows.map((row) => row.uid).filter((uid) => !known.has(uid))) : new Set();
    page = { ...found, rows, uids: rows.map((row) => row.uid), fresh };
    known = new Set(page.uids);
    shownFor = key;
    show(find("where-error"), false);
    find("where").removeAttribute("aria-invalid");
    draw();
    summarise(where, force);
  } catch (error) {
    if (givenUp(error)) return;
    shownFor = "";
    const said = find("where-error");
    said.textContent = error.text ?? String(error);
    show(said, true);
    if (error.status === 400) find("where").setAttribute("aria-invalid", "true");
  } finally {
    table.removeAttribute("aria-busy");
  }
}

async function summarise(where, force) {
  if (counted === where && !force && page.total !== undefined) return;
  try {
    const found = await get("count", { where }, { only: "count" });
    counted = where;
    page.total = found.trajectories;
    const parts = [count(found.trajectories, "trajectory", "trajectories"), count(found.steps, "step")];
    if (found.return_mean !== null) parts.push(`mean return ${number(found.return_mean)}`);
    if (found.success_mean !== null) parts.push(`success ${(100 * found.success_mean).toFixed(1)}%`);
    find("summary").textContent = (where ? "matching: " : "") + parts.join(" · ");
    range();
    overview.load(where);
  } catch (error) {
    if (!givenUp(error)) find("summary").textContent = error.text ?? String(error);
  }
}

/** The lake has grown: show it where the newest are shown, offer it elsewhere. */
export function grown(added) {
  const { where, after, before } = state;
  if (order() === "-t_commit" && !after && !before) {
    show(find("fresh"), false);
    load({ force: true });
    return;
  }
  const fresh = find("fresh");
  fresh.textContent = added > 0 ? `${number(added)} new${where ? " in the lake" : ""}: show the newest` : "The lake changed: show the newest";
  show(fresh, true);
}

function range() {
  const { start, rows, total } = page;
  const text = rows.length ? `${number(start + 1)}–${number(start + rows.length)}${total === undefined ? "" : ` of ${number(total)}`}` : "none";
  find("range").textContent = text;
  find("first").disabled = start === 0;
  find("previous").disabled = start === 0;
  find("next").disabled = !page.more;
}

function draw() {
  if (!page) return;
  const names = columns();
  const picker = find("columns");
  for (const box of picker.querySelectorAll("input")) box.checked = names.includes(box.value);
  const table = find("table");
  replace(table.tHead, make("tr", {}, names.map(heading)));
  if (page.rows.length) replace(table.tBodies[0], page.rows.map((row) => line(row, names)));
  else {
    const text = state.where ? "No trajectory matches." : "No trajectories yet: they appear here as collectors write them.";
    replace(table.tBodies[0], make("tr", {}, make("td", { colSpan: names.length, class: "empty" }, text)));
  }
  range();
}

function heading(name) {
  const label = NAMES[name] ?? name;
  const by = order().replace(/^-/, "");
  const down = order().startsWith("-");
  if (!orders.has(name)) return make("th", { scope: "col" }, label);
  const sorted = by === name ? (down ? "descending" : "ascending") : undefined;
  const arrow = sorted ? (down ? " ↓" : " ↑") : "";
  const next = by === name && down ? name : `-${name}`;
  const button = make("button", { type: "button", title: `Sort by ${label}`, onclick: () => {
    update({ order: next, after: undefined, before: undefined });
    requestAnimationFrame(() => document.querySelector(`th[data-name="${CSS.escape(name)}"] button`)?.focus());
  } }, label + arrow);
  return make("th", { scope: "col", "aria-sort": sorted, "data-name": name, class: RIGHT.has(name) ? "right" : undefined }, button);
}

function line(row, names) {
  const here = hashOf({ ...state, uid: row.uid, t: undefined, from: undefined, to: undefined, with: undefined });
  const cells = names.map((name, place) => {
    const content = cell(name, row);
    const inner = name === "uid" ? make("a", { href: here, class: "uid", title: row.uid }, content) : content;
    const props = { class: RIGHT.has(name) ? "right" : undefined, title: TIMES.has(name) ? time(row[name]) : long(row[name]) };
    return place === 0 ? make("th", { ...props, scope: "row" }, inner) : make("td", props, inner);
  });
  return make("tr", { class: page.fresh.has(row.uid) ? "new" : undefined, onclick: (event) => {
    if (!event.target.closest("a") && !String(getSelection())) location.hash = here;
  } }, cells);
}

const long = (value) => (typeof value === "string" && value.length > 24 ? value : undefined);

function cell(name, row) {
  const value = row[name];
  if (name === "uid") return short(value);
  if (name === "attempts") return attempts(value);
  if (name === "policy_version") return version(value);
  if (TIMES.has(name)) return value ? ago(value) : "–";
  if (name === "seed") return value === null ? "–" : plain(value);
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "string" && /^[0-9a-f]{32}$/.test(value)) return short(value);
  return value === "" ? "–" : number(value);
}

export function attempts(value) {
  if (!value?.length) return "–";
  const done = value.filter(Boolean).length;
  const drawn = value.length <= 24 ? value.map((won) => (won ? "●" : "○")).join("") : "";
  return make("span", { class: "attempts", role: "img", "aria-label": `${done} of ${value.length} attempts succeeded` }, drawn || `${done} of ${value.length}`);
}

/** Move the focus between rows. */
export function move(step) {
  const links = [...find("table").querySelectorAll("tbody a.uid")];
  if (!links.length) return;
  const at = links.indexOf(document.activeElement);
  links[Math.min(Math.max(at + step, 0), links.length - 1)].focus();
}
