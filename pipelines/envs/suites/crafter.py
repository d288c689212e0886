"""Crafter (Hafner, ICLR 2022): survive in an unseen world, or follow instructions there.

What each step achieved is shown beside the instructions, so that hindsight may ask for it instead (`crafter_goals`).
The package reports death and the time limit alike. A world is drawn from the episode's seed alone: its random numbers
also when creatures vanish, which in the package as it stands depend on where objects are in memory.
"""

from __future__ import annotations

import collections
from typing import Any

import crafter
import gymnasium
import numpy as np
from pydantic import Field, model_validator

from pipelines.config.base import SettingsModel
from pipelines.envs.env import Env
from pipelines.envs.gymnasium_env import GymnasiumEnv
from pipelines.envs.suites import crafter_goals as words
from pipelines.envs.task_env import FAILED, NOTHING, SOLVED, TaskEnv

ACTIONS = 17


class CrafterSettings(SettingsModel):
    """Parameters of `crafter`."""

    goals: int = Field(0, ge=0, le=32)
    """Most instructions of an episode; 0: none, but the game's own rewards."""
    least_goals: int = Field(1, ge=1, le=32)
    """Fewest instructions of an episode."""
    travel: float = Field(0.25, ge=0, le=1)
    """Share of instructions that name a place, not an achievement."""
    max_steps: int = Field(10_000, ge=1)
    """Steps after which an episode is truncated."""
    size: int = Field(64, ge=36, le=256)
    """Height and width of the picture."""
    show_achievements: bool = False
    """Show, as 22 bits in `obs.achievements`, which achievements the episode has had."""

    @model_validator(mode="after")
    def _counts(self) -> CrafterSettings:
        if self.goals and self.least_goals > self.goals:
            raise ValueError(f"least_goals {self.least_goals} is more than goals {self.goals}")
        return self


class _Ordered(dict[Any, None]):
    """A set that is gone through in the order in which its members came."""

    def add(self, member: Any) -> None:
        self[member] = None

    def remove(self, member: Any) -> None:
        del self[member]


class _Game(crafter.Env):  # type: ignore[misc, unused-ignore]  # untyped where Crafter is installed
    """The game, begun from a seed, in which nothing depends on the addresses of objects."""

    def begin(self, number: int) -> np.ndarray:
        """Begin in world `number`; the package would draw one from a hash."""
        world = self._world
        plain = type(world).reset

        def numbered(seed: int) -> None:
            plain(world, number)
            world._chunks = collections.defaultdict(_Ordered)

        world.reset = numbered
        return self.reset()

    @property
    def position(self) -> np.ndarray:
        return self._player.pos

    @property
    def counts(self) -> dict[str, int]:
        """How often this episode had each achievement."""
        return self._player.achievements


class Crafter(TaskEnv):
    """One world an episode. A task is named by its world's number and, if any, its goals: `17: eat cow, wake up`."""

    Settings = CrafterSettings
    about = "Survive in an unseen world of resources and monsters, or follow instructions there"
    splits = "worlds (and instructions) of separate seeds"
    action_space = gymnasium.spaces.Discrete(ACTIONS)

    @classmethod
    def make(cls, name: str, settings: CrafterSettings, *, num_envs: int, seed: int, split: str) -> Env:
        return GymnasiumEnv(name, lambda: cls(settings), num_envs=num_envs, seed=seed, split=split)

    def __init__(self, settings: CrafterSettings) -> None:
        s = self.settings = settings
        self.horizon, self.has_success = s.max_steps, s.goals > 0
        self.achievements = () if s.goals else words.ACHIEVEMENTS
        picture = gymnasium.spaces.Box(0, 255, (s.size, s.size, 3), np.uint8)
        parts: dict[str, gymnasium.Space[Any]] = {"image": picture}
        for part, count in (("achieved", words.ACHIEVED_GOALS), ("goals", s.goals)) if s.goals else ():
            shape = (count, words.WORDS_PER_GOAL)
            parts[part] = gymnasium.spaces.Box(0, len(words.WORDS) - 1, shape, np.uint8)
        if s.show_achievements:
            parts["achievements"] = gymnasium.spaces.MultiBinary(len(words.ACHIEVEMENTS))
        self._is_plain = len(parts) == 1
        self.observation_space = picture if self._is_plain else gymnasium.spaces.Dict(parts)
        self._game: _Game | None = None
        self._named: tuple[int, tuple[words.Goal, ...]] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        s = self.settings
        world = int(self.np_random.integers(2**31)) if seed is None else seed
        goals = words.draw_goals(self.np_random, least=s.least_goals, most=s.goals, travel=s.travel) if s.goals else ()
        if self._named is not None:
            world, goals = self._named
        asked = [words.spell(goal) for goal in goals]
        self.task = f"{world}: {', '.join(asked)}" if asked else str(world)
        self.goal_text, self.outcome = ", then ".join(asked), NOTHING
        self._progress = words.GoalProgress(goals)
        self._time = 0
        game = self._game = self._game or _Game(size=(s.size, s.size), length=None, seed=0)
        picture = game.begin(world)
        self._counts = dict(game.counts)
        return self._observe(picture, ()), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self._game is not None
        picture, reward, _, info = self._game.step(action)
        self._time += 1
        counts = self._game.counts
        events = tuple(words.parse_goal(name) for name, count in counts.items() if count > self._counts[name])
        self._counts = dict(counts)
        dead, solved = info["discount"] == 0, False
        if self.settings.goals:
            reward = float(self._progress.advance((words.find_square(self._game.position), *events)))
            solved = self._progress.is_done
        terminated = dead or solved
        truncated = self._time >= self.settings.max_steps and not terminated
        self.outcome = SOLVED if solved else FAILED if terminated or truncated else NOTHING
        return self._observe(picture, events), float(reward), terminated, truncated, {}

    @property
    def achieved(self) -> list[bool]:  # type: ignore[override]
        return [self._counts[name] > 0 for name in self.achievements]

    def play(self, task: str) -> None:
        """Play `WORLD` or `WORLD: GOAL, GOAL`."""
        world, _, goals = task.partition(":")
        asked = tuple(words.parse_goal(text) for text in goals.split(",")) if goals.strip() else ()
        if not 0 <= int(world) < 2**32:
            raise ValueError(f"worlds have numbers from 0 to 2^32 - 1, not {world}")
        if bool(asked) != bool(self.settings.goals) or len(asked) > self.settings.goals:
            raise ValueError(f"it asks for {len(asked)} goals, env.goals is {self.settings.goals}")
        self._named = int(world), asked

    def _observe(self, picture: np.ndarray, events: tuple[words.Goal, ...]) -> Any:
        if self._is_plain:
            return picture
        assert self._game is not None
        observed: dict[str, np.ndarray] = {"image": picture}
        if self.settings.goals:
            here = words.find_square(self._game.position)
            observed["achieved"] = words.as_rows((here, *events), words.ACHIEVED_GOALS)
            observed["goals"] = words.as_rows(self._progress.shown, self.settings.goals)
        if self.settings.show_achievements:
            observed["achievements"] = np.array([self._counts[name] > 0 for name in words.ACHIEVEMENTS], dtype=np.int8)
        return observed
