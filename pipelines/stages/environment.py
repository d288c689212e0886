"""Environments as stages ask for them."""

from __future__ import annotations

from pydantic import BaseModel

from pipelines.config.settings import Settings
from pipelines.envs.env import Env
from pipelines.envs.make import Split, make, settings_model
from pipelines.errors import UsageError


def env_model(name: str) -> type[BaseModel]:
    """The model of the parameters of environment `name`. UsageError if there is no such environment."""
    return settings_model(name)


def make_env(settings: Settings, *, actors: int, seed: int, split: Split = "train") -> Env:
    """The run's environment as one batch of `actors`. UsageError if the run names none."""
    if not settings.env.name:
        raise UsageError("no environment is named", hint="give --env NAME; amago envs lists them")
    return make(settings.env.name, num_envs=actors, seed=seed, split=split, params=settings.env.params)
