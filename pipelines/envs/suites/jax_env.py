"""Environments in JAX, all actors in one compiled step, each with random numbers of its own.

Libraries that begin the next episode within the step that ends one return its first observation. Here only `reset`
resets, so the end of an episode shows its true final observation. A time limit truncates, anything else terminates. A
reset of some actors computes a reset of all and keeps those of a mask, so that nothing is compiled twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipelines.envs.env import EnvSpec, EpisodeEnv, StepResult, rows_not_finite
from pipelines.errors import StageFailed, UsageError
from pipelines.lake.spaces import OBSERVATION, Box, Discrete, Space, Spaces

Tree = Any  # nested containers of arrays, as JAX passes them through


@jax.jit  # type: ignore[untyped-decorator, unused-ignore]  # untyped where JAX is not installed
def make_keys(seeds: jax.Array) -> jax.Array:
    """Make keys of JAX's random numbers (N, 2) from seeds (N,) below 2^32."""
    return jax.vmap(jax.random.PRNGKey)(seeds)


@jax.jit  # type: ignore[untyped-decorator, unused-ignore]  # untyped where JAX is not installed
def fold_keys(keys_N: jax.Array, counter: jax.Array) -> jax.Array:
    """Make other keys (N, 2) from keys (N, 2), one for each counter (N,)."""
    return jax.vmap(jax.random.fold_in)(keys_N, counter)


@jax.jit  # type: ignore[untyped-decorator, unused-ignore]  # untyped where JAX is not installed
def merge(mask: jax.Array, new: Tree, old: Tree) -> Tree:
    """Take `new` for the actors in `mask` (N,), `old` for the others; leaves keep the type that they have in `old`."""

    def choose(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *(1,) * (b.ndim - 1)), a.astype(b.dtype), b)

    return jax.tree.map(choose, new, old)


_RESET_KEY = 0  # steps are counted from 1


