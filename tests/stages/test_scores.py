"""A chain's scores: which evaluations it makes, what each belongs to, and which checkpoint is its best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.config import places
from pipelines.config.policy_files import list_checkpoints
from pipelines.config.settings import Settings
from pipelines.events import Event, Notice
from pipelines.learning import bundle
from pipelines.learning import checkpoint as checkpoints
from pipelines.runs.evaluations import find_last_and_best
from pipelines.runs.stored import read_run
from pipelines.stages import evaluate, export
from pipelines.stages import run as chain
from pipelines.stages.plan import plan
from tests.stages.recipes import tiny

LAKE = {"name": "meta-frozen-lake", "size": 3, "attempts": 2}
PENDULUM = {"name": "gym:Pendulum-v1", "attempts": 2, "max_episode_steps": 10}
STAGES = [{"stage": "collect", "steps": 160}, {"stage": "train", "steps": 2}, {"stage": "evaluate"}]


def judged(*entries: dict[str, Any], epochs: int = 4, before: int = 2) -> list[tuple[int, Any, str, str, bool]]:
    """Return (epoch, marks best, split, checkpoint, final) of each evaluation of a chain, whose `entries` come after
    `before` of the stages collect and train."""
    stages = [*STAGES[:before], *({"stage": "evaluate", **entry} for entry in entries), *STAGES[before:2]]
    steps = [step for step in plan(tiny(epochs=epochs, stages=stages)) if step.entry.stage == "evaluate"]
    return [
        (s.epoch, s.settings.evaluate.mark_best, w.task_split, w.checkpoint, s.is_final)
        for s in steps
        for w in [s.settings.evaluate]
    ]


def test_a_chain_chooses_its_best_on_training_tasks_and_is_scored_on_others() -> None:
    assert judged({}, epochs=2) == [
        (0, True, "train", "latest", False),
        (1, True, "train", "latest", False),
        (1, False, "test", "latest", True),
    ]


def test_the_last_epoch_is_evaluated_whatever_the_interval() -> None:
    assert [found[0] for found in judged({"every": 5}, epochs=20)] == [0, 5, 10, 15, 19, 19]
    assert [found[0] for found in judged({"every": 5, "stop_epoch": 9}, epochs=20)] == [0, 5]


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([{"split": "test"}], [(0, False, "test", "latest", True)]),
        ([{"mark_best": False}], [(0, False, "test", "latest", True)]),
        ([{"split": "train"}], [(0, True, "train", "latest", True)]),
        ([{"mark_best": True, "split": "test"}], [(0, True, "test", "latest", True)]),
        (
            [{"mark_best": True}, {"checkpoint": "best"}],
            [(0, True, "train", "latest", False), (0, False, "test", "best", True)],
        ),
        (
            [{"seed": 5}, {"seed": 6}],  # one of them chooses: their scores cannot be compared
            [(0, True, "train", "latest", False), (0, False, "test", "latest", True)],
        ),
    ],
)
def test_a_recipe_may_say_otherwise(entries: list[dict], expected: list) -> None:
    assert judged(*entries, epochs=1) == expected


def test_nothing_is_chosen_before_the_first_update() -> None:
    assert judged({}, epochs=1, before=1) == [(0, False, "test", "latest", True)]


def make(env: dict[str, Any], **tables: Any) -> Settings:
    return tiny(env=env, **{"epochs": 3, "stages": STAGES, **tables})


@pytest.mark.system
def test_a_chain_keeps_and_marks_its_best_checkpoint(tmp_path: Path) -> None:
    """Also if it is older than all that are kept, and it can be exported."""
    run = tmp_path / "run"
    settings = make(LAKE, epochs=6, train={"keep_checkpoints": 1, "learning_rate": 1e-9})
    heard: list[Event] = []
    result = chain.run(settings, run=run, listener=heard.append)
    best = json.loads((run / "run.json").read_text())["best"]
    scores = {
        each.update: each.score().value  # type: ignore[union-attr]
        for each in read_run(run).evaluations
        if each.split == "train"
    }
    assert set(scores) == {2, 4, 6, 8, 10, 12}
    assert (best["score"], best["split"]) == (max(scores.values()), "train")
    assert checkpoints.load(run / "checkpoints", "best").update == best["update"]
    assert set(list_checkpoints(run / "checkpoints")) == {best["update"], 12}
    exporting = {"export": settings.export.model_copy(update={"checkpoint": "best"})}
    done = export.run(settings.model_copy(update=exporting), run=run)
    assert done.metrics["update"] == best["update"]
    assert result.metrics["best_update"] == best["update"]
    assert (result.metrics["evaluated_update"], result.metrics["evaluated_split"]) == (12, "test")
    final = find_last_and_best(read_run(run).scores.final)
    assert final is not None
    assert result.metrics["return_mean"] == final[0].score().value  # type: ignore[union-attr]
    lines = [event.text for event in heard if isinstance(event, Notice) and "evaluate" in event.stage]
    assert sum("on train tasks: return" in line and "best so far" in line for line in lines) == 6
    [last] = [line for line in lines if "on test tasks" in line]
    assert "best so far" not in last
    again = chain.run(settings, run=run)
    assert again.status == "skipped"
    assert again.metrics["return_mean"] == result.metrics["return_mean"]


def reports(run: Path) -> list[tuple[str, bool, int]]:
    """Return (split, greedy, episodes) of the evaluations of the last update."""
    found = read_run(run).evaluations
    last = max(each.update for each in found)
    return sorted(
        (each.split, bool(each.standard.greedy), int(each.metrics["episodes"])) for each in found if each.update == last
    )


@pytest.mark.system
def test_discrete_policies_are_sampled_and_checked_the_other_way_at_the_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = chain.run(make(LAKE, epochs=2, evaluate={"episodes": 40}), run=run)
    assert reports(run) == [("test", False, 40), ("test", True, 10), ("train", False, 40)]
    [check] = [each for each in read_run(run).evaluations if each.standard.greedy and each.split == "test"]
    figures = json.loads(check.path.read_text()) | {"metrics": {**check.metrics, "return_ci95": [8, 9]}}
    assert "greedy_return_ci95" not in result.metrics or evaluate.differs(result.metrics, check.metrics)
    check.path.write_text(json.dumps(figures))
    again = chain.run(make(LAKE, epochs=2, evaluate={"episodes": 40}), run=run)
    assert again.metrics["greedy_return_ci95"] == [8, 9]
    assert bundle.read(export_of(run, tmp_path / "bundle")).greedy is False


@pytest.mark.system
def test_continuous_policies_are_greedy(tmp_path: Path) -> None:
    run = tmp_path / "run"
    chain.run(make(PENDULUM, epochs=1, evaluate={"episodes": 12}), run=run)
    assert reports(run) == [("test", False, 10), ("test", True, 12), ("train", True, 12)]
    assert bundle.read(export_of(run, tmp_path / "bundle")).greedy is True


def export_of(run: Path, to: Path) -> Path:
    settings = Settings.model_validate({**read_run(run).document, "export": {"to": str(to)}})
    export.run(settings, run=run)
    return to


@pytest.mark.system
def test_who_chooses_how_to_act_gets_that_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    chain.run(make(LAKE, epochs=1, evaluate={"episodes": 8, "greedy": True}), run=run)
    assert reports(run) == [("test", True, 8), ("train", True, 8)]
    settings = make(LAKE, evaluate={"episodes": 8, "greedy": False})
    result = evaluate.run(settings, run=run)
    assert (result.metrics["greedy"], result.metrics["split"]) == (False, "test")
    assert "greedy_play" not in result.metrics
    [row] = [each for each in read_run(run).scores.final if each.update == 2]
    assert row.standard.greedy is True  # the run's own choice


def test_both_ways_are_shown_where_they_differ() -> None:
    def report(mean: float, half: float, greedy: bool) -> dict[str, Any]:
        figures = {"episodes": 50, "return_mean": mean, "return_ci95": [mean - half, mean + half], "per_attempt": []}
        about = {"update": 5, "env": {"name": "x"}, "settings": {"split": "test", "greedy": greedy}, "known": {}}
        return {**about, "metrics": figures}

    sampled = report(0.84, 0.05, False)
    assert evaluate.differs(sampled["metrics"], report(0.25, 0.05, True)["metrics"])
    assert not evaluate.differs(sampled["metrics"], report(0.80, 0.05, True)["metrics"])
    rows = evaluate.tables(sampled, report(0.25, 0.05, True))[0].rows
    assert [row[0] for row in rows] == ["return", "return (greedy play, 50 episodes)"]


@pytest.mark.system
def test_a_best_checkpoint_of_other_tasks_is_not_compared(tmp_path: Path) -> None:
    """Choosing by tasks for testing, which a user may ask for, starts over instead of mixing both."""
    run = tmp_path / "run"
    chain.run(make(LAKE, epochs=2), run=run)
    wanted = {"mark_best": True, "split": "test", "checkpoint": "2", "episodes": 6}
    evaluate.run(make(LAKE, evaluate=wanted), run=run)
    best = json.loads((run / "run.json").read_text())["best"]
    assert (best["update"], best["split"]) == (2, "test")


@pytest.mark.system
def test_card_and_page_show_one_evaluation_that_of_the_run(tmp_path: Path) -> None:
    """Not that of the proof, which has fewer episodes; unless the run has none of this policy as it acts."""
    run, proof = tmp_path / "run", {"evaluations": {"original": {"return_mean": 0.1, "episodes": 32}}}
    chain.run(make(LAKE, epochs=1, evaluate={"episodes": 40}), run=run)
    stored, checkpoint = read_run(run), checkpoints.load(run / "checkpoints")
    shown = export.choose_evaluation(checkpoint, proof, run=stored, split="test", greedy=False)
    assert shown is not None
    assert shown.metrics["episodes"] == 40
    other = export.choose_evaluation(checkpoint, proof, run=stored, split="test", greedy=True)
    assert other is not None
    assert other.metrics["episodes"] == 32
    assert export.choose_evaluation(checkpoint, {}, run=None, split="test", greedy=True) is None


def test_a_bundle_is_shown_with_its_own_scores_if_they_have_more_episodes() -> None:
    found = bundle.read(places.locate_in_zoo("quickstart"))
    proof = {"evaluations": {"original": {"return_mean": 0.1, "episodes": 32}}}
    shown = export.choose_evaluation(found, proof, run=None, split="test", greedy=found.greedy)
    assert shown is not None
    assert shown.metrics["episodes"] == 500
    other = export.choose_evaluation(found, proof, run=None, split="test", greedy=not found.greedy)
    assert other is not None
    assert other.metrics["episodes"] == 32
