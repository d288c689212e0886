from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import InputMissing, UsageError
from pipelines.runs.comparison import aggregate, compute_curves, estimate_improvement, estimate_improvements, group_runs
from pipelines.runs.evaluations import ScoreInterval
from pipelines.runs.stored import StoredRun, read_run
from tests.runs.factory import make_run, write_evaluation

# Scores of two agents on three tasks, one score for each run, and the results of rliable 1.2.0 with 20,000 resamples.
FIRST = {
    "x": [0.551, 0.708, 0.291, 0.511, 0.893],
    "y": [0.896, 0.126, 0.207, 0.051, 0.441],
    "z": [0.5, 0.457, 0.649, 0.278, 0.676],
}
SECOND = {"x": [0.591, 0.024, 0.559, 0.259], "y": [0.615, 0.484, 0.893, 0.64], "z": [0.5, 0.5, 0.5, 0.5]}
RLIABLE = {
    ("iqm", "first"): (0.4837777777777778, 0.36022222, 0.62644722),
    ("iqm", "second"): (0.525, 0.45716667, 0.56466667),
    ("mean", "first"): (0.48233333333333334, 0.37379833, 0.60126667),
    ("mean", "second"): (0.5054166666666666, 0.41566667, 0.59185625),
}
RLIABLE_IMPROVEMENT = (0.4666666666666666, 0.25, 0.66666667)


@pytest.mark.parametrize(("statistic", "which"), RLIABLE)
def test_statistics_and_their_intervals_are_those_of_rliable(statistic: Any, which: str) -> None:
    found = aggregate(FIRST if which == "first" else SECOND, statistic, resamples=20_000)
    assert found is not None
    value, low, high = RLIABLE[statistic, which]
    assert found.value == pytest.approx(value, abs=1e-12)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.01), pytest.approx(high, abs=0.01))


def test_the_probability_of_improvement_is_that_of_rliable() -> None:
    found = estimate_improvement(FIRST, SECOND, resamples=20_000)
    value, low, high = RLIABLE_IMPROVEMENT
    assert found.value == pytest.approx(value, abs=1e-12)
    assert (found.low, found.high) == (pytest.approx(low, abs=0.02), pytest.approx(high, abs=0.02))
    assert estimate_improvement(SECOND, FIRST).value == pytest.approx(1 - value)


def test_a_single_run_has_no_interval() -> None:
    assert aggregate({"maze": [0.5]}) == ScoreInterval(value=0.5)
    assert estimate_improvement({"maze": [0.5]}, {"maze": [0.5]}) == ScoreInterval(value=0.5)
    assert aggregate({}) is None


def make(folder: Path, name: str, scores: dict[int, float], **settings: Any) -> StoredRun:
    return read_run(make_run(folder / name, scores=scores, settings=settings))


def test_runs_are_grouped_by_what_differs_except_the_seed_and_how_they_are_carried_out(tmp_path: Path) -> None:
    runs = [
        make(tmp_path, f"{rate}-{seed}", {10: score}, seed=seed, train={"learning_rate": rate, "threads": seed})
        for rate, seed, score in [(1e-3, 0, 0.1), (1e-3, 1, 0.3), (1e-4, 0, 0.5), (1e-4, 1, 0.9)]
    ]
    first, second = group_runs(runs)
    assert (first.name, second.name) == ("train.learning_rate=0.001", "train.learning_rate=0.0001")
    assert first.settings == {"train.learning_rate": 1e-3}
    assert first.score is not None
    assert (first.score.value, first.score.low, first.score.high) == (pytest.approx(0.2), 0.1, 0.3)
    (better,) = [each for each in estimate_improvements([first, second]) if each.better == second.name]
    assert better.probability.value == 1.0
    (whole,) = group_runs(runs, by=["train.steps"])
    assert len(whole.runs) == 4


