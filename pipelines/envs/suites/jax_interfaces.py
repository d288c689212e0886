"""`gymnax:NAME` and `jax:MODULE:FACTORY`: interfaces of environments in JAX, for one actor, brought to one form.

gymnax (also Craftax, Kinetix and POBAX): `reset(key, params)` and `step_env(key, state, action, params)`. Brax and
MuJoCo Playground: `reset(key)` and `step(state, action)` of a State that has `obs`, `reward` and `done`. NAVIX: the
same of a Timestep that says how it ended. Jumanji: `reset(key)` and `step(state, action)`, which return a state and a
TimeStep. Library functions that reset within a step are not called.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.suites.jax_env import Interface, JaxEnv, Tree
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.spaces import Box, Discrete, MultiDiscrete, Space
from pipelines.nearest import did_you_mean
from pipelines.registry import Registry

LIMITS = ("max_steps_in_episode", "max_timesteps")  # fields of parameters that hold the time limit
_BRAX_STEPS = 1000  # Brax and Playground leave the limit to training; this is the usual one


class _Gymnax(Interface):
    """An environment with gymnax' `reset_env` and `step_env`, and its parameters."""

    def __init__(self, env: Any, params: Any, *, name: str) -> None:
        self.env, self.params, self.title = env, params, str(getattr(env, "name", type(env).__name__))
        self.action = _convert_action(env.action_space(params), name)
        self.limit = next((int(getattr(params, field)) for field in LIMITS if hasattr(params, field)), None)
        # Environments written for older releases of gymnax inherit an `is_truncated` that reads fields which their own
        # state does not have.
        with contextlib.suppress(AttributeError, TypeError, NotImplementedError):
            if hasattr(env, "is_truncated"):
                jax.eval_shape(env.is_truncated, jax.eval_shape(env.reset, jax.random.PRNGKey(0), params)[1], params)
                self.tells_truncation = True
        seen = env.observation_space(params)
        self.choices = int(seen.n) if type(seen).__name__ == "Discrete" else None

    def reset(self, key: jax.Array) -> tuple[Tree, Tree]:
        return self.env.reset(key, self.params)

    def step(self, key: jax.Array, state: Tree, action: jax.Array) -> tuple[Tree, Tree, Any, Any, Any]:
        observation, state, reward, over, _ = self.env.step_env(key, state, action, self.params)
        late = self.env.is_truncated(state, self.params) if self.tells_truncation else False
        return observation, state, reward, over, late


class Brax(Interface):
    """An environment of Brax or MuJoCo Playground, without their wrappers of episodes."""

    limit = _BRAX_STEPS

    def __init__(self, env: Any) -> None:
        self.env, self.title = env, type(env).__name__
        ones = (1.0,) * int(env.action_size)
        self.action = Box(shape=(len(ones),), low=tuple(-one for one in ones), high=ones)

    def reset(self, key: jax.Array) -> tuple[Tree, Tree]:
        state = self.env.reset(key)
        return state.obs, state

    def step(self, key: jax.Array, state: Tree, action: jax.Array) -> tuple[Tree, Tree, Any, Any, Any]:
        state = self.env.step(state, action)
        return state.obs, state, state.reward, state.done > 0, False


class Navix(Interface):
    """An environment of NAVIX, whose public `step` would begin the next episode in the step after an end."""

    tells_truncation = True

    def __init__(self, env: Any) -> None:
        self.env, self.title, self.limit = env, type(env).__name__, int(env.max_steps)
        self.action = Discrete(n=int(env.action_space.maximum) + 1)

    def reset(self, key: jax.Array) -> tuple[Tree, Tree]:
        timestep = self.env.reset(key)
        return timestep.observation, timestep

    def step(self, key: jax.Array, state: Tree, action: jax.Array) -> tuple[Tree, Tree, Any, Any, Any]:
        after = self.env.step(state, action)
        return after.observation, after, after.reward, after.is_termination(), after.is_truncation()


class Jumanji(Interface):
    """An environment of Jumanji. Its last time step has discount 0 if it terminated, else it was truncated."""

    tells_truncation = True

    def __init__(self, env: Any, *, name: str) -> None:
        self.env, self.title = env, type(env).__name__
        self.action = _convert_action(env.action_spec, name)
        limit = getattr(env, "time_limit", None)
        self.limit = int(limit) if isinstance(limit, int) else None

    def reset(self, key: jax.Array) -> tuple[Tree, Tree]:
        state, timestep = self.env.reset(key)
        return timestep.observation, state

    def step(self, key: jax.Array, state: Tree, action: jax.Array) -> tuple[Tree, Tree, Any, Any, Any]:
        state, timestep = self.env.step(state, action)
        ended = jnp.max(timestep.discount) == 0
        return timestep.observation, state, jnp.sum(timestep.reward), timestep.last() & ended, timestep.last() & ~ended


def _find_interface(made: Any, *, name: str) -> Interface:
    """Find the interface of a factory's result: an environment, or one and its parameters. UsageError for others."""
    env, params = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if hasattr(type(env), "step_env"):
        return _Gymnax(env, env.default_params if params is None else params, name=name)
    if not (callable(getattr(env, "reset", None)) and callable(getattr(env, "step", None))):
        raise UsageError(f"environment '{name}' gives {type(env).__name__}, which has no reset and step of JAX")
    if hasattr(env, "action_spec"):
        return Jumanji(env, name=name)
    if hasattr(env, "max_steps") and hasattr(env, "action_space"):
        return Navix(env)
    if hasattr(env, "action_size"):
        return Brax(env)
    raise UsageError(
        f"environment '{name}' gives {type(env).__name__}, whose interface is not known",
        hint="it needs gymnax' reset and step_env, or the interface of Brax, NAVIX or Jumanji",
    )


