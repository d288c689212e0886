// One trajectory: its facts, pictures, timeline and origin.

import { get, givenUp, Refused } from "./api.js";
import { find, make, replace, say } from "./dom.js";
import { count, number, plain, short, time, version } from "./format.js";
import { showFrame, stopFrames, strip } from "./frames.js";
import { hashOf, state, update } from "./state.js";
import { attempts, uids } from "./table.js";
import { MOST_LINES, Timeline } from "./timeline.js";

const PICTURES = new Set(["drawing", "image", "grid"]);
const VALUES = [
  ["q v", "q and v", "value of the action taken, and of the policy's actions"],
  ["advantage", "advantage", "q - v"],
  ["weight", "weight", "of the action in behaviour cloning"],
  ["entropy", "entropy", "of the policy, nats"],
  ["disagreement", "disagreement", "highest minus lowest critic"],
  ["action_gap", "action gap", "mean q of the best action minus that of the second best"],
  ["agreement", "agreement", "1 where the policy's most probable action has the highest mean q"],
];
const SHOWN_VALUES = ["q v", "advantage", "weight", "entropy"];
const MOST_DEFAULT = 4;
const MOST_TABLE = 200;
const LONGEST_TITLE = 60;
const SMOOTH = 200; // pixels a side: larger pictures are scaled smoothly
const SPEED = 8;
const MOST_READ = 24;

let agent = null;
let open = null;
let playing = 0;

export function start(about) {
  agent = about.values;
  let waiting = 0;
  new ResizeObserver(() => {
    clearTimeout(waiting);
    waiting = setTimeout(() => open?.drawn && open.drawn !== open.timeline.width && refresh(), 150);
  }).observe(find("one"));
}

export const isOpen = () => open !== null;

/** Show the trajectory of the state. */
export async function load() {
  if (open?.uid === state.uid) {
    const other = otherUid();
    if (open.shown !== windowKey(other)) await refresh();
    else place(state.t ?? 0, { quiet: true });
    return;
  }
  close();
  const uid = state.uid;
  const one = find("one");
  replace(one, make("p", { class: "loading" }, "Loading..."));
  try {
    const found = await get(`trajectory/${uid}`, {}, { only: "trajectory" });
    if (state.uid !== uid) return;
    open = { uid, ...found, t: state.t ?? 0, shown: "" };
    build();
    document.title = `${found.facts.env} ${short(uid)} - amago view`;
    one.querySelector("h2").focus({ preventScroll: true });
    await Promise.all([refresh(), origin(uid)]);
  } catch (error) {
    if (givenUp(error)) return;
    replace(one, back(), make("pre", { class: "error", role: "alert" }, error.text ?? String(error)));
  }
}

export function close() {
  pause();
  stopFrames();
  open = null;
}

const back = () => make("a", { class: "button", href: hashOf({ ...state, uid: undefined, t: undefined, from: undefined, to: undefined, with: undefined, lanes: undefined }) }, "← Table");

function neighbour(step) {
  const all = uids();
  const at = all.indexOf(state.uid);
  return at < 0 ? undefined : all[at + step];
}

export function go(step) {
  const uid = neighbour(step);
  if (uid) update({ uid, t: undefined, from: undefined, to: undefined, with: undefined });
}

