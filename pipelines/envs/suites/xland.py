"""`xland`: XLand-MiniGrid (Nikulin et al., NeurIPS 2024), all actors in one compiled step.

A task is a ruleset (`xland_rulesets`), attempted `attempts` times, each time in another room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field
from xminigrid.core.constants import NUM_ACTIONS, NUM_COLORS, NUM_TILES
from xminigrid.core.goals import NUM_GOALS
from xminigrid.envs.xland import XLandMiniGrid
from xminigrid.types import RuleSet

from pipelines.envs.env import EnvSpec, EpisodeEnv, StepResult, unknown_task
from pipelines.envs.suites.jax_env import Tree, fold_keys, make_keys, merge
from pipelines.envs.suites.suite import ProtocolSettings
from pipelines.envs.suites.xland_rulesets import Kind, Rulesets
from pipelines.errors import UsageError
from pipelines.lake.spaces import Discrete, MultiBinary, MultiDiscrete, Spaces

T = TypeVar("T")
_VIEW = 5
SEED, _RULESET = range(2)  # purposes of random draws
_CELLS = "obs.cells"
_SPACES = Spaces(
    observation={
        _CELLS: MultiDiscrete(nvec=(NUM_TILES, NUM_COLORS) * _VIEW**2),
        "obs.goal": MultiDiscrete(nvec=(NUM_GOALS, *(NUM_TILES, NUM_COLORS) * 2)),
        "obs.direction": Discrete(n=4),
        "obs.begins": MultiBinary(n=1),
    },
    action=Discrete(n=int(NUM_ACTIONS)),
)


class _XLandSettings(ProtocolSettings):
    """Parameters of `xland`."""

    PAPER: ClassVar = {"holdout": 0.0}  # the baselines are evaluated on other draws from the whole benchmark

    difficulty: Kind = "trivial"
    """Rulesets: trivial has no rules, small, medium and high have trees of 1, 2 and 3 levels of them."""
    rulesets: int = Field(4096, ge=2)
    """How many are made."""
    ruleset_seed: int = Field(0, ge=0)
    """Of the rulesets; apart from the run's seed, so that all runs play the same ones."""
    rulesets_file: Path | None = None
    """An npz file of rulesets to play instead, such as converted published ones; where there is none yet, the ones made
    are written to it.
    """
    holdout: float = Field(0.2, ge=0, lt=1)
    """Share of rulesets kept for `split = "test"`; 0: all rulesets on both sides."""
    attempts: int = Field(10, ge=1)
    """Attempts at a ruleset in each episode."""
    size: int = Field(9, ge=5, le=31)
    """Cells along a side of the world."""
    rooms: Literal[1, 2, 4, 6, 9] = 1
    """Rooms of the world, with doors between them."""
    cells_only: bool = False
    """Show the cells in front and nothing else, as the datasets XLand-100B and XLand-Trivial-20B do."""

    @property
    def label(self) -> str:
        """What rulesets are called."""
        return self.difficulty if self.rulesets_file is None else self.rulesets_file.stem

    @property
    def attempt_steps(self) -> int:
        return 3 * self.size**2


