from __future__ import annotations

import pytest

from pipelines.config.settings import Settings
from pipelines.errors import UsageError
from pipelines.formats.scores import REFERENCES, Reference
from pipelines.stages.evaluate import add_normalized, find_reference
from pipelines.stages.evaluation_tables import tables


@pytest.mark.parametrize("name", REFERENCES)
def test_random_play_has_none_and_an_expert_a_hundred(name: str) -> None:
    low, high = REFERENCES[name]
    assert Reference.find(name).score(low) == 0
    assert Reference.find(name).score(high) == pytest.approx(100)
    assert Reference.find(name).score((low + high) / 2) == pytest.approx(50)


def test_a_tenth_of_the_way_by_hand() -> None:
    # -20.272305 + (3234.3 + 20.272305) / 10
    assert Reference.find("hopper-medium-v2").score(305.1849255) == pytest.approx(10.0, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("hopper-medium-v2", "hopper"),
        ("antmaze-umaze-v2", "antmaze"),
        ("ant-medium-v2", "ant"),
        ("maze2d-umaze-v1", "maze2d-umaze-v1"),
        ("minigrid-fourrooms-random-v0", "minigrid-fourrooms"),
    ],
)
def test_datasets_belong_to_tasks(name: str, task: str) -> None:
    assert Reference.find(name).task == task


def test_a_task_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'hopper'"):
        Reference.find("hoper")


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("gym:Hopper-v5", "hopper"),
        ("gym:HalfCheetah-v4", "halfcheetah"),
        ("gym:AdroitHandPen-v1", "pen"),
        ("robotics:AdroitHandPen-v1", "pen"),
        ("gym:gymnasium_robotics:AdroitHandPen-v1", "pen"),
        ("robotics:FetchReach-v4", None),
        ("gym:AntMaze_UMaze-v4", None),  # goes on at the goal, and pays each step there
        ("gym:Ant-v5", None),  # its observations are others
        ("gym:AntMaze_UMaze-v5", None),
        ("gym:Pendulum-v1", None),
        ("tmaze", None),
    ],
)
def test_environments_of_today(name: str, task: str | None) -> None:
    found = Reference.of_environment(name)
    assert (found.task if found else None) == task


@pytest.mark.parametrize("prefix", ["gym", "robotics"])
def test_antmaze_has_a_score_where_the_goal_ends_it(prefix: str) -> None:
    name = f"{prefix}:AntMaze_UMaze-v4"
    assert Reference.of_environment(name) is None
    found = Reference.of_environment(name, continuing=False)
    assert found is not None
    assert (found.task, found.score(1.0)) == ("antmaze", 100.0)


@pytest.mark.parametrize(
    ("params", "task"),
    [
        ({}, None),
        ({"protocol": "paper"}, "antmaze"),
        ({"continuing_task": False}, "antmaze"),
        ({"protocol": "paper", "continuing_task": True}, None),
        ({"protocol": "default"}, None),
    ],
)
def test_the_papers_protocol_ends_antmaze_at_the_goal(params: dict[str, object], task: str | None) -> None:
    settings = Settings.model_validate({"env": {"name": "robotics:AntMaze_UMaze-v4", **params}})
    found = find_reference(settings.env, settings.evaluate.reference)
    assert (found.task if found else None) == task


def test_a_report_shows_it_and_forgets_it() -> None:
    report = {
        "update": 5,
        "env": {"name": "gym:Hopper-v5"},
        "settings": {"split": "test", "greedy": True},
        "metrics": {"return_mean": 3234.3, "return_ci95": [-20.272305, 3234.3], "episodes": 1, "per_attempt": []},
    }
    found = add_normalized(report, Reference.find("hopper"))
    assert found["metrics"]["normalized_score"] == 100
    assert found["metrics"]["normalized_ci95"] == [0, 100]
    assert ["d4rl hopper", 100, 0, 100] in tables(found)[0].rows
    assert add_normalized(found, None)["metrics"] == report["metrics"]
