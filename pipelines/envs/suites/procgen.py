"""`procgen-GAME` and `procgen-multi` (Cobbe et al., ICML 2020): arcade games whose levels are drawn from numbers.

Procgen begins the next attempt within the step that ends one, and draws no picture of the last state, so the last
picture before it is shown again. A game that is asked for a mode that it does not have kills the process, so pairs are
looked up before.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, Literal, get_args

import gymnasium
import numpy as np
from pydantic import Field, field_validator

from pipelines.envs.env import Env, Score
from pipelines.envs.gymnasium_env import GymnasiumEnv
from pipelines.envs.suites.reference_scores import PROCGEN
from pipelines.envs.suites.suite import ProtocolSettings
from pipelines.envs.task_env import FAILED, NOTHING, SOLVED, TaskEnv, repeat_attempts
from pipelines.errors import UsageError
from pipelines.nearest import did_you_mean

PREFIX = "procgen-"
Mode = Literal["easy", "hard", "extreme", "memory", "exploration", "memory-hard"]
_NAMED = "bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper leaper maze miner ninja"
GAMES = (*_NAMED.split(), "plunder", "starpilot")
_ONLY = {  # modes that only these games have
    "extreme": "chaser dodgeball leaper starpilot",
    "memory": "caveflyer dodgeball heist jumper maze miner",
    "exploration": "coinrun caveflyer leaper jumper maze heist climber ninja",
}
_LAST_LEVEL = 2**31 - 1
# Steps after which a game ends an attempt: `timeout` in the games' sources, 1,000 unless a game sets it.
_TIME_LIMIT = 1000
_TIME_LIMITS = {"bigfish": 6000, "bossfight": 4000, "leaper": 500, "maze": 500, "plunder": 4000}
_JUMPER_MEMORY_TIME_LIMIT = 2000  # the only limit that depends on the mode
ACTIONS, _PIXELS, MARK = 15, 64, 4


def list_games(mode: str) -> tuple[str, ...]:
    """List the games that have `mode`."""
    return tuple(_ONLY[mode].split()) if mode in _ONLY else GAMES


def find_mode(game: str, mode: str) -> str:
    """Find the library's mode that `game` is played in.

    >>> find_mode("maze", "memory-hard"), find_mode("coinrun", "memory-hard"), find_mode("maze", "easy")
    ('memory', 'hard', 'easy')
    """
    if mode == "memory-hard":
        return "memory" if game in list_games("memory") else "hard"
    return mode


def find_time_limit(game: str, mode: str) -> int:
    """Find the number of steps after which `game` ends an attempt in `mode`.

    >>> find_time_limit("jumper", "easy"), find_time_limit("jumper", "memory"), find_time_limit("bigfish", "hard")
    (1000, 2000, 6000)
    """
    if (game, find_mode(game, mode)) == ("jumper", "memory"):
        return _JUMPER_MEMORY_TIME_LIMIT
    return _TIME_LIMITS.get(game, _TIME_LIMIT)


class ProcgenSettings(ProtocolSettings):
    """Parameters of `procgen-GAME`."""

    mode: Mode = "easy"
    """Difficulty; only some games have extreme, memory and exploration (one fixed level). memory-hard: memory where a
    game has it, else hard.
    """
    levels: int = Field(200, ge=1, lt=_LAST_LEVEL)
    """Levels to train on: 0 to levels - 1. Test levels are the later ones."""
    attempts: int = Field(1, ge=1)
    """Attempts at a level in each episode."""
    backgrounds: bool = True
    """Draw pictures behind the game; false: black."""

    @classmethod
    def paper(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The paper's: 500 levels of the hard mode, 200 of the easy one, one attempt at each."""
        mode = given.get("mode", "hard")
        return {"mode": mode, "levels": 200 if mode == "easy" else 500, "attempts": 1}


class ProcgenMultiSettings(ProcgenSettings):
    """Parameters of `procgen-multi`."""

    attempts: int = Field(2, ge=1)
    """Attempts at a level in each episode."""
    games: tuple[str, ...] = ()
    """Games, each as likely; empty: all that have the mode."""
    reward_scales: dict[str, float] = Field(default_factory=dict)
    """Factors of the rewards of some games, such as `{bigfish = 0.25}`; 1 for the others."""

    @field_validator("reward_scales")
    @classmethod
    def _of_games(cls, scales: dict[str, float]) -> dict[str, float]:
        for game, scale in scales.items():
            if game not in GAMES:
                raise ValueError(f"there is no Procgen game '{game}'")
            if not 0 < scale < math.inf:
                raise ValueError(f"the scale of '{game}' must be positive and finite, not {scale}")
        return scales


