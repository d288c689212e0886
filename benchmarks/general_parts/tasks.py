"""The tasks of the benchmark (tasks.toml): environments, the scores that normalise theirs, and agents to compare."""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from pipelines.envs.env import Env
from pipelines.envs.make import Split, make
from pipelines.files.atomic import write_atomically
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Space

ROOT = Path(__file__).resolve().parents[2]
TABLE, GAMES = Path(__file__).with_name("tasks.toml"), Path(__file__).with_name("popgym.toml")
RANDOM_EPISODES = 200
_GAME_SECONDS = {"Easy": 300.0, "Medium": 600.0, "Hard": 900.0}

Agent = Literal["amago", "ppo", "dqn", "sac", "recurrent-ppo"]
AGENTS: tuple[Agent, ...] = ("amago", "ppo", "dqn", "sac", "recurrent-ppo")


class Task(BaseModel):
    """A row of the table."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    env: str
    params: dict[str, Any] = {}
    kind: str
    set: Literal["tuning", "report", "popgym"]
    episodes: int
    random: float
    gru: float = math.nan
    best: float
    source: str
    peers: tuple[Agent, ...]
    zoo: str = "default"
    seconds: float = 300.0

    def normalize(self, score: float) -> float:
        """Scale a return to 0 for uniformly random actions and 1 for the best that is known."""
        return (score - self.random) / (self.best - self.random)

    def make(self, *, num_envs: int, seed: int, split: Split) -> Env:
        """Construct actors of the task's environment."""
        return make(self.env, num_envs=num_envs, seed=seed, split=split, params=self.params)


def load_tasks() -> dict[str, Task]:
    """Read the tables, in their order."""
    tasks, games = (tomllib.loads(path.read_text(encoding="utf-8")) for path in (TABLE, GAMES))
    shared = {"kind": "memory", "set": "popgym", "episodes": 200, "peers": ()}
    for name, row in games.items():
        seconds = next(seconds for level, seconds in _GAME_SECONDS.items() if name.endswith(level))
        tasks[name] = {"env": name, **shared, "seconds": seconds, **row}
    return {name: Task(name=name, **row) for name, row in tasks.items()}


def write_random(name: str, value: float, path: Path) -> None:
    """Replace the measured score of random actions in a table."""
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(rf"(^\[{re.escape(name)}\]\n(?:(?!\[).*\n)*?random = )\S+$", re.MULTILINE)
    written, count = pattern.subn(rf"\g<1>{value:.4g}", text)
    if count != 1:
        raise ValueError(f"{path} has no row {name} with a field random")
    write_atomically(path, written)


def random_actions(space: Space, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw `count` actions uniformly."""
    match space:
        case Discrete(n=n):
            drawn = rng.integers(n, size=count)
        case MultiDiscrete(nvec=nvec):
            drawn = rng.integers(nvec, size=(count, len(nvec)))
        case MultiBinary(n=n):
            drawn = rng.integers(2, size=(count, n))
        case Box(shape=shape):
            drawn = rng.uniform(-1, 1, size=(count, *shape))
        case _:
            raise ValueError(f"{space} cannot be a space of actions")
    return drawn.astype(space.dtype)


def episode_returns(env: Env, act: Any, episodes: int) -> np.ndarray:
    """Play whole episodes and return the return of each, `episodes` rounded up to a multiple of the actors. Each actor
    plays as many as any other: taking those that end first would prefer short ones.

    `act(observation, begins)` gives actions; `begins` (N,) bool marks first steps.
    """
    quota = math.ceil(episodes / env.num_envs)
    found: list[list[float]] = [[] for _ in range(env.num_envs)]
    total, begins = np.zeros(env.num_envs), np.ones(env.num_envs, dtype=bool)
    observation = env.reset()
    while any(len(each) < quota for each in found):
        result = env.step(act(observation, begins))
        total += result.reward
        begins = result.terminated | result.truncated
        for actor in np.flatnonzero(begins):
            found[actor].append(float(total[actor]))
        total[begins] = 0
        observation = env.reset(begins) if begins.any() else result.observation
    return np.array([value for each in found for value in each[:quota]])


def measure_random(task: Task, episodes: int = RANDOM_EPISODES, *, seed: int = 0) -> np.ndarray:
    """Play the task's test side with uniformly random actions, and return the returns."""
    env, rng = task.make(num_envs=min(episodes, 20), seed=seed, split="test"), np.random.default_rng(seed)
    try:
        space = env.spec.spaces.action
        return episode_returns(env, lambda observation, begins: random_actions(space, env.num_envs, rng), episodes)
    finally:
        env.close()
