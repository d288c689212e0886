"""Symbolic Alchemy: find out what potions do to stones, and use it in the trials that follow (Wang et al., NeurIPS
2021 Datasets and Benchmarks; level with perceptual mapping, rotation and bottlenecks).

One hidden chemistry for all trials of an episode; three new stones and twelve new potions in each. Actions: 0
nothing; else k = a - 1: stone k // 13 goes into the cauldron (k % 13 = 0) or into potion k % 13 - 1. A potion is used
up whether or not it moves the stone; what is gone cannot be used, and trying uses nothing. The cauldron pays the sum of
the stone's three coordinates, and 12 more for the best one: -3, -1, 1 or 15. With `end_trial` all actions are one
higher, and 0 ends the trial. Nothing tells that a trial ended but the new items, which its last step already shows; the
episode's last shows what was left. Ends are terminated and truncated alike. Observation, float32 (39,): for each stone
three coordinates as they are seen, their true sum / 3, and 0, or 2, 2, 2, 2, 1 once gone; for each potion its colour
/ 3 - 1 and 0, or 1, 1 once used.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.env import EnvSpec, NativeEnv, StepResult
from pipelines.envs.protocol import ProtocolSettings
from pipelines.envs.suites import chemistry
from pipelines.envs.suites.chemistry import EMPTY, GONE, MOVES, POTION_LOOKS, STEPS_TO_BEST, STONE_LOOKS, VERTICES
from pipelines.lake.spaces import Box, Discrete, Spaces

NUM_STONES, NUM_POTIONS = 3, 12
NUM_ACTIONS = 1 + NUM_STONES * (1 + NUM_POTIONS)
PAID = np.append(VERTICES.sum(axis=1) + 12 * (VERTICES > 0).all(axis=1), 0).astype(np.float32)  # by vertex; GONE: 0
CHEMISTRY, STONES, POTIONS = range(3)  # purposes of random draws


class AlchemySettings(ProtocolSettings):
    """Parameters of `alchemy`."""

    PAPER: ClassVar = {"holdout": 0.0}

    trials: int = Field(10, ge=1)
    """Trials with one chemistry, in one episode."""
    trial_steps: int = Field(20, ge=1)
    """Steps of a trial."""
    end_trial: bool = False
    """An action more, number 0, that ends the trial; the others follow it."""
    holdout: float = Field(0.2, ge=0, lt=1)
    """Share of the 167,424 chemistries kept for `split = "test"`; 0: all of them on both sides."""


class Alchemy(NativeEnv):
    """N laboratories. State: `stones` (N, 3) and `potions` (N, 12) as in `chemistry`, `chemistry`, `clock` (steps in
    the trial), `trial`.
    """

    def __init__(self, name: str, settings: AlchemySettings, *, num_envs: int, seed: int, split: str) -> None:
        super().__init__(_spec(name, settings), num_envs=num_envs, seed=seed, split=split)
        self.settings, self._test = settings, split == "test"
        self.chemistry, self.graph, self.clock, self.trial = np.zeros((4, num_envs), dtype=np.int64)
        self.stones = np.zeros((num_envs, NUM_STONES), dtype=np.int64)
        self.potions = np.zeros((num_envs, NUM_POTIONS), dtype=np.int64)
        self._stone_looks = np.zeros((num_envs, 9, 5), dtype=np.float32)
        self._potion_looks = np.zeros((num_envs, 7, 2), dtype=np.float32)
        self._row = np.arange(num_envs)
        used = np.arange(NUM_ACTIONS) - 1
        ending = [-1] if settings.end_trial else []
        self._stone_of = np.append(ending, np.maximum(used, 0) // (1 + NUM_POTIONS)).astype(np.int64).clip(0)
        self._slot_of = np.append(ending, np.where(used < 0, -1, used % (1 + NUM_POTIONS))).astype(np.int64)

    def _begin(self, indices: np.ndarray, episodes: np.ndarray) -> None:
        drawn = chemistry.draw(self.draws, CHEMISTRY, episodes, holdout=self.settings.holdout, test=self._test)
        self.clock[indices] = self.trial[indices] = 0
        self._know(indices, drawn)
        self._restock(indices, episodes)

    def _know(self, indices: np.ndarray, drawn: np.ndarray) -> None:
        self.chemistry[indices] = drawn
        self.graph[indices], signs, turn, potion_map = chemistry.parts(drawn)
        self._stone_looks[indices] = STONE_LOOKS[signs, turn]
        self._potion_looks[indices] = POTION_LOOKS[potion_map]

    def _restock(self, indices: np.ndarray, episodes: np.ndarray) -> None:
        """New items for the trials that the actors are in."""
        for items, stream, kinds in ((self.stones, STONES, GONE), (self.potions, POTIONS, EMPTY)):
            count = items.shape[1]
            counter = self.trial[indices, None] * count + np.arange(count)
            items[indices] = self.draws.integers(episodes[:, None], stream, kinds, counter)

    def _assign(self, actor: int, task: str) -> None:
        self._know(np.array([actor]), np.array([chemistry.by_name(task)]))

    def _observe(self) -> dict[str, np.ndarray]:
        row = self._row[:, None]
        seen = np.empty((self.num_envs, 5 * NUM_STONES + 2 * NUM_POTIONS), dtype=np.float32)
        seen[:, : 5 * NUM_STONES] = self._stone_looks[row, self.stones].reshape(self.num_envs, -1)
        seen[:, 5 * NUM_STONES :] = self._potion_looks[row, self.potions].reshape(self.num_envs, -1)
        return {"obs": seen}

    def step(self, actions: np.ndarray) -> StepResult:
        s = self.settings
        stone, slot = self._stone_of[actions], self._slot_of[actions]
        vertex = self.stones[self._row, stone]
        potion = np.where(slot > 0, self.potions[self._row, np.maximum(slot - 1, 0)], EMPTY)
        sold = (slot == 0) & (vertex != GONE)
        reward = PAID[vertex] * sold
        self.stones[self._row, stone] = np.where(sold, GONE, MOVES[self.graph, vertex, potion])
        used = np.flatnonzero((vertex != GONE) & (potion != EMPTY))
        self.potions[used, slot[used] - 1] = EMPTY
        self.clock += 1
        over = self.clock >= s.trial_steps
        if s.end_trial:
            over |= actions == 0
        self.trial += over
        self.clock[over] = 0
        last = self.trial >= s.trials
        renewed = np.flatnonzero(over & ~last)
        if len(renewed):
            self._restock(renewed, self.episodes.current[renewed])
        return StepResult(
            observation=self._observe(),
            reward=reward,
            terminated=last,
            truncated=last,
            reset=self._nobody,
            attempt_end=over,
            success=self._nobody,
        )

    def tasks(self, indices: np.ndarray) -> list[str]:
        return [chemistry.name_of(number) for number in self.chemistry[indices].tolist()]

    def expert(self) -> np.ndarray:
        """By one who knows the chemistry: a potion that brings a stone nearer to the best, while there is one; then
        the stones that pay.
        """
        graph = self.graph[:, None, None]
        after = MOVES[graph, self.stones[:, :, None], self.potions[:, None, :]]
        nearer = STEPS_TO_BEST[graph, after] < STEPS_TO_BEST[graph, self.stones[:, :, None]]
        pays = PAID[self.stones] > 0
        choices = np.concatenate([nearer, pays[:, :, None]], axis=2)
        stone, slot = np.divmod(choices.reshape(self.num_envs, -1).argmax(axis=1), 1 + NUM_POTIONS)
        slot = (slot + 1) % (1 + NUM_POTIONS)
        action = np.where(choices.any(axis=(1, 2)), 1 + stone * (1 + NUM_POTIONS) + slot, 0)
        return (action + self.settings.end_trial).astype(np.int32)


def settings_model(name: str) -> type[SettingsModel]:
    return AlchemySettings


def make(name: str, settings: AlchemySettings, *, num_envs: int, seed: int, split: str) -> Alchemy:
    return Alchemy(name, settings, num_envs=num_envs, seed=seed, split=split)


def _spec(name: str, s: AlchemySettings) -> EnvSpec:
    return EnvSpec(
        name=name,
        spaces=Spaces(
            observation={"obs": Box(shape=(5 * NUM_STONES + 2 * NUM_POTIONS,))},
            action=Discrete(n=NUM_ACTIONS + s.end_trial),
        ),
        horizon=s.trials * s.trial_steps,
        num_attempts=s.trials,
        about=f"{s.trials} trials of {s.trial_steps} steps with three stones, twelve potions, one hidden chemistry",
        split=f"{s.holdout:.0%} of the chemistries are held out" if s.holdout else "all chemistries on both sides",
    )
