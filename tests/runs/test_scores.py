"""Which evaluations count: only those of the environment, tasks and way to act that the run's own settings name."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.errors import InputMissing
from pipelines.report.model_card import find_evaluation
from pipelines.runs.comparison import compute_curves, estimate_improvements, group_runs
from pipelines.runs.evaluations import RunScores, find_last_and_best
from pipelines.runs.removal import find_prunable
from pipelines.runs.stored import read_run
from pipelines.runs.summary import summarize_runs
from pipelines.stages.tune import read_score
from tests.runs.factory import START, make_run, write_evaluation
from tests.tiers import examples

ENV = {"name": "tmaze", "corridor": 20}
CHAIN = [
    {"stage": "collect"},
    {"stage": "train"},
    {"stage": "evaluate", "start_epoch": -9},
    {"stage": "evaluate", "checkpoint": "best", "start_epoch": -1},
]
OWN = {"split": "test", "tasks": "", "greedy": False, "label": "", "seed": 77, "episodes": 50}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "cache"))


def evaluate(run: Path, update: int, score: float, *, series: str = "own00000", **changes: Any) -> Path:
    """Write an evaluation as the run's own settings make it, apart from `changes`."""
    fields = {"env": changes.pop("env", ENV), "time": changes.pop("time", START + update)}
    settings = {**OWN, **changes}
    return write_evaluation(run, update, score, series=series, settings=settings, default_greedy=False, **fields)


def make(path: Path, scores: dict[int, float], *, seed: int = 0, stages: Any = CHAIN, **evaluation: Any) -> Path:
    settings = {"env": ENV, "seed": seed, "stages": stages, "evaluate": {"seed": 77, "episodes": 50, **evaluation}}
    run = make_run(path, settings=settings)
    for update, score in scores.items():
        evaluate(run, update, score)
        evaluate(run, update, score / 2, split="train", series="train000")
    return run


def read(runs: list[Path]) -> Any:
    """Return what compare, runs, prune and tune make of the runs, apart from sizes, ages and numbers of evaluations."""
    stored = [read_run(path) for path in runs]
    ignored = ("bytes", "age", "evaluations", "other_evaluations")
    rows = summarize_runs(runs)
    groups = group_runs(stored)
    return (
        [{key: value for key, value in row.items() if key not in ignored} for row in rows],
        [(group.name, group.scores, group.score) for group in groups],
        [(each.better, each.than, each.probability) for each in estimate_improvements(groups)],
        [(line.name, line.x, line.values) for line in compute_curves(groups)],
        find_prunable(rows, keep_best=1),
        [read_score(path, "return_mean") for path in runs],
    )


foreign = st.fixed_dictionaries(
    {},
    optional={
        "env": st.sampled_from([{"name": "tmaze", "corridor": 400}, {"name": "bandit"}, {}, {"name": "tmaze"}]),
        "tasks": st.sampled_from(["success", "length > 3"]),
        "greedy": st.just(True),
        "attempts": st.sampled_from([2, 30]),
        "memory": st.just("attempt"),
        "temperature": st.sampled_from([0.5, 2]),
    },
).filter(bool)
OTHER_SPLIT = st.just({"split": "train", "seed": 5})  # the chain's own evaluations on tasks for training have seed 77
evaluations = st.lists(
    st.tuples(
        st.sampled_from([0, 1]),
        st.integers(0, 500),
        st.floats(-100, 100, allow_nan=False),
        st.floats(0, 1000),
        st.sampled_from(["a0000000", "b0000000", "own00001"]),
        st.one_of(foreign, st.builds(lambda other: {"split": "train", "seed": 5, **other}, foreign), OTHER_SPLIT),
    ),
    max_size=12,
    unique_by=lambda each: (each[0], each[1], each[4]),
)


@pytest.mark.system
@given(evaluations)
@examples(20)
def test_evaluations_of_other_standards_change_nothing(added: list[Any]) -> None:
    """Neither compare, runs, prune nor tune looks at other environments, parameters, tasks or ways to act."""
    with TemporaryDirectory() as folder:
        runs = [make(Path(folder) / name, {10: 0.1, 20: 0.5 + n}, seed=n) for n, name in enumerate("ab")]
        before = read(runs)
        for which, update, score, time, series, changes in added:
            evaluate(runs[which], update, score, time=START + time, series=series, **changes)
        assert read(runs) == before


@pytest.mark.system
@given(st.lists(st.tuples(st.integers(0, 500), st.floats(-9, 9)), max_size=8, unique_by=lambda each: each[0]))
@examples(10)
def test_evaluations_of_another_split_do_not_change_scores(added: list[tuple[int, float]]) -> None:
    with TemporaryDirectory() as folder:
        run = make_run(Path(folder) / "run", settings={"env": ENV})
        evaluate(run, 10, 0.25)
        before = read([run])
        for update, score in added:
            evaluate(run, update, score, split="train", series="train000")
        assert read([run]) == before


