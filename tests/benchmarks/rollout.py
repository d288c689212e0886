"""How fast experience comes in: `python tests/benchmarks/rollout.py`, on an idle machine.

Three tables, and all of it as JSON in the last line:

- a Transformer (width 128, 3 layers) that acts in meta-frozen-lake (5 x 5, 10 attempts) with exploration, everything
  recorded, one thread, by the number of actors; beside it the reference's rate where it is known;
- environments of one step after another, by the number of worker processes, with random actions, recorded: how many
  times one process (1.6 and more is wanted with 2 workers), and how much of what as many processes do that only step
  (85% and more);
- built-ins with random actions and 1,024 actors, recorded (500,000 steps/s and more are wanted).

Rates are environment steps a second, the best of a few turns; `cpu` counts seconds of this process only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch

from pipelines.config.settings import Settings
from pipelines.envs.make import make
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.agent import Agent
from pipelines.rollout.policy_client import RandomPolicy
from pipelines.stages.collect import Collector
from pipelines.stages.policies import Acting

LAKE = {"name": "meta-frozen-lake", "size": 5, "attempts": 10}
AGENT = {
    "timestep": {"hidden": [128], "output": 64},
    "sequence": {"kind": "transformer", "d_model": 128, "num_layers": 3, "num_heads": 8, "d_ff": 512},
}
REFERENCE = {8: 1716, 16: 1920, 24: 2113}  # steps a second of AMAGO 3.3 on two cores
SLOW = {"name": "tests.envs.breaking:Walk", "seconds": 5e-4, "length": 200}
BUILT_INS = (LAKE, {"name": "dark-key-door"}, {"name": "tmaze"}, {"name": "goal-frozen-lake"})
_TURNS = 4


def measure(env: dict[str, Any], *, actors: int, workers: int, seconds: float, agent: bool = False) -> dict[str, Any]:
    """Rate of collecting into a new lake, wall and CPU of this process, the best of a few turns of `seconds`."""
    settings = Settings.model_validate({"env": env, "agent": AGENT, "collect": {"actors": actors, "workers": workers}})
    with tempfile.TemporaryDirectory() as folder, Collector(settings, Path(folder) / "lake", name="bench") as collector:
        acting = collector.first_policy()
        if agent:
            learner = Agent(collector.env.spec.spaces, settings.agent).eval()
            policy = AgentPolicy(learner, num_actors=actors, capacity=settings.train.window)
            acting = Acting(policy=policy, policy_id="bench", version=0)
        collector.act_by(acting)
        assert collector.rollout is not None
        steps = 10 * actors
        best: dict[str, Any] = {"rate": 0.0, "cpu": 0.0}
        collector.rollout.run(steps=(collector.env.spec.horizon or 100) * actors if agent else steps)  # memories fill
        for _ in range(_TURNS):
            wall, cpu = time.perf_counter(), time.process_time()
            done = 0
            while time.perf_counter() - wall < seconds:
                stats = collector.rollout.run(steps=steps)
                done += stats.steps
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            best["cpu"] = max(best["cpu"], done / cpu)
            if done / wall > best["rate"]:
                shares = {
                    "policy_share": stats.policy_seconds / stats.seconds,
                    "env_share": stats.env_seconds / stats.seconds,
                }
                best |= {"rate": done / wall, **shares}
        return best


def _alone(env: dict[str, Any], actors: int, seconds: float, ready: Any, rates: Any) -> None:
    params = {key: value for key, value in env.items() if key != "name"}
    made = make(env["name"], num_envs=actors, seed=0, params=params)
    policy = RandomPolicy(made.spec.spaces.action, seed=0)
    observation, anything = made.reset(), np.zeros(actors)  # random policies look at how many actors there are
    best = 0.0
    ready.wait()
    for _ in range(_TURNS):
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            result = made.step(policy.act(observation, anything, anything, anything))
            over = result.terminated | result.truncated
            observation = made.reset(over) if over.any() else result.observation
            done += actors
        best = max(best, done / (time.perf_counter() - began))
    rates.put(best)


def alone(env: dict[str, Any], *, actors: int, processes: int, seconds: float) -> float:
    """Rate of environments that are only stepped, by as many processes at once."""
    context = multiprocessing.get_context("spawn")
    ready, rates = context.Barrier(processes), context.SimpleQueue()
    share = max(actors // processes, 1)
    started = [context.Process(target=_alone, args=(env, share, seconds, ready, rates)) for _ in range(processes)]
    for process in started:
        process.start()
    total = sum(rates.get() for _ in started)
    for process in started:
        process.join()
    return total


def acting(sizes: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    found = []
    for actors in sizes:
        row = {"actors": actors} | measure(LAKE, actors=actors, workers=0, seconds=seconds, agent=True)
        known = REFERENCE.get(actors)
        row |= {"times_reference": row["rate"] / known} if known else {}
        row["times_best_reference"] = row["rate"] / max(REFERENCE.values())
        found.append(row)
    return found


def sharing(
    envs: Sequence[dict[str, Any]], workers: Sequence[int], actors: int, seconds: float
) -> list[dict[str, Any]]:
    found = []
    for env in envs:
        one = 0.0
        for count in workers:
            row = {"env": env["name"], "workers": count} | measure(env, actors=actors, workers=count, seconds=seconds)
            one = row["rate"] if count == 0 else one
            free = alone(env, actors=actors, processes=max(count, 1), seconds=seconds)
            found.append(row | {"times_one_process": row["rate"] / one, "of_alone": row["rate"] / free})
    return found


def built_ins(actors: int, seconds: float) -> list[dict[str, Any]]:
    return [{"env": env["name"]} | measure(env, actors=actors, workers=0, seconds=seconds) for env in BUILT_INS]


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """A table on stdout."""
    print(f"\n{title}")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    print("  ".join(f"{name:>20}" for name in columns))
    for row in rows:
        print("  ".join(f"{_cell(row.get(name, '')):>20}" for name in columns))


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
    parser.add_argument("--actors", type=int, nargs="+", default=[8, 16, 24, 32, 64, 128, 256])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--env", nargs="+", default=[], help="more environments to share out, e.g. minigrid:ID")
    parser.add_argument("--only", choices=["acting", "sharing", "built-ins"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"torch": torch.__version__}
    if options.only in (None, "acting"):
        result["acting"] = acting(options.actors, options.seconds)
        show("meta-frozen-lake, a Transformer acts", result["acting"])
    if options.only in (None, "sharing"):
        envs = [SLOW, *({"name": name} for name in options.env)]
        result["sharing"] = sharing(envs, options.workers, 16, options.seconds)
        show("environments in workers, 16 actors, random actions", result["sharing"])
    if options.only in (None, "built-ins"):
        result["built_ins"] = built_ins(1024, options.seconds)
        show("built-ins, 1,024 actors, random actions", result["built_ins"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
