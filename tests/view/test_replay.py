"""Drawings of recorded episodes against those of the environment that played them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.envs.make import make
from pipelines.lake import collectors
from pipelines.lake.reading import Reader
from pipelines.lake.store import Lake
from pipelines.stages.library import collect
from pipelines.view.replay import Replays
from pipelines.view.steps import StepReader
from tests.tiers import some


def replays(lake: Lake) -> tuple[StepReader, Replays]:
    steps = StepReader(lake)
    return steps, Replays(lake, steps)


def collected(home: Path, env: dict[str, Any]) -> Lake:
    collect(
        env["name"], run=home, steps=120, settings={"collect.actors": 2, "collect.workers": 0, **env.get("set", {})}
    )
    return Lake(home)


@pytest.mark.parametrize(
    "env",
    some(
        [
            {"name": "tmaze", "set": {"env.corridor": 4}},
            {"name": "meta-frozen-lake", "set": {"env.size": 3, "env.attempts": 2}},
            {"name": "dark-room"},
            {"name": "mazerunner"},
            {"name": "point-robot"},
        ],
        0,
        1,
    ),
    ids=lambda env: env["name"],
)
def test_a_replay_draws_what_was_played(tmp_path: Path, env: dict[str, Any]) -> None:
    lake = collected(tmp_path / "run", env)
    steps, drawings = replays(lake)
    uid = Reader(lake).uids()[0]
    found = steps.find(uid)
    replay = drawings.find(found)
    assert replay is not None
    params = {key.removeprefix("env."): value for key, value in env.get("set", {}).items()}
    played = make(env["name"], num_envs=1, seed=5, params=params, drawn=True)
    played.play_only([found.facts["task"]])
    played.reset()
    actions = steps.rows(uid, "action", 1, found.length + 1)
    expected = [played.render("rgb_array", 0)]
    for step in range(found.length):
        played.step(actions[step : step + 1])
        expected.append(played.render("rgb_array", 0))
    for step in (found.length, 0, found.length // 2):  # in any order
        np.testing.assert_array_equal(replay.picture(step), expected[step])
    np.testing.assert_array_equal(replay.picture(10**9), expected[-1])


@pytest.mark.system
def test_episodes_with_random_transitions_are_not_drawn(tmp_path: Path) -> None:
    lake = collected(tmp_path / "run", {"name": "meta-frozen-lake", "set": {"env.slip": 0.5, "env.size": 5}})
    steps, drawings = replays(lake)
    found = [drawings.find(steps.find(uid)) for uid in Reader(lake).uids()]
    assert found.count(None) > len(found) // 2


def changed(lake: Lake, **env: Any) -> Replays:
    """The replays after somebody has rewritten what the collector says of its environment."""
    (name, record) = next(iter(collectors.read_all(lake).items()))
    collectors.write(lake, {**record, "collector": name, "env": {**record["env"], **env}})
    return replays(lake)[1]


def test_only_the_recorded_built_in_environment_is_made(tmp_path: Path) -> None:
    lake = collected(tmp_path / "run", {"name": "tmaze", "set": {"env.corridor": 4}})
    uid = Reader(lake).uids()[0]
    found = StepReader(lake).find(uid)
    assert changed(lake).find(found) is not None
    for wrong in ({"corridor": 5}, {"corridor": 10**9}, {"corridor": "x"}, {"unknown": 1}, {"name": "dark-room"}):
        assert changed(lake, **{"corridor": 4, **wrong}).find(found) is None, wrong


@pytest.mark.parametrize("name", ["gym:antigravity:X-v0", "this:s", "gym:ID", "module:attr", "nothing", ""])
def test_a_name_from_the_lake_is_never_imported(tmp_path: Path, name: str) -> None:
    lake = collected(tmp_path / "run", {"name": "tmaze", "set": {"env.corridor": 4}})
    steps = StepReader(lake)
    found = steps.find(Reader(lake).uids()[0])
    found.facts["env"] = name
    assert changed(lake, name=name).find(found) is None
    assert not {"antigravity", "this"} & sys.modules.keys()


def test_a_trajectory_without_a_collector_is_not_drawn(tmp_path: Path) -> None:
    lake = collected(tmp_path / "run", {"name": "tmaze", "set": {"env.corridor": 4}})
    steps, drawings = replays(lake)
    for file in (lake.path / "collectors").iterdir():
        file.unlink()
    assert drawings.find(steps.find(Reader(lake).uids()[0])) is None
