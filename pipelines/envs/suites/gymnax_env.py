"""`gymnax:NAME` and `jax:MODULE:FACTORY`: environments in JAX, all actors in one compiled step.

`jax:MODULE:FACTORY` calls FACTORY of MODULE with `env.options`. It returns an environment, or one and its parameters,
of gymnax' interface (Craftax, Kinetix and POBAX have it), or of Brax', MuJoCo Playground's, NAVIX' or Jumanji's (see
`jax_interfaces`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import gymnax
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.suites.jax_env import JaxEnv
from pipelines.envs.suites.jax_interfaces import LIMITS, Gymnax, interface_of
from pipelines.errors import InputMissing, UsageError
from pipelines.nearest import did_you_mean
from pipelines.registry import Registry

PREFIX, OWN_PREFIX = "gymnax:", "jax:"
FACTORIES = Registry("environment", {})


class GymnaxSettings(SettingsModel):
    """Parameters of `gymnax:NAME` and `jax:MODULE:FACTORY`."""

    max_episode_steps: int | None = Field(None, ge=1)
    """Steps after which an episode is truncated; unset: the environment's own limit."""
    params: dict[str, float | int | bool] = Field(default_factory=dict)
    """Other values for fields of the environment's parameters, such as `gravity`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor or factory, such as `maze_size`."""


def settings_model(name: str) -> type[SettingsModel]:
    return GymnaxSettings


def require_trust(name: str, params: Mapping[str, Any]) -> None:
    """InputMissing if making `jax:MODULE:FACTORY` would import a module whose name the user did not type."""
    if name.startswith(OWN_PREFIX):
        FACTORIES.require_trust(name.removeprefix(OWN_PREFIX))


def make(name: str, settings: GymnaxSettings, *, num_envs: int, seed: int, split: str) -> JaxEnv:
    if name.startswith(OWN_PREFIX):
        return _own(name, settings, num_envs=num_envs, seed=seed, split=split)
    env, params = _registered(name, settings)
    changes = dict(settings.params)
    if settings.max_episode_steps is not None:
        changes["max_steps_in_episode"] = settings.max_episode_steps
    interface = Gymnax(env, _changed(params, changes, name), name=name)
    about = f"{env.name} of gymnax, compiled for all actors at once"
    return JaxEnv(name, interface, about=about, num_envs=num_envs, seed=seed, split=split)


def _own(name: str, settings: GymnaxSettings, *, num_envs: int, seed: int, split: str) -> JaxEnv:
    target = name.removeprefix(OWN_PREFIX)
    if ":" not in target:
        raise UsageError(f"environment '{name}' names no factory", hint="it is written jax:MODULE:FACTORY")
    factory = FACTORIES.get(target)
    try:
        made = factory(**settings.options)
    except TypeError as error:
        raise UsageError(f"environment '{name}' does not take env.options {settings.options}: {error}") from error
    interface, limit, changes = interface_of(made, name=name), settings.max_episode_steps, dict(settings.params)
    if isinstance(interface, Gymnax):
        fields = [field for field in LIMITS if hasattr(interface.params, field)]
        if limit is not None and fields:
            changes[fields[0]], limit = limit, None
        if changes:
            interface = Gymnax(interface.env, _changed(interface.params, changes, name), name=name)
    elif changes:
        raise UsageError(f"environment '{name}' has no parameters to change", hint="leave env.params out")
    about = f"{interface.title}, compiled for all actors at once"
    return JaxEnv(name, interface, about=about, num_envs=num_envs, seed=seed, split=split, limit=limit)


def _registered(name: str, settings: GymnaxSettings) -> tuple[Any, Any]:
    wanted, known = name.removeprefix(PREFIX), gymnax.registered_envs
    if wanted not in known:
        hint = did_you_mean(wanted, known, prefix=PREFIX, otherwise=f"known: {', '.join(known)}")
        raise UsageError(f"gymnax has no environment '{wanted}'", hint=hint)
    try:
        return gymnax.make(wanted, **settings.options)
    except OSError as error:  # of the one that downloads data
        raise InputMissing(
            f"environment '{name}' cannot be made: {error}", hint="gymnax downloads its data then"
        ) from error
    except TypeError as error:
        raise UsageError(f"environment '{name}' does not take env.options {settings.options}: {error}") from error


def _changed(params: Any, changes: Mapping[str, Any], name: str) -> Any:
    """Parameters with other values of some fields. UsageError for one that they lack."""
    fields = [field.name for field in dataclasses.fields(params)]
    for key in changes:
        if key not in fields:
            raise UsageError(f"environment '{name}' has no parameter '{key}'", hint=f"its own: {', '.join(fields)}")
    return params.replace(**changes)
