"""POPGym (Morad et al., ICLR 2023): `popgym-GAME`, one of its games, and `popgym-multi`, 27 of them.

`popgym-multi` pads observations to 26 numbers and has 26 actions; one that the game does not have is replaced by a
random one that it has. Two of its games have a 27th action (a card seen 26 times), which cannot be chosen.
"""

from __future__ import annotations

import operator
import random
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from popgym.envs import ALL
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.env import Env
from pipelines.envs.gymnasium_env import GymnasiumEnv
from pipelines.envs.task_env import FAILED, NOTHING, TaskEnv, repeat_attempts
from pipelines.errors import UsageError
from pipelines.nearest import did_you_mean

PREFIX = "popgym-"
_TIME_SCALE = 1000.0
# RepeatPreviousEasy and so on; VelocityOnlyCartpole is spelled so.
GAMES = {registered["id"].removeprefix(PREFIX).removesuffix("-v0"): game for game, registered in ALL.items()}


class _PopgymSettings(SettingsModel):
    """Parameters of `popgym-GAME`."""

    time_limit_ends: bool = True
    """The game's step limit is an end of the game (terminated and truncated), not a pause in it (truncated alone)."""


class Popgym(TaskEnv):
    """One game as numbers; the seed is its instance."""

    Settings = _PopgymSettings
    about = "A game that takes memory"
    splits = "even seeds for train, odd seeds for test"

    @classmethod
    def make(cls, name: str, settings: _PopgymSettings, *, num_envs: int, seed: int, split: str) -> Env:
        game = name.removeprefix(PREFIX)
        if game not in GAMES:
            kinds = [known.removesuffix("Easy") for known in GAMES if known.endswith("Easy")]
            games = f"games, each followed by Easy, Medium or Hard: {', '.join(kinds)}"
            hint = did_you_mean(game, GAMES, prefix=PREFIX, otherwise=games)
            raise UsageError(f"POPGym has no game '{game}'", hint=hint)
        return GymnasiumEnv(name, lambda: cls(game, settings), num_envs=num_envs, seed=seed, split=split)

    def __init__(self, game: str, settings: _PopgymSettings) -> None:
        self._game, self._time_limit_ends = new_game(game), settings.time_limit_ends
        self.task, self.horizon = game, find_step_limit(self._game)
        self._write, self._size = make_writer(self._game.observation_space), count_numbers(self._game.observation_space)
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (self._size + 1,), np.float32)
        self.action_space = self._game.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._time, self.outcome = 0, NOTHING
        return self._show(begin(self._game, int(self.np_random.integers(2**31)) if seed is None else seed)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, reward, terminated, truncated, _ = self._game.step(action)
        self._time += 1
        self.outcome = FAILED if terminated or truncated else NOTHING
        ended = terminated or (truncated and self._time_limit_ends)
        return self._show(seen), float(reward), bool(ended), bool(truncated), {}

    def play(self, task: str) -> None:
        if task != self.task:
            raise ValueError(f"its only task is '{self.task}'")

    def _show(self, seen: Any) -> np.ndarray:
        shown = np.zeros(self._size + 1, dtype=np.float32)
        self._write(seen, shown)
        shown[-1] = self._time / _TIME_SCALE
        return shown


def new_game(game: str) -> gymnasium.Env:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the mazes say that they need no memory
        return GAMES[game]()


def begin(game: gymnasium.Env, seed: int) -> Any:
    """Begin a game and return its first observation. The mazes draw from global generators, which are left as they
    were.
    """
    ours, theirs = random.getstate(), np.random.get_state()
    try:
        return game.reset(seed=seed)[0]
    finally:
        random.setstate(ours)
        np.random.set_state(theirs)


def find_step_limit(game: gymnasium.Env) -> int:
    """Find the most steps of a game: the cards that are dealt, or the game's own limit."""
    for name in ("max_episode_length", "episode_length"):
        if hasattr(game, name):
            return int(getattr(game, name))
    return int(game.deck.num_cards) - 1  # type: ignore[attr-defined]


def count_numbers(space: gymnasium.Space[Any]) -> int:
    """Count the numbers that `make_writer` makes of an observation."""
    if isinstance(space, gymnasium.spaces.Tuple):
        return sum(count_numbers(part) for part in space.spaces)
    if isinstance(space, gymnasium.spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, gymnasium.spaces.Discrete):
        return int(space.n)
    assert space.shape is not None
    return int(np.prod(space.shape))


def make_writer(space: gymnasium.Space[Any], first: int = 0) -> Callable[[Any, np.ndarray], None]:
    """Make a function that writes an observation of `space` into zeros (size,) float32, from the place `first` on:
    numbers as they are, each choice one-hot, one after another. It raises ValueError for one outside the space.
    """
    if isinstance(space, gymnasium.spaces.Tuple):
        firsts = np.cumsum([first, *map(count_numbers, space.spaces)]).tolist()
        parts = [make_writer(part, place) for part, place in zip(space.spaces, firsts, strict=False)]

        def write_all(seen: Any, out: np.ndarray) -> None:
            for write, value in zip(parts, seen, strict=True):
                write(value, out)

        return write_all
    if not isinstance(space, gymnasium.spaces.Discrete | gymnasium.spaces.MultiDiscrete):
        stop = first + count_numbers(space)

        def write_numbers(seen: Any, out: np.ndarray) -> None:
            out[first:stop] = np.asarray(seen, dtype=np.float32).ravel()

        return write_numbers
    is_one = isinstance(space, gymnasium.spaces.Discrete)
    sizes = [int(space.n)] if isinstance(space, gymnasium.spaces.Discrete) else space.nvec.ravel().tolist()
    places = np.cumsum([first, *sizes]).tolist()

    def write_choices(seen: Any, out: np.ndarray) -> None:
        choices = [seen] if is_one else np.asarray(seen).ravel().tolist()
        for choice, size, place in zip(choices, sizes, places, strict=False):
            if not 0 <= choice < size:
                raise ValueError(f"the game shows {seen}, which is not in {space}")
            out[place + operator.index(choice)] = 1.0
        if len(choices) != len(sizes):
            raise ValueError(f"the game shows {seen}, which is not in {space}")

    return write_choices


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
MULTI_GAMES = (
    *(game + level for game in _THREE_LEVELS for level in ("Easy", "Medium", "Hard")),
    "MultiarmedBanditEasy",
    "MultiarmedBanditMedium",
    "MineSweeperEasy",
)


class _PopgymMultiSettings(SettingsModel):
    """Parameters of `popgym-multi`."""

    warmup: int = Field(1, ge=0)
    """Attempts without rewards, in which to find out which game it is."""
    attempts: int = Field(1, ge=1)
    """Attempts after them, which pay."""


class PopgymMulti(TaskEnv):
    """An attempt at one game, which is the task. `longest`: steps of the longest game."""

    Settings = _PopgymMultiSettings
    about = "One of 27 games that take memory: find out which, then play it"
    splits = "even seeds for train, odd seeds for test, of the same games"
    kinds = MULTI_GAMES
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (WIDTH + 4,), np.float32)
    action_space = gymnasium.spaces.Discrete(WIDTH)

    @classmethod
    def make(cls, name: str, settings: _PopgymMultiSettings, *, num_envs: int, seed: int, split: str) -> Env:
        longest = max(find_step_limit(new_game(game)) for game in MULTI_GAMES)

        def make_one() -> gymnasium.Env:
            return repeat_attempts(cls(settings, longest), settings.warmup + settings.attempts, pause=True)

        return GymnasiumEnv(name, make_one, num_envs=num_envs, seed=seed, split=split)

    def __init__(self, settings: _PopgymMultiSettings, longest: int) -> None:
        self._warmup = settings.warmup
        self.horizon = longest
        self._named: str | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = MULTI_GAMES[self.np_random.integers(len(MULTI_GAMES))]
        self.task, self.outcome = self._named or (options or {}).get("kind", drawn), NOTHING
        self._game = new_game(self.task)
        self._write, actions = make_writer(self._game.observation_space), self._game.action_space
        if isinstance(actions, gymnasium.spaces.Discrete):
            self._places: tuple[int, ...] = (int(actions.n),)
        else:
            assert isinstance(actions, gymnasium.spaces.MultiDiscrete)
            self._places = tuple(int(n) for n in actions.nvec)
        self._choices = min(int(np.prod(self._places)), WIDTH)
        self._finished = 0
        return self._begin(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        valid = action < self._choices
        chosen = action if valid else int(self.np_random.integers(self._choices))
        move = chosen if len(self._places) == 1 else np.unravel_index(chosen, self._places)
        seen, reward, terminated, truncated, _ = self._game.step(move)
        paid = float(reward) if self._finished >= self._warmup else 0.0
        self._time += 1
        over = bool(terminated or truncated)
        self._finished += over
        self.outcome = FAILED if over else NOTHING
        return self._show(seen, valid=valid, reward=float(reward)), paid, over, bool(truncated), {}

    def retry(self, seed: int) -> np.ndarray:
        return self._begin()

    def play(self, task: str) -> None:
        if task not in MULTI_GAMES:
            raise ValueError(f"games are {', '.join(MULTI_GAMES)}")
        self._named = task

    def _begin(self) -> np.ndarray:
        """Begin an attempt, which is a new instance of the game; return its first observation."""
        self._time = 0
        return self._show(begin(self._game, int(self.np_random.integers(2**31))), valid=True, reward=0.0)

    def _show(self, seen: Any, *, valid: bool, reward: float) -> np.ndarray:
        shown = np.zeros(WIDTH + 4, dtype=np.float32)
        self._write(seen, shown)
        finished = min(self._finished / self._warmup, 1.0) if self._warmup else 1.0
        shown[WIDTH:] = self._time / _TIME_SCALE, finished, valid, reward
        return shown
