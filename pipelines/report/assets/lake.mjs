// The rules of meta-frozen-lake, without `hard`, `recover` and `slip`, for one lake: pipelines/envs/suites/frozen_lake.py.
// Cells are numbered row * size + column.

export const ACTIONS = ["stay", "down", "up", "right", "left"];
const MOVES = [[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]];
const HOLE_CHANCE = 0.2;

export class Lake {
  // `rules`: {size, attempts, limit: steps of an attempt, progress: whether finished attempts are observed}.
  constructor(rules, holes) {
    Object.assign(this, { rules, holes: [...holes], cell: 0, clock: 0, attempt: 0, lagging: 0, fresh: true });
  }

  get over() {
    return this.attempt >= this.rules.attempts;
  }

  observation() {
    const { size, attempts, progress } = this.rules;
    const place = [Math.floor(this.cell / size) / size, (this.cell % size) / size];
    return [...place, this.fresh ? 1 : 0, progress ? this.lagging / attempts : 0];
  }

  // Move. Returns where the move led and what came of it; after an attempt's end the agent is back at the start.
  step(action) {
    const { size, limit } = this.rules;
    const [down, right] = MOVES[action];
    const within = (place) => Math.min(Math.max(place, 0), size - 1);
    const reached = within(Math.floor(this.cell / size) + down) * size + within((this.cell % size) + right);
    const [success, fell] = [reached === size * size - 1, this.holes[reached]];
    this.clock += 1;
    const ended = success || fell || this.clock >= limit;
    const result = { reached, reward: success ? 1 : 0, success, fell, ended, steps: this.clock, attempt: this.attempt };
    this.cell = ended ? 0 : reached;
    this.lagging = this.attempt;
    this.fresh = ended;
    if (ended) this.clock = 0;
    this.attempt += ended ? 1 : 0;
    return result;
  }
}

// Draws lakes as the environment does from `codes`, the lakes of a split: bit i is a hole in cell i + 1.
export class LakeSource {
  constructor(size, codes, random) {
    Object.assign(this, { size, codes, random });
    const inner = size * size - 2;
    const count = (code) => code.toString(2).replaceAll("0", "").length;
    let total = 0;
    this.cumulative = codes.map((code) => (total += HOLE_CHANCE ** count(code) * (1 - HOLE_CHANCE) ** (inner - count(code))));
  }

  draw() {
    const wanted = this.random() * this.cumulative.at(-1);
    const place = this.cumulative.findIndex((sum) => sum > wanted);
    return this.holes(this.codes.at(place));
  }

  holes(code) {
    const cells = this.size * this.size;
    return Array.from({ length: cells }, (_, cell) => cell > 0 && cell < cells - 1 && Boolean((code >> (cell - 1)) & 1));
  }
}

// Return the fewest moves from start to goal; null where there is no way.
export function shortest(size, holes) {
  const steps = new Map([[0, 0]]);
  for (const cell of steps.keys()) {
    const lake = new Lake({ size, attempts: 2, limit: 2 }, holes);
    for (const action of [1, 2, 3, 4]) {
      lake.cell = cell;
      lake.clock = 0;
      const { reached } = lake.step(action);
      if (!holes[reached] && !steps.has(reached)) steps.set(reached, steps.get(cell) + 1);
    }
  }
  return steps.get(size * size - 1) ?? null;
}
