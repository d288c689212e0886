"""Agents of other packages on our environments: what they see, how episodes end, and when a run ends."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.general_parts.tasks import load_tasks
from pipelines.envs.make import make
from pipelines.lake.spaces import Box, Discrete, MultiBinary, MultiDiscrete, Ragged

peer = pytest.importorskip("benchmarks.general_parts.peer", reason="needs the extra peers", exc_type=ImportError)
ROOT = Path(__file__).parents[2]


def test_observations_become_one_vector_with_choices_one_hot_and_without_texts():
    text = Ragged(max_length=4, dtype="uint8", text=True)
    columns = {
        "obs.a": Box(shape=(2,)),
        "obs.b": Discrete(n=3),
        "obs.c": MultiDiscrete(nvec=(2, 2)),
        "obs.d": MultiBinary(n=2),
        "obs.t": text,
        "obs.t.length": text.length_space,
    }
    flatten = peer.Flatten(columns)
    seen = flatten(
        {
            "obs.a": np.array([[0.5, -1.0]]),
            "obs.b": np.array([2]),
            "obs.c": np.array([[1, 0]]),
            "obs.d": np.array([[1, 0]], np.uint8),
            "obs.t": np.zeros((1, 4), np.uint8),
            "obs.t.length": np.array([0]),
        }
    )
    assert seen.tolist() == [[0.5, -1, 0, 0, 1, 0, 1, 1, 0, 1, 0]]
    assert flatten.space.shape == (11,)
    assert not flatten.is_image


def test_a_single_picture_stays_one_and_cells_of_a_grid_become_choices():
    image = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)
    flatten = peer.Flatten({"obs": Box(shape=(8, 8, 3), dtype="uint8")})
    assert flatten.is_image
    assert (flatten({"obs": image}) == image).all()
    cell = np.array([[[[10 * 25, 5 * 51, 2 * 85]]]], np.uint8)  # the library's codes 10, 5 and 2, as we spread them
    grid = peer.Flatten({"obs.image": Box(shape=(1, 1, 3), dtype="uint8"), "obs.direction": Discrete(n=4)})
    [seen] = grid({"obs.image": cell, "obs.direction": np.array([3])})
    assert np.flatnonzero(seen).tolist() == [10, 11 + 5, 17 + 2, 21 + 3]


def test_actors_begin_again_at_once_and_the_last_observation_is_kept():
    env = peer.ActorVecEnv(make("tmaze", num_envs=2, seed=0, params={"corridor": 3}))
    env.reset()
    for _ in range(3):
        _, _, done, infos = env.step(np.zeros(2, int))
        assert not done.any()
        assert infos == [{}, {}]
    seen, reward, done, infos = env.step(np.array([1, 3]))
    assert done.all()
    assert sorted(reward.tolist()) in ([0, 0], [0, 1], [1, 1])
    assert [info["TimeLimit.truncated"] for info in infos] == [False, False]
    assert [info["terminal_observation"][0] for info in infos] == [1, 1]  # at the junction
    assert (seen[:, 0] == 0).all()  # at the start
    env.close()


@pytest.mark.parametrize("name", load_tasks())
def test_settings_name_the_row_that_they_are_from(name):
    task = load_tasks()[name]
    for agent in task.peers:
        settings = peer.settings_of(agent, task.zoo)
        assert settings["row"] in (task.zoo, "default")


def test_schedules_fall_with_the_share_of_the_cpu_seconds_that_is_left():
    assert peer.schedule("lin_0.5")(0.5) == 0.25
    assert peer.schedule(0.1) == 0.1


@pytest.mark.system
@pytest.mark.parametrize(("name", "agent"), [("cartpole", "ppo"), ("tmaze-20", "recurrent-ppo"), ("pendulum", "sac")])
def test_peer_is_stopped_by_cpu_seconds_and_scored_both_ways(name, agent):
    job = {"task": name, "agent": agent, "seed": 1, "seconds": 12.0, "episodes": 4}
    command = [sys.executable, "-m", "benchmarks.general_parts.peer"]
    done = subprocess.run(command, input=json.dumps(job), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["train_cpu_seconds"] >= 12
    assert found["env_steps"] > 0
    points = [point["cpu_seconds"] for point in found["curve"]]
    assert points == sorted(points)
    assert points[-1] == found["train_cpu_seconds"]
    assert {"sampled", "greedy"} <= found["curve"][0].keys()
