"""What `amago collect --env ENV` as it stands collects ends episodes, so that its result shows a return."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config.load import resolve
from pipelines.envs.make import catalogue, requirement
from pipelines.envs.suites.catalogue import ENTRIES
from pipelines.events import Event, Notice
from pipelines.rollout.environment import find_env_model
from pipelines.stages import collect

BUILT_IN = sorted(entry.name for entry in catalogue() if entry.extra is None and not entry.is_pattern)
SUITES = (
    "half-cheetah-vel",
    "cheetah-dir",
    "ant-dir",
    "gym:HalfCheetah-v5",
    "dmc:cartpole-balance",
    "robotics:FetchReach-v4",
    "metaworld-ml1-reach",
    "metaworld-ml10",
    "metaworld-ml25",
    "metaworld-ml45",
    "metaworld-mt10",
    "metaworld-mt25",
    "metaworld-mt50",
    "crafter",
    "procgen-multi",
    "procgen-bigfish",
    "atari-multi",
    "atari-pong",
    "retro:Airstriker-Genesis-v0",
    "gymnax:CartPole-v1",
    "jax:gymnax.environments.classic_control:CartPole",
    "xland",
    "babyai-multi",
    "minigrid:MiniGrid-DoorKey-5x5-v0",
    "pettingzoo:tictactoe_v3",
    "popgym-multi",
    "popgym-RepeatPreviousEasy",
)


def shown(name: str, place: Path) -> dict:
    settings = resolve({"env": {"name": name}}, env_model=find_env_model)
    return dict(collect.run(settings, lake=place / "lake").metrics)


@pytest.mark.system
@pytest.mark.parametrize("name", [*BUILT_IN, "gym:CartPole-v1", "gym:Pendulum-v1"])
def test_the_default_shows_a_return(name: str, tmp_path: Path) -> None:
    metrics = shown(name, tmp_path)
    assert metrics["return_mean"] is not None
    assert metrics["trajectories"] >= 2
    assert metrics["steps"] >= 10_000


def test_every_environment_of_the_catalogue_is_collected_from_here() -> None:
    names = [*BUILT_IN, *SUITES, "gym:CartPole-v1"]
    missing = [entry.name for entry in ENTRIES if not any(entry.matches(name) for name in names)]
    assert missing == ["module:attr"]


@pytest.mark.system
def test_fewer_actors_than_usual_are_explained(tmp_path: Path) -> None:
    heard: list[Event] = []
    long = resolve({"env": {"name": "dark-key-door", "horizon": 1500}}, env_model=find_env_model)
    metrics = collect.run(long, lake=tmp_path / "lake", listener=heard.append).metrics
    assert (metrics["actors"], metrics["trajectories"]) == (3, 6)
    texts = [event.text for event in heard if isinstance(event, Notice)]
    assert "10,000 steps of 3 actors: an episode may take 1,500" in texts


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SUITES)
def test_the_default_shows_a_return_in_every_suite(name: str, tmp_path: Path) -> None:
    extra, installed = requirement(name)
    if not installed:
        pytest.skip(f"amago[{extra}] is not installed")
    metrics = shown(name, tmp_path)
    assert metrics["return_mean"] is not None
    assert metrics["trajectories"] >= 2
