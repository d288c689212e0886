"""cheetah-dir and ant-dir are gymnasium's bodies, paid for the velocity along a hidden direction."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("mujoco")

from pipelines.envs.draws import BANDS, bands_of
from pipelines.envs.make import make
from pipelines.errors import InputMissing
from tests.envs import contract

CHEETAH, ANT = "cheetah-dir", "ant-dir"
SHORT = {"attempts": 2, "attempt_steps": 5}


@pytest.mark.parametrize("name", [CHEETAH, ANT])
@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_the_contract(check, name):
    check(name, params=SHORT)


@pytest.mark.parametrize(("task", "sign"), [("direction=forward", 1), ("direction=backward", -1)])
def test_a_cheetah_is_paid_for_its_velocity(task, sign):
    env = make(CHEETAH, num_envs=1, seed=0, params={"attempts": 1, "attempt_steps": 30, "control_cost": 0.1})
    env.play_only([task])
    env.reset()
    body, rng = env.envs[0]._body, np.random.default_rng(0)
    for step in range(30):
        action, before = rng.uniform(-1, 1, (1, 6)).astype(np.float32), body.data.qpos[0]
        result = env.step(action)
        velocity = (body.data.qpos[0] - before) / 0.05
        expected = sign * velocity - 0.1 * float((action.astype(np.float64) ** 2).sum())
        assert result.reward[0] == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert (result.terminated[0], result.truncated[0]) == (False, step == 29)


def test_an_ant_is_paid_for_its_velocity_along_the_direction():
    env = make(ANT, num_envs=1, seed=0, params={"attempts": 1, "attempt_steps": 20})
    env.play_only(["direction=30.500"])
    assert env.reset()["obs"].shape == (1, 27)
    body, rng = env.envs[0]._body, np.random.default_rng(0)
    for _ in range(20):
        action, before = rng.uniform(-1, 1, (1, 8)).astype(np.float32), body.data.body(1).xpos[:2].copy()
        result = env.step(action)
        velocity = (body.data.body(1).xpos[:2] - before) / 0.05
        along = math.cos(math.radians(30.5)) * velocity[0] + math.sin(math.radians(30.5)) * velocity[1]
        rest = body.healthy_reward - body.control_cost(action[0].astype(np.float64)) - body.contact_cost
        assert result.reward[0] == pytest.approx(along + rest, rel=1e-4, abs=1e-4)


def test_an_ant_that_leaves_its_healthy_height_ends_its_attempt():
    env = make(ANT, num_envs=1, seed=0, params={"attempts": 2, "attempt_steps": 50})
    env.reset()
    one = env.envs[0].env
    ends = []
    for _ in range(2):
        flying = one._body.init_qpos.copy()
        flying[2] = 2.0
        one._body.set_state(flying, one._body.init_qvel)
        result = env.step(np.zeros((1, 8), dtype=np.float32))
        ends.append(tuple(bool(getattr(result, flag)[0]) for flag in contract.FLAGS))
    assert ends == [(False, False, True, True, False), (True, False, False, True, False)]


def test_attempts_keep_the_direction():
    for name, size in ((CHEETAH, 6), (ANT, 8)):
        env = make(name, num_envs=1, seed=1, params=SHORT)
        env.reset()
        task = env.tasks(np.arange(1))
        ends = []
        for _ in range(10):
            result = env.step(np.zeros((1, size), dtype=np.float32))
            assert env.tasks(np.arange(1)) == task
            ends.append(bool(result.attempt_end[0]))
        assert ends == ([False] * 4 + [True]) * 2
        assert result.truncated.all()
        env.close()


def test_angles_of_test_are_never_trained_on():
    for split in ("train", "test"):
        names = contract.first_tasks(ANT, 4, count=400, seed=0, split=split)
        words = {"forward": 0.0, "backward": 180.0}
        texts = [name.removeprefix("direction=") for name in names]
        bands = {int(words.get(text) or float(text)) * BANDS // 360 for text in texts if text != "forward"}
        assert bands <= set(bands_of(split).tolist())
        assert len(bands) >= 0.8 * len(bands_of(split))
    both = {"direction=forward", "direction=backward"}
    assert set(contract.first_tasks(ANT, 4, count=20, seed=0, params={"directions": "two"})) == both
    assert set(contract.first_tasks(CHEETAH, 4, count=20, seed=0)) == both


def test_wrong_directions_are_refused():
    for name, wrong in (
        (CHEETAH, "direction=12.000"),
        (CHEETAH, "up"),
        (ANT, "direction=360.000"),
        (ANT, "direction=1"),
    ):
        with pytest.raises(InputMissing, match="is not a task"):
            make(name, num_envs=1, seed=0).play_only([wrong])
