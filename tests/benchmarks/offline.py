"""The benchmark of learning from a dataset: `amago run --from` and agents of d3rlpy on the same steps.

    python tests/benchmarks/offline.py record --data DATA [--tasks hopper,...]
    python tests/benchmarks/offline.py run --data DATA --to FILE [--tasks hopper,...] [--learners amago,td3bc,...]
                             [--seeds 1,2] [--minutes 3] [--d3rlpy-python PYTHON] [--set agent.x=y]
    python tests/benchmarks/offline.py book

`record` trains an agent without a recipe and keeps what it collected at first, as D4RL's medium-replay does, in files
of D4RL's kind; the pendulum's is half random, half a noisy swing-up. `run` gives every learner one thread and the file:
ours the minutes of `--minutes`, in which it reads the file, measures and evaluates itself; those of d3rlpy as many CPU
seconds for updates alone, with settings of its own reproductions. Each line of the result has the mean returns of the
last policy (`return_last`) and of the one that the learner gives, which for ours is the best of its evaluations, in
episodes of their own. `book` writes the table of docs/results.md from docs/offline.jsonl. PYTHON has d3rlpy 2.8.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from benchmarks.section import Section

ROOT = Path(__file__).parents[2]
PENDULUM_STEPS, EPISODE = 100_000, 200
EVALUATED = 50
RESULTS, PAGE = ROOT / "docs/offline.jsonl", ROOT / "docs/results.md"
SECTION = Section("offline", "tests/benchmarks/offline.py book")


@dataclass(frozen=True)
class Task:
    """`env` in gymnasium, the `minutes` of the agent whose data it is, and the share of its updates that is kept.
    `tuning`: settings may be chosen on it."""

    env: str
    minutes: float
    share: float
    learners: tuple[str, ...] = ("td3bc", "iql", "cql", "bc")
    tuning: bool = False


CHOICES = ("dcql", "dbc")
TASKS = {
    "halfcheetah": Task("HalfCheetah-v5", 5, 0.214, tuning=True),
    "lunarlander": Task("LunarLander-v3", 2, 0.31, CHOICES, tuning=True),
    "hopper": Task("Hopper-v5", 5, 0.39),
    "walker2d": Task("Walker2d-v5", 5, 0.67),
    "pendulum": Task("Pendulum-v1", 0, 1.0),
    "acrobot": Task("Acrobot-v1", 2, 0.2, CHOICES),
    "cartpole": Task("CartPole-v1", 1, 0.3, CHOICES),
}

# In a process of d3rlpy's Python: FILE ENV LEARNER SEED CPU_SECONDS EPISODES
D3RLPY = """
import json, logging, sys, time
import gymnasium, h5py, numpy as np, torch
import d3rlpy
import structlog
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
path, env_id, learner, seed, limit, episodes = *sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6])
torch.set_num_threads(1)
d3rlpy.seed(seed)
env = gymnasium.make(env_id)
with h5py.File(path) as file:
    arrays = {name: file[name][()] for name in ("observations", "actions", "rewards", "terminals", "timeouts")}
is_choice = not hasattr(env.action_space, "high")
scale = 1 if is_choice else float(env.action_space.high[0])  # d3rlpy's policies act in [-1, 1]
arrays["actions"] = arrays["actions"].reshape(len(arrays["rewards"]), -1) / (1 if is_choice else scale)
floats = arrays.keys() - ({"actions"} if is_choice else set())
arrays |= {name: arrays[name].astype(np.float32) for name in floats}
space = d3rlpy.ActionSpace.DISCRETE if is_choice else d3rlpy.ActionSpace.CONTINUOUS
data = d3rlpy.dataset.MDPDataset(**arrays, action_space=space)
algos, processing = d3rlpy.algos, d3rlpy.preprocessing
scaler = processing.StandardObservationScaler()
scaler.fit_with_transition_picker(data.episodes, data.transition_picker)
rewards = None
if learner == "iql":
    rewards = processing.ReturnBasedRewardScaler(multiplier=1000.0)
    rewards.fit_with_trajectory_slicer(data.episodes, data.trajectory_slicer)
