"""How fast experience comes in: `python tests/benchmarks/rollout.py`, on an idle machine.

Four tables, and all of it as JSON in the last line:

- a Transformer (width 128, 3 layers) that acts in meta-frozen-lake (5 x 5, 10 attempts) with exploration, everything
  recorded, one thread, by the number of actors; beside it the reference's rate where it is known;
- environments of one step after another, by the number of worker processes, with random actions, recorded: how many
  times one process (1.6 and more is wanted with 2 workers), and how much of what as many processes do that only step
  (85% and more);
- built-ins with random actions and 1,024 actors, recorded (500,000 steps/s and more are wanted);
- `amago collect` with a random policy, actors and workers chosen by `auto`, beside a plain loop over one environment of
  the package itself that samples its action space: `of_bare`, the ratio of steps a CPU second, workers included, should
  be .5 or more, and .8 or more where a step costs 50 us or more. Environments that are not installed are left out.

Rates are environment steps a second, the best of a few turns, in the second table the mean of turns that alternate,
`error` the standard error of what is left `of_alone`; `cpu` counts seconds of this process only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import gymnasium
import numpy as np
import torch

from pipelines.config.settings import Settings
from pipelines.envs.env import Env
from pipelines.envs.make import make
from pipelines.learning.acting import AgentPolicy
from pipelines.learning.agent import Agent
from pipelines.rollout.collector import Collector
from pipelines.rollout.environment import with_actors
from pipelines.rollout.plan import CollectionPlan
from pipelines.rollout.policies import Acting, RandomPolicy

LAKE = {"name": "meta-frozen-lake", "size": 5, "attempts": 10}
AGENT = {
    "timestep": {"hidden": [128], "output": 64},
    "sequence": {"kind": "transformer", "d_model": 128, "num_layers": 3, "num_heads": 8, "d_ff": 512},
}
REFERENCE = {8: 1716, 16: 1920, 24: 2113}  # steps a second of AMAGO 3.3 on two cores
SLOW = {"name": "tests.envs.breaking:Walk", "seconds": 5e-4, "length": 200}
BUILT_INS = (LAKE, {"name": "dark-key-door"}, {"name": "tmaze"}, {"name": "goal-frozen-lake"})
BARE = (
    "gym:CartPole-v1",
    "gym:LunarLander-v3",
    "popgym-RepeatPreviousEasy",
    "popgym-CountRecallEasy",
    "minigrid:BabyAI-GoToLocal-v0",
    "half-cheetah-vel",
    "robotics:PointMaze_UMaze-v3",
    "dmc:cartpole-swingup",
    "gymnax:CartPole-v1",
    "xland",
)
_NEEDS = {"popgym": "popgym", "minigrid": "minigrid", "half": "mujoco", "robotics": "gymnasium_robotics"}
_NEEDS |= {"dmc": "dm_control", "gymnax": "gymnax", "xland": "xminigrid"}
_TURNS, _SHARED_TURNS, _BARE_TURNS = 4, 15, 6


class Collecting:
    """Collecting into a new lake, in turns; with an agent, or at random. `behaviour`: as for `CollectionPlan`."""

    def __init__(
        self,
        env: dict[str, Any],
        *,
        actors: int | str,
        workers: int | str,
        agent: bool = False,
        behaviour: Mapping[str, Any] | None = None,
    ) -> None:
        collect = {"actors": actors, "workers": workers}
        settings = Settings.model_validate({"env": env, "agent": AGENT, "collect": collect})
        settings = settings.model_copy(update={"collect": with_actors(settings.collect, settings.env)})
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        policy = (lambda env, seed: self._untrained(settings, env)) if agent else None
        plan = CollectionPlan(
            settings=settings, place=Path(folder) / "lake", name="bench", behaviour=behaviour, policy=policy
        )
        collector = self._stack.enter_context(Collector(plan))
        collector.sink.open()
        self.actors, self.workers = collector.env.num_envs, collector.workers
        self._rollout = collector.rollout
        first = (collector.env.spec.horizon or 100) if agent else 10  # memories fill
        self._rollout.run(steps=first * self.actors)

    @staticmethod
    def _untrained(settings: Settings, env: Env) -> Acting:
        agent = Agent(env.spec.spaces, settings.agent).eval()
        policy = AgentPolicy(agent, num_actors=env.num_envs, capacity=settings.train.resolved_context_length)
        return Acting(policy=policy, policy_id="bench", version=0)

    def __enter__(self) -> Collecting:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def turn(self, seconds: float) -> dict[str, float]:
        """Rates by the clock and by the CPU of this process, and where its time went."""
        wall, cpu, workers = time.perf_counter(), time.process_time(), worker_seconds()
        until = wall + seconds
        # One run, as long as the turn: at its end all actors are even, so that a run waits for the slowest.
        stats = self._rollout.run(steps=sys.maxsize, stop=lambda: time.perf_counter() >= until)
        wall, cpu, done = time.perf_counter() - wall, time.process_time() - cpu, stats.steps
        workers = worker_seconds() - workers
        shares = {
            "policy_share": stats.policy_seconds / stats.seconds,
            "env_share": stats.env_seconds / stats.seconds,
        }
        return {"rate": done / wall, "cpu": done / cpu, "cpu_in_all": done / (cpu + workers), **shares}


def worker_seconds() -> float:
    """Return the CPU seconds that the worker processes have used so far."""
    ticks = 0
    for children in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for process in children.read_text().split():
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(env: dict[str, Any], *, actors: int, workers: int, seconds: float, agent: bool = False) -> dict[str, Any]:
    """The best of a few turns, by each clock."""
    with Collecting(env, actors=actors, workers=workers, agent=agent) as collecting:
        turns = [collecting.turn(seconds) for _ in range(_TURNS)]
    return max(turns, key=lambda turn: turn["rate"]) | {"cpu": max(turn["cpu"] for turn in turns)}


def _alone(env: dict[str, Any], actors: int, pipe: Any) -> None:
    params = {key: value for key, value in env.items() if key != "name"}
    made = make(env["name"], num_envs=actors, seed=0, params=params)
    policy = RandomPolicy(made.spec.spaces.action, seed=0)
    observation, anything = made.reset(), np.zeros(actors)  # random policies look at how many actors there are
    pipe.send(None)
    while (seconds := pipe.recv()) is not None:
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            result = made.step(policy.act(observation, anything, anything, anything))
            over = result.terminated | result.truncated
            observation = made.reset(over) if over.any() else result.observation
            done += actors
        pipe.send(done / (time.perf_counter() - began))


class Alone:
    """Environments that are only stepped, by some processes at once, in turns."""

    def __init__(self, env: dict[str, Any], *, actors: int, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._started = [], []
        for _ in range(processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_alone, args=(env, max(actors // processes, 1), theirs))
            process.start()
            self._pipes.append(ours)
            self._started.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *error: Any) -> None:
        for pipe, process in zip(self._pipes, self._started, strict=True):
            pipe.send(None)
            process.join()

    def turn(self, seconds: float) -> float:
        """Their rate, together."""
        for pipe in self._pipes:
            pipe.send(seconds)
        return float(sum(pipe.recv() for pipe in self._pipes))


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
    """Of each environment and number of workers: means over turns that took turns with one another, in any order."""
    found = []
    for env in envs:
        with contextlib.ExitStack() as stack:
            counts = list(dict.fromkeys([0, *workers]))
            made = [stack.enter_context(Collecting(env, actors=actors, workers=count)) for count in counts]
            sizes = list(dict.fromkeys(max(count, 1) for count in counts))
            free = {n: stack.enter_context(Alone(env, actors=actors, processes=n)) for n in sizes}
            rng = np.random.default_rng(0)
            turns: list[dict[tuple[str, int], Any]] = []
            for _ in range(_SHARED_TURNS):
                calls: dict[tuple[str, int], Callable[[float], Any]]
                calls = {("alone", n): each.turn for n, each in free.items()}
                calls |= {("shared", n): each.turn for n, each in zip(counts, made, strict=True)}
                order = rng.permutation(len(calls)).tolist()  # else a host that is busy now and then favours some
                turns.append({kind: calls[kind](seconds) for kind in (list(calls)[place] for place in order)})
        for count in counts:
            rows = [turn["shared", count] for turn in turns]
            means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
            rates = {kind: np.array([_rate(turn[kind]) for turn in turns]) for kind in turns[0]}
            one, alone = rates["shared", 0], rates["alone", max(count, 1)]
            of_alone, error = _ratio(rates["shared", count], alone)
            means |= {"times_one_process": means["rate"] / float(one.mean()), "of_alone": of_alone, "error": error}
            found.append({"env": env["name"], "actors": actors, "workers": count} | means)
    return found


def _rate(turn: Any) -> float:
    return turn["rate"] if isinstance(turn, dict) else turn


def _ratio(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """Of what both did in turns of equal length, and its standard error (by leaving out each of them)."""
    n = len(ours)
    others = (ours.sum() - ours) / (theirs.sum() - theirs)
    error = np.sqrt((n - 1) / n * np.square(others - others.mean()).sum())
    return float(ours.sum() / theirs.sum()), float(error)


def built_ins(actors: int, seconds: float) -> list[dict[str, Any]]:
    return [{"env": env["name"]} | measure(env, actors=actors, workers=0, seconds=seconds) for env in BUILT_INS]


class Bare:
    """One environment as its own package makes it, in a plain loop with samples of its action space."""

    def __init__(self, name: str) -> None:
        self._step, self._reset = bare(name)
        self._reset()

    def turn(self, seconds: float) -> float:
        """Steps a CPU second."""
        until, cpu, done = time.perf_counter() + seconds, time.process_time(), 0
        step, reset = self._step, self._reset
        while time.perf_counter() < until:
            for _ in range(50):
                if step():
                    reset()
            done += 50
        return done / (time.process_time() - cpu)


def bare(name: str) -> tuple[Callable[[], bool], Callable[[], Any]]:
    """Return a function that takes a random step and says whether the episode is over, and one that begins another."""
    suite, _, task = name.partition(":")
    if suite == "gymnax":
        import gymnax
        import jax

        made, params = gymnax.make(task)
        state = {"key": jax.random.PRNGKey(0)}
        reset, step = jax.jit(made.reset), jax.jit(made.step)
        split, sample = jax.jit(jax.random.split), jax.jit(made.action_space(params).sample)

        def begin() -> None:
            state["key"], key = split(state["key"])
            _, state["state"] = reset(key, params)

        def act() -> bool:
            state["key"], key = split(state["key"])
            outcome = step(key, state["state"], sample(key), params)
            state["state"] = outcome[1]
            return any(bool(over) for over in outcome[3:-1])  # before 1.0 one flag, then termination and truncation

        return act, begin
    if suite == "xland":
        import jax
        import xminigrid

        world, params = xminigrid.make("XLand-MiniGrid-R1-9x9")
        kept = {"key": jax.random.PRNGKey(0)}
        first, move, part = jax.jit(world.reset), jax.jit(world.step), jax.jit(jax.random.split)
        draw = jax.jit(lambda key: jax.random.randint(key, (), 0, world.num_actions(params)))

        def enter() -> None:
            kept["key"], key = part(kept["key"])
            kept["time"] = first(params, key)

        def go() -> bool:
            kept["key"], key = part(kept["key"])
            kept["time"] = move(params, kept["time"], draw(key))
            return bool(kept["time"].last())

        return go, enter
    if suite == "dmc":
        from dm_control import suite as control

        task_env = control.load(*task.split("-", 1))
        spec, rng = task_env.action_spec(), np.random.default_rng(0)
        return (
            lambda: task_env.step(rng.uniform(spec.minimum, spec.maximum, spec.shape)).last(),
            task_env.reset,
        )
    if suite == "half-cheetah-vel":
        env = gymnasium.make("HalfCheetah-v5")
    elif suite.startswith("popgym-"):
        from pipelines.envs.suites.popgym import new_game

        env = new_game(suite.removeprefix("popgym-"))
    else:
        if suite in ("minigrid", "robotics"):
            gymnasium.register_envs(importlib.import_module(_NEEDS[suite]))
        env = gymnasium.make(task)

    def walk() -> bool:
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        return terminated or truncated

    return walk, env.reset


def beside_bare(names: Sequence[str], seconds: float) -> list[dict[str, Any]]:
    """Of each environment that is installed: the best of turns that alternate between the two."""
    found = []
    for name in names:
        needs = _NEEDS.get(name.partition(":")[0].partition("-")[0])
        if needs and importlib.util.find_spec(needs) is None:
            continue
        plain = Bare(name)
        with Collecting({"name": name}, actors="auto", workers="auto", behaviour={}) as collecting:
            turns = [(collecting.turn(seconds)["cpu_in_all"], plain.turn(seconds)) for _ in range(_BARE_TURNS)]
            ours, theirs = (max(rates) for rates in zip(*turns, strict=True))
            row = {"env": name, "actors": collecting.actors, "workers": collecting.workers}
        found.append(row | {"cpu": ours, "bare": theirs, "step_us": 1e6 / theirs, "of_bare": ours / theirs})
        print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return found


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
    parser.add_argument("--seconds", type=float, default=3.0, help="of each turn, at whose end up to one is waited")
    parser.add_argument("--actors", type=int, nargs="+", default=[8, 16, 24, 32, 64, 128, 256])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--env", nargs="+", default=[], help="more environments to share out, e.g. minigrid:ID")
    parser.add_argument("--shared-actors", type=int, nargs="+", default=[16, 32], help="actors of those")
    parser.add_argument("--only", choices=["acting", "sharing", "built-ins", "bare"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {"torch": torch.__version__}
    if options.only in (None, "acting"):
        result["acting"] = acting(options.actors, options.seconds)
        show("meta-frozen-lake, a Transformer acts", result["acting"])
    if options.only in (None, "sharing"):
        envs = [SLOW, *({"name": name} for name in options.env)]
        result["sharing"] = [
            row for actors in options.shared_actors for row in sharing(envs, options.workers, actors, options.seconds)
        ]
        show("environments in workers, random actions", result["sharing"])
    if options.only in (None, "built-ins"):
        result["built_ins"] = built_ins(1024, options.seconds)
        show("built-ins, 1,024 actors, random actions", result["built_ins"])
    if options.only in (None, "bare"):
        result["bare"] = beside_bare(options.env or BARE, options.seconds)
        show("amago collect at auto beside the bare package, random actions", result["bare"])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
