"""`minigrid:ID` and `babyai-multi`: small grid worlds with instructions (Chevalier-Boisvert et al., 2018 and 2023).

A task is (level, seed): the seed fixes layout and instruction. The library's codes are at most 10, 5 and 3; here they
are spread over 0 to 255, since networks divide bytes by 255.
"""

from __future__ import annotations

import contextlib
import io
from typing import Any, ClassVar

import gymnasium
import minigrid  # noqa: F401 (registers its levels)
import numpy as np
from gymnasium.envs.registration import load_env_creator
from minigrid.envs.babyai.core.roomgrid_level import RoomGridLevel
from pydantic import Field, field_validator, model_validator

from pipelines.config.base import SettingsModel
from pipelines.envs.env import Env
from pipelines.envs.gymnasium_env import GymnasiumEnv
from pipelines.envs.task_env import NOTHING, Outcome, TaskEnv, repeat_attempts
from pipelines.errors import InputMissing, UsageError
from pipelines.nearest import did_you_mean

PREFIX, MULTI = "minigrid:", "babyai-multi"
_WORDS = """go to the a open pick up red green blue purple yellow grey ball box key door object in front of you on your
    left right behind then"""
WORDS = tuple(_WORDS.split())
_UNKNOWN, _FIRST_WORD, VOCABULARY, MISSION_WORDS = 1, 2, 30, 9
_MISSION_LETTERS = 256
TILE = 24  # pixels of a cell in drawings
SPREAD = np.array([25, 51, 85], dtype=np.uint8)  # 10 kinds, 5 colours and 3 states become at most 255
# Levels with one instruction about one object, and the three others that AMAGO trains on: two that the library calls
# debug levels, and a sequence of two doors.
_LEVELS = """GoToRedBallGrey GoToRedBall GoToRedBallNoDists GoToObj GoToObjS4 GoToObjS6 GoToLocal GoToLocalS5N2
    GoToLocalS6N2 GoToLocalS6N3 GoToLocalS6N4 GoToLocalS7N4 GoToLocalS7N5 GoToLocalS8N2 GoToLocalS8N3 GoToLocalS8N4
    GoToLocalS8N5 GoToLocalS8N6 GoToLocalS8N7 GoTo GoToOpen GoToObjMaze GoToObjMazeOpen GoToObjMazeS4R2
    GoToObjMazeS4 GoToObjMazeS5 GoToObjMazeS6 GoToObjMazeS7 GoToImpUnlock GoToRedBlueBall GoToDoor GoToObjDoor Open
    OpenRedDoor OpenDoor OpenDoorColor OpenDoorLoc Pickup UnblockPickup PickupLoc PickupDist PickupAbove Unlock
    UnlockLocal UnlockLocalDist KeyInBox UnlockPickup UnlockPickupDist BlockedUnlockPickup UnlockToUnlock
    ActionObjDoor FindObjS5 FindObjS6 FindObjS7 KeyCorridor KeyCorridorS3R1 KeyCorridorS3R2 KeyCorridorS3R3
    KeyCorridorS4R3 KeyCorridorS5R3 KeyCorridorS6R3 OneRoomS8 OneRoomS12 OneRoomS16 OneRoomS20 OpenDoorDebug
    OpenRedBlueDoors PickupDistDebug"""
# The library's ID of each level: one of them is in its second version.
LEVELS = {level: f"BabyAI-{level}-v{int(level == 'GoToObjS6')}" for level in _LEVELS.split()}
_NUMBERS = {word: _FIRST_WORD + number for number, word in enumerate(WORDS)}


class _BabyAISettings(SettingsModel):
    """Parameters of `babyai-multi`."""

    levels: tuple[str, ...] | None = Field(None, min_length=1)
    """Levels, e.g. GoToLocal; each episode plays one of them, all equally likely; unset: all 68."""
    test_levels: tuple[str, ...] = ()
    """Levels of `split = "test"`; empty: those of training, with other seeds."""
    attempts: int = Field(2, ge=1)
    """Attempts at one task, in one episode."""

    @field_validator("levels", "test_levels")
    @classmethod
    def _known(cls, levels: tuple[str, ...] | None) -> tuple[str, ...] | None:
        some = f"levels are such as {next(iter(LEVELS))}"
        for name in levels or ():
            if name not in LEVELS:
                raise ValueError(f"'{name}' is not a level of {MULTI}; {did_you_mean(name, LEVELS, otherwise=some)}")
        return levels

    @model_validator(mode="after")
    def _apart(self) -> _BabyAISettings:
        both = sorted({*self.of("train")} & {*self.test_levels})
        if both:
            raise ValueError(f"levels both of training and of test: {', '.join(both)}")
        if not self.of("train"):
            raise ValueError("all levels are test_levels, no level is left to train on")
        return self

    def of(self, split: str) -> tuple[str, ...]:
        """List the levels of one side."""
        if split == "test" and self.test_levels:
            return self.test_levels
        return self.levels or tuple(level for level in LEVELS if level not in self.test_levels)


def find_id(name: str) -> str:
    """Check that the library can make `name`. UsageError for no ID, InputMissing for one whose files it lacks."""
    known = [level for level in gymnasium.registry if level.startswith(("MiniGrid-", "BabyAI-"))]
    if name not in known:
        hint = did_you_mean(name, known, prefix=PREFIX, otherwise=f"IDs are such as '{PREFIX}{known[0]}'")
        raise UsageError(f"minigrid has no environment '{name}'", hint=hint)
    if name.startswith("MiniGrid-WFC-"):
        raise InputMissing(
            f"environment '{name}' needs pattern pictures that minigrid's package lacks",
            hint="choose one without WFC in its name",
        )
    return name


