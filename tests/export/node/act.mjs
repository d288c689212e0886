// Acts for a program that speaks JSON, one line a question and one an answer; `["act", observation, reward]`.
//
//   node act.mjs ONNXRUNTIME BUNDLE OPTIONS
//
// ONNXRUNTIME: the directory of the package onnxruntime-node; OPTIONS: those of OnnxPolicy.open, as JSON.

import { createRequire } from "node:module";
import { resolve } from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [onnxruntime, bundle, options] = process.argv.slice(2);
const ort = createRequire(import.meta.url)(resolve(onnxruntime));
const answer = (value) => process.stdout.write(JSON.stringify(value) + "\n");

try {
  const { OnnxPolicy } = await import(pathToFileURL(resolve(bundle, "policy.mjs")));
  const policy = await OnnxPolicy.open({ directory: bundle, ort, ...JSON.parse(options) });
  const calls = {
    reset: (which) => policy.reset(which),
    act: (observation, reward) => policy.act(observation, reward),
    async step(...given) {
      const found = await policy.step(...given);
      return Object.fromEntries(["greedy", "sampled", "parameters"].map((name) => [name, Array.from(found[name].data, Number)]));
    },
  };
  answer({ ready: true });
  for await (const line of createInterface({ input: process.stdin })) {
    const [name, ...given] = JSON.parse(line);
    answer({ value: (await calls[name](...given)) ?? null });
  }
} catch (error) {
  answer({ error: error.message });
}
