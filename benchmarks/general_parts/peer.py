"""One run of an agent of Stable-Baselines3 or sb3-contrib, in a process of its own:
`python -m benchmarks.general_parts.peer < JOB > RESULT`.

The environments are our own actors (`pipelines.envs`), presented as a `VecEnv`: the observation is one vector, with
choices one-hot, or a picture. Schedules are shares of the run's CPU seconds, since a run ends when these are used up.
"""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3 import DQN, PPO, SAC
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv, VecFrameStack, VecNormalize, VecTransposeImage

from benchmarks.general_parts.tasks import Task, episode_returns, load_tasks
from pipelines.envs.env import Env
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Ragged, Space

SETTINGS = Path(__file__).with_name("peers.toml")
_ALGORITHMS: dict[str, type[BaseAlgorithm]] = {"ppo": PPO, "dqn": DQN, "sac": SAC, "recurrent-ppo": RecurrentPPO}
_POINTS = 4  # of a learning curve, the end included
_GRID_SCALES, _GRID_SIZES = (25, 51, 85), (11, 6, 4)  # kinds, colours and states of a MiniGrid cell
_TEST_SEED = 1_000
_FRAMES = 4  # that rl-zoo stacks for pictures
_STEPS = 10**9  # never reached: CPU seconds end a run


class Flatten:
    """Maps a batch of observations to one array: a single picture stays one; of everything else numbers are kept,
    choices become one-hot, and texts are left out. The cells of a MiniGrid are choices."""

    def __init__(self, columns: Mapping[str, Space]) -> None:
        lengths = {f"{name}.length" for name, space in columns.items() if isinstance(space, Ragged)}
        self._columns = {
            name: space
            for name, space in columns.items()
            if name not in lengths and not (isinstance(space, Ragged) and space.text)
        }
        only = next(iter(self._columns.values())) if len(self._columns) == 1 else None
        self.is_image = isinstance(only, Box) and only.is_image
        zeros = {name: np.zeros((1, *space.shape), space.dtype) for name, space in self._columns.items()}
        shape = self(zeros).shape[1:]
        self.space = (
            gymnasium.spaces.Box(0, 255, shape, np.uint8)
            if self.is_image
            else gymnasium.spaces.Box(-np.inf, np.inf, shape, np.float32)
        )

    def __call__(self, observation: Mapping[str, np.ndarray]) -> np.ndarray:
        if self.is_image:
            return np.asarray(observation[next(iter(self._columns))])
        parts = [_vector(np.asarray(observation[name]), space) for name, space in self._columns.items()]
        return np.concatenate(parts, axis=1, dtype=np.float32)


def _vector(values: np.ndarray, space: Space) -> np.ndarray:
    """Convert a column (N, ...) to numbers (N, F)."""
    match space:
        case Discrete(n=n):
            return np.eye(n, dtype=np.float32)[values]
        case MultiDiscrete(nvec=nvec):
            return np.concatenate([np.eye(n, dtype=np.float32)[values[:, i]] for i, n in enumerate(nvec)], axis=1)
        case Box(shape=(_, _, 3), dtype="uint8"):
            cells = values.reshape(len(values), -1, 3) // np.array(_GRID_SCALES, np.uint8)
            parts = [np.eye(size, dtype=np.float32)[cells[..., i]] for i, size in enumerate(_GRID_SIZES)]
            return np.concatenate(parts, axis=2).reshape(len(values), -1)
    return values.reshape(len(values), -1).astype(np.float32)


def action_space(space: Space) -> gymnasium.Space[Any]:
    """Describe an action space for gymnasium; continuous actions are in [-1, 1]."""
    match space:
        case Discrete(n=n):
            return gymnasium.spaces.Discrete(n)
        case MultiDiscrete(nvec=nvec):
            return gymnasium.spaces.MultiDiscrete(nvec)
        case MultiBinary(n=n):
            return gymnasium.spaces.MultiBinary(n)
        case Box(shape=shape):
            return gymnasium.spaces.Box(-1.0, 1.0, shape, np.float32)
    raise ValueError(f"{space} cannot be a space of actions")