class Procgen(TaskEnv):
    """An attempt at a level of one of `games`. A task is named `GAME/LEVEL`."""

    Settings: ClassVar[type[ProcgenSettings]] = ProcgenSettings
    has_success = True
    about = "Arcade games whose levels are drawn from numbers"
    observation_space = gymnasium.spaces.Box(0, 255, (_PIXELS, _PIXELS, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(ACTIONS)

    @classmethod
    def make(cls, name: str, settings: ProcgenSettings, *, num_envs: int, seed: int, split: str) -> Env:
        able = list_games(settings.mode)
        games: tuple[str, ...] = (name.removeprefix(PREFIX),)
        if isinstance(settings, ProcgenMultiSettings):
            games = settings.games or able
        for game in games:
            if game not in GAMES:
                hint = did_you_mean(game, GAMES, otherwise=f"games: {', '.join(GAMES)}")
                raise UsageError(f"there is no Procgen game '{game}'", hint=hint)
            if game not in able:
                modes = [mode for mode in get_args(Mode) if game in list_games(mode)]
                raise UsageError(
                    f"the Procgen game '{game}' has no mode '{settings.mode}'",
                    hint=f"its modes: {', '.join(modes)}; games with this one: {', '.join(able)}",
                )

        def make_one() -> gymnasium.Env:
            return repeat_attempts(cls(settings, games), settings.attempts, pause=True)

        return GymnasiumEnv(name, make_one, num_envs=num_envs, seed=seed, split=split)

    def __init__(self, settings: ProcgenSettings, games: tuple[str, ...]) -> None:
        s = self.settings = settings
        self.games = self.kinds = games
        self.horizon = max(find_time_limit(game, s.mode) for game in games)
        self.splits = f"levels 0 to {s.levels - 1} to train on, later ones to test"
        if s.mode == "exploration":
            self.splits = "each game has one level in this mode, on both sides"
        self._package = import_procgen()
        self._scales = s.reward_scales if isinstance(s, ProcgenMultiSettings) else {}
        self.score = self._find_score()
        self._named: tuple[str, int] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        s, rng = self.settings, self.np_random
        low, high = (s.levels, _LAST_LEVEL) if self.split == "test" else (0, s.levels)
        drawn, self.level = self.games[rng.integers(len(self.games))], int(rng.integers(low, high))
        self.game = (options or {}).get("kind", drawn)
        if self._named is not None:
            self.game, self.level = self._named
        if s.mode == "exploration":
            self.level = int(self._package.env.EXPLORATION_LEVEL_SEEDS[self.game])
        self.task, self.outcome = f"{self.game}/{self.level}", NOTHING
        self._attempt = self._time = 0
        self._play = self._make_game()
        self._picture = self._play.observe()[1]["rgb"][0]
        return self._picture, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._play.act(np.array([action]))
        rewards, observation, first = self._play.observe()
        reward = float(rewards[0]) * self._scales.get(self.game, 1.0)
        self._time += 1
        if not first[0]:
            self.outcome, self._picture = NOTHING, observation["rgb"][0]
            return self._show(), reward, False, False, {}
        solved = bool(self._play.get_info()[0]["prev_level_complete"])
        late = self._time >= find_time_limit(self.game, self.settings.mode)
        truncated = self.settings.attempts == 1 and not solved and late
        self.outcome = SOLVED if solved else FAILED
        return self._show(), reward, not truncated, truncated, {}

    def retry(self, seed: int) -> np.ndarray:
        """The game already is at its start."""
        self._time = 0
        self._attempt += 1
        self._picture = self._play.observe()[1]["rgb"][0]
        return self._show()

    def play(self, task: str) -> None:
        game, _, level = task.partition("/")
        if game not in self.games:
            raise ValueError(f"its games are {', '.join(self.games)}")
        if not level.isdecimal() or int(level) >= _LAST_LEVEL:
            raise ValueError(f"tasks are named GAME/LEVEL, and levels go from 0 to {_LAST_LEVEL - 1}")
        self._named = game, int(level)

    def _make_game(self) -> Any:
        """Make the game at the start of its level; it returns there by itself after each attempt."""
        s = self.settings
        levels = {} if s.mode == "exploration" else {"start_level": self.level, "num_levels": 1}
        return self._package.ProcgenGym3Env(
            num=1,
            env_name=self.game,
            distribution_mode=find_mode(self.game, s.mode),
            use_backgrounds=s.backgrounds,
            rand_seed=0,  # of the choice among levels; there is one
            num_threads=0,
            **levels,
        )

    def _show(self) -> np.ndarray:
        if not self._attempt:
            return self._picture
        picture = self._picture.copy()
        picture[:MARK, :MARK] = 0
        return picture

    def _find_score(self) -> Score | None:
        """Find the paper's normalisation, of an attempt's mean return before scaling; None if a game has no bounds."""
        modes = {game: find_mode(game, self.settings.mode) for game in self.games}
        if not set(modes.values()) <= PROCGEN.keys():
            return None
        bounds = {}
        for game, mode in modes.items():
            low, high = PROCGEN[mode][game]
            unit = self.settings.attempts * self._scales.get(game, 1.0)
            bounds[game] = (low * unit, high * unit)
        return Score(name="procgen_normalized", bounds=bounds)


class ProcgenMulti(Procgen):
    """An attempt at a level of several games."""

    Settings = ProcgenMultiSettings


def import_procgen() -> ModuleType:
    """Import the package without the `gym` at which it registers its games: that one does not work with numpy 2, prints
    a notice, and is not needed. So Procgen also runs where it was installed without its dependencies.
    """
    if "procgen" in sys.modules or "gym" in sys.modules:
        return importlib.import_module("procgen")
    absent = {name: ModuleType(name) for name in ("gym", "gym.envs", "gym.envs.registration")}
    absent["gym.envs.registration"].register = lambda **_: None  # type: ignore[attr-defined]
    sys.modules.update(absent)
    try:
        return importlib.import_module("procgen")
    finally:
        for name in absent:
            sys.modules.pop(name, None)
