// Lanes over the steps of a window, one chart each, with one cursor over all of them.

import { draw, drop, quiet } from "./charts.js";
import { make } from "./dom.js";
import { number } from "./format.js";

const LEFT = 58;
const RIGHT = 12;
export const MOST_LINES = 6;
const MOST_HEAT = 240;

export class Timeline {
  /** `moved(t)`, `zoomed(from, to)`: what the user did. */
  constructor(element, { moved, zoomed }) {
    Object.assign(this, { element, moved, zoomed });
    this.cursor = make("div", { class: "cursor", "aria-hidden": "true" });
    this.brush = make("div", { class: "brush", "aria-hidden": "true", hidden: true });
    this.top = make("div", { class: "above" });
    this.lanes = make("div", { class: "lanes" });
    element.replaceChildren(this.top, this.lanes, this.cursor, this.brush);
    this.figures = new Map();
    this.window = { start: 0, stop: 1 };
    this.#listen();
  }

  get width() {
    return Math.max(this.element.clientWidth, 260);
  }

  get plot() {
    return { left: LEFT, width: this.width - LEFT - RIGHT };
  }

  /** Draw lanes: {name, title, kind, role, series: [{label, t, mean, low, high, dashed}], choices, texts}. */
  async draw(window, lanes, marks) {
    this.window = window;
    const names = new Set(lanes.map((lane) => lane.name));
    for (const [name, figure] of this.figures) {
      if (names.has(name)) continue;
      drop(figure.querySelector(".chart"));
      figure.remove();
      this.figures.delete(name);
    }
    const drawn = [];
    for (const lane of lanes) {
      if (!this.figures.has(lane.name)) {
        const figure = make("figure", { class: "lane" }, make("figcaption", {}), make("div", { class: "chart" }));
        this.figures.set(lane.name, figure);
      }
      const figure = this.figures.get(lane.name);
      this.lanes.append(figure);
      caption(figure.querySelector("figcaption"), lane);
      const chart = figure.querySelector(".chart");
      if (lane.texts) chart.replaceChildren(words(lane, window));
      else drawn.push(draw(chart, this.#specification(lane, marks, drawn.length === 0), described(lane, window)));
    }
    await Promise.all(drawn);
    this.place(this.t ?? window.start);
  }

  /** Move the cursor to a step. */
  place(t) {
    this.t = t;
    const { start, stop } = this.window;
    const inside = t >= start && t < stop;
    this.cursor.hidden = !inside;
    if (!inside) return;
    const { left, width } = this.plot;
    this.cursor.style.transform = `translateX(${left + ((t - start + 0.5) / (stop - start)) * width}px)`;
  }

  #at(event) {
    const { left, width } = this.plot;
    const { start, stop } = this.window;
    const share = (event.clientX - this.element.getBoundingClientRect().left - left) / width;
    return Math.min(Math.max(Math.floor(start + share * (stop - start)), start), stop - 1);
  }

  #listen() {
    let from = null;
    let planned = false;
    this.element.addEventListener("pointermove", (event) => {
      if (event.pointerType === "touch" && from === null) return;
      if (planned) return;
      planned = true;
      requestAnimationFrame(() => {
        planned = false;
        const t = this.#at(event);
        if (from !== null) this.#select(from, event.clientX);
        this.moved(t);
      });
    });
    this.element.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.target.closest("button, a, summary, input")) return;
      from = event.clientX;
      this.moved(this.#at(event));
    });
    const end = (event) => {
      if (from === null) return;
      const [a, b] = [this.#at({ clientX: Math.min(from, event.clientX) }), this.#at({ clientX: Math.max(from, event.clientX) })];
      const far = Math.abs(event.clientX - from) > 8;
      from = null;
      this.brush.hidden = true;
      if (far && b > a) this.zoomed(a, b + 1);
    };
    window.addEventListener("pointerup", end);
    window.addEventListener("pointercancel", () => {
      from = null;
      this.brush.hidden = true;
    });
    this.element.addEventListener("dblclick", () => this.zoomed(0, Infinity));
  }

  #select(from, to) {
    const edge = this.element.getBoundingClientRect().left;
    this.brush.hidden = Math.abs(to - from) <= 8;
    this.brush.style.left = `${Math.min(from, to) - edge}px`;
    this.brush.style.width = `${Math.abs(to - from)}px`;
  }

  /** `first`: the lane with the axis of steps, above it. */
  #specification(lane, marks, first) {
    const { start, stop } = this.window;
    const axis = first ? { orient: "top", title: null, grid: false, tickMinStep: 1, labelFlush: stop - start > 12, format: ",d", domain: false } : null;
    if (axis && stop - start <= 12) axis.values = Array.from({ length: stop - start }, (_, place) => start + place);
    const x = { type: "quantitative", scale: { domain: [start - 0.5, stop - 0.5], nice: false, zero: false }, axis };
    const bands = attemptBands(marks, start, stop);
    const layers = [];
    if (bands.length > 1) {
      const shaded = bands.filter((band) => band.number % 2 === 0);
      layers.push({ data: { values: shaded }, mark: { type: "rect", opacity: 0.09, color: "#888888" }, encoding: { x: { ...x, field: "a" }, x2: { field: "b" } } });
      if (first && bands.length <= 40) {
        const mark = { type: "text", align: "left", baseline: "top", dx: 3, dy: 1, fontSize: 10, color: quiet() };
        layers.push({ data: { values: bands }, mark, encoding: { x: { ...x, field: "a" }, y: { value: 0 }, text: { field: "text" } } });
      }
    }
    const heat = isHeat(lane);
    layers.push(...(heat ? heatLayers(lane, x) : lineLayers(lane, x, this.window)));
    const ends = [...(marks.terminated ?? []).map((t) => ({ t, of: "terminated" })), ...(marks.truncated ?? []).map((t) => ({ t, of: "truncated" }))];
    if (ends.length) {
      layers.push({ data: { values: ends }, mark: { type: "rule", strokeDash: [3, 3], opacity: 0.6, color: "#888888" }, encoding: { x: { ...x, field: "t" } } });
    }
    return {
      width: this.width, height: heat ? Math.min(Math.max(lane.series.length * 6, 60), 160) : 66,
      autosize: { type: "fit-x", contains: "padding" },
      padding: { left: 0, right: RIGHT, top: 6, bottom: 2 },
      layer: layers,
      resolve: { scale: { color: "shared" } },
    };
  }
}

