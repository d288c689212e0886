"""Slow implementations of the built-ins, one environment at a time, written from their rules sentence by
sentence.

They know nothing of the fast ones but the random numbers: `draw(stream, counter)` gives the one that the fast
environment used for that purpose, so that both walk through the same world.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

Draw = Callable[[int, int], float]


class Outcome(NamedTuple):
    observation: dict[str, list[float]]
    reward: float
    terminated: bool
    truncated: bool
    reset: bool
    attempt_end: bool
    success: bool


class LiteralFrozenLake:
    """Map rows as strings of `.` and `#`; the start is the first cell, the goal the last."""

    def __init__(self, rows, swapped, draw: Draw, streams, *, attempts, limit, hard, recover, slip, show_progress):
        self.rows, self.swapped, self.draw, self.streams = rows, swapped, draw, streams
        self.attempts, self.limit, self.hard, self.recover = attempts, limit, hard, recover
        self.slip, self.show_progress = slip, show_progress
        self.size = len(rows)
        self.finished = self.time = 0
        self.begin_attempt()

    def begin_attempt(self):
        self.ice = [list(row) for row in self.rows]
        self.row = self.column = self.steps = 0

    def observe(self, fresh, finished):
        row, column = self.row, self.column
        if self.hard and self.draw(self.streams["jitter"], self.time) < 0.25:
            row += int(self.draw(self.streams["jitter_row"], self.time) * 3) - 1
            column += int(self.draw(self.streams["jitter_column"], self.time) * 3) - 1
            row, column = max(0, min(self.size - 1, row)), max(0, min(self.size - 1, column))
        shown = finished / self.attempts if self.show_progress else 0
        return {"obs": [row / self.size, column / self.size, float(fresh), shown]}

    def first(self):
        return self.observe(True, 0)

    def step(self, action):
        self.time += 1
        self.steps += 1
        if self.draw(self.streams["slip"], self.time) < self.slip:
            action = 0
        if self.swapped:
            action = {1: 3, 3: 1}.get(action, action)
        row, column = self.row, self.column
        if action == 1:
            row = min(row + 1, self.size - 1)
        elif action == 2:
            row = max(row - 1, 0)
        elif action == 3:
            column = min(column + 1, self.size - 1)
        elif action == 4:
            column = max(column - 1, 0)
        reward, over, success = 0.0, False, False
        left = (self.row, self.column)
        if self.hard and (row, column) != left and self.draw(self.streams["melt"], self.time) < 0.33:
            self.ice[left[0]][left[1]] = "#"
        if self.ice[row][column] == "#":
            if self.recover:
                reward = -0.1
            else:
                over = True
                self.row, self.column = row, column
        else:
            self.row, self.column = row, column
        if (self.row, self.column) == (self.size - 1, self.size - 1):
            reward, over, success = 1.0, True, True
        if self.steps >= self.limit:
            over = True
        before = self.finished
        if over:
            self.begin_attempt()
            self.finished += 1
        observation = self.observe(over, before)
        return Outcome(observation, reward, self.finished >= self.attempts, False, over, over, success)


class LiteralTMaze:
    def __init__(self, side, *, variant, corridor, goal_reward, penalty, penalty_rule):
        self.side, self.goal_reward, self.penalty, self.penalty_rule = side, goal_reward, penalty, penalty_rule
        self.oracle_length = {"passive": 0, "active": 1}[variant]
        self.end = self.oracle_length + corridor
        self.length = {"passive": corridor + 1, "active": corridor + 3}[variant]
        self.x, self.y, self.time, self.visited = self.oracle_length, 0, 0, False

    def observe(self):
        if self.x == 0:
            sign = 0 if self.visited else self.side
            self.visited = True
            return {"obs": [0.0, float(sign)]}
        if self.x == self.end:
            return {"obs": [1.0, float(self.y)]}
        return {"obs": [0.0, 0.0]}

    first = observe

    def step(self, action):
        self.time += 1
        x, y = {0: (1, 0), 1: (0, 1), 2: (-1, 0), 3: (0, -1)}[action]
        x, y = self.x + x, self.y + y
        if (x, y) in {(self.end, 1), (self.end, -1)} | {(cell, 0) for cell in range(self.end + 1)}:
            self.x, self.y = x, y
        last = self.time == self.length
        success = last and self.y == self.side
        reward = 0.0
        if last:
            reward = self.goal_reward if success else 0.0
        elif self.penalty_rule == "action":
            reward = self.penalty if action != 0 and self.time > self.oracle_length else 0.0
        elif self.x < self.time - self.oracle_length:
            reward = self.penalty
        return Outcome(self.observe(), reward, last, last, False, last, success)


class LiteralDarkKeyDoor:
    def __init__(self, start, key, door, meaning, *, size, light, show_clock, attempt_steps, horizon):
        self.start, self.key, self.door, self.meaning = start, key, door, meaning
        self.size, self.light, self.attempt_steps, self.horizon = size, light, attempt_steps, horizon
        self.show_clock = show_clock
        self.place, self.has_key, self.steps, self.time, self.over = start, False, 0, 0, False

    def observe(self):
        shown = [self.place[0] / self.size, self.place[1] / self.size, float(self.has_key)]
        if self.show_clock:
            shown.append(self.steps / self.attempt_steps)
        if self.light:
            shown += [c / self.size for c in (*self.door, *self.key)]
        return {"obs": shown}

    first = observe

    def step(self, action):
        self.time += 1
        reward, success, went_back = 0.0, False, self.over
        if self.over:
            self.place, self.has_key, self.steps, self.over = self.start, False, 0, False
        else:
            dx, dy = [(0, -1), (-1, 0), (0, 1), (1, 0), (0, 0)][self.meaning[action]]
            x, y = self.place[0] + dx, self.place[1] + dy
            self.place = (max(0, min(self.size - 1, x)), max(0, min(self.size - 1, y)))
            self.steps += 1
            if self.has_key and self.place == self.door:
                reward, success, self.over = 1.0, True, True
            elif not self.has_key and self.place == self.key:
                reward, self.has_key = 1.0, True
            if self.steps >= self.attempt_steps:
                self.over = True
        last = self.time == self.horizon
        return Outcome(self.observe(), reward, last, last, went_back, self.over, success)


class LiteralGoalFrozenLake:
    def __init__(self, rows, goal, *, limit):
        self.rows, self.goal, self.limit = rows, goal, limit
        self.size, self.row, self.column, self.time = len(rows), 0, 0, 0

    def observe(self):
        holes = []
        for row, column in ((1, 0), (-1, 0), (0, 1), (0, -1)):
            row, column = self.row + row, self.column + column
            inside = 0 <= row < self.size and 0 <= column < self.size
            holes.append(float(inside and self.rows[row][column] == "#"))
        here = [self.row / self.size, self.column / self.size]
        return {
            "obs.observation": here + holes,
            "obs.achieved_goal": here,
            "obs.desired_goal": [self.goal[0] / self.size, self.goal[1] / self.size],
        }

    first = observe

    def step(self, action):
        self.time += 1
        row, column = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)][action]
        if 0 <= self.row + row < self.size and 0 <= self.column + column < self.size:
            self.row, self.column = self.row + row, self.column + column
        success = (self.row, self.column) == self.goal
        terminated = success or self.rows[self.row][self.column] == "#"
        truncated = not terminated and self.time >= self.limit
        over = terminated or truncated
        return Outcome(self.observe(), float(success), terminated, truncated, False, over, success)


def assert_equal(env, literal_of: Callable[[int], object], *, steps: int, seed: int = 0, good: float = 0.0) -> int:
    """Step `env` and one literal environment for each actor with the same actions; all they show must be
    equal.

    `literal_of(i)` makes actor i's for its present task. With chance `good` an action is the expert's.
    Returns the number of episodes that ended.
    """
    rng = np.random.default_rng(0)
    observation = env.reset()
    literals = [literal_of(i) for i in range(env.num_envs)]
    for i, literal in enumerate(literals):
        _same_observation(observation, i, literal.first())
    episodes = 0
    for _ in range(steps):
        actions = rng.integers(env.spec.spaces.action.n, size=env.num_envs)
        actions = np.where(rng.random(env.num_envs) < good, env.expert(), actions).astype(np.int32)
        result = env.step(actions)
        for i, literal in enumerate(literals):
            expected = literal.step(int(actions[i]))
            _same_observation(result.observation, i, expected.observation)
            assert result.reward[i] == np.float32(expected.reward)
            for flag in ("terminated", "truncated", "reset", "attempt_end", "success"):
                assert bool(getattr(result, flag)[i]) == expected[Outcome._fields.index(flag)], flag
        over = result.terminated | result.truncated
        if over.any():
            observation = env.reset(over)
            for i in np.flatnonzero(over):
                literals[i] = literal_of(i)
                _same_observation(observation, i, literals[i].first())
                episodes += 1
            for i in np.flatnonzero(~over):
                for name, column in observation.items():
                    np.testing.assert_array_equal(column[i], result.observation[name][i])
    return episodes


def _same_observation(observation, i, expected) -> None:
    assert set(observation) == set(expected)
    for name, values in expected.items():
        assert observation[name].dtype == np.float32
        np.testing.assert_array_equal(observation[name][i], np.array(values, dtype=np.float32), err_msg=name)
