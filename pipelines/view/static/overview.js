// The curve above the table: returns of the trajectories that match, over time, policy versions or lengths.

import { get, givenUp } from "./api.js";
import { draw, drop } from "./charts.js";
import { find } from "./dom.js";
import { count, number } from "./format.js";
import { state, update } from "./state.js";

const NAMES = { t_commit: "time written", policy_version: "policy version", length: "length" };
let bins = null;
let shownFor = "";

export function start() {
  find("across").value = state.across in NAMES ? state.across : "t_commit";
  find("across").addEventListener("change", () => {
    update({ across: find("across").value }, { quiet: true });
    load(state.where ?? "", true);
  });
  find("overview").addEventListener("toggle", () => load(state.where ?? "", true));
}

export async function load(where) {
  if (!find("overview").open) return;
  const across = find("across").value;
  try {
    ({ bins } = await get("curve", { where, across, bins: 60 }, { only: "curve" }));
    shownFor = across;
    await redraw();
  } catch (error) {
    if (!givenUp(error)) drop(find("curve"));
  }
}

export async function redraw() {
  const figure = find("curve");
  if (!bins?.length || find("list").hidden) {
    drop(figure);
    return;
  }
  const time = shownFor === "t_commit";
  const values = bins.map((bin) => ({ ...bin, x: time ? 1000 * bin.x : bin.x }));
  const one = values.length === 1;
  const x = { field: "x", type: time ? "temporal" : "quantitative", title: NAMES[shownFor], scale: time ? { nice: false } : { zero: false, nice: false }, axis: { grid: false, tickCount: 8 } };
  const y = { type: "quantitative", title: "return", scale: { zero: false } };
  const highest = Math.max(...bins.map((bin) => bin.mean));
  const label = `Returns over ${NAMES[shownFor]}: mean ${number(bins[0].mean)} at first, ${number(bins.at(-1).mean)} at last, ${number(highest)} at most, in ${count(bins.length, "interval")}. The band holds 80% of them.`;
  await draw(figure, {
    width: Math.max(figure.clientWidth, 240), height: 110, autosize: { type: "fit-x", contains: "padding" }, padding: 4,
    data: { values },
    layer: [
      { mark: { type: "area", opacity: 0.18 }, encoding: { x, y: { ...y, field: "low" }, y2: { field: "high" } } },
      { mark: { type: "line", strokeWidth: 2, point: one || values.length < 30 ? { size: 28, filled: true } : false }, encoding: { x, y: { ...y, field: "mean" } } },
    ],
  }, label);
}