config = {
    "td3bc": lambda: algos.TD3PlusBCConfig(alpha=2.5, observation_scaler=scaler),
    "iql": lambda: algos.IQLConfig(weight_temp=3.0, expectile=0.7, observation_scaler=scaler, reward_scaler=rewards),
    "cql": lambda: algos.CQLConfig(
        actor_learning_rate=1e-4,
        critic_learning_rate=3e-4,
        temp_learning_rate=1e-4,
        alpha_learning_rate=0.0,
        batch_size=256,
        n_action_samples=10,
        conservative_weight=5.0,
        observation_scaler=scaler,
    ),
    "bc": lambda: algos.BCConfig(batch_size=256, observation_scaler=scaler),
    "dcql": lambda: algos.DiscreteCQLConfig(  # its defaults are for Atari: 8,000 updates between targets
        learning_rate=1e-3, target_update_interval=100, batch_size=256, observation_scaler=scaler
    ),
    "dbc": lambda: algos.DiscreteBCConfig(batch_size=256, observation_scaler=scaler),
}[learner]()
agent = config.create(device="cpu:0")
agent.build_with_dataset(data)
updates, began = 0, time.process_time()
while time.process_time() - began < limit:
    for _ in range(20):
        agent.update(data.sample_transition_batch(agent.config.batch_size))
    updates += 20
used, returns = time.process_time() - began, []
for episode in range(episodes):
    observation, over, total = env.reset(seed=1_000_003 + episode)[0], False, 0.0
    while not over:
        action = agent.predict(np.asarray(observation, np.float32)[None])[0]
        observation, reward, terminated, truncated, _ = env.step(int(action) if is_choice else scale * action)
        total, over = total + reward, terminated or truncated
    returns.append(total)
print(json.dumps({"return_mean": float(np.mean(returns)), "updates": updates, "cpu_seconds": round(used, 1)}))
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