def _convert_action(space: Any, name: str) -> Space:
    """Convert a space of gymnax or a specification of Jumanji by the name of its class: libraries bring classes of
    their own under gymnax' names. UsageError for others.
    """
    kind = type(space).__name__
    if kind == "Discrete":
        return Discrete(n=int(space.n))
    if kind == "DiscreteArray":
        return Discrete(n=int(space.num_values))
    if kind in ("MultiDiscrete", "MultiDiscreteArray"):
        fields = ("num_values", "nvec", "number_of_dims_per_distribution")  # the last: Kinetix has one of its own
        counts: Any = next(getattr(space, field) for field in fields if hasattr(space, field))
        return MultiDiscrete(nvec=tuple(int(n) for n in np.ravel(counts)))
    if kind in ("Box", "BoundedArray"):
        ends = (space.low, space.high) if kind == "Box" else (space.minimum, space.maximum)
        low, high = (np.broadcast_to(np.asarray(end, np.float64), space.shape).ravel().tolist() for end in ends)
        return Box(shape=tuple(space.shape), low=tuple(low), high=tuple(high))
    what = f"a {kind}" if kind.endswith("Array") else f"a {kind} space"
    raise UsageError(f"environment '{name}': actions of {what} are not supported")


PREFIX, _OWN_PREFIX = "gymnax:", "jax:"
_FACTORIES = Registry("environment", {})


class _GymnaxSettings(SettingsModel):
    """Parameters of `gymnax:NAME` and `jax:MODULE:FACTORY`."""

    max_episode_steps: int | None = Field(None, ge=1)
    """Steps after which an episode is truncated; unset: the environment's own limit."""
    params: dict[str, float | int | bool] = Field(default_factory=dict)
    """Other values for fields of the environment's parameters, such as `gravity`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor or factory, such as `maze_size`."""


class Gymnax(JaxEnv):
    """N actors in one of gymnax' own environments."""

    Settings = _GymnaxSettings

    def __init__(self, name: str, settings: _GymnaxSettings, *, num_envs: int, seed: int, split: str) -> None:
        import gymnax

        wanted, known = name.removeprefix(PREFIX), gymnax.registered_envs
        if wanted not in known:
            hint = did_you_mean(wanted, known, prefix=PREFIX, otherwise=f"known: {', '.join(known)}")
            raise UsageError(f"gymnax has no environment '{wanted}'", hint=hint)
        try:
            env, params = gymnax.make(wanted, **settings.options)
        except OSError as error:  # of the one that downloads data
            raise InputMissing(
                f"environment '{name}' cannot be made: {error}", hint="gymnax downloads its data then"
            ) from error
        except TypeError as error:
            raise UsageError(f"environment '{name}' does not take env.options {settings.options}: {error}") from error
        changes = dict(settings.params)
        if settings.max_episode_steps is not None:
            changes["max_steps_in_episode"] = settings.max_episode_steps
        interface = _Gymnax(env, _change(params, changes, name), name=name)
        about = f"{env.name} of gymnax, compiled for all actors at once"
        super().__init__(name, interface, about=about, num_envs=num_envs, seed=seed, split=split)


class JaxFactory(JaxEnv):
    """N actors in an environment that a factory makes."""

    Settings = _GymnaxSettings

    @staticmethod
    def require_trust(name: str, params: Mapping[str, Any]) -> None:
        """Raise InputMissing if making the environment would import a module whose name the user did not type."""
        _FACTORIES.require_trust(name.removeprefix(_OWN_PREFIX))

    def __init__(self, name: str, settings: _GymnaxSettings, *, num_envs: int, seed: int, split: str) -> None:
        target = name.removeprefix(_OWN_PREFIX)
        if ":" not in target:
            raise UsageError(f"environment '{name}' names no factory", hint="it is written jax:MODULE:FACTORY")
        factory = _FACTORIES.get(target)
        try:
            made = factory(**settings.options)
        except TypeError as error:
            raise UsageError(f"environment '{name}' does not take env.options {settings.options}: {error}") from error
        interface, limit, changes = _find_interface(made, name=name), settings.max_episode_steps, dict(settings.params)
        if isinstance(interface, _Gymnax):
            fields = [field for field in LIMITS if hasattr(interface.params, field)]
            if limit is not None and fields:
                changes[fields[0]], limit = limit, None
            if changes:
                interface = _Gymnax(interface.env, _change(interface.params, changes, name), name=name)
        elif changes:
            raise UsageError(f"environment '{name}' has no parameters to change", hint="leave env.params out")
        about = f"{interface.title}, compiled for all actors at once"
        super().__init__(name, interface, about=about, num_envs=num_envs, seed=seed, split=split, limit=limit)


def _change(params: Any, changes: Mapping[str, Any], name: str) -> Any:
    """Replace some fields of parameters. UsageError for one that they lack."""
    fields = [field.name for field in dataclasses.fields(params)]
    for key in changes:
        if key not in fields:
            raise UsageError(f"environment '{name}' has no parameter '{key}'", hint=f"its own: {', '.join(fields)}")
    return params.replace(**changes)
