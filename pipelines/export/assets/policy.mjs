// Acts with the policy in this directory; needs onnxruntime-node or onnxruntime-web, nothing else.
//   const policy = await OnnxPolicy.open();       // {actors: 8}: observations, rewards of 8 at once
//   policy.reset();
//   while (!done) {
//     const action = await policy.act(observation, reward);    // reward: that of the previous action; 0 at first
// Values are numbers, texts, typed arrays, and arrays of these, flat or nested; of Dict observations objects.

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, uint64: BigUint64Array, bool: Uint8Array,
  int8: Int8Array, uint8: Uint8Array, int16: Int16Array, uint16: Uint16Array, int32: Int32Array, uint32: Uint32Array,
};
const FIXED = { discrete: "int32", multi_discrete: "int32", multi_binary: "uint8" };
// Of the messages of an ONNX file, the fields that lead to a tensor; of which at most so many are read.
const TENSORS = {
  ModelProto: { 7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto" },
  TrainingInfoProto: { 1: "GraphProto", 2: "GraphProto" },
  GraphProto: { 1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto" },
  FunctionProto: { 7: "NodeProto", 11: "AttributeProto" },
  NodeProto: { 5: "AttributeProto" },
  AttributeProto: {
    5: "TensorProto", 6: "GraphProto", 10: "TensorProto", 11: "GraphProto", 22: "SparseTensorProto",
    23: "SparseTensorProto",
  },
  SparseTensorProto: { 1: "TensorProto", 2: "TensorProto" },
};
const MOST_FIELDS = 1 << 20;
const IS_NODE = typeof process !== "undefined" && Boolean(process.versions?.node);

export class OnnxPolicy {
  // Open the policy in `directory` (a URL or a path), or `given`: the text of policy.json and the bytes of policy.onnx.
  // `actors`: how many environments, whose values then have a leading axis. `greedy`: take the most probable action
  // instead of one sampled with `seed` (default: as policy.json says). `ort`: the module of ONNX Runtime. Fails if a file was altered.
  static async open({ directory = new URL(".", import.meta.url), given, ort, ...options } = {}) {
    ort ??= await import(IS_NODE ? "onnxruntime-node" : "onnxruntime-web");
    const text = given ? given[0] : new TextDecoder().decode(await contentOf(directory, "policy.json"));
    const record = await readRecord(text);
    const model = given ? given[1] : await contentOf(directory, "policy.onnx");
    const wanted = record.files["policy.onnx"];
    if ((await checksum(model)) !== wanted) throw new Error("policy.onnx is not as it was written (SHA-256)");
    requireOwnTensors(model);
    const session = await ort.InferenceSession.create(model, { intraOpNumThreads: 1, logSeverityLevel: 3 });
    return new OnnxPolicy(ort, record, session, options);
  }

  constructor(ort, record, session, { actors = null, greedy = record.greedy, seed = 0 } = {}) {
    Object.assign(this, { ort, record, session, greedy, single: actors === null, actors: actors ?? 1 });
    this.columns = Object.fromEntries(record.spaces.observation);
    this.space = record.spaces.action;
    this.random = uniforms(seed);
    this.reset();
  }

  // Begin an episode: of all actors, or of those where `which` is true.
  reset(which = null) {
    if (which) return void (this.begins = this.begins.map((begins, actor) => begins || Boolean(which[actor])));
    const rows = Object.entries(this.record.memory);
    this.memory = Object.fromEntries(rows.map(([name, [shape, dtype]]) => [name, this.tensor(name, dtype, shape)]));
    this.previous = new Array(this.actors * sizeOf(shapeOf(this.space))).fill(0);
    this.begins = new Array(this.actors).fill(true);
  }

  // Resolve to the action for `observation`; `reward` is that of the previous action. One call at a time.
  async act(observation, reward = 0) {
    const columns = {};
    flatten(this.single ? [observation] : observation, "obs", columns, this.columns, this.single);
    const absent = Object.keys(this.columns).filter((name) => !(name in columns));
    if (absent.length) throw new Error("the observation lacks " + absent.join(", "));
    for (const [name, space] of Object.entries(this.columns)) {
      columns[name] = shifted(flat(columns[name]), space, -1);
      requireStored(columns[name], space, name);
    }
    const rewards = typeof reward === "number" ? new Array(this.actors).fill(reward) : reward;
    if (!Array.from(rewards, Math.fround).every(Number.isFinite)) throw new Error("the reward is not finite");
    const found = await this.step(columns, this.previous, rewards, this.begins, null, false);
    this.previous = found[this.greedy ? "greedy" : "sampled"].data;
    this.begins = new Array(this.actors).fill(false);
    const actions = executed(this.previous, this.space, this.actors);
    return this.single ? actions[0] : actions;
  }

  // Run the graph once on flat arrays in stored form; resolve to its outputs, or only those that acting needs.
  async step(columns, action, reward, reset, noise = null, all = true) {
    const { max_time: most, noise: width, memory: rows } = this.record;
    if (most !== null && this.memory.time.data.some((time, actor) => !reset[actor] && time >= most))
      throw new Error(`an episode has more than the ${most} steps that the policy can distinguish`);
    noise ??= Array.from({ length: this.actors * width }, () => (this.greedy ? 0.5 : this.random()));
    const given = { noise: this.tensor("noise", "float32", [width], noise) };
    given.reward = this.tensor("reward", "float32", [], reward);
    given.reset = this.tensor("reset", "bool", [], reset);
    const typed = (name, space, values) => (given[name] = this.tensor(name, dtypeOf(space), shapeOf(space), values));
    typed("action", this.space, action);
    for (const [name, space] of Object.entries(this.columns)) typed(name, space, columns[name]);
    for (const name of Object.keys(rows)) given["memory." + name] = this.memory[name];
    const feeds = Object.fromEntries(this.session.inputNames.map((name) => [name, given[name]]));
    const unneeded = all ? [] : ["parameters", this.greedy ? "sampled" : "greedy"];
    const found = await this.session.run(feeds, this.session.outputNames.filter((name) => !unneeded.includes(name)));
    this.memory = Object.fromEntries(Object.keys(rows).map((name) => [name, found["next." + name]]));
    return found;
  }

  // Return a tensor of `values`, or of zeros, with a leading axis of actors.
  tensor(name, dtype, shape, values = null) {
    const size = this.actors * sizeOf(shape);
    if (values !== null && values.length !== size) throw new Error(`${name} has ${values.length} numbers, not ${size}`);
    const Kind = ARRAYS[dtype];
    if (!Kind) throw new Error(`${name} is of type ${dtype}, which JavaScript lacks`);
    const convert = dtype.endsWith("64") && dtype !== "float64" ? (value) => BigInt(Math.trunc(Number(value))) : Number;
    const data = values === null ? new Kind(size) : values instanceof Kind ? values : Kind.from(values, convert);
    return new this.ort.Tensor(dtype, data, [this.actors, ...shape]);
  }
}

// Convert flat actions in stored form to the environment's: for each actor a number or nested arrays.
export function executed(values, space, actors) {
  const [shape, size] = [shapeOf(space), sizeOf(shapeOf(space))];
  let plain = shifted(Array.from(values, Number), space, 1);
  if (space.kind === "box" && space.low && space.high) {
    const kind = space.native ?? space.dtype;
    plain = plain.map((value, place) => {
      const [low, high] = [space.low[place % size], space.high[place % size]];
      const scaled = low + ((Math.min(Math.max(value, -1), 1) + 1) * (high - low)) / 2;
      return kind.includes("int") ? roundEven(scaled) : kind === "float64" ? scaled : Math.fround(scaled);
    });
  }
  return Array.from({ length: actors }, (_, actor) => nested(plain.slice(actor * size, (actor + 1) * size), shape));
}

function nested(values, [length, ...rest]) {
  const size = values.length / length;
  const part = (_, place) => nested(values.slice(place * size, (place + 1) * size), rest);
  return length === undefined ? values[0] : Array.from({ length }, part);
}

// Add the columns of an observation: Dict and Tuple observations have one for each part.
function flatten(value, name, columns, spaces, single) {
  const space = spaces[name];
  const parts = single ? value[0] : value;
  if (space?.kind === "ragged") {
    const rows = Array.from(value, (each) => padded(each, space, name));
    columns[name] = rows.map(([row]) => row);
    columns[name + ".length"] = rows.map(([, length]) => length);
  } else if (space) {
    columns[name] = value;
  } else if (typeof parts === "object") {
    for (const [key, part] of Object.entries(parts ?? {}))
      flatten(single ? [part] : part, `${name}.${key}`, columns, spaces, single);
  }
}

// Return a text's code points or numbers, padded with zeros, and how many there are.
function padded(value, { max_length: most }, name) {
  const given = typeof value === "string" ? Array.from(value, (letter) => letter.codePointAt(0)) : flat(value);
  if (given.length > most) throw new Error(`${name} has ${given.length} numbers, more than ${most}`);
  return [[...given, ...new Array(most - given.length).fill(0)], given.length];
}

// Fail unless the numbers of a column are of its space: one that is not would stay in the memory, without a word.
function requireStored(values, space, name) {
  const [dtype, choices] = [dtypeOf(space), space.kind === "discrete" ? [space.n] : (space.nvec?.flat() ?? [])];
  if (!choices.length && !dtype.startsWith("float") && values instanceof ARRAYS[dtype]) return;
  const whole = dtype.includes("int") && new ARRAYS[dtype](1);
  values.forEach((value, place) => {
    const number = numberOf(value);
    if (!Number.isFinite(dtype === "float32" ? Math.fround(number) : number))
      throw new Error(`${name} has a number that is not finite`);
    if (whole) whole[0] = dtype.endsWith("64") ? BigInt(Math.trunc(number)) : number;
    if (whole && Number(whole[0]) !== number)
      throw new Error(`${name} has a number that is not ${dtype}`);
    if (choices.length && !(number >= 0 && number < choices[place % choices.length]))
      throw new Error(`${name} has a choice that does not exist`);
  });
}

// Convert choices, which count from 0 in stored form and from `start` in the environment.
function shifted(values, { start }, sign) {
  const starts = [start].flat();
  return start ? Array.from(values, (value, n) => numberOf(value) + sign * starts[n % starts.length]) : values;
}

const roundEven = (value) => Math.round(value) - (value % 1 && value % 0.5 === 0 ? Math.abs(Math.round(value) % 2) : 0);
const numberOf = (value) => (["number", "bigint", "boolean"].includes(typeof value) ? Number(value) : NaN);
const isArray = (value) => Array.isArray(value) || ArrayBuffer.isView(value);
const nests = (value) => isArray(value) && isArray(value[0]);
const flat = (value) => (nests(value) ? value.flatMap((each) => [...flat(each)]) : isArray(value) ? value : [value]);
const hex = (number, digits) => number.toString(16).padStart(digits, "0");
const escaped = (text) => JSON.stringify(text).replace(/[\x7f-\uffff]/g, (unit) => "\\u" + hex(unit.charCodeAt(0), 4));
const sizeOf = (shape) => shape.reduce((product, length) => product * length, 1);
const dtypeOf = (space) => FIXED[space.kind] ?? space.dtype;
const lengthOf = (space) => (space.kind === "discrete" ? 0 : (space.n ?? space.max_length ?? space.nvec?.length));
const shapeOf = (space) => (lengthOf(space) ? [lengthOf(space)] : (space.shape ?? []));

// Return a seeded source of numbers in [0, 1) that float32 holds exactly (mulberry32).
export function uniforms(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let mixed = Math.imul(state ^ (state >>> 15), state | 1);
    mixed ^= mixed + Math.imul(mixed ^ (mixed >>> 7), mixed | 61);
    return ((mixed ^ (mixed >>> 14)) >>> 8) / 0x1000000;
  };
}

// Read an ONNX file as far as its tensors; fails if one has its values in another file, which ONNX Runtime would read
// from the current directory, or if the content is no such file.
export function requireOwnTensors(model) {
  const unknown = () => new Error("policy.onnx is not a graph that can be checked");
  const stack = [["ModelProto", 0, model.length]];
  let left = MOST_FIELDS;
  while (stack.length) {
    let [message, at, end] = stack.pop();
    const varint = () => {
      for (let value = 0, scale = 1, last = Math.min(at + 10, end); at < last; scale *= 128) {
        value += (model[at] & 127) * scale;
        if (model[at++] < 128) return value;
      }
      throw unknown();
    };
    while (at < end) {
      const tag = varint();
      const [number, wire] = [Math.floor(tag / 8), tag % 8];
      const value = wire === 0 || wire === 2 ? varint() : 0;
      // external_data, and data_location
      if (message === "TensorProto" && (number === 13 || (number === 14 && value)))
        throw new Error("policy.onnx has a tensor whose values are in another file");
      at += { 0: 0, 1: 8, 2: value, 5: 4 }[wire] ?? Infinity;
      const kind = wire === 2 ? TENSORS[message]?.[number] : undefined;
      if (at > end || number < 1 || tag >= 2 ** 32 || --left <= 0) throw unknown();
      if (kind) stack.push([kind, at - value, at]);
    }
  }
}

// Parse policy.json; fails if it is not as it was written. Its checksum is of what Python's json.dumps writes with keys
// sorted and numbers as in the file: to keep those, numbers and texts are parsed as tagged texts.
async function readRecord(text) {
  const tag = (token, inner) => (inner === undefined ? `"n${token}"` : `"s${inner}"`);
  const { schecksum: wanted, ...record } = JSON.parse(text.replace(/"((?:[^"\\]|\\.)*)"|-?\d[\d.eE+-]*/g, tag));
  const found = "s" + (await checksum(new TextEncoder().encode(canonical(record))));
  if (wanted !== found) throw new Error("policy.json is not as it was written");
  return JSON.parse(text);
}

function canonical(value) {
  if (typeof value === "string") return value[0] === "n" ? value.slice(1) : escaped(value.slice(1));
  if (Array.isArray(value)) return `[${value.map(canonical).join(", ")}]`;
  if (value === null || typeof value !== "object") return String(value);
  const item = (key) => `${escaped(key.slice(1))}: ${canonical(value[key])}`;
  return `{${Object.keys(value).sort().map(item).join(", ")}}`;
}

async function checksum(content) {
  if (!globalThis.crypto?.subtle) throw new Error("the page must come from https, localhost or a file");
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", content));
  return Array.from(digest, (byte) => hex(byte, 2)).join("");
}

async function contentOf(directory, name) {
  if (IS_NODE) {
    const { readFile } = await import("node:fs/promises");
    return readFile(directory instanceof URL ? new URL(name, directory) : `${directory}/${name}`);
  }
  const answer = await fetch(new URL(name, new URL(`${directory}/`.replace(/\/+$/, "/"), location.href)));
  if (!answer.ok) throw new Error(`${name} cannot be read: ${answer.status}`);
  return new Uint8Array(await answer.arrayBuffer());
}
