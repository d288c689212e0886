"""`gymnax:NAME`: environments of gymnax (JAX), all actors in one compiled step.

gymnax's own `step` begins the next episode within the step that ends one, and returns that one's first observation.
Here `step_env` is called, which does not, so that an end shows its true final observation, and actors are reset with
keys of their own. A time limit truncates, anything else terminates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments import spaces as theirs
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.draws import Draws
from pipelines.envs.env import Env, EnvSpec, StepResult
from pipelines.envs.suites.jax_batch import Tree, as_numpy, folded, keys, merged
from pipelines.errors import InputMissing, StageFailed, UsageError
from pipelines.lake.spaces import OBSERVATION, Box, Discrete, Space, Spaces
from pipelines.nearest import did_you_mean

PREFIX = "gymnax:"
SEED = 0  # purpose of a random draw
RESET_KEY = 0  # steps are counted from 1


class GymnaxSettings(SettingsModel):
    """Parameters of `gymnax:NAME`."""

    max_episode_steps: int | None = Field(None, ge=1)
    """Steps after which an episode is truncated; unset: the environment's own limit."""
    params: dict[str, float | int | bool] = Field(default_factory=dict)
    """Other values for fields of the environment's parameters, such as `gravity`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment's constructor, such as `maze_size`."""


