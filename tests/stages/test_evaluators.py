"""Several evaluators play the same episodes as one, also after one has died."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pipelines.config.run_directory import RunDirectory
from pipelines.errors import StageFailed, UsageError
from pipelines.events import Event, Notice, Progress
from pipelines.learning import checkpoint as checkpoints
from pipelines.rollout.episodes import Episode
from pipelines.rollout.plan import EvaluationPlan
from pipelines.stages import collect, evaluate, train
from pipelines.stages.engines import perform_all
from pipelines.stages.evaluate import EvaluatorTask
from tests.stages.recipes import tiny
from tests.stages.threads import ThreadEngine


def trained(run: Path, **tables: Any) -> Any:
    """The settings and the checkpoint of a run."""
    settings = tiny(**tables)
    collect.run(settings, run=run)
    train.run(settings, run=run, lakes=[(run / "lake", 1.0)])
    return settings, checkpoints.load(RunDirectory(run).checkpoints, "latest")


def shares(settings: Any, checkpoint: Any, bounds: list[int]) -> list[EvaluatorTask]:
    plan = EvaluationPlan(settings=settings, checkpoint=checkpoint, sharers=len(bounds) - 1)
    return [EvaluatorTask(plan=replace(plan, place=slice(*pair))) for pair in pairwise(bounds)]


def together(tasks: list[EvaluatorTask], engine: ThreadEngine | None = None, listener: Any = None) -> list[Episode]:
    hear = listener or (lambda event: None)
    parts = perform_all(tasks, engine or ThreadEngine(), what="evaluator", restarts=2, listener=hear)
    return sorted((episode for part in parts for episode in part.episodes), key=lambda each: each.number)


def facts(episodes: list[Episode]) -> list[tuple[Any, ...]]:
    return [(e.number, e.task, e.length, e.total_reward, e.success, e.attempts) for e in episodes]


@pytest.mark.system
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_episodes_do_not_depend_on_the_number_of_evaluators(tmp_path: Path, greedy: bool, workers: int) -> None:
    settings, checkpoint = trained(
        tmp_path / "run",
        env={"corridor": 6},
        collect={"workers": workers},
        evaluate={"episodes": 23, "actors": 7, "greedy": greedy},
    )
    alone = together(shares(settings, checkpoint, [0, 7]))
    assert [episode.number for episode in alone] == list(range(23))
    for bounds in ([0, 3, 7], [0, 1, 2, 7]):
        assert facts(together(shares(settings, checkpoint, bounds))) == facts(alone)


@pytest.mark.system
def test_an_evaluator_that_dies_is_started_again_and_nothing_changes(tmp_path: Path) -> None:
    settings, checkpoint = trained(tmp_path / "run", evaluate={"episodes": 12, "actors": 4})
    tasks, told, counts = shares(settings, checkpoint, [0, 2, 4]), list[str](), list[tuple[int, int | None]]()

    def hear(event: Event) -> None:
        told.extend([event.text] if isinstance(event, Notice) else [])
        counts.extend([(event.done, event.total)] if isinstance(event, Progress) else [])

    engine = ThreadEngine(lambda number, kind: (number, kind) == (0, "done"))
    assert facts(together(tasks, engine, hear)) == facts(together(shares(settings, checkpoint, [0, 4])))
    assert [text for text in told if "again" in text] == [
        "evaluator 0 (pid 0 on here) was killed by a test; starting it again"
    ]
    assert counts[-1] == (12, 12)
    with pytest.raises(StageFailed, match=r"evaluator 0 .* was killed"):
        together(tasks[:1], ThreadEngine(lambda number, kind: kind == "done"))


@pytest.mark.system
def test_what_an_evaluator_refuses_is_the_error_of_all(tmp_path: Path) -> None:
    settings, checkpoint = trained(tmp_path / "run", evaluate={"actors": 3, "require": "no_such_mean > 1"})
    with pytest.raises(UsageError, match="no metric 'no_such_mean'"):
        together(shares(settings, checkpoint, [0, 1, 3]))


@pytest.mark.system
def test_evaluators_are_processes_with_the_result_of_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings, _ = trained(run, evaluate={"episodes": 20, "actors": 6})
    alone = evaluate.run(settings, run=run)
    command = [sys.executable, "-m", "amago_cli", "evaluate", str(run), "--evaluators", "2", "--output", "json"]
    same = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert same["status"] == "skipped"  # it is the same evaluation
    alone.outputs[0].unlink()
    again = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert again["status"] == "done"
    assert again["metrics"] == json.loads(json.dumps(alone.metrics))
