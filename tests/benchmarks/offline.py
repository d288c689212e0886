"""The benchmark of learning from recorded data: `d4rl-regression` and d3rlpy's IQL on the same 100 k steps of Pendulum.

    python tests/benchmarks/offline.py --seeds 0-2 --to offline.jsonl [--d3rlpy-python PYTHON] [--set agent.x=y]

Half of the steps are random, half are a noisy swing-up by energy. Each learner runs in a process of its own with one
thread: ours as `amago run d4rl-regression --profile small`, from the file to the evaluation; d3rlpy's IQL with
learning rates of 1e-3 and rewards times 0.1 (its defaults, 3e-4 and unscaled, are for a million updates), until it
has used as many CPU seconds (--cpu-seconds), including reading the file. Each line of the result has the mean return
of 50 episodes, the CPU seconds, user and system, of the whole process with its children, and the number of updates.
Where other processes compete for the caches, a CPU second has fewer updates: compare runs on an idle machine, or at
equal --updates. PYTHON is one with d3rlpy 2.8 (see the extra `clients`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import gymnasium
import numpy as np

STEPS = 100_000
EPISODE = 200
EVALUATED = 50

IQL = """
import json, sys, time
import gymnasium, h5py, numpy as np, torch
import d3rlpy

path, seed, limit, episodes, most = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:])
torch.set_num_threads(1)
d3rlpy.seed(seed)
with h5py.File(path) as file:
    arrays = {name: file[name][()] for name in ("observations", "actions", "rewards", "terminals", "timeouts")}
arrays["actions"] = arrays["actions"] / 2  # d3rlpy's policies act in [-1, 1]
data = d3rlpy.dataset.MDPDataset(**arrays)
learner = d3rlpy.algos.IQLConfig(
    actor_learning_rate=1e-3,
    critic_learning_rate=1e-3,
    reward_scaler=d3rlpy.preprocessing.MultiplyRewardScaler(0.1),
).create(device="cpu:0")
learner.build_with_dataset(data)
updates = 0
while updates < most if most else time.process_time() < limit:
    for _ in range(20):
        learner.update(data.sample_transition_batch(learner.batch_size))
    updates += 20
env, returns = gymnasium.make("Pendulum-v1"), []
for episode in range(episodes):
    observation, over, total = env.reset(seed=1_000_003 + episode)[0], False, 0.0
    while not over:
        action = learner.predict(observation[None])[0]
        observation, reward, terminated, truncated, _ = env.step(np.clip(2 * action, -2, 2))
        total, over = total + reward, terminated or truncated
    returns.append(total)
print(json.dumps({"return_mean": float(np.mean(returns)), "updates": updates}))
"""


def swing_up(observation: np.ndarray, rng: np.random.Generator) -> float:
    """Pump energy into the pendulum until it is near the top, then hold it there, noisily."""
    cosine, sine, speed = observation
    angle = np.arctan2(sine, cosine)
    if cosine > 0.9:
        torque = -12 * angle - 3 * speed
    else:
        torque = 2 * np.sign(speed) if 0.5 * speed**2 + 15 * (cosine - 1) < 0 else -0.5 * speed
    return float(np.clip(torque + rng.normal(0, 0.7), -2, 2))


def recorded(path: Path, seed: int) -> None:
    """Write a file of D4RL's kind: random and swing-up episodes in turn."""
    import h5py

    rng, env = np.random.default_rng(seed), gymnasium.make("Pendulum-v1")
    seen = np.zeros((STEPS // EPISODE, EPISODE + 1, 3), dtype=np.float32)
    actions, rewards = np.zeros((STEPS // EPISODE, EPISODE, 1), np.float32), np.zeros((STEPS // EPISODE, EPISODE))
    for number in range(STEPS // EPISODE):
        seen[number, 0] = env.reset(seed=int(rng.integers(2**30)))[0]
        for t in range(EPISODE):
            torque = swing_up(seen[number, t], rng) if number % 2 else rng.uniform(-2, 2)
            actions[number, t] = torque
            seen[number, t + 1], rewards[number, t], *_ = env.step(actions[number, t])
    ends = np.tile(np.arange(EPISODE) == EPISODE - 1, STEPS // EPISODE)
    with h5py.File(path, "w") as file:
        file["observations"], file["next_observations"] = seen[:, :-1].reshape(-1, 3), seen[:, 1:].reshape(-1, 3)
        file["actions"], file["rewards"] = actions.reshape(-1, 1), rewards.reshape(-1).astype(np.float32)
        file["terminals"], file["timeouts"] = np.zeros(STEPS, dtype=bool), ends
    print(f"data: {rewards[::2].sum(1).mean():.0f} at random, {rewards[1::2].sum(1).mean():.0f} by the swing-up")


def timed(command: list[str], folder: Path, **environment: str) -> tuple[str, float, float]:
    """Run a command; what it wrote to stdout, and its CPU and wall seconds, children included."""
    before, began = os.times(), time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:4])} ...: exit {done.returncode}\n{done.stderr[-2000:]}")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return done.stdout, cpu, time.monotonic() - began


def amago(path: Path, seed: int, settings: list[str]) -> dict[str, Any]:
    """Train and evaluate the recipe."""
    fixed = [f'source.name="hdf5:{path}"', 'env.name="gym:Pendulum-v1"', f"seed={seed}", "train.threads=1"]
    command = [sys.executable, "-P", "-m", "amago_cli", "run", "d4rl-regression", "--profile", "small", "-q"]
    command += ["--output", "json", "--run", f"runs/{seed}-{time.time_ns():x}"]
    command += [part for each in (*fixed, *settings) for part in ("-s", each)]
    out, cpu, wall = timed(command, path.parent, PYTHONPATH=str(Path(__file__).parents[2]))
    mean = json.loads(out)["metrics"]["return_mean"]
    about = {"learner": "amago", "seed": seed, "set": settings}
    return {**about, "return_mean": mean, "cpu_seconds": cpu, "seconds": wall}


def iql(path: Path, seed: int, python: str, cpu_seconds: float, updates: int) -> dict[str, Any]:
    """Train and evaluate d3rlpy's IQL."""
    command = [python, "-W", "ignore", "-c", IQL, *map(str, (path, seed, cpu_seconds, EVALUATED, updates))]
    out, cpu, wall = timed(command, path.parent)
    found = json.loads(out.strip().splitlines()[-1])
    return {"learner": "d3rlpy IQL", "seed": seed, **found, "cpu_seconds": cpu, "seconds": wall}


def results(path: Path, seed: int, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train each learner on the file with one seed."""
    if arguments.only != "d3rlpy":
        yield amago(path, seed, arguments.set)
    if arguments.only != "amago" and arguments.d3rlpy_python:
        yield iql(path, seed, arguments.d3rlpy_python, arguments.cpu_seconds, arguments.updates)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0-2", help="FIRST-LAST")
    parser.add_argument("--to", type=Path, default=Path("offline.jsonl"))
    parser.add_argument("--cpu-seconds", type=float, default=90.0, help="of d3rlpy's training")
    parser.add_argument("--updates", type=int, default=0, help="of d3rlpy's training, in place of --cpu-seconds")
    parser.add_argument("--d3rlpy-python", default="", help="a Python with d3rlpy; without one ours runs alone")
    parser.add_argument("--only", choices=("amago", "d3rlpy"), help="one of the learners")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE laid over our settings")
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition("-")
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "pendulum-mixed.hdf5"
        recorded(path, seed=0)
        for seed in range(int(first), int(last or first) + 1):
            for result in results(path, seed, arguments):
                line = json.dumps(result)
                print(line, flush=True)
                with arguments.to.open("a") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
