// The page: what is shown follows from the address, keys and the lake's growth.

import { get, givenUp } from "./api.js";
import { isDark } from "./charts.js";
import { find, say, show } from "./dom.js";
import { ago, count, number } from "./format.js";
import * as overview from "./overview.js";
import * as query from "./query.js";
import { onChange, state } from "./state.js";
import * as table from "./table.js";
import * as trajectory from "./trajectory.js";

let lookSeconds = 2;
const THEME = "amago view theme";
let last = null;

async function main() {
  theme();
  buttons();
  let about;
  try {
    about = await get("lake");
  } catch (error) {
    fail(error);
    return;
  }
  find("place").textContent = about.lake;
  find("place").title = about.lake;
  document.title = `${about.lake} - amago view`;
  lookSeconds = about.look_seconds;
  figures(about);
  overview.start();
  table.start(about);
  trajectory.start(about);
  query.start();
  onChange(route);
  route();
  setTimeout(look, 1000 * lookSeconds);
}

function route() {
  const one = Boolean(state.uid);
  const was = !find("one").hidden;
  show(find("one"), one);
  show(find("list"), !one);
  if (one) {
    trajectory.load();
    if (!table.uids().length) table.load();
    return;
  }
  document.title = `${find("place").textContent} - amago view`;
  const uid = was && document.querySelector("#one h2 .uid")?.textContent;
  trajectory.close();
  table.load().then(() => {
    overview.redraw();
    if (uid) document.querySelector(`#table a.uid[title="${CSS.escape(uid)}"]`)?.focus();
  });
}

function figures(now) {
  const parts = [count(now.trajectories, "trajectory", "trajectories"), count(now.steps, "step")];
  if (now.derived) parts.push(`${number(now.derived)} relabelled`);
  find("figures").textContent = parts.join(" · ");
  const live = find("live");
  show(live, now.newest !== null);
  live.textContent = now.newest === null ? "" : `last write ${ago(now.newest)}`;
  live.classList.toggle("now", Date.now() / 1000 - now.newest < 60);
  const warnings = now.warnings.join("\n");
  find("warnings").textContent = warnings;
  show(find("warnings"), Boolean(warnings));
  last = now;
}

/** Look for what collectors have added, while the page is visible. */
async function look() {
  if (!document.hidden) {
    try {
      const before = last;
      const now = await get("state", {}, { only: "state" });
      figures(now);
      show(find("banner"), false);
      if (now.trajectories !== before.trajectories || now.newest !== before.newest) {
        const added = now.trajectories - before.trajectories;
        table.grown(added);
      }
    } catch (error) {
      if (!givenUp(error)) fail(error);
    }
  }
  setTimeout(look, 1000 * lookSeconds);
}

function fail(error) {
  const banner = find("banner");
  const text = error.text ?? String(error);
  if (banner.textContent !== text) banner.textContent = text;
  show(banner, true);
}

function theme() {
  const set = (name) => {
    if (name) document.documentElement.dataset.theme = name;
    const next = isDark() ? "Light" : "Dark";
    find("theme").textContent = next;
    find("theme").title = `Switch to ${next.toLowerCase()}`;
  };
  set(localStorage.getItem(THEME) ?? "");
  const redraw = () => {
    overview.redraw();
    trajectory.redraw();
  };
  find("theme").addEventListener("click", () => {
    const name = isDark() ? "light" : "dark";
    localStorage.setItem(THEME, name);
    set(name);
    redraw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    set("");
    redraw();
  });
}

function buttons() {
  find("link").addEventListener("click", async () => {
    const button = find("link");
    try {
      await navigator.clipboard.writeText(location.href);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Copy it from the address bar";
    }
    say("link copied");
    setTimeout(() => (button.textContent = "Copy link"), 1500);
  });
  find("keys").addEventListener("click", () => find("help").showModal());
  find("home").addEventListener("click", (event) => {
    event.preventDefault();
    location.hash = "";
  });
  find("skip").addEventListener("click", (event) => {
    event.preventDefault();
    find("main").focus();
  });
  let waiting = 0;
  addEventListener("resize", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => state.uid || table.load().then(overview.redraw), 150);
  });
  document.addEventListener("keydown", keys);
}

function keys(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || find("help").open) return;
  const on = event.target;
  if (on.matches("input:not([type=checkbox], [type=range]), textarea, select")) {
    if (event.key === "Escape") on.blur();
    return;
  }
  const act = state.uid && trajectory.isOpen() ? onTrajectory(event, on) : onTable(event);
  const both = { "?": () => find("help").showModal() };
  const chosen = act ?? both[event.key];
  if (!chosen) return;
  event.preventDefault();
  chosen();
}

function onTable(event) {
  return {
    "/": () => find("where").focus(),
    j: () => table.move(1),
    k: () => table.move(-1),
  }[event.key];
}

function onTrajectory(event, on) {
  const far = event.shiftKey ? 10 : 1;
  if (event.key === " " && on.matches("button, summary, a, input")) return undefined;
  if (on.matches("input[type=range]") && event.key !== "Escape" && event.key !== " ") return undefined;
  return {
    ArrowLeft: () => trajectory.step(-far),
    ArrowRight: () => trajectory.step(far),
    Home: () => trajectory.jump(false),
    End: () => trajectory.jump(true),
    " ": () => trajectory.play(),
    "+": () => trajectory.zoomBy(0.5),
    "=": () => trajectory.zoomBy(0.5),
    "-": () => trajectory.zoomBy(2),
    0: () => trajectory.zoom(0, Infinity),
    "[": () => trajectory.go(-1),
    "]": () => trajectory.go(1),
    Escape: () => document.querySelector("#one nav a")?.click(),
  }[event.key];
}

main();