def test_an_evaluation_with_other_parameters_does_not_cost_a_better_run_its_place(tmp_path: Path) -> None:
    better, worse = make(tmp_path / "better", {20: 0.9}), make(tmp_path / "worse", {20: 0.2})
    evaluate(better, 20, 0.1, env={"name": "tmaze", "corridor": 400}, series="long0000", time=START + 99)
    assert find_prunable(summarize_runs([better, worse]), keep_best=1) == [worse]
    (row, _) = summarize_runs([better, worse])
    assert (row["score"], row["score_update"], row["other_evaluations"]) == (0.9, 20, 1)
    assert row["scored_on"] == "test tasks, sampled"


def test_a_score_names_its_temperature_and_a_card_shows_none_of_another(tmp_path: Path) -> None:
    run = make(tmp_path / "run", {}, stages=[], temperature=0.5)
    evaluate(run, 20, 0.9, temperature=0.5)
    (row,) = summarize_runs([run])
    assert (row["score"], row["scored_on"]) == (0.9, "test tasks, sampled at temperature 0.5")
    assert find_evaluation(read_run(run), 20, greedy=False) is None  # an exported policy acts at temperature 1


def test_runs_in_environments_of_other_parameters_are_never_ranked(tmp_path: Path) -> None:
    long = {"name": "tmaze", "corridor": 400}
    runs = [make(tmp_path / "short", {20: 0.9}), make_run(tmp_path / "long", settings={"env": long, "seed": 3})]
    evaluate(runs[1], 20, 0.2, env=long)
    assert find_prunable(summarize_runs(runs), keep_best=1) == []
    groups = group_runs([read_run(run) for run in runs], by=["train.steps"])
    assert groups[0].scores == {"tmaze corridor=20": (0.9,), "tmaze corridor=400": (0.2,)}
    assert estimate_improvements(group_runs([read_run(run) for run in runs])) == []


def test_the_latest_update_counts_even_if_an_older_one_is_evaluated_afterwards(tmp_path: Path) -> None:
    run = make(tmp_path / "run", {10: 0.1, 20: 0.5})
    evaluate(run, 15, 3.0, series="late0000", time=START + 500)
    found = find_last_and_best(read_run(run).scores.final)
    assert found is not None
    assert [(each.update, each.standard.split) for each in found] == [(20, "test"), (15, "test")]


@pytest.mark.parametrize(
    ("settings", "changes", "counts"),
    [
        ({}, {}, True),
        ({}, {"greedy": True}, False),
        ({"greedy": True}, {"greedy": True}, True),
        ({"greedy": True}, {}, False),
        ({"split": "train"}, {"split": "train"}, True),
        ({"split": "train"}, {}, False),
        ({"tasks": "success"}, {"tasks": "success"}, True),
        ({"tasks": "success"}, {}, False),
        ({"temperature": 0.5}, {"temperature": 0.5}, True),
        ({"temperature": 1}, {}, True),
        ({"temperature": 0.5}, {}, False),
        ({"episodes": 7, "seed": 3}, {"episodes": 9, "seed": 4}, True),
    ],
)
def test_a_run_is_scored_as_its_own_settings_say(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], counts: bool
) -> None:
    run = make(tmp_path / "run", {}, stages=[], **settings)
    evaluate(run, 10, 0.5, **changes)
    assert bool(read_run(run).scores.final) is counts


def test_a_chain_is_scored_as_its_last_evaluation_and_its_curve_has_all_of_them(tmp_path: Path) -> None:
    run = read_run(make(tmp_path / "run", {10: 0.1, 20: 0.5}))
    assert {each.split for each in run.scores.final} == {"test"}
    assert {each.split for each in run.scores.curve} == {"train", "test"}


def test_a_run_without_an_environment_is_scored_in_that_of_its_first_evaluation(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    evaluate(run, 10, 0.5)
    evaluate(run, 20, 9.0, env={"name": "bandit"}, series="other000")
    assert [each.update for each in read_run(run).scores.final] == [10]


@pytest.mark.parametrize(
    "damage", [{"stages": 3, "evaluate": []}, {"env": "x"}, {"stages": [1, {"stage": "evaluate"}]}]
)
def test_damaged_settings_select_without_an_error(tmp_path: Path, damage: dict[str, Any]) -> None:
    run = make(tmp_path / "run", {10: 0.5})
    assert len(RunScores.select(read_run(run).evaluations, damage).curve) in (0, 1, 2)


def test_runs_with_evaluations_of_others_only_are_refused_with_the_reason(tmp_path: Path) -> None:
    run = make(tmp_path / "run", {})
    evaluate(run, 10, 0.5, greedy=True)
    with pytest.raises(InputMissing, match="their 1 are of other environments, tasks or ways to act"):
        group_runs([read_run(run)])
    assert json.dumps(summarize_runs([run])[0]["score"]) == "null"