function build() {
  const { facts } = open;
  const task = facts.task && facts.task !== facts.env ? facts.task : "";
  const map = asMap(task);
  const name = [facts.env, map || task.length > LONGEST_TITLE ? "" : task].filter(Boolean).join(" · ") || "trajectory";
  const pictures = open.columns.filter((column) => PICTURES.has(column.kind));
  const turn = (step, text, key) => make("button", { type: "button", disabled: !neighbour(step), onclick: () => go(step), "aria-keyshortcuts": key, title: `${text} trajectory of the table's page (${key})` }, text);
  replace(
    find("one"),
    make("nav", { class: "turn", "aria-label": "Trajectories" }, back(), turn(-1, "Previous", "["), turn(1, "Next", "]")),
    make("h2", { tabIndex: -1 }, name, " ", make("small", { class: "uid", title: "uid" }, facts.uid)),
    facts.goal_text ? make("p", { class: "goal" }, facts.goal_text) : null,
    make("div", { class: "head" }, map && pictures[0]?.kind !== "drawing" ? make("pre", { class: "map", role: "img", "aria-label": `The task as a map: ${task.slice(0, 400)}` }, map) : null, make("dl", { class: "facts" }, chips(facts, map || name.includes(task) ? "" : task))),
    tools(pictures),
    make("div", { class: pictures.length ? "stage pictured" : "stage" },
      make("aside", { class: "moment", "aria-label": "The step under the cursor" },
        pictures.length ? picture(pictures) : null,
        make("table", { id: "moment" }, make("caption", {}), make("tbody"))),
      make("div", { id: "timeline", class: "timeline", role: "group", "aria-label": "Timeline: arrow keys move the cursor", tabIndex: 0 })),
    make("details", { class: "panel", id: "rows", ontoggle: table }, make("summary", {}, "Steps as a table"), make("div", { class: "scroll", tabIndex: 0, role: "region", "aria-label": "Steps as a table" })),
    make("section", { class: "panel origin", id: "origin", "aria-label": "Origin" }, make("p", { class: "loading" }, "Looking up who acted and what trained on it...")),
  );
  open.timeline = new Timeline(find("timeline"), {
    moved: (t) => {
      pause();
      place(t);
    },
    zoomed: zoom,
  });
}

