// Pictures of steps: the one under the cursor, and a strip of the window.

import { address } from "./api.js";
import { find, make } from "./dom.js";

const SIDE = 512;
let wanted = "";
let loading = false;

/** Show the picture of a step; while one is on its way, only the last one asked for is fetched next. */
export function showFrame(image, uid, column, step) {
  wanted = address(`frame/${uid}`, { column, step, side: SIDE });
  image.alt = `${column} at step ${step}`;
  if (!loading) next(image);
}

async function next(image) {
  const url = wanted;
  if (image.getAttribute("src") === url) return;
  loading = true;
  image.setAttribute("src", url);
  await image.decode().catch(() => undefined);
  loading = false;
  if (image.isConnected && wanted !== url) next(image);
}

const GAP = 2; // pixels between the frames of a strip, as the server draws it
const HEIGHT = 64;
const MOST_SIDE = 96;

/** Return the frames of a window, each above its step in the timeline below. `plot`: where that is. */
export async function strip(uid, column, shape, start, stop, plot) {
  const steps = stop - start;
  const [rows, columns] = shape.length === 3 && shape[0] < 8 ? shape.slice(1) : shape;
  const wide = Math.max(12, Math.min((HEIGHT * columns) / rows, 3 * HEIGHT));
  const count = Math.max(1, Math.min(steps, Math.floor(plot.width / (wide + 4)), 48));
  const image = new Image();
  image.src = address(`strip/${uid}`, { column, start, stop, count, side: MOST_SIDE });
  await image.decode();
  const ratio = window.devicePixelRatio || 1;
  const canvas = make("canvas", { class: "strip", width: Math.round((plot.left + plot.width) * ratio), height: HEIGHT * ratio });
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `${column} at ${count} steps from ${start} to ${stop - 1}`);
  canvas.style.width = `${plot.left + plot.width}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.imageSmoothingEnabled = Math.max(rows, columns) > HEIGHT;
  const size = Math.ceil(columns / Math.ceil(Math.max(rows, columns) / MOST_SIDE));
  const drawn = Math.round((image.naturalWidth + GAP) / (size + GAP));
  let end = -Infinity;
  for (let place = 0; place < drawn; place += 1) {
    const step = drawn === 1 ? 0 : Math.round((place * (steps - 1)) / (drawn - 1));
    const middle = plot.left + ((step + 0.5) / steps) * plot.width;
    const left = Math.min(Math.max(middle - wide / 2, 0), plot.left + plot.width - wide);
    if (left < end) continue; // the last one has no room
    end = left + wide + GAP;
    pen.drawImage(image, place * (size + GAP), 0, size, image.naturalHeight, left, 0, wide, HEIGHT);
  }
  return canvas;
}

export function stopFrames() {
  wanted = "";
  loading = false;
  find("one").querySelector("img.frame")?.removeAttribute("src");
}