class XLand(EpisodeEnv):
    """N actors. JAX holds one `TimeStep` of all; counts of attempts are here."""

    Settings = _XLandSettings

    def __init__(self, name: str, settings: _XLandSettings, *, num_envs: int, seed: int, split: str) -> None:
        super().__init__(name, num_envs=num_envs, seed=seed, split=split)
        s = self.settings = settings
        self.rulesets = self._load_rulesets()
        train, test = self.rulesets.split(s.holdout, s.ruleset_seed)
        self._mine = test if split == "test" and len(test) else train
        self._playing = self._mine
        self._require_room(name)
        self.spec = EnvSpec(
            name=name,
            spaces=Spaces(observation=self._choose_columns(_SPACES.observation), action=_SPACES.action),
            horizon=s.attempt_steps * s.attempts,
            num_attempts=s.attempts,
            has_success=True,
            about=f"{s.label} rulesets of XLand-MiniGrid, {s.attempts} attempts of {s.attempt_steps} steps at one",
            split=f"{len(test)} of {len(self.rulesets)} rulesets are held out"
            if s.holdout
            else "all rulesets on both sides",
        )
        self._env = XLandMiniGrid()
        self._params = self._env.default_params(
            height=s.size, width=s.size, view_size=_VIEW, max_steps=s.attempt_steps, grid_type=f"R{s.rooms}"
        )
        self._reset_all = jax.jit(jax.vmap(self._reset_one))
        self._step_all = jax.jit(jax.vmap(self._step_one))
        self.ruleset = np.zeros(num_envs, dtype=np.int64)
        self.attempt = np.zeros(num_envs, dtype=np.int64)
        self._begins = np.zeros(num_envs, dtype=bool)
        self._keys = np.zeros((num_envs, 2), dtype=np.uint32)
        self._state: Tree = None

    def _reset_one(self, key: jax.Array, goal: jax.Array, rules: jax.Array, tiles: jax.Array) -> Tree:
        ruleset = RuleSet(goal=goal, rules=rules, init_tiles=tiles)
        return _fix_types(self._env.reset(self._params.replace(ruleset=ruleset), key))

    def _step_one(self, state: Tree, action: jax.Array) -> Tree:
        return _fix_types(self._env.step(self._params, state, action))

    def reset(self, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
        indices, episodes = self._advance(mask)
        self.ruleset[indices] = self._playing[self._choose(episodes, _RULESET, len(self._playing))]
        self.attempt[indices] = 0
        seeds = np.zeros(self.num_envs, dtype=np.uint32)
        seeds[indices] = self.draws.integers(episodes, SEED, 2**31)
        begun = np.zeros(self.num_envs, dtype=bool)
        begun[indices] = True
        self._keys = merge(begun, make_keys(seeds), jnp.asarray(self._keys))
        self._begin(begun)
        self._begins = self._begins | begun
        return self._observe()

    def _begin(self, mask: np.ndarray) -> None:
        """Put the actors in `mask` at the start of an attempt, in a world of its own."""
        own = fold_keys(self._keys, self.attempt.astype(np.uint32))
        r = self.rulesets
        state = self._reset_all(own, r.goals[self.ruleset], r.rules[self.ruleset], r.tiles[self.ruleset])
        self._state = state if self._state is None else merge(mask, state, self._state)

    def step(self, actions: np.ndarray) -> StepResult:
        self._state = self._step_all(self._state, np.asarray(actions, dtype=np.int32))
        reward = np.array(self._state.reward, dtype=np.float32)
        over = np.array(self._state.last(), dtype=bool)
        self.attempt += over
        terminated = self.attempt >= self.settings.attempts
        again = over & ~terminated
        if again.any():
            self._begin(again)
        self._begins = again
        return StepResult(
            observation=self._observe(),
            reward=reward,
            terminated=terminated,
            truncated=self._nobody,
            reset=again,
            attempt_end=over,
            success=over & (reward > 0),
        )

    def _observe(self) -> dict[str, np.ndarray]:
        state = self._state
        shown: dict[str, np.ndarray] = {
            _CELLS: np.array(state.observation, dtype=np.int32).reshape(self.num_envs, -1),
            "obs.goal": self.rulesets.goals[self.ruleset].astype(np.int32),
            "obs.direction": np.array(state.state.agent.direction, dtype=np.int32),
            "obs.begins": self._begins[:, None].astype(np.uint8),
        }
        return self._choose_columns(shown)

    def _choose_columns(self, columns: Mapping[str, T]) -> dict[str, T]:
        """Choose the columns that are observed."""
        return {name: each for name, each in columns.items() if name == _CELLS or not self.settings.cells_only}

    def tasks(self, indices: np.ndarray) -> list[str]:
        """Name the ruleset: `DIFFICULTY/NUMBER` or `FILE/NUMBER`, its number among all."""
        return [f"{self.settings.label}/{number}" for number in self.ruleset[indices].tolist()]

    def play_only(self, tasks: Sequence[str]) -> None:
        numbers, label = [], self.settings.label
        for name in tasks:
            kind, _, number = name.rpartition("/")
            if kind != label or not number.isdecimal() or int(number) >= len(self.rulesets):
                raise unknown_task(
                    name, self.spec.name, hint=f"its tasks: {label}/0 to {label}/{len(self.rulesets) - 1}"
                )
            numbers.append(int(number))
        self._playing, self._in_turn = np.array(numbers), True

    def _load_rulesets(self) -> Rulesets:
        s = self.settings
        if s.rulesets_file is not None and s.rulesets_file.exists():
            return Rulesets.load(s.rulesets_file)
        try:
            made = Rulesets.generate(s.difficulty, s.rulesets, s.ruleset_seed)
        except ValueError as error:
            raise UsageError(f"env.rulesets: {error}") from error
        if s.rulesets_file is not None:
            made.save(s.rulesets_file)
        return made

    def _require_room(self, name: str) -> None:
        """Raise UsageError unless all tiles of a ruleset, and the agent, find a free cell."""
        s = self.settings
        if s.rooms == 9 and s.size % 3 != 1:
            raise UsageError(f"environment '{name}': nine rooms need a size of 7, 10, 13, ...", hint="set env.size so")
        walls = {1: 0, 2: 1, 4: 2, 6: 2, 9: 4}[s.rooms]
        free, needed = (s.size - 2) ** 2 - walls * (s.size - 2), self.rulesets.tiles.shape[1] + 1
        if free < needed:
            raise UsageError(
                f"environment '{name}': {needed} things do not fit into {s.rooms} rooms of {s.size}x{s.size} cells",
                hint="set env.size higher, or env.rooms lower",
            )


def _fix_types(timestep: Any) -> Any:
    """Give every leaf a type that does not change from step to step, so that a step is compiled once."""
    return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype), timestep)