/** Return the rows of a task that is a map, such as "..#/#..", and what follows it; null for others. */
function asMap(task) {
  const [first, ...rest] = task.split(" ");
  const rows = first.split("/");
  const width = rows[0].length;
  if (rows.length < 2 || width < 2 || width > 40 || rows.length > 40 || rows.some((row) => row.length !== width) || !/^[#.A-Za-z0-9_*+-]+$/.test(rows.join("")) || !/[.#]/.test(first)) return null;
  return [...rows.map((row) => [...row].join(" ")), rest.join(" ")].join("\n").trimEnd();
}

function chips(facts, task) {
  const success = facts.success === null ? null : facts.success ? "yes" : "no";
  const shown = [
    ["task", task],
    ["return", number(facts.return)],
    ["success", success],
    ["steps", number(facts.length)],
    ["attempts", facts.attempts?.length ? attempts(facts.attempts) : null],
    ["policy version", facts.policy_version < 0 ? null : version(facts.policy_version)],
    ["ended by", facts.terminated ? "termination" : facts.truncated ? "truncation" : null],
    ["written", time(facts.t_commit)],
    ["relabelled by", facts.relabel_method],
    ...facts.tags.map(([key, value]) => [key, value]),
  ];
  return shown.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([key, value]) => make("div", {}, make("dt", {}, key), make("dd", {}, value)));
}

function tools(pictures) {
  const lanes = make("details", { class: "menu" }, make("summary", {}, "Lanes"), make("fieldset", { id: "lanes" }, make("legend", {}, "Lanes of the timeline")));
  const box = lanes.querySelector("fieldset");
  for (const [name, label] of candidates()) {
    box.append(make("label", {}, make("input", { type: "checkbox", value: name, checked: chosenLanes().includes(name), onchange: () => {
      update({ lanes: [...box.querySelectorAll("input:checked")].map((each) => each.value) }, { replace: true, quiet: true });
      refresh();
    } }), ` ${label}`));
  }
  const button = (text, title, act, key) => make("button", { type: "button", title: key ? `${title} (${key})` : title, "aria-label": title, onclick: act }, text);
  return make("div", { class: "timeline-tools" },
    make("button", { type: "button", id: "play", onclick: play, title: "Play (Space)" }, "Play"),
    make("label", { class: "slider" }, make("span", {}, "step "), make("output", { id: "at" }, "0"),
      make("input", { type: "range", id: "slider", min: 0, max: open.facts.length, value: 0, "aria-label": "step", oninput: (event) => {
        pause();
        place(Number(event.target.value));
      } })),
    make("span", { class: "group" }, button("−", "Zoom out", () => zoomBy(2), "-"), button("+", "Zoom in", () => zoomBy(0.5), "+"), button("All", "Show all steps", () => zoom(0, Infinity), "0")),
    make("span", { id: "window" }),
    compare(),
    lanes,
    pictures.length > 1 ? make("label", {}, "picture ", make("select", { id: "picture", onchange: () => {
      update({ pic: find("picture").value }, { replace: true, quiet: true });
      refresh();
    } }, pictures.map((column) => make("option", { value: column.name, selected: column.name === state.pic }, column.name)))) : null,
    make("span", { id: "note", role: "status" }));
}

function compare() {
  const { facts, derived } = open;
  if (!facts.base_uid && !derived.length) return null;
  const options = facts.base_uid
    ? [["", "its original"], ["none", "nothing"]]
    : [["", "nothing"], ...derived.map((each) => [each.uid, `${each.relabel_method} (return ${number(each.return)}, ${short(each.uid)})`])];
  const other = facts.base_uid ?? undefined;
  return make("span", { class: "group" },
    make("label", {}, "beside ", make("select", { id: "with", onchange: (event) => {
      update({ with: event.target.value || undefined });
    } }, options.map(([value, text]) => make("option", { value, selected: (state.with ?? "") === value }, text)))),
    other ? make("a", { href: hashOf({ ...state, uid: other, with: facts.uid, from: undefined, to: undefined, lanes: undefined }) }, "open it") : null,
    open.more_derived ? make("small", {}, " the first of them") : null);
}

function picture(pictures) {
  const column = pictures.find((each) => each.name === state.pic) ?? pictures[0];
  const smooth = Math.max(...column.shape.slice(0, 2)) > SMOOTH;
  return make("div", { class: "picture" }, make("img", { class: smooth ? "frame smooth" : "frame", width: 512, height: 512, alt: column.name }));
}

const pictureColumn = () => {
  const pictures = open.columns.filter((column) => PICTURES.has(column.kind));
  return pictures.find((each) => each.name === state.pic) ?? pictures[0];
};

function candidates() {
  const columns = open.columns.filter((column) => !PICTURES.has(column.kind));
  const roles = ["reward", "action", "observation", "flag"];
  const own = (role) => columns.filter((column) => column.role === role).map((column) => [column.name, column.name]);
  const values = agent ? VALUES.map(([name, label]) => [`value:${name}`, label]) : [];
  return [...own(roles[0]), ...values, ...own(roles[1]), ...own(roles[2]), ...own(roles[3])];
}

function chosenLanes() {
  const all = candidates().map(([name]) => name);
  if (state.lanes) return all.filter((name) => state.lanes.includes(name));
  const role = Object.fromEntries(open.columns.map((column) => [column.name, column]));
  let left = MOST_DEFAULT;
  return all.filter((name) => {
    if (name.startsWith("value:")) return SHOWN_VALUES.includes(name.slice(6));
    const column = role[name];
    if (column.role === "flag") return false;
    if (column.role !== "observation") return true;
    return column.kind === "text" || (!column.wide && left-- > 0);
  });
}

const otherUid = () => {
  if (state.with === "none") return undefined;
  return state.with ?? open.facts.base_uid ?? undefined;
};

const span = () => {
  const all = open.facts.length + 1;
  const from = Math.min(state.from ?? 0, all - 1);
  return [from, Math.min(Math.max(state.to ?? all, from + 1), all)];
};

const windowKey = (other) => JSON.stringify([span(), other, state.lanes, state.pic]);

/** Fetch and draw the window of the state. */
async function refresh() {
  const mine = open;
  const [start, stop] = span();
  const other = otherUid();
  mine.shown = windowKey(other);
  const width = mine.timeline.width;
  mine.drawn = width;
  const chosen = chosenLanes();
  const columns = chosen.filter((name) => !name.startsWith("value:"));
  const points = Math.max(60, Math.min(Math.round(width), 1000));
  const wantsValues = agent && chosen.some((name) => name.startsWith("value:"));
  find("window").textContent = stop - start > mine.facts.length ? `all ${count(mine.facts.length, "step")}` : `steps ${number(start)} to ${number(stop - 1)} of ${number(mine.facts.length)}`;
  try {
    const [steps, beside, values] = await Promise.all([
      get(`steps/${mine.uid}`, { start, stop, points, column: columns }, { only: "steps" }),
      other ? besideOf(other, start, stop, points) : null,
      wantsValues ? valuesOf(mine.uid, start, stop) : null,
    ]);
    if (open !== mine || mine.shown !== windowKey(otherUid())) return;
    Object.assign(mine, { steps, beside, values: values?.lanes ? values : null });
    const notes = [steps.exact ? "" : "each point stands for several steps: mean, lowest and highest", values?.note ?? "", beside?.note ?? ""];
    find("note").textContent = notes.filter(Boolean).join(" · ");
    film(start, stop);
    const { length, attempts: won } = mine.facts;
    await mine.timeline.draw({ start, stop }, lanes(chosen), { ...steps.marks, length, attempts: won ?? [] });
    if (open !== mine) return;
    place(state.t ?? start, { quiet: true });
    table();
  } catch (error) {
    if (!givenUp(error) && open === mine) find("note").textContent = error.text ?? String(error);
  }
}

async function valuesOf(uid, start, stop) {
  try {
    return await get(`values/${uid}`, { start, stop }, { only: "values" });
  } catch (error) {
    if (error instanceof Refused) return { note: error.text.replace("\n", ": ") };
    throw error;
  }
}

/** Fetch the trajectory to compare with, in the steps of the open one. */
async function besideOf(uid, start, stop, points) {
  try {
    const other = await get(`trajectory/${uid}`, {}, { only: "beside" });
    const [facts, mine] = [other.facts, open.facts];
    const isBase = mine.base_uid === uid;
    const shift = isBase ? -mine.base_offset : facts.base_uid === mine.uid ? facts.base_offset : 0;
    const changed = isBase ? open.changed : other.changed;
    const [a, b] = [Math.max(start - shift, 0), Math.min(stop - shift, facts.length + 1)];
    if (b <= a) return { lanes: [], note: "the other one has no steps here" };
    const columns = chosenLanes().filter((name) => changed.includes(name));
    const [steps, values] = await Promise.all([
      get(`steps/${uid}`, { start: a, stop: b, points: Math.max(1, Math.round((points * (b - a)) / (stop - start))), column: columns }, { only: "beside steps" }),
      agent ? valuesOf(uid, a, b) : null,
    ]);
    return { lanes: steps.lanes, t: steps.t.map((t) => t + shift), values: values?.lanes, vt: values?.t?.map((t) => t + shift), which: isBase ? "original" : "relabelled", mine: isBase ? "relabelled" : "original", shift };
  } catch (error) {
    if (error instanceof Refused) return { lanes: [], note: error.message };
    throw error;
  }
}

const LABELS = (column, place) => (column.size === 1 ? column.name : `${column.name}[${place}]`);

function lanes(chosen) {
  const { steps, beside, values } = open;
  const drawn = [];
  for (const name of chosen) {
    if (name.startsWith("value:")) {
      const lane = values && valueLane(name.slice(6), values, beside);
      if (lane) drawn.push(lane);
      continue;
    }
    const column = steps.lanes.find((lane) => lane.name === name);
    if (!column) continue;
    const other = beside?.lanes.find((lane) => lane.name === name);
    if (column.texts) {
      drawn.push({ ...column, about: "", title: other ? `${name} (${beside.mine})` : name });
      if (other) drawn.push({ ...other, name: `${name}\u0000other`, title: `${name} (${beside.which})`, texts: other.texts.map(([t, text]) => [t + beside.shift, text]) });
      continue;
    }
    if (other && column.dims > MOST_LINES) {
      drawn.push({ ...numericLane(column, steps, undefined, beside), title: `${name} (${beside.mine})` });
      drawn.push({ ...numericLane(other, beside, undefined, beside), name: `${name}\u0000other`, title: `${name} (${beside.which})` });
    } else drawn.push(numericLane(column, steps, other, beside));
  }
  return drawn;
}

/** The original below, the relabelled one, which is dashed, above it. */
const ordered = (mine, others) => (others.length && mine[0].which === "relabelled" ? [...others, ...mine] : [...mine, ...others]);

function numericLane(column, steps, other, beside) {
  const of = (lane, t, which) => lane.mean.map((mean, place) => ({ label: LABELS(lane, place), t, mean, low: lane.low?.[place], high: lane.high?.[place], which }));
  const series = ordered(of(column, steps.t, other ? beside.mine : ""), other ? of(other, beside.t, beside.which) : []);
  const shape = column.shape.length ? column.shape.join("×") : "";
  const cut = column.dims < column.size ? `the first ${column.dims} of ${number(column.size)} values` : "";
  const choices = column.choices ? `one of ${column.choices}` : "";
  const bars = column.role === "reward" && !other;
  return { ...column, series, bars, zero: column.role === "reward", stop: steps.stop, about: [column.role === column.name ? "" : column.role, shape, choices, cut].filter(Boolean).join(", ") };
}

function valueLane(name, values, beside) {
  const [, title, about] = VALUES.find(([each]) => each === name);
  const of = (lanes, t, which) => name.split(" ").map((each) => ({ label: each, t, mean: lanes[each], which }));
  const other = beside?.values;
  const series = ordered(of(values.lanes, values.t, other ? beside.mine : ""), other ? of(beside.values, beside.vt, beside.which) : []);
  return { name: `value:${name}`, title, about, kind: "scalar", role: "value", series, zero: name === "advantage", bars: name === "advantage" && !other };
}

async function film(start, stop) {
  const column = pictureColumn();
  if (!column) return;
  const { timeline, uid } = open;
  try {
    const drawn = await strip(uid, column.name, column.shape, start, stop, timeline.plot);
    if (open?.timeline === timeline && timeline.window.start === start && timeline.window.stop === stop) timeline.top.replaceChildren(drawn);
  } catch {
    timeline.top.replaceChildren();
  }
}

/** Move to a step, within the trajectory. */
function place(t, { quiet = false } = {}) {
  if (!open?.steps) return;
  t = Math.min(Math.max(t, 0), open.facts.length);
  open.t = t;
  open.timeline.place(t);
  find("at").textContent = number(t);
  find("slider").value = t;
  const column = pictureColumn();
  if (column) showFrame(find("one").querySelector("img.frame"), open.uid, column.name, t);
  read(t);
  if (!quiet) remember(t);
}

let remembering = 0;
function remember(t) {
  clearTimeout(remembering);
  const uid = open.uid;
  remembering = setTimeout(() => {
    if (state.uid === uid) update({ t: t || undefined }, { replace: true, quiet: true });
  }, 200);
}

/** Move by steps, scrolling the window along. */
export function step(by) {
  pause();
  advance(by);
}

function advance(by) {
  const t = Math.min(Math.max(open.t + by, 0), open.facts.length);
  const [start, stop] = span();
  place(t);
  if (t < start || t >= stop) {
    const from = Math.min(Math.max(t - Math.floor((stop - start) / 4), 0), Math.max(open.facts.length + 1 - (stop - start), 0));
    zoom(from, from + stop - start);
  }
  return t;
}

export const jump = (end) => {
  pause();
  advance(end ? open.facts.length : -open.facts.length);
};

export function play() {
  if (playing) {
    pause();
    return;
  }
  if (!open) return;
  if (open.t >= open.facts.length) place(span()[0]);
  find("play").textContent = "Pause";
  playing = setInterval(() => {
    if (advance(1) >= open.facts.length) pause();
  }, 1000 / SPEED);
}

function pause() {
  if (!playing) return;
  clearInterval(playing);
  playing = 0;
  if (find("play")) find("play").textContent = "Play";
}

export function zoom(from, to) {
  const all = open.facts.length + 1;
  from = Math.min(Math.max(Math.round(from), 0), all - 1);
  to = Math.min(Math.max(Math.round(to), from + 2), all);
  const whole = from === 0 && to === all;
  update({ from: whole ? undefined : from, to: whole ? undefined : to, t: open.t || undefined }, { replace: true });
}

export function zoomBy(factor) {
  const [start, stop] = span();
  const size = Math.max(2, Math.round((stop - start) * factor));
  const middle = open.t >= start && open.t < stop ? open.t : (start + stop) / 2;
  const from = Math.max(0, Math.round(middle - size * ((middle - start) / (stop - start))));
  zoom(from, Math.min(from + size, open.facts.length + 1));
}

// The step under the cursor, in numbers.

let asking = 0;
function read(t) {
  const exact = open.steps.exact && t >= open.steps.start && t < open.steps.stop;
  clearTimeout(asking);
  if (exact) {
    shown(t, open.steps, t - open.steps.start);
    return;
  }
  const uid = open.uid;
  asking = setTimeout(async () => {
    try {
      const steps = await get(`steps/${uid}`, { start: t, stop: t + 1, points: 1, column: chosenLanes().filter((name) => !name.startsWith("value:")) }, { only: "read" });
      if (open?.uid === uid && open.t === t) shown(t, steps, 0);
    } catch (error) {
      if (!givenUp(error)) throw error;
    }
  }, 80);
}

function shown(t, steps, at) {
  const rows = [];
  const flags = Object.entries(steps.marks).filter(([name, all]) => all.includes(t) && (name !== "reset" || t < open.facts.length)).map(([name]) => (name === "reset" ? "an attempt begins" : name));
  for (const lane of steps.lanes) {
    if (lane.role === "flag") continue;
    if (lane.texts) {
      const text = lane.texts.filter(([from]) => from <= t).at(-1)?.[1];
      rows.push([lane.name, text === undefined ? "–" : text || "(empty)"]);
    } else {
      const values = lane.mean.map((series) => series[at]);
      const some = values.slice(0, MOST_READ).map((value) => (value === null ? "–" : plain(value)));
      rows.push([lane.name, some.join(" ") + (values.length > MOST_READ || lane.dims < lane.size ? " ..." : "")]);
    }
  }
  const { values } = open;
  const place = values ? t - values.start : -1;
  if (values && place >= 0 && place < values.t.length) {
    for (const [name, series] of Object.entries(values.lanes)) rows.push([name, series[place] === null ? "–" : number(series[place])]);
  }
  const body = find("moment");
  if (t === open.facts.length) flags.push("the last observation");
  body.caption.textContent = `Step ${number(t)}${flags.length ? `: ${flags.join(", ")}` : ""}`;
  replace(body.tBodies[0], rows.map(([name, value]) => make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, value))));
}

