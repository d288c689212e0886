// Vega-Lite in the colours of the page. Its expressions are interpreted, so that no script is made from text.

import { make } from "./dom.js";

const COLOURS = {
  light: ["#0072b2", "#c2410c", "#007a5a", "#a3478a", "#8a6d00", "#2b7fae", "#555555"],
  dark: ["#56b4e9", "#f0884d", "#3fcf9f", "#e08fc6", "#e6c84a", "#9ad0f5", "#b8b8b8"],
};
export const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
/** Look up a colour of the style sheet: a variable's own value is text, which may depend on the theme. */
function colourOf(variable) {
  const probe = make("i");
  probe.style.color = `var(${variable})`;
  document.body.append(probe);
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}
export const quiet = () => colourOf("--ink-soft");
export const colours = () => COLOURS[isDark() ? "dark" : "light"];

function config() {
  const [ink, faint] = [quiet(), colourOf("--line")];
  const font = getComputedStyle(document.body).fontFamily;
  return {
    background: "transparent",
    font,
    view: { stroke: null },
    axis: {
      domainColor: faint, tickColor: faint, gridColor: faint, labelColor: ink, titleColor: ink,
      labelFontSize: 11, titleFontSize: 11, titleFontWeight: "normal", gridOpacity: 0.6,
    },
    legend: { labelColor: ink, titleColor: ink, labelFontSize: 11, orient: "top", symbolStrokeWidth: 3, offset: 2 },
    mark: { color: colours()[0] },
    range: { category: colours() },
  };
}

const views = new WeakMap();
let library;

/** Wait for the library, which is a script of its own. */
function ready() {
  library ??= new Promise((resolve, reject) => {
    const look = (left) => {
      if (window.vegaEmbed) resolve(window.vegaEmbed);
      else if (left === 0) reject(new Error("the charting library did not load"));
      else setTimeout(look, 50, left - 1);
    };
    look(1200);
  });
  return library;
}

/** Draw a specification into `element`; `label` describes it in words. Returns its Vega view. */
export async function draw(element, specification, label) {
  const embed = await ready();
  const turn = (views.get(element)?.turn ?? 0) + 1;
  views.set(element, { ...views.get(element), turn });
  const holder = make("div", { class: "canvas" });
  const made = await embed(holder, { ...specification, config: config() }, {
    mode: "vega-lite", actions: false, ast: true, renderer: "canvas", defaultStyle: false, tooltip: false, hover: false,
  });
  if (views.get(element).turn !== turn) {
    made.finalize();
    return null;
  }
  views.get(element).made?.finalize();
  views.set(element, { turn, made });
  for (const canvas of holder.querySelectorAll("canvas")) {
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", label);
  }
  holder.querySelector(".vega-embed")?.removeAttribute("role");
  element.replaceChildren(holder);
  return made.view;
}

export function drop(element) {
  views.get(element)?.made?.finalize();
  views.delete(element);
  element.replaceChildren();
}
