// An exported policy on lakes, and what it remembers of them.

import { Lake } from "./lake.mjs";
import { OnnxPolicy } from "./policy.mjs";

function softmax(values) {
  const most = Math.max(...values);
  const powers = Array.from(values, (value) => Math.exp(value - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}

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
    this.names = Object.entries(opened.record.memory).filter(([, [shape, dtype]]) => dtype === "float32" && shape.length).map(([name]) => name);
    this.cached = this.names.some((name) => name.startsWith("values"));
  }

  async step(forget) {
    const { lake, policy } = this;
    const observation = { obs: lake.observation() };
    const [before, begins, previous] = [policy.memory, policy.begins, policy.previous];
    const found = await policy.step(observation, previous, [this.reward], begins);
    const parameters = found.parameters.data;
    const action = Number(found.greedy.data[0]);
    const cell = lake.cell;
    const probabilities = softmax(parameters);
    const step = { cell, action, probabilities, ...this.written(before, policy.memory, begins[0]) };
    step.influence = begins[0] ? [] : await this.influence(before, observation, previous, probabilities);
    Object.assign(step, lake.step(action));
    policy.previous = found.greedy.data;
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
    if (!this.cached) return { slot: null, columns: this.names.map((name) => Float32Array.from(after[name].data)) };
    const sizes = this.names.map((name) => after[name].dims);
    const isKey = (name) => name.startsWith("keys");
    const at = (name, [, heads, a, b], slot) => {
      const [width, slots] = isKey(name) ? [a, b] : [b, a];
      const place = (row) => (isKey(name) ? row * slots + slot : (Math.floor(row / width) * slots + slot) * width + (row % width));
      return Array.from({ length: heads * width }, (_, row) => place(row));
    };
    const slots = sizes[0][isKey(this.names[0]) ? 3 : 2];
    const changed = (slot) => this.names.some((name, n) => at(name, sizes[n], slot).some((place) => after[name].data[place] !== before[name].data[place]));
    const last = begins ? 0 : ((this.steps.at(-1)?.slot ?? -1) + 1) % slots;
    const slot = [last, ...Array(slots).keys()].find(changed) ?? last;
    for (const step of this.steps) if (step.slot === slot) step.slot = null; // overwritten
    return { slot, columns: this.names.map((name, n) => Float32Array.from(at(name, sizes[n], slot), (place) => after[name].data[place])) };
  }

  // For each remembered step, how much the probabilities of the next action would change without its values: half the
  // sum of absolute differences. One run of the graph, with a copy of the memory for each.
  async influence(memory, observation, previous, probabilities) {
    const held = this.steps.filter((step) => step.slot !== null);
    if (!this.cached || !held.length) return [];
    const actors = held.length;
    const copies = {};
    for (const [name, tensor] of Object.entries(memory)) {
      const rows = new tensor.data.constructor(actors * tensor.data.length);
      for (let actor = 0; actor < actors; actor++) rows.set(tensor.data, actor * tensor.data.length);
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
      return [this.steps.indexOf(step), probabilities.reduce((sum, share, n) => sum + Math.abs(share - other[n]) / 2, 0)];
    });
  }
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