function table() {
  const panel = find("rows");
  if (!panel?.open || !open?.steps) return;
  const { steps, values } = open;
  const into = panel.querySelector("div");
  if (!steps.exact || steps.stop - steps.start > MOST_TABLE) {
    replace(into, make("p", {}, `Zoom in to ${MOST_TABLE} steps or fewer to see them as a table.`));
    return;
  }
  const numeric = steps.lanes.filter((lane) => !lane.texts);
  const heads = numeric.flatMap((lane) => lane.mean.slice(0, 8).map((_, place) => LABELS(lane, place)));
  const names = values ? Object.keys(values.lanes) : [];
  const rows = steps.t.map((t, at) => make("tr", {},
    make("th", { scope: "row", class: "right" }, number(t)),
    numeric.flatMap((lane) => lane.mean.slice(0, 8).map((series) => make("td", { class: "right" }, number(series[at])))),
    names.map((name) => make("td", { class: "right" }, number(values.lanes[name][t - values.start] ?? null)))));
  replace(into, make("table", {}, make("caption", { class: "visually-hidden" }, "Steps"),
    make("thead", {}, make("tr", {}, ["step", ...heads, ...names].map((name) => make("th", { scope: "col", class: "right" }, name)))), make("tbody", {}, rows)));
}

// Who acted, what trained on it, what derives from it.

