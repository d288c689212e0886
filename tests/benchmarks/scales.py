"""Two tasks in one lake of random play, whose rewards differ a thousandfold: what each kind of agent makes of them.

    python tests/benchmarks/scales.py [--updates 5000] [--seeds 3] [--scale 1000] [--alone] [--json]

A grid of 4 x 4 cells, a start and a goal, both seen; an episode ends at the goal, which pays, or after 12 steps. Task 0
pays 1. Task 1 pays `--scale`; it is shown in numbers of its own, and all four moves go the other way. Agents learn
through the learner's own update from the same 4,000 random episodes of each task. The score is exact: the share of all
240 pairs of start and goal from which the greedy policy arrives within 8 steps (6 suffice; moving one way only: 0.1).
`--alone` trains on task 0 alone: what can be had.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

SIZE, LIMIT, EVALUATED, EPISODES = 4, 12, 8, 4_000
MOVES = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]])
AGENTS: dict[str, dict[str, Any]] = {
    "actor-critic": {"kind": "actor-critic"},
    "actor-critic, two-hot": {"kind": "actor-critic", "critic": {"kind": "two-hot", "hidden": [64, 64]}},
    "multi-task": {"kind": "multi-task"},
    "multi-task, two-hot labels": {"kind": "multi-task", "critic": {"hidden": [64, 64], "labels": "two-hot"}},
}
NETWORK = {
    "timestep": {"hidden": [64, 64], "output": 64},
    "sequence": {"kind": "identity"},
    "actor": {"hidden": [64]},
    "critic": {"hidden": [64, 64]},
    "gammas": [0.5],
    "acting_gamma": 0.7,
    "target_tau": 0.02,
}


def moved(place: np.ndarray, action: np.ndarray, task: np.ndarray) -> np.ndarray:
    """Cells (N, 2) after the actions (N,): walls stop, task 1 goes the other way."""
    way = MOVES[action] * np.where(task == 1, -1, 1)[:, None]
    return np.clip(place + way, 0, SIZE - 1)


def shown(place: np.ndarray, goal: np.ndarray, task: np.ndarray) -> np.ndarray:
    """Observation (N, 8): each task has numbers of its own, 0 in the other."""
    seen = np.concatenate([place, goal], 1) + 1
    return np.concatenate([seen * (task == 0)[:, None], seen * (task == 1)[:, None]], 1).astype(np.float32)


def pairs() -> tuple[np.ndarray, np.ndarray]:
    """Every start and goal that differ (240, 2) each."""
    cells = np.stack(np.meshgrid(range(SIZE), range(SIZE)), -1).reshape(-1, 2)
    start, goal = (cells[index] for index in np.nonzero(1 - np.eye(len(cells))))
    return start, goal


def played(task: int, scale: float, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Columns (EPISODES, LIMIT + 1, ...) of random play and how many rows of each are real."""
    starts, goals = pairs()
    chosen = rng.integers(len(starts), size=EPISODES)
    place, goal, tasks = starts[chosen], goals[chosen], np.full(EPISODES, task)
    rows = LIMIT + 1
    columns = {
        "obs": np.zeros((EPISODES, rows, 8), np.float32),
        "action": np.zeros((EPISODES, rows), np.int32),
        "reward": np.zeros((EPISODES, rows), np.float32),
        "terminated": np.zeros((EPISODES, rows), np.uint8),
    }
    lengths, going = np.full(EPISODES, 1), np.full(EPISODES, True)
    columns["obs"][:, 0] = shown(place, goal, tasks)
    for t in range(1, rows):
        action = rng.integers(4, size=EPISODES)
        place = moved(place, action, tasks)
        there = (place == goal).all(1)
        columns["obs"][going, t] = shown(place, goal, tasks)[going]
        columns["action"][going, t] = action[going]
        columns["reward"][going, t] = there[going] * scale
        columns["terminated"][going, t] = there[going]
        lengths += going
        going &= ~there
    return columns, lengths


def score(agent: Any, task: int) -> float:
    """Share of pairs that the greedy policy solves."""
    from pipelines.learning.acting import AgentPolicy

    place, goal = pairs()
    tasks, count = np.full(len(place), task), len(place)
    policy = AgentPolicy(agent.eval(), num_actors=count, capacity=1, greedy=True)
    action, zero, reached = np.zeros(count, np.int32), np.zeros(count, np.float32), np.full(count, False)
    for t in range(EVALUATED):
        action = policy.act({"obs": shown(place, goal, tasks)}, action, zero, np.full(count, t))
        place = np.where(reached[:, None], place, moved(place, action, tasks))
        reached |= (place == goal).all(1)
    return float(reached.mean())


def trained(kind: dict[str, Any], scales: list[float], updates: int, seed: int, rate: float) -> dict[str, Any]:
    """Scores of each task after training on the mix of all, and the CPU seconds of it."""
    import torch

    from pipelines.config.model import AgentSettings
    from pipelines.config.settings import TrainSettings
    from pipelines.data.batch import Batch
    from pipelines.lake.spaces import Box, Discrete, Spaces
    from pipelines.training.learner import Learner

    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    lakes = [played(task, scale, rng) for task, scale in enumerate(scales)]
    spaces = Spaces(observation={"obs": Box(shape=(8,))}, action=Discrete(n=4))
    settings = TrainSettings(
        batch_size=48,
        context_length=LIMIT,
        learning_rate=rate,
        warmup_steps=50,
        threads=1,
        device="cpu",
        log_every=10**9,
    )
    learner = Learner(spaces, AgentSettings.model_validate(NETWORK | kind), settings, seed=seed)

    def draw(size: int) -> Batch:
        picked = [rng.integers(EPISODES, size=size // len(lakes)) for _ in lakes]
        parts = zip(lakes, picked, strict=True)
        found = [({n: c[i] for n, c in columns.items()}, lengths[i]) for (columns, lengths), i in parts]
        columns = {name: np.concatenate([each[name] for each, _ in found]) for name in found[0][0]}
        return Batch(columns=columns, lengths=np.concatenate([n for _, n in found]), start=np.zeros(size, np.int64))

    begun = time.process_time()
    for _ in range(updates):
        learner.step(draw)
    spent = time.process_time() - begun
    return {"scores": [score(learner.agent, task) for task in range(len(scales))], "seconds": spent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=5000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1000.0)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--only", metavar="AGENT", help="one of the agents")
    parser.add_argument("--alone", action="store_true", help="train on task 0 alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    scales = [1.0] if options.alone else [1.0, options.scale]
    for name, kind in AGENTS.items():
        if options.only not in (None, name):
            continue
        for seed in range(options.seeds):
            found = trained(kind, scales, options.updates, seed, options.learning_rate)
            if options.json:
                print(json.dumps({"agent": name, "seed": seed, **found}), flush=True)
                continue
            scores = "  ".join(f"x{scale:g}: {score:.2f}" for scale, score in zip(scales, found["scores"], strict=True))
            print(f"{name:24} seed {seed}  {scores}  {found['seconds']:.0f} s", flush=True)


if __name__ == "__main__":
    main()