class ActorVecEnv(VecEnv):
    """Our actors as Stable-Baselines3 steps environments: an actor whose episode ends begins the next one at once."""

    def __init__(self, env: Env) -> None:
        spaces = env.spec.spaces
        self.env, self.flatten, self._dtype = env, Flatten(spaces.observation), spaces.action.dtype
        super().__init__(env.num_envs, self.flatten.space, action_space(spaces.action))

    def reset(self) -> np.ndarray:
        return self.flatten(self.env.reset())

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = np.asarray(actions).astype(self._dtype)

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        result = self.env.step(self._actions)
        seen, done = self.flatten(result.observation), result.terminated | result.truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        if done.any():
            for actor in np.flatnonzero(done):
                cut = bool(result.truncated[actor] and not result.terminated[actor])
                infos[actor] = {"terminal_observation": seen[actor], "TimeLimit.truncated": cut}
            seen = self.flatten(self.env.reset(done))
        return seen, result.reward, done, infos

    def close(self) -> None:
        self.env.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [None if attr_name == "render_mode" else getattr(self, attr_name)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs

    def seed(self, seed: int | None = None) -> Sequence[None]:
        return [None] * self.num_envs  # the actors were made with a seed


def settings_of(agent: str, zoo: str) -> dict[str, Any]:
    """Look up the settings of an agent: the zoo's row, or the default one where it has none; `row` names it."""
    rows = tomllib.loads(SETTINGS.read_text(encoding="utf-8"))[agent]
    row = zoo if zoo in rows else "default"
    return {**rows[row], "row": row}


def schedule(value: Any) -> Any:
    """Convert "lin_X" to a function that falls from X to 0.

    >>> schedule("lin_0.5")(0.5), schedule(0.1)
    (0.25, 0.1)
    """
    if not (isinstance(value, str) and value.startswith("lin_")):
        return value
    initial = float(value.removeprefix("lin_"))
    return lambda remaining: initial * remaining


class CpuClock:
    """CPU seconds of this process, all threads and imports included, without those spent while it is paused."""

    def __init__(self) -> None:
        self._paused = 0.0

    @property
    def seconds(self) -> float:
        return time.process_time() - self._paused

    def pause(self, call: Callable[[], Any]) -> Any:
        """Return what `call` does, without counting its seconds."""
        began = time.process_time()
        try:
            return call()
        finally:
            self._paused += time.process_time() - began


class _Budget(BaseCallback):
    """Ends training after so many CPU seconds, lets schedules follow them, and evaluates on the way."""

    def __init__(self, clock: CpuClock, seconds: float, evaluate: Callable[[], None], parent: int) -> None:
        super().__init__()
        self._clock, self._limit, self._evaluate, self._parent, self._points = clock, seconds, evaluate, parent, 1

    def _on_training_start(self) -> None:
        def update(num_timesteps: int, total_timesteps: int) -> None:
            self.model._current_progress_remaining = max(0.0, 1.0 - self._clock.seconds / self._limit)

        self.model._update_current_progress_remaining = update

    def _on_step(self) -> bool:
        if os.getppid() != self._parent:
            sys.exit("the process that started this run is gone")
        if self._clock.seconds >= self._limit:
            return False
        if self._clock.seconds >= self._limit * self._points / _POINTS:
            self._points += 1
            self._clock.pause(self._evaluate)
        return True


def stacked(env: VecEnv, settings: Mapping[str, Any], *, training: bool) -> VecEnv:
    """Add the wrappers that rl-zoo adds: frames for pictures, and normalisation."""
    if len(env.observation_space.shape or ()) == 3:
        return VecTransposeImage(VecFrameStack(env, _FRAMES))
    if settings.get("normalize"):
        return VecNormalize(env, training=training, norm_reward=training, gamma=settings.get("gamma", 0.99))
    return env


def make_model(task: Task, agent: str, env: VecEnv, settings: Mapping[str, Any], *, seed: int) -> BaseAlgorithm:
    """Construct an agent with the zoo's settings."""
    given = {key: schedule(value) for key, value in settings.items() if key not in ("n_envs", "normalize", "row")}
    if "policy_kwargs" in given:
        networks = dict(given["policy_kwargs"])
        if "activation_fn" in networks:
            networks["activation_fn"] = getattr(torch.nn, networks["activation_fn"])
        given["policy_kwargs"] = networks
    kind = "Cnn" if len(env.observation_space.shape or ()) == 3 else "Mlp"
    policy = f"{kind}LstmPolicy" if agent == "recurrent-ppo" else f"{kind}Policy"
    return _ALGORITHMS[agent](policy, env, seed=seed, device="cpu", verbose=0, **given)


def evaluate(task: Task, model: BaseAlgorithm, env: VecEnv, episodes: int, *, greedy: bool) -> np.ndarray:
    """Return the returns of whole episodes of the test side. Actors are many, so that networks run in batches."""
    actors = task.make(num_envs=min(episodes, 20), seed=_TEST_SEED, split="test")
    flatten, state = Flatten(actors.spec.spaces.observation), None
    frames: np.ndarray | None = None

    def act(observation: Mapping[str, np.ndarray], begins: np.ndarray) -> np.ndarray:
        nonlocal state, frames
        seen = flatten(observation)
        if flatten.is_image:
            channels = seen.shape[-1]
            frames = np.zeros((*seen.shape[:-1], _FRAMES * channels), seen.dtype) if frames is None else frames
            frames[begins] = 0
            frames = np.concatenate((frames[..., channels:], seen), axis=-1)
            seen = frames.transpose(0, 3, 1, 2)
        elif isinstance(env, VecNormalize):
            seen = env.normalize_obs(seen)
        actions, state = model.predict(seen, state=state, episode_start=begins, deterministic=greedy)
        return np.asarray(actions).astype(actors.spec.spaces.action.dtype)

    try:
        return episode_returns(actors, act, episodes)
    finally:
        actors.close()


def play(job: Mapping[str, Any]) -> dict[str, Any]:
    """Train an agent for the job's CPU seconds; return its scores, its learning curve and its settings."""
    torch.set_num_threads(1)
    task, clock, seconds = load_tasks()[job["task"]], CpuClock(), float(job["seconds"])
    settings = settings_of(job["agent"], task.zoo)
    actors = task.make(num_envs=settings["n_envs"], seed=job["seed"], split="train")
    env = stacked(ActorVecEnv(actors), settings, training=True)
    model = make_model(task, job["agent"], env, settings, seed=job["seed"])
    curve: list[dict[str, float]] = []

    def add_point(episodes: int) -> None:
        at = round(clock.seconds, 2)
        both = {
            name: round(float(evaluate(task, model, env, episodes, greedy=greedy).mean()), 4)
            for name, greedy in (("sampled", False), ("greedy", True))
        }
        curve.append({"cpu_seconds": at, "env_steps": model.num_timesteps, **both})

    budget = _Budget(clock, seconds, lambda: add_point(max(job["episodes"] // 4, 1)), os.getppid())
    model.learn(_STEPS, callback=budget)
    trained = clock.seconds
    add_point(job["episodes"])
    env.close()
    return {
        "settings": settings,
        "env_steps": model.num_timesteps,
        "updates": int(model._n_updates),
        "train_cpu_seconds": round(trained, 2),
        "curve": curve,
        "sampled": curve[-1]["sampled"],
        "greedy": curve[-1]["greedy"],
    }


def main() -> None:
    print(json.dumps(play(json.load(sys.stdin))))


if __name__ == "__main__":
    main()