async function origin(uid) {
  let found;
  try {
    found = await get(`origin/${uid}`, {}, { only: "origin" });
  } catch (error) {
    if (!givenUp(error) && open?.uid === uid) replace(find("origin"), make("p", { class: "error" }, error.text ?? String(error)));
    return;
  }
  if (open?.uid !== uid) return;
  const { facts, derived } = open;
  const { collector, policy, trained } = found;
  const kept = policy.kept === null ? "" : policy.kept ? ", which is kept" : ", which was deleted";
  const who = facts.policy_version < 0 ? (policy.id || "a policy that was not trained") : `${policy.id} after ${count(facts.policy_version, "update")}${policy.kept === null ? "" : `: checkpoint ${facts.policy_version}${kept}`}`;
  const acted = [
    ["policy", who],
    ["exploration", `mean epsilon ${number(facts.epsilon)}`],
    ["collector", facts.collector || "–"],
    ["run", policy.run ?? collector?.run],
    ["environment", collector ? Object.entries(collector.env).map(([key, value]) => (key === "name" ? value : `${key}=${value}`)).join(" ") : facts.env],
    ["seed", plain(facts.seed)],
    ["host", collector?.host ? `${collector.host}, process ${collector.pid}` : ""],
    ["command", collector?.command],
    ["acted from", facts.t_start ? `${time(facts.t_start)} to ${time(facts.t_end)}` : ""],
    ["source", facts.source],
    ["segment", facts.segment],
  ];
  const list = (rows) => make("dl", {}, rows.filter(([, value]) => value).map(([key, value]) => make("div", {}, make("dt", {}, key), make("dd", {}, value))));
  const training = trained.length
    ? make("ul", {}, trained.map((run) => make("li", {}, make("strong", {}, run.run), `: could draw it from update ${number(run.first)} on`, run.checkpoints.length ? `; checkpoints kept since: ${run.checkpoints.map(number).join(", ")}` : "")))
    : make("p", {}, "No checkpoint of a run beside this lake could have drawn it.");
  const relatives = derived.map((each) => make("li", {},
    make("a", { href: hashOf({ ...state, uid: each.uid, with: undefined, from: undefined, to: undefined, lanes: undefined }) }, `${each.relabel_method} ${short(each.uid)}`),
    ` return ${number(each.return)}, ${count(each.length, "step")}${each.base_offset ? ` from step ${number(each.base_offset)}` : ""} `,
    make("button", { type: "button", onclick: () => {
      update({ with: each.uid });
      const select = find("with");
      if (select) select.value = each.uid;
      say("compared");
      scrollTo({ top: 0 });
    } }, "Compare")));
  replace(find("origin"),
    make("h3", {}, facts.base_uid ? "Who acted in its original" : "Who acted"), list(acted),
    make("h3", {}, "What trained on it"), training,
    facts.base_uid ? [make("h3", {}, "Derived from"), make("p", {}, make("a", { href: hashOf({ ...state, uid: facts.base_uid, with: undefined, from: undefined, to: undefined, lanes: undefined }) }, facts.base_uid), ` from its step ${number(facts.base_offset)} on; changed: ${open.changed.join(", ")}`)] : [],
    derived.length ? [make("h3", {}, "Relabelled versions"), make("ul", {}, relatives)] : []);
}

/** Redraw in the colours of the page. */
export const redraw = () => open && refresh();
