// The page in which an exported policy plays lakes; policy_page.py puts everything into one file.

import { ACTIONS, LakeSource, shortest } from "./lake.mjs";
import { partsOf, Player, playMany } from "./lake_player.mjs";
import * as ort from "./onnxruntime.mjs";
import { OnnxPolicy, uniforms } from "./policy.mjs";

const MANY = 60;
const PACES = [1, 2, 4, 8, 15, 30, 0]; // steps a second; 0: as fast as possible
const PAUSE = 1200; // milliseconds between lakes
const OUTCOMES = { goal: ["★", "reached the goal"], fell: ["✕", "fell into a hole"], late: ["◷", "ran out of steps"] };
const GLYPHS = ["·", "↓", "↑", "→", "←"];

const STATES =
  "One column for each step: the state after it, orange above zero and blue below. A state is all that this policy remembers, " +
  "so its effect is that of the whole state. Point at a column, or use the arrow keys, to see what happened.";

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const { rules, reference } = data;
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) value === true ? made.setAttribute(key, "") : value !== false && made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function drawn(name, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

const fromBase64 = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const percent = (share) => `${Math.round(100 * share)}%`;

async function inflated(text) {
  const stream = new Blob([fromBase64(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Page {
  constructor(opened) {
    this.opened = opened;
    const seed = new URLSearchParams(location.hash.slice(1)).get("seed");
    this.source = new LakeSource(rules.size, data.maps, uniforms(seed === null ? crypto.getRandomValues(new Uint32Array(1))[0] : Number(seed)));
    this.success = [];
    this.chosen = null;
    this.playing = false;
    this.busy = Promise.resolve();
    this.board();
    this.memory();
    this.begin(this.source.draw(), true);
    $("play").addEventListener("click", () => this.play(!this.playing));
    $("step").addEventListener("click", () => (this.play(false), this.queue(() => this.advance())));
    $("new").addEventListener("click", () => this.queue(() => this.begin(this.source.draw(), true)));
    $("many").addEventListener("click", () => this.queue(() => this.many()));
    $("speed").addEventListener("input", () => this.pace());
    $("forget").addEventListener("change", () => this.queue(() => ((this.success = []), this.begin(this.player.lake.holes, this.player.drawnLake))));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    addEventListener("resize", () => this.draw());
    for (const id of ["play", "step", "new", "many"]) $(id).disabled = false;
    this.pace();
    this.play(!still);
  }

  // Run `work` when what is going on is done: the policy takes one step at a time.
  queue(work) {
    this.busy = this.busy.then(work).then(() => this.draw()).catch(failed);
    return this.busy;
  }

  pace() {
    const pace = PACES[Number($("speed").value)];
    $("pace").textContent = pace ? `${pace} step${pace > 1 ? "s" : ""} a second` : "no pause";
    this.delay = pace ? 1000 / pace : 0;
  }

  async play(playing) {
    this.playing = playing;
    $("play").textContent = playing ? "Pause" : "Play";
    const run = (this.run = Symbol("run"));
    while (this.playing && this.run === run) {
      const ended = this.player.lake.over;
      await this.queue(() => this.advance());
      await new Promise((done) => setTimeout(done, this.player.lake.over && !ended ? Math.max(PAUSE, this.delay) : this.delay));
    }
  }

  begin(holes, drawnLake) {
    this.player = new Player(this.opened, rules, holes, drawnLake);
    this.chosen = null;
  }

  async advance() {
    const { player } = this;
    if (player.lake.over) return this.begin(this.source.draw(), true);
    const { ended, attempt } = await player.step($("forget").checked);
    const [, words] = OUTCOMES[player.results.at(-1)?.outcome] ?? [];
    if (ended) $("announced").textContent = `Attempt ${attempt + 1} ${words}.`;
    if (player.lake.over && player.drawnLake) this.success.push(player.results.map(({ outcome }) => outcome === "goal"));
  }

  async many() {
    $("played").textContent = `Playing ${MANY} lakes.`;
    this.success.push(...(await playMany(this.opened, rules, this.source, MANY, $("forget").checked)));
  }

  board() {
    const { size } = rules;
    this.cells = Array.from({ length: size * size }, (_, cell) => {
      const button = element("button", { type: "button" });
      button.addEventListener("click", () => this.queue(() => this.dig(cell)));
      return button;
    });
    this.cells[0].disabled = this.cells.at(-1).disabled = true;
    this.overlay = drawn("svg", { viewBox: `0 0 ${size} ${size}`, "aria-hidden": "true" });
    this.trail = drawn("polyline", {});
    this.agent = drawn("circle", { r: 0.2 });
    this.overlay.append(this.trail, this.agent);
    $("board").style.gridTemplateColumns = `repeat(${size}, minmax(0, 1fr))`;
    $("board").append(...this.cells, this.overlay);
  }

  dig(cell) {
    const holes = [...this.player.lake.holes];
    holes[cell] = !holes[cell];
    this.begin(holes, false);
  }

  memory() {
    const parts = partsOf(this.opened.record.memory);
    const states = parts.some(({ kind }) => kind === "state");
    if (states) $("memory-about").textContent = STATES;
    const lanes = [["what happened", "lane"], [states ? "effect on each action" : "effect on the last action", "influence"]];
    lanes.push(...parts.map(({ title }) => [title, "tensor"]));
    this.lanes = lanes.map(([label, kind]) => {
      const canvas = element("canvas", { class: kind, "aria-hidden": "true" });
      const named = element("span", {}, label);
      $("memory").append(named, canvas);
      return canvas;
    });
    this.mark = element("i", { hidden: true });
    $("memory").append(this.mark);
    $("memory").addEventListener("pointermove", (event) => {
      const { left, width } = this.lanes[0].getBoundingClientRect();
      this.choose(Math.floor(((event.clientX - left) / width) * this.horizon));
    });
    $("memory").addEventListener("pointerleave", () => this.choose(null));
    $("memory").addEventListener("keydown", (event) => {
      const last = this.player.steps.length - 1;
      const to = { ArrowLeft: (this.chosen ?? last + 1) - 1, ArrowRight: (this.chosen ?? -1) + 1, Home: 0, End: last, Escape: null }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      this.choose(to === null ? null : Math.min(Math.max(to, 0), last));
    });
  }

  get horizon() {
    return rules.attempts * rules.limit;
  }

  choose(place) {
    this.chosen = place !== null && place >= 0 && place < this.player.steps.length ? place : null;
    this.drawChosen();
  }

  draw() {
    this.drawBoard();
    this.drawAttempts();
    this.drawLast();
    this.drawScores();
    this.drawMemory();
  }

  drawBoard() {
    const { lake, steps, drawnLake } = this.player;
    const { size } = rules;
    const fallen = new Set(steps.filter((step) => step.fell).map((step) => step.reached));
    this.cells.forEach((button, cell) => {
      const [row, column] = [Math.floor(cell / size) + 1, (cell % size) + 1];
      const kind = cell === 0 ? "start" : cell === size * size - 1 ? "goal" : lake.holes[cell] ? "hole" : "ice";
      button.className = kind;
      button.setAttribute("aria-label", `row ${row}, column ${column}: ${kind}${cell === lake.cell ? ", the agent" : ""}`);
      if (!button.disabled) button.setAttribute("aria-pressed", String(lake.holes[cell]));
      button.replaceChildren(kind === "goal" ? "★" : fallen.has(cell) ? element("span", { class: "fallen" }, "✕") : "");
    });
    const ended = steps.at(-1)?.ended;
    const attempt = ended ? steps.at(-1).attempt : lake.attempt;
    const path = steps.filter((step) => step.attempt === attempt).flatMap((step, n) => (n ? [step.reached] : [step.cell, step.reached]));
    const middle = (cell) => [(cell % size) + 0.5, Math.floor(cell / size) + 0.5];
    this.trail.setAttribute("points", path.map((cell) => middle(cell).join()).join(" "));
    const [x, y] = middle(ended ? path.at(-1) : lake.cell);
    this.agent.setAttribute("cx", x);
    this.agent.setAttribute("cy", y);
    const way = shortest(size, lake.holes);
    const about = drawnLake ? "" : way === null ? "Your lake, without a way to the goal." : "Your lake.";
    const state = lake.over ? `Done: ${this.player.results.filter(({ outcome }) => outcome === "goal").length} of ${rules.attempts} attempts reached the goal.` : `Attempt ${lake.attempt + 1} of ${rules.attempts}.`;
    $("status").textContent = [state, about, way ? `The shortest way has ${way} moves.` : ""].filter(Boolean).join(" ");
  }

  drawAttempts() {
    const { results, lake } = this.player;
    $("attempts").replaceChildren(
      ...Array.from({ length: rules.attempts }, (_, n) => {
        const { outcome, steps } = results[n] ?? {};
        const [glyph, words] = OUTCOMES[outcome] ?? ["–", n === lake.attempt ? "now" : "to come"];
        const said = steps === undefined ? words : `${steps} step${steps > 1 ? "s" : ""}`;
        const spoken = element("span", { class: "visually-hidden" }, `attempt ${n + 1}: ${outcome ? words + " after " : ""}`);
        return element("li", { class: outcome ?? (n === lake.attempt ? "now" : "") }, spoken, element("b", { "aria-hidden": "true" }, glyph), said);
      }),
    );
  }

  drawLast() {
    const last = this.player.steps.at(-1);
    const shares = last?.probabilities ?? ACTIONS.map(() => 1 / ACTIONS.length);
    $("last").replaceChildren(
      ...ACTIONS.flatMap((action, n) => {
        const bar = element("i");
        bar.style.width = percent(shares[n]);
        const taken = last?.action === n ? "taken" : "";
        return [element("dt", { class: taken }, action), element("dd", { class: "meter", "aria-hidden": "true" }, bar), element("dd", { class: taken }, percent(shares[n]))];
      }),
    );
  }

  drawScores() {
    const lakes = this.success.length;
    const shares = Array.from({ length: rules.attempts }, (_, n) => (lakes ? this.success.filter((row) => row[n]).length / lakes : null));
    const forgets = $("forget").checked ? ", with its memory erased after each attempt" : "";
    $("played").textContent = lakes ? `${lakes} lake${lakes > 1 ? "s" : ""} played here${forgets}; lakes of your own do not count.` : "No lake played to the end yet.";
    const interval = (entry) => (entry ? `${percent(entry.mean)} (${percent(entry.low)} to ${percent(entry.high)})` : "–");
    const one = (values, n) => (values ? percent(values[n]) : "–");
    $("scores").replaceChildren(
      ...shares.map((share, n) => {
        const cells = [share === null ? "–" : percent(share), interval(reference.evaluated?.[n]), one(reference.optimal, n), one(reference.random, n)];
        return element("tr", { "data-share": share ?? "" }, element("th", { scope: "row" }, String(n + 1)), ...cells.map((cell) => element("td", {}, cell)));
      }),
    );
    this.drawChart(shares);
  }

  drawChart(shares) {
    const width = Math.max(280, $("chart").clientWidth);
    const height = Math.min(300, Math.round(width * 0.6));
    const [left, top, base] = [44, 16, height - 42];
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}` });
    const across = (width - left) / rules.attempts;
    const [x, y] = [(n) => left + across * (n + 0.5), (share) => base - share * (base - top)];
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      svg.append(drawn("line", { class: "rule", x1: left, x2: width, y1: y(share), y2: y(share) }));
      svg.append(drawn("text", { x: left - 8, y: y(share) + 4, "text-anchor": "end" }, percent(share)));
    }
    shares.forEach((share, n) => {
      svg.append(drawn("text", { x: x(n), y: base + 20, "text-anchor": "middle" }, String(n + 1)));
      if (share !== null) {
        svg.append(drawn("rect", { class: "here", x: x(n) - across * 0.3, y: y(share), width: across * 0.6, height: base - y(share), rx: 3 }));
      }
      const known = reference.evaluated?.[n];
      if (!known) return;
      const shape = `M${x(n)} ${y(known.low)}V${y(known.high)}M${x(n) - 7} ${y(known.low)}h14M${x(n) - 7} ${y(known.high)}h14`;
      svg.append(drawn("path", { class: "evaluated", d: shape }));
    });
    for (const name of ["optimal", "random"]) {
      const points = reference[name]?.map((share, n) => `${x(n)},${y(share)}`);
      if (points) svg.append(drawn("polyline", { class: name, points: points.join(" ") }));
    }
    svg.append(drawn("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, "attempt"));
    $("chart").replaceChildren(svg);
  }

  // Draw in units of steps, on a canvas as sharp as the screen.
  lane(canvas) {
    const ratio = devicePixelRatio || 1;
    const { width, height } = canvas.getBoundingClientRect();
    [canvas.width, canvas.height] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    return { context, across: width / this.horizon, height };
  }

  // Return [step, effect]: of remembered steps on the last action, or of the state at each step on its action.
  effects() {
    const { steps, cached } = this.player;
    return cached ? (steps.at(-1)?.influence ?? []) : steps.flatMap((step) => step.influence);
  }

  drawMemory() {
    const { steps } = this.player;
    const [happened, influence, ...tensors] = this.lanes;
    {
      const { context, across, height } = this.lane(happened);
      context.textAlign = "center";
      steps.forEach((step, n) => {
        context.fillStyle = step.attempt % 2 ? color("--line") : color("--ice");
        context.fillRect(n * across, 0, across, height);
        context.fillStyle = step.success ? color("--good") : step.fell ? color("--bad") : step.ended ? color("--soft") : "transparent";
        if (step.ended) context.fillRect(n * across, height - 5, across, 5);
        if (across < 9) return;
        context.fillStyle = color("--ink");
        context.font = "12px sans-serif";
        context.fillText(GLYPHS[step.action], (n + 0.5) * across, 13);
        if (step.ended) context.fillText(OUTCOMES[step.success ? "goal" : step.fell ? "fell" : "late"][0], (n + 0.5) * across, 26);
      });
    }
    {
      const { context, across, height } = this.lane(influence);
      context.fillStyle = color("--accent");
      const found = this.effects();
      const most = Math.max(0.1, ...found.map(([, share]) => share));
      for (const [n, share] of found) {
        const tall = (share / most) * height;
        context.fillRect(n * across + 0.5, height - tall, Math.max(across - 1, 1), tall);
      }
    }
    tensors.forEach((canvas, tensor) => this.drawTensor(canvas, tensor));
    this.drawChosen();
  }

  drawTensor(canvas, tensor) {
    const { steps } = this.player;
    const rows = steps[0]?.columns[tensor].length ?? 1;
    [canvas.width, canvas.height] = [this.horizon, rows];
    const context = canvas.getContext("2d");
    const image = context.createImageData(this.horizon, rows);
    const [plus, minus, paper] = ["--plus", "--minus", "--code"].map((name) => rgb(color(name)));
    const most = Math.max(1e-9, ...steps.map((step) => Math.max(...step.columns[tensor].map(Math.abs))));
    steps.forEach((step, column) => {
      step.columns[tensor].forEach((value, row) => {
        const share = Math.sqrt(Math.abs(value) / most);
        const faded = this.player.cached && step.slot === null ? 0.15 * share : share;
        const end = value > 0 ? plus : minus;
        const at = 4 * (row * this.horizon + column);
        for (let part = 0; part < 3; part++) image.data[at + part] = paper[part] + (end[part] - paper[part]) * faded;
        image.data[at + 3] = 255;
      });
    });
    context.putImageData(image, 0, 0);
  }

  drawChosen() {
    const step = this.chosen === null ? null : this.player.steps[this.chosen];
    this.mark.hidden = !step;
    this.cells.forEach((button, cell) => button.classList.toggle("chosen", Boolean(step) && cell === step.cell));
    if (!step) return void ($("chosen").textContent = "\u00a0");
    const { left, width } = this.lanes[0].getBoundingClientRect();
    const across = width / this.horizon;
    this.mark.style.left = `${left - $("memory").getBoundingClientRect().left + this.chosen * across}px`;
    this.mark.style.width = `${across}px`;
    const place = (cell) => `row ${Math.floor(cell / rules.size) + 1}, column ${(cell % rules.size) + 1}`;
    const outcome = step.ended ? ` and ${OUTCOMES[step.success ? "goal" : step.fell ? "fell" : "late"][1]}` : "";
    const share = this.effects().find(([n]) => n === this.chosen)?.[1];
    const kept = this.player.cached && step.slot === null ? " Erased from memory." : "";
    const without = this.player.cached ? "Without it, the last action's" : "Without the state, this action's";
    const weight = share === undefined ? "" : ` ${without} probabilities would move by ${percent(share)}.`;
    $("chosen").textContent = `Step ${this.chosen + 1}, attempt ${step.attempt + 1}: at ${place(step.cell)}, ${ACTIONS[step.action]} (${percent(step.probabilities[step.action])})${outcome}.${kept}${weight}`;
  }
}

function rgb(hex) {
  const whole = hex.length === 4 ? hex.replace(/[^#]/g, "$&$&") : hex;
  return [1, 3, 5].map((place) => parseInt(whole.slice(place, place + 2), 16));
}

function failed(error) {
  $("failure").textContent = `The policy cannot run here: ${error.message}`;
  $("failure").hidden = false;
  throw error;
}

try {
  Object.assign(ort.env.wasm, { numThreads: 1, proxy: false, wasmBinary: await inflated($("wasm").textContent) });
  const opened = await OnnxPolicy.open({ ort, given: [data.record, fromBase64(data.model)] });
  new Page(opened);
} catch (error) {
  failed(error);
}