class Interface(ABC):
    """The environment of one actor. `limit`: maximum steps of an episode. `tells_truncation`: `step` distinguishes
    truncation; otherwise any end at the limit is one. `choices`: values of an observation that is a single integer.
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
        """Take one step: (observation, state, reward, terminated, truncated)."""


class JaxEnv(EpisodeEnv):
    """N actors in the environment's own state, one array each. `limit`: steps of an episode instead of the interface's
    own.
    """

    def __init__(
        self,
        name: str,
        interface: Interface,
        *,
        about: str,
        num_envs: int,
        seed: int,
        split: str,
        limit: int | None = None,
    ) -> None:
        super().__init__(name, num_envs=num_envs, seed=seed, split=split)
        self.interface, self._limit = interface, limit or interface.limit
        self._scale: tuple[np.ndarray, np.ndarray] | None = None  # the lower bound of a Box, and half its width
        if isinstance(space := interface.action, Box):
            low, high = (np.asarray(bound, np.float32).reshape(space.shape) for bound in (space.low, space.high))
            self._scale = low, (high - low) / 2
        self._counts = not interface.tells_truncation or limit is not None
        first = jax.eval_shape(interface.reset, jax.random.PRNGKey(0))
        action = jax.ShapeDtypeStruct(interface.action.shape, np.int32 if self._scale is None else np.float32)
        later = jax.eval_shape(interface.step, jax.random.PRNGKey(0), first[1], action)
        self._state_form = later[1]
        self.spec = EnvSpec(
            name=name,
            spaces=Spaces(observation=_convert_form(first[0], interface.choices), action=interface.action),
            horizon=self._limit,
            about=about,
            split="separate keys of random numbers",
        )
        self._reset_all = jax.jit(jax.vmap(self._reset_one))
        self._step_all = jax.jit(jax.vmap(self._step_one))
        self._keys = np.zeros((num_envs, 2), dtype=np.uint32)
        self._time = np.zeros(num_envs, dtype=np.uint32)
        self._state: Tree = None
        self._columns: dict[str, np.ndarray] = {}

    def _reset_one(self, key: jax.Array) -> tuple[Tree, Tree]:
        observation, state = self.interface.reset(jax.random.fold_in(key, _RESET_KEY))
        return observation, self._cast(state)

    def _step_one(self, key: jax.Array, state: Tree, action: jax.Array) -> tuple[Tree, Tree, Any, Any, Any]:
        observation, state, reward, terminated, truncated = self.interface.step(key, state, action)
        return observation, self._cast(state), reward, terminated, truncated

    def _cast(self, state: Tree) -> Tree:
        """Give a state the shapes and types that it has after a step, so that a step is compiled once."""

        def cast(leaf: jax.Array, form: jax.ShapeDtypeStruct) -> jax.Array:
            if jax.dtypes.issubdtype(form.dtype, jax.dtypes.prng_key):
                return leaf
            return jnp.broadcast_to(jax.lax.convert_element_type(leaf, form.dtype), form.shape)

        return jax.tree.map(cast, state, self._state_form)

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        indices, episodes = self._advance(mask)
        seeds = np.zeros(self.num_envs, dtype=np.uint32)
        seeds[indices] = self._draw_seeds(episodes)
        chosen = np.zeros(self.num_envs, dtype=bool)
        chosen[indices] = True
        self._keys = merge(chosen, make_keys(seeds), jnp.asarray(self._keys))
        self._time[indices] = 0
        observation, state = self._reset_all(self._keys)
        if self._state is None:
            self._require_batch(state)
        self._state = state if self._state is None else merge(chosen, state, self._state)
        columns = self._read(observation)
        if self._columns:
            for name, column in columns.items():
                column[~chosen] = self._columns[name][~chosen]
        self._columns = columns
        return columns

    def _require_batch(self, state: Tree) -> None:
        """Raise UsageError if some leaf is not one per actor: MuJoCo Warp, called from JAX, keeps some of its own."""
        if any(leaf.shape[:1] != (self.num_envs,) for leaf in jax.tree.leaves(state)):
            raise UsageError(
                f"environment '{self.spec.name}' shares a part of its state between actors",
                hint='of MuJoCo Playground, choose MJX: env.options.config_overrides = {impl = "jax"}',
            )

    def step(self, actions: np.ndarray) -> StepResult:
        self._time += 1
        step_keys = fold_keys(self._keys, self._time)
        outcome = self._step_all(step_keys, self._state, self._decode(actions))
        observation, self._state, reward, terminated, truncated = outcome
        self._columns = self._read(observation)
        over = np.array(terminated, dtype=bool).reshape(self.num_envs)
        late = np.array(truncated, dtype=bool).reshape(self.num_envs) & ~over
        if self._counts and self._limit is not None:
            timed_out = self._time >= self._limit
            if not self.interface.tells_truncation:
                over &= ~timed_out
            late |= timed_out & ~over
        return StepResult(
            observation=self._columns,
            reward=np.array(reward, dtype=np.float32).reshape(self.num_envs),
            terminated=over,
            truncated=late,
            reset=self._nobody,
            attempt_end=over | late,
            success=self._nobody,
        )

    def tasks(self, indices: np.ndarray) -> list[str]:
        return [self.spec.name] * len(indices)

    def play_only(self, tasks: Sequence[str]) -> None:
        if set(tasks) != {self.spec.name}:
            super().play_only(tasks)

    def _decode(self, actions: np.ndarray) -> np.ndarray:
        if self._scale is None:
            return np.asarray(actions, dtype=np.int32)
        low, half = self._scale
        return (low + (np.asarray(actions, dtype=np.float32) + 1) * half).astype(np.float32)

    def _read(self, observation: Tree) -> dict[str, np.ndarray]:
        columns = {}
        for name, value in list_leaves(observation, OBSERVATION):
            space = self.spec.spaces.observation[name]
            column = columns[name] = np.array(value, dtype=space.dtype)
            if space.dtype == "float32" and (bad := rows_not_finite(column)):
                raise StageFailed(
                    f"environment '{self.spec.name}': observation '{name}' of actor {bad[0]} is not finite"
                )
        return columns


def _convert_form(form: Tree, choices: int | None) -> dict[str, Space]:
    """Convert the result of `reset` to our spaces: not all declared shapes and types hold."""
    found: dict[str, Space] = {}
    for name, leaf in list_leaves(form, OBSERVATION):
        if choices is not None and leaf.shape == ():
            found[name] = Discrete(n=choices)
            continue
        kind = np.dtype(leaf.dtype)
        dtype = "uint8" if kind == np.bool_ or kind == np.uint8 else "float32" if kind.kind == "f" else "int32"
        found[name] = Box(shape=tuple(leaf.shape), dtype=dtype)
    return found


def list_leaves(observation: Tree, name: str) -> list[tuple[str, Any]]:
    """List columns and their arrays, named as the system names the parts of a Dict or Tuple."""
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
    return [leaf for key, value in parts for leaf in list_leaves(value, f"{name}.{key}")]