def make_level(level: str) -> Any:
    """Make the level with this ID, without gymnasium's wrappers, whose warnings would be shown at each episode."""
    spec = gymnasium.registry[level]
    assert isinstance(spec.entry_point, str)
    return load_env_creator(spec.entry_point)(**spec.kwargs)


def find_step_limit(level: str) -> int | None:
    """Find the most steps of an attempt. None where it depends on the instruction."""
    env = make_level(level)
    if not isinstance(env, RoomGridLevel) or env.fixed_max_steps:
        return int(env.max_steps)
    if level not in LEVELS.values():
        return None
    return int(env.room_size**2 * env.num_rows * env.num_cols)


class Minigrid(TaskEnv):
    """An attempt at one (level, seed), named `LEVEL/SEED`. `levels`: the library's ID of each name; `attempts`: of how
    many the share of finished ones is shown.
    """

    Settings: ClassVar[type[SettingsModel]] = SettingsModel
    has_success = True
    about = "A grid world seen in part, with an instruction"
    splits = "even seeds for train, odd seeds for test"

    @classmethod
    def make(cls, name: str, settings: Any, *, num_envs: int, seed: int, split: str) -> Env:
        level = find_id(name.removeprefix(PREFIX))
        return cls._make_batch(name, {level: level}, 1, num_envs=num_envs, seed=seed, split=split)

    @classmethod
    def _make_batch(cls, name: str, levels: dict[str, str], attempts: int, splits: str = splits, **which: Any) -> Env:
        limits = [find_step_limit(level) for level in levels.values()]
        longest = None if None in limits else max(filter(None, limits))

        def make_one() -> gymnasium.Env:
            env = cls(levels, attempts=attempts, longest=longest, in_words=name == MULTI)
            env.splits = splits
            return repeat_attempts(env, attempts, pause=True)

        return GymnasiumEnv(name, make_one, max_length=MISSION_WORDS, **which)

    def __init__(self, levels: dict[str, str], *, attempts: int, longest: int | None, in_words: bool) -> None:
        self._attempts, self.horizon = attempts, longest
        self._levels, self._in_words, self.kinds = levels, in_words, tuple(levels)
        self._id = next(iter(levels.values()))
        self._env = make_level(self._id)
        self.action_space = self._env.action_space
        spaces: dict[str, gymnasium.Space[Any]] = {
            "image": self._env.observation_space["image"],
            "direction": gymnasium.spaces.Discrete(4),
        }
        if in_words:
            spaces["mission"] = gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(VOCABULARY))
            spaces["attempt"] = gymnasium.spaces.Box(0.0, 1.0, (1,), np.float32)
        else:
            letters = "".join(map(chr, range(32, 127)))
            spaces["mission"] = gymnasium.spaces.Text(_MISSION_LETTERS, min_length=0, charset=letters)
        self.observation_space = gymnasium.spaces.Dict(spaces)
        self._named: tuple[str, int] | None = None

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = list(self._levels)[self.np_random.integers(len(self._levels))]
        level = (options or {}).get("kind", drawn)
        self._seed = int(self.np_random.integers(2**31)) if seed is None else seed
        if self._named is not None:
            level, self._seed = self._named
        if self._levels[level] != self._id:
            self._id = self._levels[level]
            self._env = make_level(self._id)
        self.task, self.outcome = f"{level}/{self._seed}", NOTHING
        self._finished = 0
        observation = self._begin()
        self.goal_text = self._env.mission
        return observation, {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        seen, reward, terminated, truncated, _ = self._env.step(action)
        over = bool(terminated or truncated)
        self._finished += over
        self.outcome = Outcome(attempt_end=True, success=bool(terminated and reward > 0)) if over else NOTHING
        return self._show(seen), float(reward), bool(terminated), bool(truncated), {}

    def retry(self, seed: int) -> dict[str, Any]:
        return self._begin()

    def play(self, task: str) -> None:
        level, _, seed = task.partition("/")
        if level not in self._levels or not seed.isdecimal():
            raise ValueError(f"tasks are LEVEL/SEED, e.g. {next(iter(self._levels))}/1")
        self._named = level, int(seed)

    def drawn(self, mode: str) -> Any:
        return self._env.pprint_grid() if mode == "ansi" else self._env.get_frame(tile_size=TILE)

    def _begin(self) -> dict[str, Any]:
        """Begin an attempt and return its first observation."""
        with contextlib.redirect_stdout(io.StringIO()):  # levels print each layout that they reject
            return self._show(self._env.reset(seed=self._seed)[0])

    def _show(self, seen: dict[str, Any]) -> dict[str, Any]:
        shown = {"image": seen["image"] * SPREAD, "direction": int(seen["direction"]), "mission": seen["mission"]}
        if self._in_words:
            shown["mission"] = [_NUMBERS.get(word, _UNKNOWN) for word in seen["mission"].replace(",", "").split()]
            shown["attempt"] = np.array([self._finished / self._attempts], dtype=np.float32)
        return shown


class BabyAI(Minigrid):
    """An attempt at one of several levels, whose instruction is shown as numbers of words."""

    Settings = _BabyAISettings

    @classmethod
    def make(cls, name: str, settings: _BabyAISettings, *, num_envs: int, seed: int, split: str) -> Env:
        splits = cls.splits
        if settings.test_levels:
            splits = f"{len(settings.of('train'))} levels to train on, {len(settings.test_levels)} others to test"
        levels = {level: LEVELS[level] for level in settings.of(split)}
        return cls._make_batch(name, levels, settings.attempts, splits, num_envs=num_envs, seed=seed, split=split)
