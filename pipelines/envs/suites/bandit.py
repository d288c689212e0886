"""Multi-armed bandits with hidden means (Duan et al., 2016, "RL^2"; Lee et al., NeurIPS 2023, for Gaussian ones)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.drawing import AMBER, BLUE, GREEN, GREY, INK, PALE, Canvas
from pipelines.envs.env import EnvSpec, StepResult
from pipelines.envs.native import NativeEnv
from pipelines.envs.scenes import WIDTH
from pipelines.lake.spaces import Box, Discrete, Spaces

MEAN, REWARD, _ANGLE = range(3)  # purposes of random draws; those of rewards are counted by the step
_PARTS = 1_000_000  # means are whole numbers of these, so that their names are exact


class _BanditSettings(SettingsModel):
    """Parameters of `bandit`."""

    arms: int = Field(10, ge=2, le=1000)
    """Number of arms."""
    steps: int = Field(100, ge=1)
    """Steps of an episode."""
    rewards: Literal["bernoulli", "gaussian"] = "bernoulli"
    """Distribution of an arm's rewards around its mean."""
    noise: float = Field(0.3, ge=0)
    """Standard deviation of Gaussian rewards."""


class Bandit(NativeEnv):
    """N bandits. State: `means` (N, arms) in millionths, `time`, `pulls` (N, arms) so far."""

    Settings = _BanditSettings

    def __init__(self, name: str, settings: _BanditSettings, *, num_envs: int, seed: int, split: str) -> None:
        s = self.settings = settings
        spec = EnvSpec(
            name=name,
            spaces=Spaces(observation={"obs": Box(shape=(1,))}, action=Discrete(n=s.arms)),
            horizon=s.steps,
            about=f"{s.arms} arms with hidden means and {s.rewards} rewards, {s.steps} pulls",
            split="separate draws of the means, from one distribution",
            random_return=s.steps * (_PARTS - 1) / 2 / _PARTS,
        )
        super().__init__(spec, num_envs=num_envs, seed=seed, split=split)
        self.means = np.zeros((num_envs, s.arms), dtype=np.int64)
        self.time = np.zeros(num_envs, dtype=np.int64)
        self._row = np.arange(num_envs)
        self.pulls = np.zeros((num_envs, s.arms), dtype=np.int64)
        self._latest = np.full(num_envs, -1)  # arm

    def _begin(self, indices: np.ndarray, episodes: np.ndarray) -> None:
        arms = np.arange(self.settings.arms)
        self.means[indices] = self.draws.integers(episodes[:, None], MEAN, _PARTS, arms)
        self.time[indices] = self.pulls[indices] = 0
        self._latest[indices] = -1

    def _assign(self, actor: int, task: str) -> None:
        means = [round(float(text) * _PARTS) for text in task.removeprefix("means=").split(",")]
        if len(means) != self.settings.arms or not all(0 <= mean < _PARTS for mean in means):
            raise ValueError("a mean from 0 to 1 for each arm is needed")
        self.means[actor] = means

    def _observe(self) -> dict[str, np.ndarray]:
        return {"obs": (self.time / self.settings.steps).astype(np.float32)[:, None]}

    def step(self, actions: np.ndarray) -> StepResult:
        s = self.settings
        self.time += 1
        self._latest[:] = actions
        self.pulls[self._row, actions] += 1
        mean, episode = self.means[self._row, actions] / _PARTS, self.episodes.chance
        chance = self.draws.uniform(episode, REWARD, self.time)
        if s.rewards == "bernoulli":
            reward = chance < mean
        else:  # Box and Muller's transform of two uniform numbers
            radius = np.sqrt(-2.0 * np.log1p(-chance))
            angle = 2.0 * np.pi * self.draws.uniform(episode, _ANGLE, self.time)
            reward = mean + s.noise * radius * np.cos(angle)
        over = self.time >= s.steps
        return StepResult(
            observation=self._observe(),
            reward=reward.astype(np.float32),
            terminated=over,
            truncated=self._nobody,
            reset=self._nobody,
            attempt_end=over,
            success=self._nobody,
        )

    def _scene(self, actor: int) -> _Arms:
        return _Arms(means=self.means[actor] / _PARTS, pulls=self.pulls[actor], latest=int(self._latest[actor]))

    def tasks(self, indices: np.ndarray) -> list[str]:
        """The arms' means."""
        return ["means=" + ",".join(f"{mean / _PARTS:.6f}" for mean in self.means[i].tolist()) for i in indices]

    def expert(self) -> np.ndarray:
        """The best arm, by one who knows it."""
        return self.means.argmax(axis=1).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class _Arms:
    """The scene of one bandit: means as bars upwards, shares of the pulls as bars downwards; `latest`: the arm that was
    pulled last (-1: none).
    """

    means: np.ndarray
    pulls: np.ndarray
    latest: int

    def picture(self) -> np.ndarray:
        canvas, arms = Canvas(300, WIDTH), len(self.means)
        each, ground = (WIDTH - 20) / arms, 190
        for at in (0.0, 0.5, 1.0):
            canvas.line(10, ground - 170 * at, WIDTH - 10, ground - 170 * at, 1, PALE)
        most, best = max(int(self.pulls.sum()), 1), int(self.means.argmax())
        for arm, (mean, pulls) in enumerate(zip(self.means.tolist(), self.pulls.tolist(), strict=True)):
            left, right = 10 + each * (arm + 0.12), 10 + each * (arm + 0.88)
            color = BLUE if arm == self.latest else GREEN if arm == best else GREY
            canvas.rectangle(left, ground - 170 * mean, right, ground, color)
            canvas.rectangle(left, 214, right, 214 + 76 * pulls / most, AMBER)
            if each >= 14:
                canvas.text(str(arm), (left + right) / 2, 203, INK, scale=2 if each >= 28 else 1, middle=True)
        return canvas.pixels

    def text(self) -> str:
        marks = ["@" if arm == self.latest else " " for arm in range(len(self.means))]
        return "\n".join(
            f"{marks[arm]} arm {arm:<3} mean {mean:.2f} {'#' * round(20 * mean):<20} {pulls} pulls"
            for arm, (mean, pulls) in enumerate(zip(self.means.tolist(), self.pulls.tolist(), strict=True))
        )
