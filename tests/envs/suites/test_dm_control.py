"""`dmc:DOMAIN-TASK` keeps the contract; its episodes are those of the suite."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("dm_control")
pytest.importorskip("shimmy")

from dm_control import suite

from pipelines.envs.make import make
from pipelines.envs.suites import dm_control
from pipelines.envs.suites import suite as packages
from pipelines.errors import InputMissing, UsageError
from tests.envs import contract


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
def test_the_contract(check):
    check("dmc:cartpole-swingup")


@pytest.mark.slow
@pytest.mark.parametrize("task", dm_control.list_names())
def test_every_task_can_be_played(task):
    contract.observations_are_what_the_spec_says(f"dmc:{task}", num_envs=1, steps=3)


def test_every_task_of_the_suite_has_a_name():
    expected = {f"{domain}-{task}" for domain, task in suite.BENCHMARKING}
    assert expected <= set(dm_control.list_names())


def test_it_is_the_suites_own_environment():
    env = make("dmc:cheetah-run", num_envs=1, seed=0)
    observation = env.reset()
    own = suite.load("cheetah", "run")
    own.reset()
    own.physics.set_state(env.envs[0].unwrapped._env.physics.get_state())
    own.physics.forward()
    assert set(observation) == {"obs.position", "obs.velocity"}
    action = np.full((1, 6), 0.3, dtype=np.float32)
    for _ in range(5):
        result, expected = env.step(action), own.step(action[0])
        for key, value in expected.observation.items():
            np.testing.assert_allclose(result.observation[f"obs.{key}"][0], value, rtol=1e-5, atol=1e-5)
        assert result.reward[0] == pytest.approx(expected.reward, abs=1e-6)


def test_episodes_are_truncated_after_1000_steps():
    env = make("dmc:cartpole-balance", num_envs=1, seed=0)
    assert env.spec.horizon == 1000
    env.reset()
    for _ in range(1000):
        result = env.step(np.zeros((1, 1), dtype=np.float32))
        ended = (bool(result.terminated[0]), bool(result.truncated[0]))
        assert ended == (False, False) or _ == 999
    assert ended == (False, True)
    short = make("dmc:cartpole-balance", num_envs=1, seed=0, params={"max_episode_steps": 3})
    assert short.spec.horizon == 3
    short.reset()
    assert [bool(short.step(np.zeros((1, 1), dtype=np.float32)).truncated[0]) for _ in range(3)] == [False, False, True]


def test_train_and_test_begin_elsewhere():
    first = [make("dmc:cheetah-run", num_envs=3, seed=0, split=split).reset() for split in ("train", "test")]
    assert not np.isin(first[0]["obs.position"], first[1]["obs.position"]).any()


def test_the_nearest_name_is_offered():
    with pytest.raises(UsageError, match="did you mean 'dmc:cheetah-run'"):
        make("dmc:cheetah-runn", num_envs=1, seed=0)


def test_a_version_that_fails_later_is_refused_before(monkeypatch):
    monkeypatch.setattr(packages.metadata, "version", lambda package: "4.0.0" if package == "mujoco" else "1.0.50")
    with pytest.raises(InputMissing, match=r'pip install "mujoco<4.0"'):
        make("dmc:cheetah-run", num_envs=1, seed=0)


def test_quadrupeds_play_whatever_numpy_has():
    env = make("dmc:quadruped-walk", num_envs=1, seed=0)
    env.reset()
    assert np.isfinite(env.step(np.zeros((1, 12), np.float32)).reward).all()
    assert dm_control._WithIn1d().in1d(np.array([1, 2]), [2]).tolist() == [False, True]


@pytest.mark.system
def test_tasks_with_a_terrain_need_no_display(tmp_path):
    """dm_control's own choice of a renderer, GLFW, aborts the process without one."""
    environment = {name: value for name, value in os.environ.items() if not re.search("DISPLAY|MUJOCO_GL", name)}
    command = [sys.executable, "-m", "amago_cli", "collect", "--env", "dmc:quadruped-escape", "--steps", "32"]
    done = subprocess.run(
        [*command, "--actors", "1", "--run", str(tmp_path / "run")],
        env=environment | {"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 or "No OpenGL rendering backend is available" in done.stderr.splitlines()[-1]
