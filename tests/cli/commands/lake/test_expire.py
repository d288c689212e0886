from pathlib import Path

import pytest

from tests.cli.conftest import Amago


def figures(amago: Amago, lake: Path) -> dict:
    found = amago("lake", "info", lake, "--output", "json").json["metrics"]
    return {name: found[name] for name in ("trajectories", "steps")}


def test_a_dry_run_lists_what_would_go_segment_by_segment(amago: Amago, small: Path) -> None:
    before = figures(amago, small)
    call = amago("lake", "expire", small, "--max-steps", 100, "--dry-run", "--output", "json").json["metrics"]
    assert call["steps"] + call["steps_left"] == before["steps"]
    assert call["trajectories"] + call["trajectories_left"] == before["trajectories"]
    assert sum(row["trajectories"] for row in call["expired"]) == call["trajectories"]
    assert {"segment", "of", "steps", "bytes", "overlay", "whole"} <= call["expired"][0].keys()
    assert figures(amago, small) == before
    text = amago("lake", "expire", small, "--max-steps", 100, "--dry-run").out
    assert "would expire" in text
    assert call["expired"][0]["segment"] in text


@pytest.mark.system
def test_the_rest_fits_and_collecting_again_does_not_make_up_for_it(amago: Amago, small: Path) -> None:
    assert amago("lake", "expire", small, "--max-steps", 100).code == 0
    left = figures(amago, small)
    assert 0 < left["steps"] <= 100
    again = amago("collect", "--env", "gym:CartPole-v1", "--run", small, "--steps", 400, "--actors", 4)
    assert "nothing to do" in again.out
    assert figures(amago, small) == left


def test_sql_and_age_choose(amago: Amago, small: Path) -> None:
    shortest = amago("lake", "sql", small, "select min(length) as n from trajectories", "--output", "json").json[0]["n"]
    call = amago("lake", "expire", small, "--where", f"length > {shortest}", "--output", "json").json
    assert call["metrics"]["trajectories"] > 0
    lengths = amago("lake", "sql", small, "select distinct length as n from trajectories", "--output", "json").json
    assert lengths == [{"n": shortest}]
    assert "nothing to do" in amago("lake", "expire", small, "--max-age", "7d").out
    assert amago("lake", "expire", small, "--max-age", "0.001s").code == 0
    assert figures(amago, small)["trajectories"] == 0


def test_a_purge_leaves_no_file_that_held_expired_trajectories(amago: Amago, small: Path) -> None:
    def segments() -> set[Path]:
        return set((small / "lake" / "segments").rglob("*.arrow"))

    before = segments()
    arguments = "lake", "expire", small, "--max-steps", 100, "--purge", "--output", "json"
    assert "purged_segments" not in amago(*arguments, "--dry-run").json["metrics"]
    assert segments() == before
    assert amago("lake", "expire", small, "--max-steps", 150).code == 0
    assert segments() == before  # within their grace period
    purged = amago(*arguments).json["metrics"]
    assert purged["purged_segments"] > 0
    assert purged["purged_bytes"] > 0
    assert not segments() & before
    assert 0 < figures(amago, small)["steps"] <= 100


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "nothing to expire"),
        (["--max-age", "soon"], "'soon' is not an age"),
        (["--max-steps", "0"], "--max-steps"),
        (["--where", "nonsense = 1"], "nonsense"),
    ],
)
def test_what_makes_no_sense_is_refused(amago: Amago, small: Path, options: list[str], said: str) -> None:
    call = amago("lake", "expire", small, *options)
    assert call.code == 2
    assert said in call.err
