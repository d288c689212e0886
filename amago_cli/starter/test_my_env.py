"""Tests that every environment should pass, and tests of this one."""

import gymnasium.utils.env_checker
import numpy as np
from my_env import MyEnv


def play(env: MyEnv, seed: int) -> tuple[list[float], list[bool]]:
    """Return the rewards, and the success of each attempt, of a player who knows the exit."""
    env.reset(seed=seed)
    rewards, successes, over = [], [], False
    while not over:
        down, right = np.array(env.exit) - env.place
        action = (1 if down > 0 else 0) if down else (3 if right > 0 else 2)
        _, reward, terminated, truncated, _ = env.step(action)
        over = terminated or truncated
        rewards.append(reward)
        if env.outcome.attempt_end:
            successes.append(env.outcome.success)
    return rewards, successes


def test_env_follows_the_gymnasium_api() -> None:
    gymnasium.utils.env_checker.check_env(MyEnv(), skip_render_check=True)


def test_task_depends_on_the_seed_alone() -> None:
    env = MyEnv()
    exits = []
    for seed in (*range(50), *range(50)):
        env.reset(seed=seed)
        exits.append(env.exit)
    assert exits[:50] == exits[50:]
    assert len(set(exits)) > 10


def test_optimal_player_succeeds_in_every_attempt() -> None:
    for seed in range(20):
        rewards, successes = play(MyEnv(attempts=3), seed)
        assert successes == [True] * 3
        assert sum(rewards) == 3.0
        assert len(rewards) <= 3 * 4


def test_drawing_shows_the_agent_and_the_exit() -> None:
    env = MyEnv(size=3)
    env.reset(seed=0)
    env.exit = (0, 2)
    assert env.render() == "..X\n.@.\n..."


def test_attempt_fails_after_its_time_limit() -> None:
    env = MyEnv(attempts=2, attempt_steps=5)
    env.reset(seed=0)
    env.exit = (env.size - 1, env.size - 1)
    steps = [env.step(0) for _ in range(10)]  # up, against the wall
    assert [over for _, _, over, _, _ in steps] == [False] * 9 + [True]
    assert sum(reward for _, reward, _, _, _ in steps) == 0.0
    assert env.outcome.attempt_end
    assert not env.outcome.success