export const isHeat = (lane) => lane.series.length > MOST_LINES;

function attemptBands(marks, start, stop) {
  const begins = [...new Set([0, ...(marks.reset ?? [])])].filter((t) => t < (marks.length ?? Infinity)).sort((a, b) => a - b);
  return begins.map((a, place) => {
    const b = begins[place + 1] ?? Math.min(stop, marks.length);
    const won = marks.attempts?.[place];
    return { a: Math.max(a, start) - 0.5, b: Math.min(b, stop) - 0.5, number: place + 1, text: `${place + 1}${won === undefined ? "" : won ? " ●" : " ○"}` };
  }).filter((band) => band.b > band.a);
}

const yAxis = (extra) => ({ title: null, minExtent: LEFT, maxExtent: LEFT, tickCount: 3, labelLimit: LEFT - 8, ...extra });

/** An axis of `count` choices. By itself, Vega's has ticks between them where there are two or three. */
function choiceAxis(count, extra) {
  const step = Math.max(1, Math.ceil((count - 1) / 4));
  const values = Array.from({ length: Math.floor((count - 1) / step) + 1 }, (_, place) => place * step);
  return yAxis({ values, format: "d", ...extra });
}

function lineLayers(lane, x, window) {
  const values = [];
  for (const series of lane.series) {
    series.t.forEach((t, place) => {
      if (series.mean[place] === null) return;
      values.push({ t, v: series.mean[place], low: series.low?.[place], high: series.high?.[place], series: series.label, which: series.which ?? "" });
    });
  }
  const discrete = lane.kind === "discrete";
  const several = new Set(lane.series.map((series) => series.label)).size > 1;
  const both = new Set(lane.series.map((series) => series.which ?? "")).size > 1;
  const lowest = Math.min(...values.map((row) => row.low ?? row.v));
  const highest = Math.max(...values.map((row) => row.high ?? row.v));
  const flat = !(highest > lowest);
  const scale = flat ? { domain: [(values.length ? lowest : 0) - 1, (values.length ? lowest : 0) + 1] } : { zero: lane.zero ?? false, nice: true };
  const size = Math.max(Math.abs(lowest), Math.abs(highest));
  const format = size > 0 && size < 1e-3 ? ".1e" : size >= 1e5 ? "~s" : highest - lowest < size / 100 ? ".6~g" : undefined;
  const axis = discrete && lane.choices ? choiceAxis(lane.choices) : yAxis(discrete ? { tickMinStep: 1, format: "d" } : { format });
  const y = { field: "v", type: "quantitative", scale: discrete && lane.choices ? { domain: [-0.5, lane.choices - 0.5] } : scale, axis };
  const domain = [...new Set(lane.series.map((series) => (several ? series.label : series.which ?? "")))];
  const color = { field: several ? "series" : "which", type: "nominal", scale: { domain }, legend: several || both ? { title: null } : null };
  const dash = both ? { strokeDash: { field: "which", type: "nominal", scale: { domain: ["original", "relabelled"], range: [[1, 0], [4, 3]] }, legend: { title: null } } } : {};
  const data = { values };
  const layers = [];
  if (lane.series.some((series) => series.low)) {
    layers.push({ data, mark: { type: "area", opacity: 0.2, clip: true }, encoding: { x: { ...x, field: "t" }, y: { ...y, field: "low" }, y2: { field: "high" }, color } });
  }
  const few = (window.stop - window.start) <= 120;
  const interpolate = discrete || lane.role === "action" ? "step" : "linear";
  if (lane.bars && !lane.series[0].low) {
    layers.push({ data, mark: { type: "rule", strokeWidth: few ? 3 : 1.5, clip: true }, encoding: { x: { ...x, field: "t" }, y, y2: { datum: 0 }, color, ...(both ? { xOffset: undefined } : {}) } });
    layers.push({ data, mark: { type: "point", filled: true, size: few ? 22 : 6, clip: true, opacity: 1 }, encoding: { x: { ...x, field: "t" }, y, color } });
    return layers;
  }
  layers.push({ data, mark: { type: "line", strokeWidth: 1.6, interpolate, clip: true }, encoding: { x: { ...x, field: "t" }, y, color, ...dash } });
  if (few) layers.push({ data, mark: { type: "point", filled: true, size: 16, opacity: 1, clip: true }, encoding: { x: { ...x, field: "t" }, y, color } });
  return layers;
}

