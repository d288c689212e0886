"""A batch of TaskEnvs tells of tasks, attempts and success, and can be told which tasks to play."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

from pipelines.envs.env import EpisodeCounter
from pipelines.envs.make import make
from pipelines.envs.task_env import FAILED, NOTHING, SOLVED, Outcome, TaskEnv
from pipelines.errors import InputMissing
from tests.envs import contract


class Guess(TaskEnv):
    """Two attempts of two steps at naming a hidden number; the second step counts."""

    observation_space = gymnasium.spaces.Discrete(2)
    action_space = gymnasium.spaces.Discrete(5)
    num_attempts, has_success, horizon, about = 2, True, 4, "Guess a number, twice"

    def __init__(self):
        self._named = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(5)) if self._named is None else self._named
        self.task, self.goal_text, self.outcome = f"{self.split}-{self.number}", "guess", NOTHING
        self.time = 0
        return 0, {}

    def step(self, action):
        self.time += 1
        if self.time % 2:
            self.outcome = NOTHING
            return 1, 0.0, False, False, {}
        won, over = action == self.number, self.time == 4
        self.outcome = Outcome(reset=not over, attempt_end=True, success=bool(won))
        return 0, float(won), over, False, {}

    def play(self, task):
        if task.partition("-")[2] not in "01234":
            raise ValueError("numbers are 0 to 4")
        self._named = int(task.partition("-")[2])


GUESS = "tests.envs.test_task_env:Guess"


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_a_batch_keeps_the_contract(check):
    check(GUESS)


def test_attempts_and_soft_resets_come_from_the_outcome():
    env = make(GUESS, num_envs=2, seed=0, split="test")
    assert (env.spec.num_attempts, env.spec.has_success, env.spec.horizon) == (2, True, 4)
    env.reset()
    tasks = env.tasks(np.arange(2))
    hidden = np.array([int(task.removeprefix("test-")) for task in tasks])
    assert env.goal_texts(np.arange(2)) == ["guess"] * 2
    env.step(hidden)
    result = env.step(np.array([hidden[0], (hidden[1] + 1) % 5]))
    assert result.reset.all()
    assert result.attempt_end.all()
    assert result.success.tolist() == [True, False]
    assert not (result.terminated | result.truncated).any()
    env.step(hidden)
    result = env.step(hidden)
    assert result.terminated.all()
    assert result.success.all()
    assert not result.reset.any()


def test_named_tasks_are_played_in_turn():
    env = make(GUESS, num_envs=2, seed=0)
    env.play_only(["train-3", "train-1", "train-0"])
    seen = []
    for _ in range(3):
        env.reset()
        seen += env.tasks(np.arange(2))
    assert seen == ["train-3", "train-1", "train-0"] * 2
    with pytest.raises(InputMissing, match=r"'train-7' is not a task .* numbers are 0 to 4"):
        env.play_only(["train-7"])


def test_a_slice_of_the_actors_plays_its_own_episodes():
    """Actors 2 and 3 of 5, as a worker process has them."""
    counter = EpisodeCounter(num_envs=2, total=5, offset=2)
    assert counter.advance(np.array([0, 1])).tolist() == [2, 3]
    assert counter.advance(np.array([1])).tolist() == [8]
    counter.start_at(100)
    assert counter.advance(np.array([0, 1])).tolist() == [102, 103]


def test_outcomes_by_name():
    assert (FAILED.attempt_end, FAILED.success, SOLVED.success, NOTHING.attempt_end) == (True, False, True, False)
