"""Interfaces of environments in JAX, for one actor, brought to one form (`Interface`).

gymnax (also Craftax, Kinetix and POBAX): `reset(key, params)` and `step_env(key, state, action, params)`. Brax and
MuJoCo Playground: `reset(key)` and `step(state, action)` of a State that has `obs`, `reward` and `done`. NAVIX: the
same of a Timestep that says how it ended. Jumanji: `reset(key)` and `step(state, action)`, which return a state and a
TimeStep. None of them resets within a step here: the library functions that do are not called.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipelines.envs.suites.jax_batch import Tree
from pipelines.errors import UsageError
from pipelines.lake.spaces import Box, Discrete, MultiDiscrete, Space

LIMITS = ("max_steps_in_episode", "max_timesteps")  # fields of parameters that hold the time limit
_BRAX_STEPS = 1000  # Brax and Playground leave the limit to training; this is the usual one


class Interface(ABC):
    """One actor's environment. `limit`: steps of an episode; `tells_truncation`: `step` says whether an end is the time
    limit's; else an end at the limit is. `choices`: values of an observation that is a single whole number.
    """

    title: str
    action: Space
    limit: int | None = None
    tells_truncation: bool = False
    choices: int | None = None

    @abstractmethod
    def reset(self, key: jax.Array) -> tuple[Tree, Tree]:
        """Begin an episode: (observation, state)."""

    @abstractmethod
    def step(self, key: jax.Array, state: Tree, action: jax.Array) -> tuple[Tree, Tree, Any, Any, Any]:
        """Do one step: (observation, state, reward, terminated, truncated)."""


class Gymnax(Interface):
    """An environment with gymnax' `reset_env` and `step_env`, and its parameters."""

    def __init__(self, env: Any, params: Any, *, name: str) -> None:
        self.env, self.params, self.title = env, params, str(getattr(env, "name", type(env).__name__))
        self.action = _acted(env.action_space(params), name)
        self.limit = next((int(getattr(params, field)) for field in LIMITS if hasattr(params, field)), None)
        self.tells_truncation = hasattr(env, "is_truncated")
        seen = env.observation_space(params)
        self.choices = int(seen.n) if _kind(seen) == "Discrete" else None

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
        self.action = _specified(env.action_spec, name)
        limit = getattr(env, "time_limit", None)
        self.limit = int(limit) if isinstance(limit, int) else None

    def reset(self, key: jax.Array) -> tuple[Tree, Tree]:
        state, timestep = self.env.reset(key)
        return timestep.observation, state

    def step(self, key: jax.Array, state: Tree, action: jax.Array) -> tuple[Tree, Tree, Any, Any, Any]:
        state, timestep = self.env.step(state, action)
        ended = jnp.max(timestep.discount) == 0
        return timestep.observation, state, jnp.sum(timestep.reward), timestep.last() & ended, timestep.last() & ~ended


def interface_of(made: Any, *, name: str) -> Interface:
    """The interface of what a factory returned: an environment, or one and its parameters. UsageError for others."""
    env, params = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if hasattr(type(env), "step_env"):
        return Gymnax(env, env.default_params if params is None else params, name=name)
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


def leaves(observation: Tree, name: str) -> list[tuple[str, Any]]:
    """Columns and their arrays, named as the system names the parts of a Dict or Tuple."""
    if isinstance(observation, Mapping):
        parts = list(observation.items())
    elif hasattr(observation, "_asdict"):  # a named tuple
        parts = list(observation._asdict().items())
    elif isinstance(observation, tuple | list):
        parts = list(enumerate(observation))
    elif hasattr(observation, "__dataclass_fields__"):
        parts = [(field, getattr(observation, field)) for field in observation.__dataclass_fields__]
    else:
        return [(name, observation)]
    return [leaf for key, value in parts for leaf in leaves(value, f"{name}.{key}")]


def _kind(space: Any) -> str:
    """Libraries bring classes of their own under gymnax' names."""
    return type(space).__name__


def _acted(space: Any, name: str) -> Space:
    if _kind(space) == "Discrete":
        return Discrete(n=int(space.n))
    if _kind(space) == "Box":
        return _box(tuple(space.shape), space.low, space.high)
    raise UsageError(f"environment '{name}': actions of a {_kind(space)} space are not supported")


def _specified(spec: Any, name: str) -> Space:
    if _kind(spec) == "DiscreteArray":
        return Discrete(n=int(spec.num_values))
    if _kind(spec) == "MultiDiscreteArray":
        return MultiDiscrete(nvec=tuple(int(n) for n in np.ravel(spec.num_values)))
    if _kind(spec) == "BoundedArray":
        low, high = (
            np.broadcast_to(np.asarray(bound, np.float64), spec.shape) for bound in (spec.minimum, spec.maximum)
        )
        return Box(shape=tuple(spec.shape), low=tuple(low.ravel().tolist()), high=tuple(high.ravel().tolist()))
    raise UsageError(f"environment '{name}': actions of a {_kind(spec)} are not supported")


def _box(shape: tuple[int, ...], low: Any, high: Any) -> Box:
    bounds = [np.broadcast_to(np.asarray(bound, np.float64), shape).ravel().tolist() for bound in (low, high)]
    return Box(shape=shape, low=tuple(bounds[0]), high=tuple(bounds[1]))
