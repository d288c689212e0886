// An exported policy on lakes, and what it remembers of them.

import { Lake } from "./lake.mjs";
import { OnnxPolicy } from "./policy.mjs";

const ROWS = 64; // drawn of a tensor

function softmax(values) {
  const most = Math.max(...values);
  const powers = Array.from(values, (value) => Math.exp(value - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}

// Return the parts of a memory that are drawn: keys and values of each layer, or each layer of recurrent states.
export function partsOf(memory) {
  const states = Object.keys(memory).filter((name) => name.startsWith("state")).length;
  return Object.entries(memory).flatMap(([name, [[layers]]]) => {
    const [, kind, number] = name.match(/^(keys|values|state)(\d+)$/) ?? [];
    if (!kind) return [];
    if (kind !== "state") return [{ name, kind, title: `${kind}, layer ${Number(number) + 1}` }];
    const title = states > 1 ? `state ${Number(number) + 1}` : "state";
    return Array.from({ length: layers }, (_, layer) => ({ name, kind, layer, layers, title: `${title}, layer ${layer + 1}` }));
  });
}

// Return at most ROWS numbers: of each group of values the one that is furthest from zero.
function condensed(values) {
  const size = Math.ceil(values.length / ROWS);
  const groups = Array.from({ length: Math.ceil(values.length / size) }, (_, n) => values.slice(n * size, (n + 1) * size));
  return Float32Array.from(groups, (group) => group.reduce((most, value) => (Math.abs(value) > Math.abs(most) ? value : most)));
}

// Return half the sum of absolute differences of two distributions.
const moved = (shares, others) => shares.reduce((sum, share, n) => sum + Math.abs(share - others[n]) / 2, 0);

// One policy on one lake, with what it remembers, step by step.
export class Player {
  constructor(opened, rules, holes, drawnLake) {
    this.policy = new OnnxPolicy(opened.ort, opened.record, opened.session, { actors: 1 });
    this.probe = new OnnxPolicy(opened.ort, opened.record, opened.session, { actors: 1 });
    this.lake = new Lake(rules, holes);
    this.drawnLake = drawnLake; // as the environment draws it, not edited
    this.steps = [];
    this.results = [];
    this.reward = 0;
    this.parts = partsOf(opened.record.memory);
    this.cached = this.parts.some(({ kind }) => kind === "values");
  }

  async step(forget) {
    const { lake, policy } = this;
    const observation = { obs: lake.observation() };
    const [before, begins, previous] = [policy.memory, policy.begins, policy.previous];
    const found = await policy.step(observation, previous, [this.reward], begins);
    const parameters = found.parameters.data;
    const chosen = found[policy.greedy ? "greedy" : "sampled"].data;
    const action = Number(chosen[0]);
    const cell = lake.cell;
    const probabilities = softmax(parameters);
    const step = { cell, action, probabilities, ...this.written(before, policy.memory, begins[0]) };
    step.influence = begins[0] ? [] : await this.influence(before, observation, previous, probabilities);
    Object.assign(step, lake.step(action));
    policy.previous = chosen;
    policy.begins = [false];
    this.reward = step.reward;
    this.steps.push(step);
    if (step.ended) {
      this.results.push({ outcome: step.success ? "goal" : step.fell ? "fell" : "late", steps: step.steps });
      if (forget) this.forget();
    }
    return step;
  }

  forget() {
    this.policy.reset([true]);
    for (const step of this.steps) step.slot = null;
  }

  // What the step wrote into memory: the keys and values of its slot, or the states after it.
  written(before, after, begins) {
    if (!this.cached) return { slot: null, columns: this.parts.map((part) => condensed(layerOf(after[part.name].data, part))) };
    const { parts } = this;
    const at = ({ name, kind }, slot) => {
      const [, heads, a, b] = after[name].dims;
      const [width, slots] = kind === "keys" ? [a, b] : [b, a];
      const place = (row) => (kind === "keys" ? row * slots + slot : (Math.floor(row / width) * slots + slot) * width + (row % width));
      return Array.from({ length: heads * width }, (_, row) => place(row));
    };
    const slots = after[parts[0].name].dims[parts[0].kind === "keys" ? 3 : 2];
    const changed = (slot) => parts.some((part) => at(part, slot).some((place) => after[part.name].data[place] !== before[part.name].data[place]));
    const last = begins ? 0 : ((this.steps.at(-1)?.slot ?? -1) + 1) % slots;
    const slot = [last, ...Array(slots).keys()].find(changed) ?? last;
    for (const step of this.steps) if (step.slot === slot) step.slot = null; // overwritten
    return { slot, columns: parts.map((part) => condensed(at(part, slot).map((place) => after[part.name].data[place]))) };
  }

  // For each remembered step, how much the probabilities of the next action would change without its values; for states,
  // how much without them all. One run of the graph, with a copy of the memory for each.
  async influence(memory, observation, previous, probabilities) {
    const held = this.cached ? this.steps.filter((step) => step.slot !== null) : [null];
    if (!held.length) return [];
    const actors = held.length;
    const copies = {};
    for (const [name, tensor] of Object.entries(memory)) {
      const rows = new tensor.data.constructor(actors * tensor.data.length);
      const emptied = name.startsWith("state");
      for (let actor = 0; actor < actors && !emptied; actor++) rows.set(tensor.data, actor * tensor.data.length);
      if (name.startsWith("values")) {
        const [, heads, slots, width] = tensor.dims;
        held.forEach(({ slot }, actor) => {
          for (let head = 0; head < heads; head++) {
            const from = ((actor * heads + head) * slots + slot) * width;
            rows.fill(0, from, from + width);
          }
        });
      }
      copies[name] = new this.policy.ort.Tensor(tensor.type, rows, [actors, ...tensor.dims.slice(1)]);
    }
    const { probe } = this;
    [probe.actors, probe.memory] = [actors, copies];
    const repeated = (values) => Array.from({ length: actors }, () => [...values]).flat();
    const found = await probe.step({ obs: repeated(observation.obs) }, repeated(previous), repeated([this.reward]), repeated([false]));
    const width = probabilities.length;
    return held.map((step, actor) => {
      const other = softmax(found.parameters.data.slice(actor * width, (actor + 1) * width));
      return [step ? this.steps.indexOf(step) : this.steps.length, moved(probabilities, other)];
    });
  }
}

// Return the values of a part that is one layer of a state.
function layerOf(data, { layer, layers }) {
  const size = data.length / layers;
  return data.slice(layer * size, (layer + 1) * size);
}

// Play `count` lakes at once, without drawing; returns success (lakes x attempts).
export async function playMany(opened, rules, source, count, forget) {
  const policy = new OnnxPolicy(opened.ort, opened.record, opened.session, { actors: count });
  const lakes = Array.from({ length: count }, () => new Lake(rules, source.draw()));
  const found = lakes.map(() => []);
  let rewards = lakes.map(() => 0);
  while (!lakes.every((lake) => lake.over)) {
    const actions = await policy.act(lakes.map((lake) => lake.observation()), rewards);
    const results = lakes.map((lake, n) => (lake.over ? null : lake.step(actions[n])));
    results.forEach((result, n) => result?.ended && found[n].push(result.success));
    rewards = results.map((result) => result?.reward ?? 0);
    if (forget) policy.reset(results.map((result) => Boolean(result?.ended)));
  }
  return found;
}
