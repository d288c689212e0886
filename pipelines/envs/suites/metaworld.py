"""Meta-World v3: a robot arm, and attempts at one task of one of fifty classes (Yu et al., CoRL 2020).

Tasks are built from the classes: the library's gymnasium registrations give test goals under the train name. In the
library's ml25 one test class is trained on as well, so its test goals are others; mt holds no class out.
"""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from metaworld import env_dict
from metaworld.sawyer_xyz_env import SawyerXYZEnv
from pydantic import Field

from pipelines.config.base import SettingsModel
from pipelines.envs.env import Env
from pipelines.envs.gymnasium_env import GymnasiumEnv
from pipelines.envs.suites.metaworld_tasks import NUM_GOALS, ClassPool
from pipelines.envs.suites.suite import ProtocolSettings
from pipelines.envs.task_env import NOTHING, Outcome, TaskEnv, repeat_attempts
from pipelines.errors import UsageError
from pipelines.nearest import did_you_mean

PREFIX, _ONE_CLASS, VERSION = "metaworld-", "metaworld-ml1-", "-v3"
_ATTEMPT_STEPS = 500
_ML = {"ml10": env_dict.ML10_V3, "ml25": env_dict.ML25_V3, "ml45": env_dict.ML45_V3}
_MT = {"mt10": env_dict.MT10_V3, "mt25": env_dict.MT25_V3, "mt50": env_dict.MT50_V3}
ALL_CLASSES = tuple(env_dict.ALL_V3_ENVIRONMENTS)
_NUMBERS = frozenset(map(str, range(NUM_GOALS)))
_SPLITS = {
    "ml1": "50 goals of the class for train, 50 others for test",
    "ml10": "5 classes for test, none of which is trained on",
    "ml25": "5 classes for test, with 50 other goals each; one of them, basketball, is trained on",
    "ml45": "5 classes for test, none of which is trained on",
    "mt": "50 goals of each class for train, 50 others for test",
}


class _MetaworldSettings(SettingsModel):
    """Parameters of `metaworld-ml...`."""

    attempts: int = Field(3, ge=1)
    """Attempts at one task, in one episode."""
    attempt_steps: int = Field(_ATTEMPT_STEPS, ge=1, le=_ATTEMPT_STEPS)
    """Steps of an attempt; the benchmarks have 500."""
    goal_seed: int = Field(0, ge=0, lt=2**31)
    """Which goals there are, whatever the run's seed; train and test are apart for each value."""


class _MultiTaskSettings(_MetaworldSettings, ProtocolSettings):
    """Parameters of `metaworld-mt...`."""

    PAPER: ClassVar = {"new_goals": False}

    attempts: int = Field(1, ge=1)
    """Attempts at one task, in one episode."""
    new_goals: bool = True
    """Test on 50 other goals of each class; false: on the goals of training, as papers do."""


def choose_classes(name: str, split: str, goal_seed: int) -> tuple[tuple[str, ...], int]:
    """Choose the classes of one side of benchmark `name`, and the seed of their goals."""
    benchmark, other = name.removeprefix(PREFIX), goal_seed + (split == "test")
    if benchmark in _ML:
        train, test = _ML[benchmark]["train"], _ML[benchmark]["test"]
        overlap = not test.keys().isdisjoint(train)  # ml25: basketball is on both sides
        return tuple(test if split == "test" else train), other if overlap else goal_seed
    if benchmark in _MT:
        return tuple(_MT[benchmark]), other
    return (name.removeprefix(_ONE_CLASS),), other