def test_planned_runs_are_grouped_by_their_budget_and_what_was_given(tmp_path: Path) -> None:
    """Epochs and steps follow from rates that each run has measured again."""
    runs = []
    for seed, minutes, epochs in [(0, 2.0, 7), (1, 2.0, 8), (0, 4.0, 15)]:
        settings = {"seed": seed, "epochs": epochs, "size": "tiny"}
        rows = [{"setting": "epochs", "value": epochs}, {"setting": "size", "value": "tiny", "given": True}]
        recipe = {"plan": {"budget": {"minutes": minutes}, "choices": rows}}
        path = make_run(tmp_path / f"{seed}-{minutes}", scores={10: 0.1}, settings=settings, recipe=recipe)
        runs.append(read_run(path))
    assert [(group.name, len(group.runs)) for group in group_runs(runs)] == [("minutes=2", 2), ("minutes=4", 1)]
    assert len(group_runs(runs, by=["epochs"])) == 3


def test_a_size_names_a_group_and_not_all_it_stands_for(tmp_path: Path) -> None:
    runs = [
        make(tmp_path, "small", {10: 0.1}, size="small", agent={"sequence": {"d_model": 128}}),
        make(tmp_path, "tiny", {10: 0.1}, size="tiny", agent={"sequence": {"d_model": 64}}),
    ]
    assert [group.name for group in group_runs(runs)] == ["size=small", "size=tiny"]


def test_environments_are_groups_or_if_more_differs_strata(tmp_path: Path) -> None:
    runs = [
        make(tmp_path, f"{env}-{steps}", {10: score}, env={"name": env}, train={"steps": steps})
        for env, steps, score in [("a", 5, 0.0), ("b", 5, 1.0), ("a", 9, 2.0), ("b", 9, 3.0)]
    ]
    assert [group.name for group in group_runs(runs[:2])] == ["env.name=a", "env.name=b"]
    first, second = group_runs(runs)
    assert first.scores == {"a": (0.0,), "b": (1.0,)}
    assert second.name == "train.steps=9"


def test_groups_without_a_telling_setting_have_names_that_differ(tmp_path: Path) -> None:
    runs = [
        make(tmp_path, name, {10: 0.1}, agent={"actor": {"hidden": [8] * count}})
        for name, count in [("a", 1), ("b", 7)]
    ]
    names = [group.name for group in group_runs(runs)]
    assert len(set(names)) == 2


def test_the_newest_evaluation_of_each_run_counts_and_unfinished_runs_are_counted(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", scores={10: 0.9, 20: 0.2}, status=None)
    (group,) = group_runs([read_run(path)])
    assert group.scores == {"tmaze": (0.2,)}
    assert group.unfinished == 1


def test_comparisons_without_scores_are_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(InputMissing, match="no runs"):
        group_runs([])
    with pytest.raises(InputMissing, match="none of these runs"):
        group_runs([make(tmp_path, "a", {})])
    scored = make(tmp_path, "b", {10: 0.5})
    with pytest.raises(InputMissing, match="return_mean"):
        group_runs([scored], metric="retrn_mean")
    with pytest.raises(UsageError, match=r"train\.learning_rate"):
        group_runs([scored], by=["train.learning_rat"])


def test_a_curve_is_where_half_of_the_runs_have_got(tmp_path: Path) -> None:
    ends = {"a": 40, "b": 40, "c": 20, "d": 10}
    runs = [
        make(tmp_path, name, {update: update / 10 for update in (10, 20, 40) if update <= end}, seed=seed)
        for seed, (name, end) in enumerate(ends.items())
    ]
    (line,) = compute_curves(group_runs(runs))
    assert line.x == [10.0, 20.0, 40.0]
    assert line.values == pytest.approx([1.0, 2.0, 4.0])
    (by_steps,) = compute_curves(group_runs(runs), axis="steps")
    assert by_steps.x == [100.0, 200.0, 400.0]
    assert compute_curves(group_runs(runs[:1]), metric="nothing") == []


def test_a_curve_interpolates_between_evaluations(tmp_path: Path) -> None:
    runs = [make(tmp_path, "a", {10: 0.0, 30: 2.0}), make(tmp_path, "b", {10: 0.0, 20: 5.0, 30: 2.0}, seed=1)]
    (line,) = compute_curves(group_runs(runs), statistic="mean")
    assert line.values == pytest.approx([0.0, 3.0, 2.0])
    assert line.low[1] == 1.0
    assert line.high[1] == 5.0


def test_scores_of_another_form_are_left_out(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", scores={10: 0.5})
    write_evaluation(path, 20, 0.0, metrics={"return_mean": "<b>"})
    (group,) = group_runs([read_run(path)])
    assert group.scores == {"tmaze": (0.5,)}
