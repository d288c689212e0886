from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Amago


def test_a_lake_and_its_run_say_the_same(amago: Amago, small: Path) -> None:
    by_run = amago("lake", "info", small, "--output", "json").json
    by_lake = amago("lake", "info", small / "lake", "--output", "json").json
    for found in (by_run, by_lake):
        for collector in found["metrics"]["collectors"]:
            assert collector.pop("seconds_since_commit") > 0
    assert by_run["metrics"] == by_lake["metrics"]
    assert by_run["lake"] == "small/lake"
    assert by_run["metrics"].keys() >= {"trajectories", "steps", "segments", "bytes"}


def test_columns_and_sources_are_shown(amago: Amago, small: Path) -> None:
    shown = amago("lake", "info", small).out
    assert "random" in shown
    assert "observation" in shown


def test_a_missing_lake(amago: Amago) -> None:
    assert amago("lake", "info", "nowhere").code == 3
