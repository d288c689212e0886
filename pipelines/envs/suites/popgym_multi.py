"""`popgym-multi`: one of 27 POPGym games in each episode, which the agent is not told.

Games with choices for actions and observations of at most 26 numbers. The first attempt is for finding out which game
it is: its rewards are withheld, but shown. The attempts after it, of new instances of the game, pay. Between attempts
there is one more step, whose action counts for nothing and which shows the new start. The last attempt terminates.

Observation float32 (30,): the game's own numbers as in `popgym-GAME`, zeros up to 26, then t / 1000 (t: steps taken in
the attempt), warm-up attempts finished / warm-up attempts, whether the last action was one of the game's, and its
reward. Actions: 26 choices; one that the game does not have is replaced by a random one that it has. Two games have a
27th action (a card seen 26 times), which cannot be chosen.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.attempts import with_attempts
from pipelines.envs.gymnasium_env import GymnasiumEnv
from pipelines.envs.suites.popgym import TIME_SCALE, Flat, begin, new_game, step_limit
from pipelines.envs.task_env import FAILED, NOTHING, TaskEnv

WIDTH = 26  # both of observations and of actions
_THREE_LEVELS = (
    "Autoencode",
    "RepeatPrevious",
    "RepeatFirst",
    "CountRecall",
    "PositionOnlyCartPole",
    "VelocityOnlyCartpole",
    "NoisyPositionOnlyCartPole",
    "HigherLower",
)
GAMES = (
    *(game + level for game in _THREE_LEVELS for level in ("Easy", "Medium", "Hard")),
    "MultiarmedBanditEasy",
    "MultiarmedBanditMedium",
    "MineSweeperEasy",
)


class PopgymMultiSettings(SettingsModel):
    """Parameters of `popgym-multi`."""

    warmup: int = Field(1, ge=0)
    """Attempts without rewards, in which to find out which game it is."""
    attempts: int = Field(1, ge=1)
    """Attempts after them, which pay."""


def settings_model(name: str) -> type[SettingsModel]:
    return PopgymMultiSettings


def make(name: str, settings: PopgymMultiSettings, *, num_envs: int, seed: int, split: str) -> GymnasiumEnv:
    longest = max(step_limit(new_game(game)) for game in GAMES)
    return GymnasiumEnv(
        name,
        lambda: with_attempts(PopgymMulti(settings, longest), settings.warmup + settings.attempts, pause=True),
        num_envs=num_envs,
        seed=seed,
        split=split,
    )


class PopgymMulti(TaskEnv):
    """An attempt at one game, which is the task. `longest`: steps of the longest game."""

    about = "One of 27 games that take memory: find out which, then play it"
    splits = "even seeds for train, odd seeds for test, of the same games"
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (WIDTH + 4,), np.float32)
    action_space = gymnasium.spaces.Discrete(WIDTH)

    def __init__(self, settings: PopgymMultiSettings, longest: int) -> None:
        self._warmup = settings.warmup
        self.horizon = longest
        self._named: str | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        game = GAMES[self.np_random.integers(len(GAMES))]
        self.task, self.outcome = self._named or game, NOTHING
        self._game = new_game(self.task)
        self._flat = Flat(self._game.observation_space)
        self._places = _places(self._game.action_space)
        self._choices = min(int(np.prod(self._places)), WIDTH)
        self._finished = 0
        return self._begin(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        valid = action < self._choices
        chosen = action if valid else int(self.np_random.integers(self._choices))
        seen, reward, terminated, truncated, _ = self._game.step(self._move(chosen))
        paid = float(reward) if self._finished >= self._warmup else 0.0
        self._time += 1
        over = bool(terminated or truncated)
        self._finished += over
        self.outcome = FAILED if over else NOTHING
        return self._shown(seen, valid=valid, reward=float(reward)), paid, over, bool(truncated), {}

    def retry(self, seed: int) -> np.ndarray:
        return self._begin()

    def play(self, task: str) -> None:
        if task not in GAMES:
            raise ValueError(f"games are {', '.join(GAMES)}")
        self._named = task

    def _begin(self) -> np.ndarray:
        """The first observation of an attempt, which is a new instance of the game."""
        self._time = 0
        return self._shown(begin(self._game, int(self.np_random.integers(2**31))), valid=True, reward=0.0)

    def _shown(self, seen: Any, *, valid: bool, reward: float) -> np.ndarray:
        shown = np.zeros(WIDTH + 4, dtype=np.float32)
        self._flat.write(seen, shown)
        finished = min(self._finished / self._warmup, 1.0) if self._warmup else 1.0
        shown[WIDTH:] = self._time / TIME_SCALE, finished, valid, reward
        return shown

    def _move(self, chosen: int) -> Any:
        """The game's own form of its action number `chosen`."""
        return chosen if len(self._places) == 1 else np.unravel_index(chosen, self._places)


def _places(space: gymnasium.Space) -> tuple[int, ...]:
    """Choices at each place of an action."""
    if isinstance(space, gymnasium.spaces.Discrete):
        return (int(space.n),)
    assert isinstance(space, gymnasium.spaces.MultiDiscrete)
    return tuple(int(n) for n in space.nvec)
