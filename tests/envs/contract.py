"""What every environment owes to the rest of the system; tests of suites call each of `CHECKS`, or those that apply."""

from __future__ import annotations

import numpy as np

from pipelines.envs.env import Env
from pipelines.envs.make import make
from pipelines.lake.spaces import Box, Discrete, MultiBinary, Space

FLAGS = ("terminated", "truncated", "reset", "attempt_end", "success")


def sample(space: Space, num_envs: int, rng: np.random.Generator) -> np.ndarray:
    """Random actions (N, ...) of the system."""
    if isinstance(space, Box):
        return rng.uniform(-1, 1, (num_envs, *space.shape)).astype(np.float32)
    if isinstance(space, Discrete):
        return rng.integers(space.n, size=num_envs)
    if isinstance(space, MultiBinary):
        return rng.integers(2, size=(num_envs, space.n))
    return rng.integers(space.nvec, size=(num_envs, len(space.nvec)))


def play(env: Env, steps: int, *, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """What random actions bring, row by row; the first row is the reset's observation."""
    rng = np.random.default_rng(seed)
    rows = [dict(env.reset())]
    for _ in range(steps):
        result = env.step(sample(env.spec.spaces.action, env.num_envs, rng))
        flags = {name: getattr(result, name) for name in FLAGS}
        rows.append({**result.observation, **flags, "reward": result.reward})
        over = result.terminated | result.truncated
        if over.any():
            rows.append(dict(env.reset(over)))
    return rows


def first_tasks(name: str, num_envs: int, *, count: int | None = None, **options) -> list[str]:
    """Names of the first `count` episodes' tasks, in the order of the episodes' numbers."""
    env = make(name, num_envs=num_envs, **options)
    found = []
    while len(found) < (count or num_envs):
        env.reset()
        found += env.tasks(np.arange(num_envs))
    env.close()
    return found[:count]


def observations_are_what_the_spec_says(name, *, num_envs=7, steps=40, **options):
    env = make(name, num_envs=num_envs, seed=0, **options)
    for row in play(env, steps):
        for column, space in env.spec.spaces.observation.items():
            assert row[column].shape == (num_envs, *space.shape)
            assert row[column].dtype == space.dtype
        if "reward" in row:
            assert row["reward"].dtype == np.float32
            assert all(row[flag].dtype == bool and row[flag].shape == (num_envs,) for flag in FLAGS)
            assert not (row["success"] & ~row["attempt_end"]).any()
    env.close()


def what_was_shown_is_never_written_again(name, *, num_envs=4, steps=30, **options):
    env = make(name, num_envs=num_envs, seed=0, **options)
    rng = np.random.default_rng(0)
    shown = [env.reset()]
    copies = [{k: v.copy() for k, v in shown[0].items()}]
    for _ in range(steps):
        result = env.step(sample(env.spec.spaces.action, num_envs, rng))
        shown.append({**result.observation, "reset": result.reset, "reward": result.reward})
        copies.append({k: v.copy() for k, v in shown[-1].items()})
        over = result.terminated | result.truncated
        if over.any():
            env.reset(over)
    for kept, copy in zip(shown, copies, strict=True):
        for column, values in kept.items():
            np.testing.assert_array_equal(values, copy[column])
    env.close()


def the_same_seed_plays_the_same(name, *, num_envs=3, steps=40, **options):
    first, second = (make(name, num_envs=num_envs, seed=5, **options) for _ in range(2))
    for mine, theirs in zip(play(first, steps), play(second, steps), strict=True):
        assert mine.keys() == theirs.keys()
        for column, values in mine.items():
            np.testing.assert_array_equal(values, theirs[column])
    first.close()
    second.close()


def task_k_does_not_depend_on_the_number_of_actors(name, *, count=12, **options):
    options = {"seed": 4, "split": "test", **options}
    many = first_tasks(name, count, **options)
    assert many == first_tasks(name, 3, count=count, **options) == first_tasks(name, 1, count=count, **options)


def state_goes_on_with_tasks_not_met_before(name, *, num_envs=6, **options):
    env = make(name, num_envs=num_envs, seed=4, **options)
    env.reset()
    state = env.state_dict()
    env.reset()
    expected = env.tasks(np.arange(num_envs))
    again = make(name, num_envs=num_envs // 2, seed=4, **options)
    again.load_state_dict(state)
    again.reset()
    assert again.tasks(np.arange(num_envs // 2)) == expected[: num_envs // 2]
    env.close()
    again.close()


def every_attempt_is_told(name, *, num_envs=2, steps=200, **options):
    """Require as many ended attempts of each episode as the spec says."""
    env = make(name, num_envs=num_envs, seed=0, **options)
    if not env.spec.has_success:
        return
    rng = np.random.default_rng(0)
    env.reset()
    told = np.zeros(num_envs, dtype=int)
    for _ in range(steps):
        result = env.step(sample(env.spec.spaces.action, num_envs, rng))
        told += result.attempt_end
        over = result.terminated | result.truncated
        if env.spec.num_attempts is not None:
            assert (told[over] == env.spec.num_attempts).all()
        told[over] = 0
        if over.any():
            env.reset(over)
    env.close()


CHECKS = (
    observations_are_what_the_spec_says,
    what_was_shown_is_never_written_again,
    the_same_seed_plays_the_same,
    task_k_does_not_depend_on_the_number_of_actors,
    state_goes_on_with_tasks_not_met_before,
    every_attempt_is_told,
)
