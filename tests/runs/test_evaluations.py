from __future__ import annotations

import json
from pathlib import Path

from pipelines.runs.evaluations import ScoreInterval, find_last_and_best, select_curve
from pipelines.runs.stored import read_run
from tests.runs.factory import START, make_run, write_evaluation


def test_an_evaluation_has_its_score_interval_steps_and_seconds(tmp_path: Path) -> None:
    (evaluation,) = read_run(make_run(tmp_path / "run", scores={25: 0.5})).evaluations
    assert evaluation.score() == ScoreInterval(value=0.5, low=0.4, high=0.6)
    assert evaluation.score("episodes") == ScoreInterval(value=50.0)
    assert evaluation.score("nothing") is None
    assert (evaluation.env, evaluation.split, evaluation.series) == ("tmaze", "test", "9318ba67")
    assert (evaluation.env_steps, evaluation.seconds) == (250.0, 1.5)
    assert evaluation.attempts() == [ScoreInterval(value=0.25, low=0.0, high=0.5)]
    assert evaluation.attempts("return") == []
    assert evaluation.known_attempts("optimal") == [0.5]
    assert evaluation.known_attempts("random") == []


def test_a_curve_is_of_the_settings_that_most_checkpoints_were_evaluated_with(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", scores={10: 0.1, 20: 0.2, 30: 0.3})
    write_evaluation(path, 30, 0.9, series="other000", time=START + 100)
    evaluations = read_run(path).evaluations
    assert [(each.update, each.series) for each in select_curve(evaluations)] == [
        (10, "9318ba67"),
        (20, "9318ba67"),
        (30, "9318ba67"),
    ]
    assert select_curve(()) == []


def test_the_best_is_among_the_evaluations_like_the_last(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", scores={10: 0.7, 20: 0.2})
    write_evaluation(path, 15, 5.0, series="training", settings={"split": "train"}, time=START)
    found = find_last_and_best(read_run(path).evaluations)
    assert found is not None
    assert [each.update for each in found] == [20, 10]
    assert find_last_and_best(()) is None


def test_figures_that_are_not_numbers_have_no_score(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", scores={10: 0.5})
    file = path / "evaluations" / "000010-9318ba67.json"
    figures = {"return_mean": 0.5, "return_ci95": ["<b>", None], "per_attempt": [3], "success_mean": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"metrics": figures, "known": {"optimal": [1]}}))
    (evaluation,) = read_run(path).evaluations
    assert evaluation.score() == ScoreInterval(value=0.5)
    assert evaluation.score("success_mean") is None
    assert evaluation.attempts() == []
    assert evaluation.known_attempts("optimal") == []
