"""Environments as stages ask for them: where they are stepped, and how many."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel

from pipelines.config.settings import Settings
from pipelines.envs.env import Env
from pipelines.envs.gymnasium_env import GymnasiumEnv
from pipelines.envs.make import Split, make, settings_model
from pipelines.envs.process import available_cores
from pipelines.envs.workers import WorkerEnv
from pipelines.errors import StageFailed, UsageError
from pipelines.rollout.policy_client import RandomPolicy

FEW, MANY = 16, 128  # actors
_EPISODES = 4  # of each actor, at least, with more than FEW
_TRIAL_SECONDS, _TRIAL_STEPS = 0.25, 300
_WORTH_SECONDS = 2e-3  # a step of all actors that is shorter is not shared out
_SHARE_SECONDS = 1e-3  # least part of it for a worker
_MESSAGE_SECONDS = 12e-3  # work that is worth a message to a worker, who waits 1 ms for the next


def env_model(name: str) -> type[BaseModel]:
    """The model of the parameters of environment `name`. UsageError if there is no such environment."""
    return settings_model(name)


def make_env(settings: Settings, *, actors: int, seed: int, split: Split = "train", workers: int = 0) -> Env:
    """The run's environment as one batch of `actors`, stepped in `workers` processes. UsageError if the run names
    none.
    """
    if not settings.env.name:
        raise UsageError("no environment is named", hint="give --env NAME; amago envs lists them")
    name, params = settings.env.name, settings.env.params
    if workers:
        return WorkerEnv(name, num_envs=actors, workers=workers, seed=seed, split=split, params=params)
    return make(name, num_envs=actors, seed=seed, split=split, params=params)


def step_seconds(env: Env) -> float:
    """What a step of one actor takes, resets included; 0 where all actors step as one batch, or where it breaks.

    Of medians: what else the machine does meanwhile makes a few steps long.
    """
    if not isinstance(env, GymnasiumEnv):
        return 0.0
    policy, zero = RandomPolicy(env.spec.spaces.action, seed=0), np.zeros(env.num_envs)
    steps: list[float] = []
    resets = [0.0]
    try:
        observation, until = env.reset(), time.perf_counter() + _TRIAL_SECONDS
        while len(steps) < _TRIAL_STEPS and time.perf_counter() < until:
            began = time.perf_counter()
            result = env.step(policy.act(observation, zero, zero, zero))
            steps.append(time.perf_counter() - began)
            observation, over = result.observation, result.terminated | result.truncated
            if over.any():
                began = time.perf_counter()
                observation = env.reset(over)
                resets.append(time.perf_counter() - began)
    except StageFailed:  # will be told when it is used
        return 0.0
    return float(np.median(steps) + np.median(resets[1:] or resets) * (len(resets) - 1) / len(steps))


def with_actors(
    settings: Settings,
    stored: Mapping[str, Any] | None = None,
    *,
    trial: Callable[[Env], float] = step_seconds,
) -> Settings:
    """`settings` with a number of actors in place of "auto": that of the run which has begun, if it is `stored`.

    More actors make a policy faster where all step as one batch, and messages to workers rarer where each steps
    quickly: as many as help, and leave each a few episodes.
    """
    if settings.collect.actors != "auto":
        return settings
    begun = (stored or {}).get("collect", {}).get("actors")
    actors = begun if isinstance(begun, int) else _enough_actors(settings, trial)
    return settings.model_copy(update={"collect": settings.collect.model_copy(update={"actors": actors})})


def _enough_actors(settings: Settings, trial: Callable[[Env], float]) -> int:
    env, cores, wanted = make_env(settings, actors=1, seed=0), available_cores(), settings.collect.workers
    with contextlib.closing(env):
        alone = isinstance(env, GymnasiumEnv) and wanted != 0
        seconds = trial(env) if alone else 0.0
    actors, horizon = FEW, env.spec.horizon
    while (
        actors < MANY
        and horizon is not None
        and settings.collect.steps >= _EPISODES * horizon * 2 * actors
        and (not isinstance(env, GymnasiumEnv) or more_help(seconds, actors=actors, workers=wanted, cores=cores))
    ):
        actors *= 2
    return actors


def more_help(seconds: float, *, actors: int, workers: int | Literal["auto"], cores: int) -> bool:
    """Whether environments that take `seconds` for a step of one actor are stepped in workers, a message to one of
    which is little work with so many actors.
    """
    count = share_out(seconds * actors, actors=actors, cores=cores) if workers == "auto" else min(workers, actors)
    messages = count if count >= max(cores, 2) else 2 * count  # a step of all (see `WorkerEnv`)
    return messages > 0 and 0 < seconds * actors < _MESSAGE_SECONDS * messages


def workers(settings: Settings, *, actors: int) -> int:
    """How many processes shall step `actors` environments: as set, else by how long one of them takes."""
    if settings.collect.workers != "auto":
        return settings.collect.workers
    cores = available_cores()
    if cores < 2 or actors < 2:
        return 0
    env = make_env(settings, actors=1, seed=0)
    with contextlib.closing(env):
        return share_out(step_seconds(env) * actors, actors=actors, cores=cores)


def share_out(seconds: float, *, actors: int, cores: int) -> int:
    """Processes for environments that take `seconds` for a step of all actors when they are stepped one by one."""
    return min(cores, actors, int(seconds / _SHARE_SECONDS)) if seconds >= _WORTH_SECONDS and cores > 1 else 0
