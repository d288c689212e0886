"""evaluate: repeatable, counted, gated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.errors import InputMissing, RequirementNotMet, UsageError
from pipelines.events import Event, Progress
from pipelines.runs.stored import read_run
from pipelines.stages import collect, evaluate, train
from pipelines.stages import run as chain
from tests.stages.recipes import tiny


@pytest.fixture
def run(trained: Path) -> Path:
    return trained


def test_the_same_evaluation_is_read_back_and_another_seed_is_another(run: Path) -> None:
    first = evaluate.run(tiny(), run=run)
    assert first.metrics["episodes"] == 6
    assert evaluate.run(tiny(), run=run).status == "skipped"
    assert evaluate.run(tiny(evaluate={"seed": 5}), run=run).status == "done"
    report = json.loads(first.outputs[0].read_text())
    assert report["metrics"]["return_mean"] == first.metrics["return_mean"]
    assert report["cpu_seconds"] > 0


def test_the_same_seed_gives_the_same_figures_whatever_the_number_of_actors(run: Path) -> None:
    few = evaluate.run(tiny(evaluate={"actors": 2}), run=run)
    many = evaluate.run(tiny(evaluate={"actors": 6}), run=run)
    assert few.metrics["return_mean"] == many.metrics["return_mean"]


def test_an_evaluation_that_clears_the_memory_is_another_one(run: Path) -> None:
    first = evaluate.run(tiny(evaluate={"attempts": 3}), run=run)
    again = evaluate.run(tiny(evaluate={"attempts": 3, "memory": "episode"}), run=run)
    assert (again.status, again.outputs) == ("skipped", first.outputs)
    cleared = evaluate.run(tiny(evaluate={"attempts": 3, "memory": "attempt"}), run=run)
    assert cleared.status == "done"
    assert "memory cleared after each attempt" in cleared.tables[0].title
    assert [each.standard.memory for each in read_run(run).evaluations].count("attempt") == 2  # sampled and greedy
    assert cleared.metrics["per_attempt"][0] == first.metrics["per_attempt"][0]


def test_clearing_the_memory_between_attempts_needs_several(run: Path) -> None:
    settings = tiny(evaluate={"memory": "attempt"})
    with pytest.raises(UsageError, match="would change nothing: an episode of"):
        evaluate.run(settings, run=run)


def test_a_chain_plays_with_and_without_memory_of_earlier_attempts(tmp_path: Path) -> None:
    evaluations = [{"stage": "evaluate", "label": memory, "memory": memory} for memory in ("attempt", "episode")]
    stages = [{"stage": "collect"}, {"stage": "train"}, *evaluations]
    settings = tiny(epochs=1, stages=stages, evaluate={"episodes": 3, "attempts": 2})
    chain.run(settings, run=tmp_path / "chain")
    memories = [each.standard.memory for each in read_run(tmp_path / "chain").evaluations]
    assert {*memories} == {"attempt", "episode"}


def test_another_temperature_is_another_evaluation(run: Path) -> None:
    first = evaluate.run(tiny(), run=run)
    again = evaluate.run(tiny(evaluate={"temperature": 1}), run=run)
    assert (again.status, again.outputs) == ("skipped", first.outputs)
    hot = evaluate.run(tiny(evaluate={"temperature": 50.0}), run=run)
    assert (hot.status, hot.metrics["temperature"]) == ("done", 50)
    assert "at temperature 50" in hot.tables[0].title
    assert hot.metrics["greedy_play"]["return_mean"] == first.metrics["greedy_play"]["return_mean"]
    named = [(each.standard.greedy, each.standard.temperature) for each in read_run(run).evaluations]
    assert named == [(False, 1), (True, 1), (False, 50)]
    with pytest.raises(UsageError) as refused:
        tiny(evaluate={"temperature": 0.5, "greedy": True})
    assert "no effect on greedy actions" in refused.value.problems[0]


def test_a_chain_of_continuous_actions_refuses_a_temperature_before_it_begins(tmp_path: Path) -> None:
    stages = [{"stage": "collect"}, {"stage": "train"}, {"stage": "evaluate", "temperature": 0.5}]
    with pytest.raises(UsageError, match="a temperature needs probabilities of choices"):
        chain.run(tiny(env={"name": "gym:Pendulum-v1"}, stages=stages), run=tmp_path / "run")
    assert not (tmp_path / "run/lake").exists()


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"require": "return_men >= 0"}, "no metric 'return_men'"),
        ({"require": "return_ci95 >= 0"}, "not a number"),
        ({"require": "per_attempt[0] >= 0"}, "has no entry"),
        ({"require": "return_mean.low >= 0"}, "has no 'low'"),
        ({"mark_best": True, "best_by": "per_attempt[-1]"}, "has no entry"),
    ],
)
def test_an_unknown_metric_is_refused_before_an_episode_is_played(run: Path, tables: dict, message: str) -> None:
    heard: list[Event] = []
    with pytest.raises(UsageError, match=message):
        evaluate.run(tiny(evaluate=tables), run=run, listener=heard.append)
    assert not any(isinstance(event, Progress) for event in heard)
    assert not list((run / "evaluations").glob("*.json"))


def test_a_chain_refuses_an_unknown_metric_before_it_begins(tmp_path: Path) -> None:
    stages = [{"stage": "collect"}, {"stage": "train"}, {"stage": "evaluate", "require": "succes_mean > 0"}]
    with pytest.raises(UsageError, match="no metric 'succes_mean'"):
        chain.run(tiny(stages=stages), run=tmp_path / "run")
    assert not (tmp_path / "run/lake").exists()


@pytest.mark.system
def test_a_chain_draws_success_and_return_by_attempt(tmp_path: Path) -> None:
    stages = [{"stage": "collect"}, {"stage": "train"}, {"stage": "evaluate", "label": "after training"}]
    lake = {"name": "meta-frozen-lake", "size": 3, "attempts": 3}
    done = chain.run(tiny(stages=stages, env=lake, collect={"steps": 200}), run=tmp_path / "lake")
    titles = [table.title for table in done.tables]
    assert titles[1:] == ["success by attempt, fresh tasks", "return by attempt, fresh tasks"]
    assert {path.name for path in done.outputs} >= {"adaptation.png", "adaptation_return.png"}
    pendulum = {"name": "gym:Pendulum-v1", "attempts": 2, "max_episode_steps": 10}
    done = chain.run(tiny(stages=stages, env=pendulum), run=tmp_path / "pendulum")
    assert [table.title for table in done.tables][1:] == ["return by attempt, fresh tasks"]
    assert (tmp_path / "pendulum/adaptation_return.png").is_file()
    assert not (tmp_path / "pendulum/adaptation.png").exists()
    assert len(done.metrics["per_attempt"]) == 2


def test_a_requirement_that_is_not_met_carries_the_result(run: Path) -> None:
    with pytest.raises(RequirementNotMet) as missed:
        evaluate.run(tiny(evaluate={"require": "return_mean > 5"}), run=run)
    assert missed.value.result.metrics["episodes"] == 6
    with pytest.raises(UsageError):
        evaluate.run(tiny(evaluate={"require": "return_mean"}), run=run)


def test_a_missing_run_or_checkpoint_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="no run"):
        evaluate.run(tiny(), run=tmp_path / "nowhere")
    with pytest.raises(InputMissing, match="there are: 3, 6"):
        evaluate.run(tiny(evaluate={"checkpoint": "4"}), run=run)


def test_an_environment_of_other_spaces_is_refused(run: Path) -> None:
    with pytest.raises(InputMissing, match="other spaces"):
        evaluate.run(tiny(env={"name": "dark-key-door"}), run=run)


def test_a_damaged_evaluation_is_made_again(run: Path) -> None:
    first = evaluate.run(tiny(), run=run)
    first.outputs[0].write_text("{")
    again = evaluate.run(tiny(), run=run)
    assert again.status == "done"
    assert again.metrics == first.metrics


@pytest.mark.system
def test_only_tasks_of_chosen_trajectories_are_played_each_told_apart(tmp_path: Path) -> None:
    collect.run(tiny(collect={"steps": 400}), run=tmp_path / "run")
    train.run(tiny(), run=tmp_path / "run", lakes=[(tmp_path / "run/lake", 1.0)])
    settings = tiny(evaluate={"tasks": "task = 'goal=-1'", "episodes": 4})
    result = evaluate.run(settings, run=tmp_path / "run")
    assert {task: row["episodes"] for task, row in result.metrics["per_task"].items()} == {"goal=-1": 4}
    both = evaluate.run(tiny(evaluate={"tasks": "length > 0", "episodes": 2}), run=tmp_path / "run")
    assert {task: row["episodes"] for task, row in both.metrics["per_task"].items()} == {"goal=-1": 1, "goal=+1": 1}
    assert [row[0] for row in both.tables[1].rows] in (["goal=-1", "goal=+1"], ["goal=+1", "goal=-1"])
    assert evaluate.run(settings, run=tmp_path / "run").status == "skipped"
    other = evaluate.run(tiny(evaluate={"tasks": "task = 'goal=+1'", "episodes": 4}), run=tmp_path / "run")
    assert other.status == "done"


@pytest.mark.system
@pytest.mark.parametrize(
    ("tasks", "error", "message"),
    [
        ("length < 0", InputMissing, "no trajectory"),
        ("drop table x", UsageError, "SQL"),
        ("true", UsageError, "episodes 2 or more"),
    ],
)
def test_tasks_that_cannot_be_chosen(tmp_path: Path, tasks: str, error: type, message: str) -> None:
    collect.run(tiny(collect={"steps": 400}), run=tmp_path / "run")
    train.run(tiny(), run=tmp_path / "run", lakes=[(tmp_path / "run/lake", 1.0)])
    with pytest.raises(error, match=message):
        evaluate.run(tiny(evaluate={"tasks": tasks, "episodes": 1}), run=tmp_path / "run")


@pytest.mark.parametrize("interval", [[1.0], [1.0, 2.0, 3.0], "wide", [[1.0], 2.0], None])
def test_stored_evaluation_with_a_malformed_interval_is_played_again(run: Path, interval: object) -> None:
    first = evaluate.run(tiny(), run=run)
    path = first.outputs[0]
    report = json.loads(path.read_text())
    report["metrics"]["return_ci95"] = interval
    path.write_text(json.dumps(report))
    assert evaluate.run(tiny(), run=run).status == "done"
    assert json.loads(path.read_text())["metrics"]["return_ci95"] == first.metrics["return_ci95"]
