"""Environments as stages ask for them: where they are stepped, and how many."""

from __future__ import annotations

import contextlib
import os
import time

import numpy as np
from pydantic import BaseModel

from pipelines.config.settings import Settings
from pipelines.envs.env import Env
from pipelines.envs.gymnasium_env import GymnasiumEnv
from pipelines.envs.make import Split, make, settings_model
from pipelines.envs.workers import WorkerEnv
from pipelines.errors import StageFailed, UsageError
from pipelines.rollout.policy_client import RandomPolicy

FEW, MANY = 16, 64  # actors
_EPISODES = 4  # of each actor, at least, with more than FEW
_TRIAL_SECONDS, _TRIAL_STEPS = 0.25, 300
_WORTH_SECONDS = 2e-3  # a step of all actors that is shorter is not shared out
_SHARE_SECONDS = 1e-3  # least part of it for a worker


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


def with_actors(settings: Settings) -> Settings:
    """`settings` with a number of actors in place of "auto".

    Where all actors step as one batch, more of them make a policy faster: as many as leave each a few episodes.
    """
    if settings.collect.actors != "auto":
        return settings
    env = make_env(settings, actors=1, seed=0)
    env.close()
    actors = FEW
    if not isinstance(env, GymnasiumEnv) and env.spec.horizon is not None:
        while actors < MANY and settings.collect.steps >= _EPISODES * env.spec.horizon * 2 * actors:
            actors *= 2
    return settings.model_copy(update={"collect": settings.collect.model_copy(update={"actors": actors})})


def workers(settings: Settings, *, actors: int) -> int:
    """How many processes shall step `actors` environments: as set, else by how long one of them takes."""
    if settings.collect.workers != "auto":
        return settings.collect.workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2 or actors < 2:
        return 0
    env = make_env(settings, actors=1, seed=0)
    with contextlib.closing(env):
        return share_out(step_seconds(env) * actors, actors=actors, cores=cores)


def share_out(seconds: float, *, actors: int, cores: int) -> int:
    """Processes for environments that take `seconds` for a step of all actors when they are stepped one by one."""
    return min(cores, actors, int(seconds / _SHARE_SECONDS)) if seconds >= _WORTH_SECONDS else 0


def step_seconds(env: Env) -> float:
    """What a step of one actor takes, resets included; 0 where all actors step as one batch, or where it breaks."""
    if not isinstance(env, GymnasiumEnv):
        return 0.0
    policy, zero = RandomPolicy(env.spec.spaces.action, seed=0), np.zeros(env.num_envs)
    try:
        observation = env.reset()
        began, steps = time.perf_counter(), 0
        while steps < _TRIAL_STEPS and time.perf_counter() - began < _TRIAL_SECONDS:
            result = env.step(policy.act(observation, zero, zero, zero))
            over = result.terminated | result.truncated
            observation = env.reset(over) if over.any() else result.observation
            steps += 1
        return (time.perf_counter() - began) / steps
    except StageFailed:  # will be told when it is used
        return 0.0
