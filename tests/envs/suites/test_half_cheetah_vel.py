"""HalfCheetah-Vel is gymnasium's cheetah with the reward of its rules; velocities are split into bands."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("mujoco")

import gymnasium

from pipelines.envs.make import make
from pipelines.envs.suites.mujoco import HalfCheetahVelSettings, draw_velocity
from pipelines.errors import InputMissing
from tests.envs import contract

NAME = "half-cheetah-vel"
SHORT = {"attempts": 2, "attempt_steps": 4}


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_the_contract(check):
    check(NAME, params=SHORT)


def test_it_moves_as_gymnasiums_cheetah_and_pays_for_the_velocity():
    env = make(NAME, num_envs=1, seed=1, params={"attempt_steps": 60, "velocity_weight": 2.0, "control_cost": 0.1})
    ours = env.reset()["obs"][0]
    inner = env.envs[0]._body
    wanted = float(env.tasks(np.array([0]))[0].removeprefix("velocity="))
    theirs = gymnasium.make("HalfCheetah-v5").unwrapped
    theirs.reset(seed=0)
    theirs.set_state(inner.data.qpos.copy(), inner.data.qvel.copy())
    rng = np.random.default_rng(0)
    for step in range(60):
        np.testing.assert_array_equal(ours, np.concatenate([theirs.data.qpos[1:], theirs.data.qvel]).astype(np.float32))
        action = rng.uniform(-1, 1, (1, 6)).astype(np.float32)
        before = theirs.data.qpos[0]
        theirs.step(action[0])
        result = env.step(action)
        velocity = (theirs.data.qpos[0] - before) / 0.05
        expected = -2.0 * abs(velocity - wanted) - 0.1 * float((action.astype(np.float64) ** 2).sum())
        assert result.reward[0] == pytest.approx(expected, rel=1e-5)
        assert not result.terminated[0]
        assert result.truncated[0] == (step == 59)
        ours = result.observation["obs"][0]


def test_attempts_begin_at_rest_with_the_same_velocity():
    env = make(NAME, num_envs=1, seed=1, params={"attempts": 3, "attempt_steps": 5})
    env.reset()
    task, seen = env.tasks(np.array([0])), []
    for _ in range(15):
        result = env.step(np.ones((1, 6), dtype=np.float32))
        seen.append((bool(result.reset[0]), bool(result.attempt_end[0]), bool(result.truncated[0])))
        if result.reset[0]:
            assert abs(result.observation["obs"][0, 8:]).max() < 0.6  # the noise of a start, 0.1 a part
        assert env.tasks(np.array([0])) == task
    still, soft, last = (False, False, False), (True, True, False), (False, True, True)
    assert seen == [*[still] * 4, soft, *[still] * 4, soft, *[still] * 4, last]


def test_train_and_test_share_no_velocity():
    rng, settings = np.random.default_rng(0), HalfCheetahVelSettings()
    train = np.array([draw_velocity(rng, settings, "train") for _ in range(4000)])
    test = np.array([draw_velocity(rng, settings, "test") for _ in range(4000)])
    assert not set((train * 10).astype(int)) & set((test * 10).astype(int))
    assert set((test * 10).astype(int)) == {2, 7, 12, 17, 22, 27}
    assert train.mean() == pytest.approx(1.5, abs=0.05)
    assert test.mean() == pytest.approx(1.5, abs=0.05)
    whole = [draw_velocity(rng, HalfCheetahVelSettings(holdout=False), "train") for _ in range(4000)]
    np.testing.assert_allclose(np.quantile(whole, [0.25, 0.5, 0.75]), [0.75, 1.5, 2.25], atol=0.1)


def test_velocities_can_be_named():
    env = make(NAME, num_envs=2, seed=0, params=SHORT)
    env.play_only(["velocity=0.250000", "velocity=2.999999"])
    env.reset()
    assert env.tasks(np.arange(2)) == ["velocity=0.250000", "velocity=2.999999"]
    for wrong in ("velocity=3.100000", "velocity=0.25", "speed=1.000000", "velocity=fast"):
        with pytest.raises(InputMissing, match="not a task of environment"):
            env.play_only([wrong])


def test_defaults_are_those_of_the_rules():
    settings = HalfCheetahVelSettings()
    assert (settings.attempts, settings.attempt_steps, settings.velocity_weight, settings.control_cost) == (
        1,
        1000,
        1.0,
        0.05,
    )


def test_the_papers_protocol_draws_from_all_velocities_on_both_sides():
    for split in ("train", "test"):
        names = contract.first_tasks(NAME, 300, seed=0, split=split, params={"protocol": "paper"})
        bands = {int(float(name.removeprefix("velocity=")) * 10) for name in names}
        assert bands == set(range(30))
