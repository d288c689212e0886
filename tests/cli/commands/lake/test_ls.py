from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Amago


def test_every_lake_below_is_listed(amago: Amago, small: Path) -> None:
    shown = amago("lake", "ls", ".", "--output", "json")
    (lake,) = shown.json["metrics"]["lakes"]
    assert lake["lake"] == "small/lake"
    assert lake["steps"] >= 400
    assert lake["environments"] == ["gym:CartPole-v1"]
    assert lake["bytes"] > 0


def test_no_lake_is_an_empty_list_and_no_directory_an_error(amago: Amago) -> None:
    assert amago("lake", "ls", ".", "--output", "json").json["metrics"]["lakes"] == []
    missing = amago("lake", "ls")
    assert missing.code == 3
    assert "no directory 'runs'" in missing.err


def test_a_damaged_lake_does_not_hide_the_others(amago: Amago, small: Path) -> None:
    broken = Path("broken")
    broken.mkdir()
    (broken / "lake.json").write_text("{")
    shown = amago("lake", "ls", ".", "--output", "json")
    first, second = shown.json["metrics"]["lakes"]
    assert "damaged" in first["error"]
    assert second["steps"] >= 400
    assert "damaged" in amago("lake", "ls", ".").out
