"""k attempts at one task of any single environment."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from pipelines.envs.make import make
from pipelines.envs.task_env import FAILED, NOTHING, SOLVED, Attempts, TaskEnv, repeat_attempts
from pipelines.errors import InputMissing, UsageError
from tests.envs import contract


class Guess(gymnasium.Env):
    """Each seed has a number from 0 to 3; guessing it within three steps solves it."""

    action_space = spaces.Discrete(4)
    observation_space: spaces.Space = spaces.Box(0, 9, (1,), np.float32)

    def __init__(self, length=3, form="box"):
        self.length, self.form = length, form
        if form == "dict":
            self.observation_space = spaces.Dict({"time": spaces.Box(0, 9, (1,), np.float32), "text": spaces.Text(8)})
        if form == "clash":
            self.observation_space = spaces.Dict({"attempt": spaces.Box(0, 9, (1,), np.float32)})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.number = 0, int(self.np_random.integers(4))
        return self._seen(), {}

    def step(self, action):
        self.time += 1
        right = action == self.number
        return self._seen(), float(right), right, self.time == self.length and not right, {"right": right}

    def _seen(self):
        seen = np.array([self.time], np.float32)
        return {"time": seen, "text": f"guess {self.number}"} if self.form == "dict" else seen


class OwnAttempts(gymnasium.Env):
    """Takes `attempts` itself."""

    observation_space = spaces.Box(0, 99, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, attempts=5):
        self.attempts = attempts

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.array([self.attempts], np.float32), {}


class Told(TaskEnv):
    """A TaskEnv with one attempt; `retry` shows the number of the attempt."""

    observation_space = spaces.Box(0, 9, (1,), np.float32)
    action_space = spaces.Discrete(2)
    has_success, horizon, num_attempts = True, 2, 1

    def __init__(self, attempts_inside=1):
        self.num_attempts = attempts_inside

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.task, self.goal_text, self.outcome = f"task {seed}", "win", NOTHING
        self.time = self.tries = 0
        return np.zeros(1, np.float32), {}

    def retry(self, seed):
        self.time, self.tries = 0, self.tries + 1
        return np.array([self.tries], np.float32)

    def step(self, action):
        self.time += 1
        over = self.time == 2
        self.outcome = (SOLVED if action else FAILED) if over else NOTHING
        return np.full(1, 9, np.float32), float(action), False, over, {}


GUESS, TOLD = f"{__name__}:Guess", f"{__name__}:Told"
PARAMS = {"attempts": 3, "success_key": "right", "max_episode_steps": None}


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize(("name", "params"), [(GUESS, PARAMS), (TOLD, {"attempts": 3})])
def test_it_keeps_the_contract(check, name, params):
    check(name, params=params)


def test_every_attempt_is_at_the_same_task_and_the_last_one_ends_the_episode():
    env = make(GUESS, num_envs=1, seed=0, params=PARAMS)
    assert (env.spec.num_attempts, env.spec.has_success) == (3, True)
    shown = env.reset()
    number = env.envs[0].env.number
    assert shown["obs.attempt"].tolist() == [[1.0, 0.0]]
    wrong = np.array([(number + 1) % 4])
    rows = []
    for action in (wrong, wrong, wrong, np.array([number]), wrong, wrong, wrong):
        result = env.step(action)
        rows.append(
            (
                result.observation["obs.observation"].item(),
                *result.observation["obs.attempt"][0].round(2).tolist(),
                *(bool(getattr(result, flag)[0]) for flag in contract.FLAGS),
                result.reward.item(),
            )
        )
        assert env.envs[0].env.number == number
    third, two_thirds = pytest.approx(0.33), pytest.approx(0.67)
    assert rows == [  # time, begins, finished; terminated, truncated, reset, attempt_end, success; reward
        (1, 0, 0, False, False, False, False, False, 0),
        (2, 0, 0, False, False, False, False, False, 0),
        (0, 1, third, False, False, True, True, False, 0),
        (0, 1, two_thirds, False, False, True, True, True, 1),
        (1, 0, two_thirds, False, False, False, False, False, 0),
        (2, 0, two_thirds, False, False, False, False, False, 0),
        (3, 0, 1, True, True, False, True, False, 0),
    ]


def test_one_attempt_changes_nothing():
    env = Guess()
    assert repeat_attempts(env, 1) is env
    plain, one = (make(GUESS, num_envs=2, seed=0, params=params) for params in ({}, {"attempts": 1}))
    assert plain.spec == one.spec
    assert list(plain.reset()) == ["obs"]


def test_a_pause_shows_the_end_of_an_attempt_and_then_the_next_start():
    env = Attempts(Told(), 2, pause=True)
    env.split = "train"
    assert env.horizon == 2 * 2 + 1
    observation, _ = env.reset(seed=4)
    assert env.step(1)[0] == 9
    observation, _, terminated, truncated, _ = env.step(1)
    assert observation == 9
    assert (terminated, truncated, env.outcome) == (False, False, SOLVED)
    observation, reward, terminated, truncated, _ = env.step(1)  # ignored
    assert (observation, reward, terminated, truncated) == (1, 0.0, False, False)
    assert env.outcome.reset
    env.step(0)
    assert env.step(0)[2:4] == (True, True)
    assert env.outcome == FAILED


def test_without_terminates_the_last_end_has_the_flags_of_the_environment():
    env = Attempts(Told(), 2, terminates=False)
    env.split = "train"
    env.reset(seed=4)
    assert [env.step(0)[2:4] for _ in range(4)] == [(False, False)] * 3 + [(False, True)]


def test_a_registered_environment_has_attempts():
    env = make("gym:CartPole-v1", num_envs=1, seed=0, params={"attempts": 4, "max_episode_steps": 20})
    assert (env.spec.horizon, env.spec.num_attempts, env.spec.has_success) == (80, 4, False)
    assert {name: space.shape for name, space in env.spec.spaces.observation.items()} == {
        "obs.observation": (4,),
        "obs.attempt": (2,),
    }
    first = env.reset()["obs.observation"].copy()
    ends = 0
    for _ in range(80):
        result = env.step(np.ones(1, dtype=np.int32))
        ends += result.attempt_end.sum()
        np.testing.assert_array_equal(result.observation["obs.observation"][result.reset], first[result.reset])
        if (result.terminated | result.truncated).any():
            break
    assert ends == 4
    assert result.terminated.all()


def test_tasks_are_seeds_and_can_be_named():
    env = make(GUESS, num_envs=2, seed=0, params=PARAMS)
    env.play_only([f"{GUESS}/6", f"{GUESS}/8"])
    env.reset()
    assert env.tasks(np.arange(2)) == [f"{GUESS}/6", f"{GUESS}/8"]
    assert [inner.env.number for inner in env.envs] == [np.random.default_rng(seed).integers(4) for seed in (6, 8)]
    with pytest.raises(InputMissing, match=r"/SEED"):
        env.play_only(["chess/1"])
    for split, rest in (("train", 0), ("test", 1)):
        names = contract.first_tasks(GUESS, 5, seed=0, split=split, params=PARAMS)
        assert {int(name.rpartition("/")[2]) % 2 for name in names} == {rest}


def test_parts_and_texts_of_an_observation_stay():
    env = make(GUESS, num_envs=1, seed=0, params={"attempts": 2, "form": "dict"})
    shown = env.reset()
    assert set(shown) == {"obs.time", "obs.text", "obs.text.length", "obs.attempt"}
    assert env.goal_texts(np.arange(1)) == [f"guess {env.envs[0].env.number}"]


def test_a_constructor_that_takes_attempts_gets_them():
    assert make(f"{__name__}:OwnAttempts", num_envs=1, seed=0).reset()["obs"] == 5
    assert make(f"{__name__}:OwnAttempts", num_envs=1, seed=0, params={"attempts": 7}).reset()["obs"] == 7


def test_a_limit_of_steps_is_of_an_attempt():
    params = {"attempts": 3, "max_episode_steps": 2, "length": 9}
    env = make(GUESS, num_envs=1, seed=0, params=params)
    assert env.spec.horizon == 6
    env.reset()
    wrong = np.array([(env.envs[0].env.unwrapped.number + 1) % 4])
    ends = [bool(env.step(wrong).attempt_end[0]) for _ in range(6)]
    assert ends == [False, True] * 3


def test_attempts_of_attempts_and_clashes_are_refused():
    with pytest.raises(UsageError, match="has 2 attempts of its own"):
        make(TOLD, num_envs=1, seed=0, params={"attempts": 3, "attempts_inside": 2})
    with pytest.raises(UsageError, match="already has a part 'attempt'"):
        make(GUESS, num_envs=1, seed=0, params={"attempts": 3, "form": "clash"})


def test_a_missing_success_key_is_named():
    env = make(GUESS, num_envs=1, seed=0, params={"attempts": 2, "success_key": "won", "length": 1})
    env.reset()
    with pytest.raises(Exception, match="info has no key 'won'"):
        env.step(np.zeros(1, dtype=np.int32))
