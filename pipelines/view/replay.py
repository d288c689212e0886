"""Drawings of recorded trajectories by the environments that come with amago.

A built-in environment is given the recorded task and plays the recorded actions. Only if observations, rewards and the
end are then exactly those recorded, at every step, are its drawings offered: where chance decides, they would show
another episode. Other environments are not made: their names and parameters come from the lake, which may be somebody
else's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.errors import AmagoError
from pipelines.lake.schema import REWARD, TERMINATED
from pipelines.lake.store import Lake
from pipelines.view.steps import StepReader, StoredTrajectory

NAME = "environment (drawn)"  # in place of a column's
MOST_STEPS = 2000
_MOST_HORIZON = 10_000
_MOST_BYTES = 64 << 20
_KEPT = 4
_KEPT_PICTURES = 128


class Replay:
    """A built-in environment that plays a recorded trajectory; pictures of any of its steps."""

    def __init__(self, env: Any, actions: np.ndarray) -> None:
        self._env, self._actions = env, actions
        self._step = -1
        self._drawn: OrderedDict[int, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def describe(self) -> dict[str, Any]:
        """Describe it as `columns.describe` does a column."""
        shape = list(self.picture(0).shape)
        about = {"name": NAME, "role": "drawing", "dtype": "uint8", "shape": shape, "kind": "drawing"}
        return {**about, "size": 0, "choices": None, "wide": True}

    def picture(self, step: int) -> np.ndarray:
        """Return (H, W, 3) uint8: the environment after `step` actions."""
        step = min(max(step, 0), len(self._actions))
        with self._lock:
            if step not in self._drawn:
                self.play(step)
                self._drawn[step] = np.asarray(self._env.render("rgb_array", 0))[..., :3]
                while len(self._drawn) > _KEPT_PICTURES:
                    self._drawn.popitem(last=False)
            return self._drawn[step]

    def play(self, step: int) -> dict[str, np.ndarray]:
        """Bring the environment to `step`; return the columns of the last row that it went through."""
        row: dict[str, np.ndarray] = {}
        if self._step < 0 or step < self._step:
            row, self._step = dict(self._env.reset()), 0
        while self._step < step:
            result = self._env.step(self._actions[self._step : self._step + 1])
            row = {**result.observation, REWARD: result.reward, TERMINATED: result.terminated}
            self._step += 1
        return row


class Replays:
    """The trajectories of a lake that can be drawn. Calls may come from several threads."""

    def __init__(self, lake: Lake, steps: StepReader) -> None:
        self._lake, self._steps = lake, steps
        self._known: OrderedDict[str, Replay | None] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, found: StoredTrajectory) -> Replay | None:
        """Find or make the replay of a trajectory; None if it cannot be drawn."""
        with self._lock:
            if found.uid not in self._known:
                self._known[found.uid] = self._make(found)
                while len(self._known) > _KEPT:
                    self._known.popitem(last=False)
            return self._known[found.uid]

    def _make(self, found: StoredTrajectory) -> Replay | None:
        rows = found.length + 1
        if found.length > MOST_STEPS or rows * found.schema.step_bytes > _MOST_BYTES:
            return None
        env = self._environment(found.facts)
        if env is None or env.spec.spaces != found.schema.spaces:
            return None
        names = list(found.schema.spaces.observation)
        if found.facts["base_uid"] is None:  # a relabelled one has other rewards
            names += [REWARD, TERMINATED]
        recorded = {name: self._steps.rows(found.uid, name, 0, rows) for name in names}
        replay = Replay(env, self._steps.rows(found.uid, "action", 1, rows))

        def is_recorded(row: Mapping[str, np.ndarray], step: int) -> bool:
            names = [name for name in recorded if step or name not in (REWARD, TERMINATED)]  # nothing led to row 0
            return all(n in row and np.array_equal(row[n][0], recorded[n][step], equal_nan=True) for n in names)

        try:
            env.play_only([found.facts["task"]])
            same = all(is_recorded(replay.play(step), step) for step in range(rows))
            return replay if same and env.render("rgb_array", 0) is not None else None
        except (AmagoError, ValueError, IndexError, OverflowError):  # no such task, or actions that it does not have
            return None

    def _environment(self, facts: Mapping[str, Any]) -> Any:
        """Make the built-in environment that a collector recorded, with one actor; None for any other."""
        from pipelines.rollout.environment import make_recorded_env

        env = make_recorded_env(self._lake, facts, actors=1, drawn=True)
        return env if env is not None and (env.spec.horizon or 0) <= _MOST_HORIZON else None


def draw_trajectory(lake: Lake, uid: str, most: int) -> np.ndarray | None:
    """Draw up to `most` evenly spaced frames (n, H, W, 3) of a trajectory; None if it cannot be drawn exactly."""
    steps = StepReader(lake)
    found = steps.find(uid)
    replay = Replays(lake, steps).find(found)
    if replay is None:
        return None
    places = np.unique(np.linspace(0, found.length, min(most, found.length + 1)).round().astype(int))
    return np.stack([replay.picture(place) for place in places.tolist()])