class Metaworld(TaskEnv):
    """An attempt at one (class, goal), named `CLASS/NUMBER`. The simulation is made at the first reset."""

    Settings: ClassVar[type[SettingsModel]] = _MetaworldSettings
    has_success = True
    about = "A robot arm and objects: attempts at one task, shown or hidden"
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (4,), np.float32)

    @classmethod
    def make(cls, name: str, settings: _MetaworldSettings, *, num_envs: int, seed: int, split: str) -> Env:
        given = name.removeprefix(_ONE_CLASS)
        if given != name:  # `reach` or `reach-v3`
            class_name = given if given.endswith(VERSION) else given + VERSION
            if class_name not in ALL_CLASSES:
                short = [known.removesuffix(VERSION) for known in ALL_CLASSES]
                classes = f"its {len(short)} classes: {', '.join(short)}"
                hint = did_you_mean(given.removesuffix(VERSION), short, prefix=_ONE_CLASS, otherwise=classes)
                raise UsageError(f"Meta-World has no class '{given}'", hint=hint)
            name = _ONE_CLASS + class_name
        old_goals = isinstance(settings, _MultiTaskSettings) and not settings.new_goals
        chosen, goal_seed = choose_classes(name, "train" if old_goals else split, settings.goal_seed)
        benchmark = name.removeprefix(PREFIX)
        shows_goal = benchmark in _MT
        splits = _SPLITS["mt" if shows_goal else benchmark if benchmark in _ML else "ml1"]
        if old_goals:
            splits = "the same 50 goals of each class on both sides"
        pool = ClassPool(goal_seed=goal_seed, hide_goal=not shows_goal)

        def make_one() -> gymnasium.Env:
            env = cls(settings, classes=chosen, pool=pool, shows_goal=shows_goal, splits=splits)
            return repeat_attempts(env, settings.attempts)

        return GymnasiumEnv(name, make_one, num_envs=num_envs, seed=seed, split=split)

    def __init__(
        self, settings: _MetaworldSettings, *, classes: tuple[str, ...], pool: ClassPool, shows_goal: bool, splits: str
    ) -> None:
        self.splits, self.horizon = splits, settings.attempt_steps
        self._steps, self._classes, self._pool, self._shows_goal = settings.attempt_steps, classes, pool, shows_goal
        self.kinds = classes
        self._named: tuple[str, int] | None = None
        self._env: SawyerXYZEnv | None = None
        self._class = ""
        seen: gymnasium.Space[Any] = gymnasium.spaces.Box(-np.inf, np.inf, (40,), np.float32)
        if shows_goal:
            seen = gymnasium.spaces.Dict({"state": seen, "class": gymnasium.spaces.Discrete(len(classes))})
        self.observation_space = seen

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = self._classes[self.np_random.integers(len(self._classes))]
        name, goal = (options or {}).get("kind", drawn), int(self.np_random.integers(NUM_GOALS))
        if self._named is not None:
            name, goal = self._named
        self._release()
        self._env, self._class = self._pool.take(name, goal), name
        self.task, self.outcome = f"{name}/{goal}", NOTHING
        self.goal_text = name.removesuffix(VERSION).replace("-", " ") if self._shows_goal else ""
        return self._begin(soft=False), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self._env is not None
        state, reward, _, _, info = self._env.step(action)
        self._time += 1
        self._succeeded |= bool(info["success"])
        over = self._time == self._steps
        self.outcome = Outcome(attempt_end=True, success=self._succeeded) if over else NOTHING
        return self._show(state, soft=False), float(reward), over, over, {}

    def retry(self, seed: int) -> Any:
        return self._begin(soft=True)

    def play(self, task: str) -> None:
        name, _, number = task.partition("/")
        if name not in self._classes or number not in _NUMBERS:
            raise ValueError(f"tasks are CLASS/NUMBER, of {', '.join(self._classes)} and 0 to {NUM_GOALS - 1}")
        self._named = name, int(number)

    def close(self) -> None:
        self._release()

    def drawn(self, mode: str) -> Any:
        if mode != "rgb_array" or self._env is None:
            return None
        self._env.render_mode = mode
        return self._env.render()

    def _begin(self, *, soft: bool) -> Any:
        """Begin an attempt and return its first observation."""
        assert self._env is not None
        self._time, self._succeeded = 0, False
        return self._show(self._env.reset()[0], soft=soft)

    def _show(self, state: np.ndarray, *, soft: bool) -> Any:
        shown = np.empty(40, dtype=np.float32)
        shown[:39], shown[39] = state, soft
        return {"state": shown, "class": self._classes.index(self._class)} if self._shows_goal else shown

    def _release(self) -> None:
        if self._env is not None:
            self._pool.give(self._class, self._env)
            self._env = None


class MetaworldMultiTask(Metaworld):
    """An attempt at one task of the multi-task benchmarks."""

    Settings = _MultiTaskSettings
