"""collect: actors that hold a task for the whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.settings import CollectSettings, Settings
from pipelines.errors import AmagoError, InputMissing, UsageError
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.rollout.environment import with_actors
from pipelines.stages import collect

GOALS = ("goal=0,1", "goal=2,0", "goal=2,2")


def rooms(env: dict[str, Any] | None = None, **table: Any) -> Settings:
    room = {"name": "dark-room", "size": 3, "attempts": 1, "attempt_steps": 5, **(env or {})}
    table = {"tasks": GOALS, "copies": 2, "steps": 120, **table}
    return Settings.model_validate({"env": room, "collect": table})


def rows(lake: Path, sql: str) -> list[tuple]:
    return query(Lake(lake), sql)[1]


@pytest.mark.system
@pytest.mark.parametrize("workers", [0, 2])
def test_every_task_is_held_by_its_copies_also_after_resuming(tmp_path: Path, workers: int) -> None:
    for steps in (120, 240):
        collect.run(rooms(steps=steps, workers=workers), run=tmp_path / "run")
    found = rows(tmp_path / "run/lake", "select task, sum(length) from trajectories group by task order by task")
    assert found == [(goal, 80) for goal in GOALS]


def test_tasks_and_copies_determine_the_number_of_actors() -> None:
    assert with_actors(rooms().collect, rooms().env).actors == 6
    with pytest.raises(UsageError, match="3 tasks x 2 copies need 6 actors, not 4"):
        with_actors(rooms(actors=4).collect, rooms().env)


@pytest.mark.parametrize("listed", [list(GOALS), [{"task": goal, "n": 1} for goal in GOALS]])
def test_tasks_are_read_from_json(tmp_path: Path, listed: Any) -> None:
    (tmp_path / "tasks.json").write_text(json.dumps(listed))
    wanted = CollectSettings.model_validate({"tasks": str(tmp_path / "tasks.json"), "steps": 10})
    assert with_actors(wanted, rooms().env).tasks == GOALS


@pytest.mark.parametrize("text", ["", "3", "[]", "[1]", '{"task": "goal=0,1"}', '[{"tusk": "goal=0,1"}]', "[\n"])
def test_other_content_of_a_tasks_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "tasks.json").write_text(text)
    with pytest.raises(UsageError, match=r"tasks\.json' (is not JSON|has no list)"):
        with_actors(rooms(tasks=[str(tmp_path / "tasks.json")]).collect, rooms().env)


@pytest.mark.parametrize(
    ("tasks", "kind", "message"),
    [
        (["goal=1,1"], InputMissing, "'goal=1,1' is not a task of environment 'dark-room'"),
        (["goal=0,1", "goal=9,9"], InputMissing, "'goal=9,9' is not a task"),
        (["goal=0,1", "goal=0,1"], UsageError, "names 'goal=0,1' 2 times"),
        (["absent.json"], InputMissing, r"'absent\.json' cannot be read"),
    ],
)
def test_wrong_tasks_are_refused_before_anything_is_written(
    tmp_path: Path, tasks: list[str], kind: type[AmagoError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        collect.run(rooms(tasks=tasks), run=tmp_path / "run")
    assert not (tmp_path / "run/lake").exists()


def test_an_environment_without_tasks_to_choose_is_refused(tmp_path: Path) -> None:
    settings = Settings.model_validate({"env": {"name": "gym:CartPole-v1"}, "collect": {"tasks": ["left"], "steps": 9}})
    with pytest.raises(InputMissing, match="does not let its tasks be chosen") as caught:
        collect.run(settings, run=tmp_path / "run")
    assert "leave out collect.tasks" in str(caught.value.hint)


@pytest.mark.system
def test_other_tasks_make_another_collector(tmp_path: Path) -> None:
    """Each counts its own steps."""
    for tasks in (GOALS, GOALS[:1], ()):
        without = {} if tasks else {"actors": 6, "copies": 1}
        collect.run(rooms(tasks=tasks, **without), lake=tmp_path / "lake")
    found = rows(tmp_path / "lake", "select sum(length) from trajectories group by collector")
    assert found == [(120,)] * 3