function heatLayers(lane, x) {
  const length = lane.series[0].t.length;
  const every = Math.max(1, Math.ceil(length / MOST_HEAT));
  const t = lane.series[0].t;
  const end = lane.stop ?? t[length - 1] + 1;
  const values = [];
  lane.series.forEach((series, row) => {
    for (let place = 0; place < length; place += every) {
      const part = series.mean.slice(place, place + every).filter((value) => value !== null);
      if (!part.length) continue;
      values.push({ a: t[place] - 0.5, b: (t[place + every] ?? end) - 0.5, row: row - 0.5, top: row + 0.5, v: part.reduce((sum, value) => sum + value, 0) / part.length });
    }
  });
  const y = { field: "row", type: "quantitative", scale: { domain: [-0.5, lane.series.length - 0.5], reverse: true, nice: false }, axis: choiceAxis(lane.series.length, { grid: false }) };
  return [{
    data: { values }, mark: { type: "rect", clip: true },
    encoding: { x: { ...x, field: "a" }, x2: { field: "b" }, y, y2: { field: "top" }, color: { field: "v", type: "quantitative", scale: { scheme: "viridis" }, legend: null } },
  }];
}

function caption(element, lane) {
  const shades = lane.series && isHeat(lane) ? `from ${extremes(lane.series).map(number).join(" to ")}, dark to light` : "";
  const facts = [lane.about, shades, lane.sampled ? "sampled: its steps are too large to read all" : ""].filter(Boolean).join(" · ");
  element.replaceChildren(make("strong", {}, lane.title ?? lane.name), facts ? make("span", {}, ` ${facts}`) : "");
}

function extremes(series) {
  const known = series.flatMap((each) => each.mean).filter((value) => value !== null);
  return known.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function described(lane, window) {
  const parts = lane.series.slice(0, 4).map((series) => {
    const known = series.mean.filter((value) => value !== null);
    if (!known.length) return `${series.label}: nothing`;
    const [low] = extremes([{ mean: series.low ?? known }]);
    const [, high] = extremes([{ mean: series.high ?? known }]);
    return `${series.which ? `${series.which} ` : ""}${series.label} from ${number(low)} to ${number(high)}`;
  });
  const more = lane.series.length > 4 ? ` and ${lane.series.length - 4} more` : "";
  return `${lane.title ?? lane.name} over steps ${window.start} to ${window.stop - 1}: ${parts.join(", ")}${more}`;
}

function words(lane, window) {
  const { texts } = lane;
  if (!texts.length) return make("p", { class: "empty" }, "no text in these steps");
  return make("ol", { class: "texts" }, texts.map(([step, text]) => make("li", {}, make("span", { class: "step" }, `${step}`), ` ${text || "(empty)"}`)));
}