class Gymnax(Env):
    """N actors in the environment's own state, one array each."""

    def __init__(self, name: str, settings: GymnaxSettings, *, num_envs: int, seed: int, split: str) -> None:
        super().__init__(num_envs=num_envs)
        self._env, self._params = _made(name, settings)
        self._draws, self._test = Draws(seed, split, name), split == "test"
        env, params = self._env, self._params
        self._scale = _scale(env.action_space(params))
        first = jax.eval_shape(lambda key: env.reset_env(key, params), jax.random.PRNGKey(0))
        action = jax.ShapeDtypeStruct(*_action_form(env.action_space(params)))
        later = jax.eval_shape(lambda *given: env.step_env(*given, params), jax.random.PRNGKey(0), first[1], action)
        self._state_form = later[1]
        limit = getattr(params, "max_steps_in_episode", None)
        self.spec = EnvSpec(
            name=name,
            spaces=Spaces(
                observation=_observed(env.observation_space(params), first[0]),
                action=_acted(env.action_space(params)),
            ),
            horizon=None if limit is None else int(limit),
            about=f"{env.name} of gymnax, compiled for all actors at once",
            split="separate keys of random numbers",
        )
        self._reset_all = jax.jit(jax.vmap(self._reset_one))
        self._step_all = jax.jit(jax.vmap(self._step_one))
        self._keys = np.zeros((num_envs, 2), dtype=np.uint32)
        self._time = np.zeros(num_envs, dtype=np.uint32)
        self._state: Tree = None
        self._columns: dict[str, np.ndarray] = {}
        self._nobody = np.zeros(num_envs, dtype=bool)
        self._nobody.setflags(write=False)

    def _reset_one(self, key: jax.Array) -> tuple[Tree, Tree]:
        observation, state = self._env.reset_env(jax.random.fold_in(key, RESET_KEY), self._params)
        return observation, self._formed(state)

    def _step_one(self, key: jax.Array, state: Tree, action: jax.Array) -> tuple[Tree, Tree, Any, Any, Any]:
        observation, state, reward, terminated, _ = self._env.step_env(key, state, action, self._params)
        return observation, self._formed(state), reward, terminated, self._env.is_truncated(state, self._params)

    def _formed(self, state: Tree) -> Tree:
        """With the shapes and types that a state has after a step, so that a step is compiled once."""

        def cast(leaf: jax.Array, form: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.broadcast_to(jax.lax.convert_element_type(leaf, form.dtype), form.shape)

        return jax.tree.map(cast, state, self._state_form)

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        indices = np.arange(self.num_envs) if mask is None else np.flatnonzero(mask)
        episodes = self.episodes.advance(indices)
        seeds = np.zeros(self.num_envs, dtype=np.uint32)
        seeds[indices] = 2 * self._draws.integers(episodes, SEED, 2**30) + self._test
        chosen = np.zeros(self.num_envs, dtype=bool)
        chosen[indices] = True
        self._keys = merged(chosen, keys(seeds), jnp.asarray(self._keys))
        self._time[indices] = 0
        observation, state = self._reset_all(self._keys)
        self._state = state if self._state is None else merged(chosen, state, self._state)
        columns = self._read(observation)
        if self._columns:
            for name, column in columns.items():
                column[~chosen] = self._columns[name][~chosen]
        self._columns = columns
        return columns

    def step(self, actions: np.ndarray) -> StepResult:
        self._time += 1
        step_keys = folded(self._keys, self._time)
        outcome = self._step_all(step_keys, self._state, self._decode(actions))
        observation, self._state, reward, terminated, truncated = outcome
        self._columns = self._read(observation)
        over = np.array(terminated, dtype=bool).reshape(self.num_envs)
        late = np.array(truncated, dtype=bool).reshape(self.num_envs) & ~over
        return StepResult(
            observation=self._columns,
            reward=as_numpy(reward, "float32").reshape(self.num_envs),
            terminated=over,
            truncated=late,
            reset=self._nobody,
            attempt_end=over | late,
            success=self._nobody,
        )

    def tasks(self, indices: np.ndarray) -> list[str]:
        """Each environment is one task."""
        return [self.spec.name] * len(indices)

    def play_only(self, tasks: Sequence[str]) -> None:
        if set(tasks) != {self.spec.name}:
            super().play_only(tasks)

    def _decode(self, actions: np.ndarray) -> np.ndarray:
        """The system's actions -> the environment's."""
        if self._scale is None:
            return np.asarray(actions, dtype=np.int32)
        low, half = self._scale
        return (low + (np.asarray(actions, dtype=np.float32) + 1) * half).astype(np.float32)

    def _read(self, observation: Tree) -> dict[str, np.ndarray]:
        columns = {}
        for name, value in _leaves(observation):
            space = self.spec.spaces.observation[name]
            column = columns[name] = as_numpy(value, space.dtype)
            if space.dtype == "float32" and not np.isfinite(column).all():
                actor = int(np.argwhere(~np.isfinite(column))[0][0])
                raise StageFailed(
                    f"environment '{self.spec.name}': observation '{name}' of actor {actor} is not finite"
                )
        return columns


def _made(name: str, settings: GymnaxSettings) -> tuple[Any, Any]:
    wanted = name.removeprefix(PREFIX)
    if wanted not in gymnax.registered_envs:
        known = gymnax.registered_envs
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
    fields = [field.name for field in dataclasses.fields(params)]
    for key in changes:
        if key not in fields:
            raise UsageError(f"environment '{name}' has no parameter '{key}'", hint=f"its own: {', '.join(fields)}")
    return env, params.replace(**changes)


def _leaves(observation: Tree, name: str = OBSERVATION) -> list[tuple[str, Any]]:
    """Columns and their arrays, named as the system names the parts of a Dict or Tuple."""
    if isinstance(observation, Mapping):
        parts = list(observation.items())
    elif isinstance(observation, tuple | list):
        parts = list(enumerate(observation))
    else:
        return [(name, observation)]
    return [leaf for key, value in parts for leaf in _leaves(value, f"{name}.{key}")]


def _observed(space: Any, form: Tree) -> dict[str, Space]:
    """Our spaces, from what `reset` really gives: not all declared shapes and types hold."""
    found: dict[str, Space] = {}
    for name, leaf in _leaves(form):
        if isinstance(space, theirs.Discrete) and leaf.shape == ():
            found[name] = Discrete(n=int(space.n))
            continue
        kind = np.dtype(leaf.dtype)
        dtype = "uint8" if kind == np.bool_ or kind == np.uint8 else "float32" if kind.kind == "f" else "int32"
        found[name] = Box(shape=tuple(leaf.shape), dtype=dtype)
    return found


def _acted(space: Any) -> Space:
    if isinstance(space, theirs.Discrete):
        return Discrete(n=int(space.n))
    if isinstance(space, theirs.Box):
        low, high = (np.broadcast_to(np.asarray(bound, np.float64), space.shape) for bound in (space.low, space.high))
        return Box(shape=tuple(space.shape), low=tuple(low.ravel().tolist()), high=tuple(high.ravel().tolist()))
    raise UsageError(f"actions of gymnax's {type(space).__name__} space are not supported")


def _scale(space: Any) -> tuple[np.ndarray, np.ndarray] | None:
    """The lower bound of a Box, and half its width; None for choices."""
    if not isinstance(space, theirs.Box):
        return None
    low, high = (np.broadcast_to(np.asarray(bound, np.float32), space.shape) for bound in (space.low, space.high))
    return low, (high - low) / 2


def _action_form(space: Any) -> tuple[tuple[int, ...], Any]:
    return ((), np.int32) if isinstance(space, theirs.Discrete) else (tuple(space.shape), np.float32)


def settings_model(name: str) -> type[SettingsModel]:
    return GymnaxSettings


def make(name: str, settings: GymnaxSettings, *, num_envs: int, seed: int, split: str) -> Gymnax:
    return Gymnax(name, settings, num_envs=num_envs, seed=seed, split=split)