def record_pendulum(path: Path) -> None:
    """Write random and swing-up episodes in turn."""
    import gymnasium
    import h5py

    rng, env = np.random.default_rng(0), gymnasium.make("Pendulum-v1")
    seen = np.zeros((PENDULUM_STEPS // EPISODE, EPISODE + 1, 3), dtype=np.float32)
    actions = np.zeros((PENDULUM_STEPS // EPISODE, EPISODE, 1), np.float32)
    rewards = np.zeros((PENDULUM_STEPS // EPISODE, EPISODE))
    for number in range(PENDULUM_STEPS // EPISODE):
        seen[number, 0] = env.reset(seed=int(rng.integers(2**30)))[0]
        for t in range(EPISODE):
            torque = swing_up(seen[number, t], rng) if number % 2 else rng.uniform(-2, 2)
            actions[number, t] = torque
            seen[number, t + 1], rewards[number, t], *_ = env.step(actions[number, t])
    ends = np.tile(np.arange(EPISODE) == EPISODE - 1, PENDULUM_STEPS // EPISODE)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["observations"], file["next_observations"] = seen[:, :-1].reshape(-1, 3), seen[:, 1:].reshape(-1, 3)
        file["actions"], file["rewards"] = actions.reshape(-1, 1), rewards.reshape(-1).astype(np.float32)
        file["terminals"], file["timeouts"] = np.zeros(PENDULUM_STEPS, dtype=bool), ends


def call(*words: object, python: str = sys.executable) -> dict[str, Any]:
    """Run a command of ours, or d3rlpy's script; the JSON of its last line or of all it wrote."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([python, *map(str, words)], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words[:5]))} ...: exit {done.returncode}\n{done.stderr[-2000:]}")
    text = done.stdout.strip()
    return json.loads(text if text.startswith("{\n") else text.splitlines()[-1])


def amago(*words: object) -> dict[str, Any]:
    """Run a command of ours."""
    return call("-P", "-m", "amago_cli", *words, "--output", "json", "-q")


def record(name: str, folder: Path) -> None:
    """Make the dataset of a task, FOLDER/NAME/dataset.hdf5, unless it is there."""
    task, to = TASKS[name], folder / name
    if (to / "dataset.hdf5").exists():
        return
    if not task.minutes:
        record_pendulum(to / "dataset.hdf5")
        return
    run = folder / f"{name}-run"
    made = amago("run", "--env", f"gym:{task.env}", "--minutes", task.minutes, "--seed", 7, "--run", run)
    last = task.share * made["metrics"]["updates"]
    amago("export", run, "--format", "hdf5", "--where", f"policy_version <= {last:.0f}", "--to", to)


def measure(path: Path) -> dict[str, Any]:
    """Read what is in a dataset with h5py."""
    import h5py

    with h5py.File(path) as file:
        ends, rewards = file["terminals"][()] | file["timeouts"][()], file["rewards"][()].astype(np.float64)
    ends[-1] = True
    returns = np.sort(np.add.reduceat(rewards, np.r_[0, np.flatnonzero(ends)[:-1] + 1]))
    high = float(returns[-max(len(returns) // 10, 1) :].mean())
    return {"steps": len(rewards), "data_mean": float(returns.mean()), "data_high": high}


def learn(name: str, learner: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a learner on a task's dataset, and score it."""
    task, path = TASKS[name], arguments.data / name / "dataset.hdf5"
    about = {"task": name, "learner": learner, "seed": seed, "minutes": arguments.minutes, **measure(path)}
    if learner != "amago":
        given = (path, task.env, learner, seed, 60 * arguments.minutes, EVALUATED)
        found = call("-W", "ignore", "-c", D3RLPY, *given, python=arguments.d3rlpy_python)
        return about | {**found, "return_last": found["return_mean"]}
    run = arguments.data / f"amago-{name}-{seed}-{time.time_ns():x}"
    before = os.times()
    sets = [word for each in arguments.set for word in ("--set", each)]
    words = ("--from", path, "--env", f"gym:{task.env}", "--minutes", arguments.minutes, "--seed", seed)
    done = amago("run", *words, "--run", run, "--set", "train.threads=1", *sets)
    after = os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    scores = {}
    for checkpoint in ("best", "latest"):
        score = amago("evaluate", run, "--checkpoint", checkpoint, "--episodes", EVALUATED, "--set", "evaluate.seed=5")
        scores[checkpoint] = score["metrics"]["return_mean"]
    about |= {"set": arguments.set} if arguments.set else {}
    found = {"return_mean": scores["best"], "return_last": scores["latest"], "updates": done["metrics"]["updates"]}
    return about | found | {"cpu_seconds": round(used, 1)}


def results(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train every learner of every task, with one seed after another."""
    for seed in map(int, arguments.seeds.split(",")):
        for name in arguments.tasks:
            wanted = arguments.learners or ["amago", *(TASKS[name].learners if arguments.d3rlpy_python else ())]
            for learner in wanted:
                yield learn(name, learner, seed, arguments)


def tabulate(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of the page: a line for each task, with the returns of all seeds."""
    names = {"td3bc": "TD3+BC", "iql": "IQL", "cql": "CQL", "bc": "BC", "dcql": "DiscreteCQL", "dbc": "DiscreteBC"}
    yield "| task | steps | recorded: mean, best tenth | amago: best, last | d3rlpy |"
    yield "|---|---|---|---|---|"
    for name, task in TASKS.items():
        found = [row for row in rows if row["task"] == name]
        if not found:
            continue
        own = ", ".join(
            f"{row['return_mean']:.4g} ({row['return_last']:.4g})" for row in found if row["learner"] == "amago"
        )
        others = "; ".join(
            f"{names[learner]} " + ", ".join(f"{row['return_mean']:.4g}" for row in found if row["learner"] == learner)
            for learner in task.learners
            if any(row["learner"] == learner for row in found)
        )
        data = found[0]
        label = f"{name} (tuning)" if task.tuning else name
        recorded = f"{data['data_mean']:.4g}, {data['data_high']:.4g}"
        yield f"| {label} | {data['steps']:,} | {recorded} | {own} | {others} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "run", "book"))
    parser.add_argument("--data", type=Path, default=Path("offline-data"), help="folder of the datasets")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(TASKS))
    parser.add_argument("--learners", type=lambda text: text.split(","), default=[])
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--to", type=Path, default=Path("offline.jsonl"))
    parser.add_argument("--d3rlpy-python", default="", help="a Python with d3rlpy; without one ours runs alone")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE laid over our settings")
    arguments = parser.parse_args()
    if arguments.what == "record":
        for name in arguments.tasks:
            record(name, arguments.data)
            print(name, json.dumps(measure(arguments.data / name / "dataset.hdf5")), flush=True)
    elif arguments.what == "run":
        for result in results(arguments):
            line = json.dumps(result)
            print(line, flush=True)
            with arguments.to.open("a") as file:
                file.write(line + "\n")
    else:
        rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
        SECTION.write(PAGE, "\n".join(tabulate(rows)))


if __name__ == "__main__":
    main()
