"""Point-Robot: walk to a hidden point of the plane in attempt after attempt (Rakelly et al., ICML 2019, "PEARL").

An action in [-1, 1]^2 moves by `step_size` times it; there are no walls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from pipelines.envs.drawing import BLUE, GREEN, GREY, PALE, PAPER, SKY, WHITE, Canvas
from pipelines.envs.draws import spread
from pipelines.envs.env import EnvSpec, StepResult
from pipelines.envs.native import AttemptsEnv
from pipelines.envs.scenes import WIDTH
from pipelines.envs.suites.suite import ProtocolSettings
from pipelines.lake.spaces import Box, Spaces

PLACE, HEIGHT = range(2)  # purposes of random draws
_PARTS = 1_000_000  # coordinates are whole numbers of these, so that their names are exact
_EDGE = 1.6  # of the part of the plane that is drawn


class _PointRobotSettings(ProtocolSettings):
    """Parameters of `point-robot`."""

    PAPER: ClassVar = {"holdout": False}

    goals: Literal["half-circle", "circle", "square"] = "half-circle"
    """Where the goal may be."""
    sparse: bool = False
    """Pay near the goal alone."""
    goal_radius: float = Field(0.2, gt=0)
    """Distance within which a sparse reward is paid, and an attempt succeeds."""
    attempts: int = Field(3, ge=1)
    """Attempts at one goal, in one episode."""
    attempt_steps: int = Field(20, ge=1)
    """Steps of an attempt."""
    step_size: float = Field(0.1, gt=0)
    """Longest move along an axis in a step."""
    holdout: bool = True
    """Keep a fifth of the angles (of a square: of x), in six bands, for `split = "test"`; false: all on both sides."""


class PointRobot(AttemptsEnv):
    """N robots. State: `place` (N, 2), `goal` (N, 2) in millionths."""

    Settings = _PointRobotSettings

    def __init__(self, name: str, settings: _PointRobotSettings, *, num_envs: int, seed: int, split: str) -> None:
        s = self.settings = settings
        spec = EnvSpec(
            name=name,
            spaces=Spaces(
                observation={"obs": Box(shape=(4,))}, action=Box(shape=(2,), low=(-1.0, -1.0), high=(1.0, 1.0))
            ),
            horizon=s.attempts * s.attempt_steps,
            num_attempts=s.attempts,
            has_success=True,
            about=("sparse rewards, " if s.sparse else "")
            + f"{s.attempts} attempts of {s.attempt_steps} steps at one point",
            split="a fifth of the goals is held out" if s.holdout else "all goals on both sides",
        )
        super().__init__(
            spec, attempts=s.attempts, attempt_steps=s.attempt_steps, num_envs=num_envs, seed=seed, split=split
        )
        self._split = split
        self.place = np.zeros((num_envs, 2))
        self.goal = np.zeros((num_envs, 2), dtype=np.int64)

    def _begin(self, indices: np.ndarray, episodes: np.ndarray) -> None:
        super()._begin(indices, episodes)
        s, share = self.settings, self.draws.uniform(episodes, PLACE)
        if s.holdout:
            share = spread(share, self._split)
        if s.goals == "square":
            goal = np.stack([2 * share - 1, 2 * self.draws.uniform(episodes, HEIGHT) - 1], axis=1)
        else:
            angle = share * np.pi * (1 if s.goals == "half-circle" else 2)
            goal = np.stack([np.cos(angle), np.sin(angle)], axis=1)
        self.goal[indices] = np.rint(goal * _PARTS)
        self.place[indices] = 0.0

    def _assign(self, actor: int, task: str) -> None:
        x, y = (round(float(text) * _PARTS) for text in task.removeprefix("goal=").split(","))
        if max(abs(x), abs(y)) > _PARTS:
            raise ValueError("goals are within [-1, 1]^2")
        self.goal[actor] = x, y

    def _place(self) -> np.ndarray:
        return self.place

    def _restart(self, mask: np.ndarray) -> None:
        self.place[mask] = 0.0

    def step(self, actions: np.ndarray) -> StepResult:
        s = self.settings
        self.place = self.place + s.step_size * np.clip(np.asarray(actions, dtype=np.float64), -1.0, 1.0)
        distance = np.linalg.norm(self.place - self.goal / _PARTS, axis=1)
        near = distance <= s.goal_radius
        return self._finish(np.where(near, 1.0 - distance, 0.0) if s.sparse else -distance, near)

    def _scene(self, actor: int) -> _Plane:
        x, y = self.goal[actor] / _PARTS
        return _Plane(goal=(x, y), place=(self.place[actor, 0], self.place[actor, 1]), settings=self.settings)

    def tasks(self, indices: np.ndarray) -> list[str]:
        """The goal's coordinates."""
        return ["goal={:.6f},{:.6f}".format(*(self.goal[i] / _PARTS)) for i in indices]

    def expert(self) -> np.ndarray:
        """Straight to the goal, by one who knows it."""
        way = (self.goal / _PARTS - self.place) / self.settings.step_size
        longest = np.abs(way).max(axis=1, keepdims=True)
        return (way / np.maximum(longest, 1.0)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class _Plane:
    """The scene of one robot: the goal, what is near enough to it, and where a goal may be."""

    goal: tuple[float, float]
    place: tuple[float, float]
    settings: _PointRobotSettings

    def picture(self) -> np.ndarray:
        canvas = Canvas(WIDTH, WIDTH)
        unit, (left, top) = WIDTH / (2 * _EDGE), self._pixel(-1.0, 1.0)
        right, bottom = self._pixel(1.0, -1.0)
        for at in (0.0, -1.0, 1.0):
            x, y = self._pixel(at, at)
            canvas.line(x, 0, x, WIDTH, 1, PALE)
            canvas.line(0, y, WIDTH, y, 1, PALE)
        if self.settings.goals == "square":
            for x0, y0, x1, y1 in ((left, top, right, top), (left, bottom, right, bottom)):
                canvas.line(x0, y0, x1, y1, 2, SKY)
            for x0 in (left, right):
                canvas.line(x0, top, x0, bottom, 2, SKY)
        else:
            canvas.ring(WIDTH / 2, WIDTH / 2, unit, 2, SKY)
            if self.settings.goals == "half-circle":
                canvas.rectangle(0, WIDTH / 2 + 2, WIDTH, WIDTH, PAPER)
        x, y = self._pixel(*self.goal)
        canvas.disc(x, y, self.settings.goal_radius * unit, (187, 247, 208))
        canvas.disc(x, y, 6, GREEN)
        canvas.disc(*self._pixel(0.0, 0.0), 4, GREY)
        x, y = self._pixel(*self.place)
        canvas.disc(x, y, 14, WHITE)
        canvas.disc(x, y, 12, BLUE)
        return canvas.pixels

    def _pixel(self, x: float, y: float) -> tuple[float, float]:
        """Return where a point is drawn; one that is too far away, at the edge."""
        across, down = (1 + np.clip(np.array([x, -y]) / _EDGE, -0.97, 0.97)) * WIDTH / 2
        return float(across), float(down)

    def text(self) -> str:
        rows = [["."] * 41 for _ in range(21)]
        for letter, (x, y) in (("+", (0.0, 0.0)), ("G", self.goal), ("@", self.place)):
            column, row = (int(size * share) for size, share in zip((41, 21), self._shares(x, y), strict=True))
            rows[row][column] = letter
        return "\n".join("".join(row) for row in rows)

    def _shares(self, x: float, y: float) -> tuple[float, float]:
        across, down = self._pixel(x, y)
        return across / WIDTH, down / WIDTH
