"""A room with a hidden exit: find it once, remember it, and walk straight to it in every later attempt.

`python -m pytest` tests it, `amago run recipe.toml --minutes 2` trains an agent on it. Change whatever you like.
"""

from typing import Any

import gymnasium
import numpy as np

from pipelines.envs.task_env import FAILED, NOTHING, SOLVED, TaskEnv

MOVES = np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])  # up, down, left, right


class MyEnv(TaskEnv):
    """Several attempts per episode at one task: reach the same exit, which is not observed.

    An attempt starts in the middle of the room, succeeds at the exit and fails after `attempt_steps` steps.
    Observation: row and column from -1 to 1, and 1 at the start of an attempt. The agent also sees its previous action
    and reward. Action: up, down, left or right; walls block. Reward: 1 at the exit.
    """

    has_success = True
    splits = "the same exits"
    render_mode = "ansi"  # `render` returns text

    def __init__(self, size: int = 5, attempts: int = 4, attempt_steps: int = 12) -> None:
        self.size, self.num_attempts, self.attempt_steps = size, attempts, attempt_steps
        self.horizon = attempts * attempt_steps  # maximum length of an episode
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))
        self.place, self.time, self.attempt = np.zeros(2, int), 0, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; the task must depend on the seed alone."""
        super().reset(seed=seed)
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        cells.remove((self.size // 2, self.size // 2))
        self.exit = cells[self.np_random.integers(len(cells))]
        self.task = f"exit at {self.exit}"
        self.attempt = 0
        self.outcome = NOTHING
        return self._begin_attempt(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Return the observation, the reward, terminated, truncated (never here) and an empty info."""
        self.place = np.clip(self.place + MOVES[action], 0, self.size - 1)
        self.time += 1
        found = tuple(self.place) == self.exit
        if not found and self.time < self.attempt_steps:
            self.outcome = NOTHING
            return self._see(), 0.0, False, False, {}
        self.outcome = SOLVED if found else FAILED
        self.attempt += 1
        return self._begin_attempt(), float(found), self.attempt == self.num_attempts, False, {}

    def render(self) -> str:
        """Draw the room, for `amago watch` and videos: @ is the agent, X the exit."""
        marks = {self.exit: "X", tuple(self.place): "@"}
        cells = range(self.size)
        return "\n".join("".join(marks.get((row, column), ".") for column in cells) for row in cells)

    def _begin_attempt(self) -> np.ndarray:
        self.place, self.time = np.full(2, self.size // 2), 0  # the middle
        return self._see()

    def _see(self) -> np.ndarray:
        row, column = 2 * self.place / (self.size - 1) - 1
        return np.array([row, column, self.time == 0], np.float32)
