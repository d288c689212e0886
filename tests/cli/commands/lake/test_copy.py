from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Amago

COUNTS = "select count(*) as trajectories, count(distinct uid) as uids from trajectories"


def counts(amago: Amago, lake: str) -> int:
    (row,) = amago("lake", "sql", lake, COUNTS, "--output", "json").json
    assert row["trajectories"] == row["uids"]
    return row["trajectories"]


def test_a_copy_is_made_and_repeated_for_nothing(amago: Amago, small: Path) -> None:
    done = amago("lake", "copy", small, "all", "--output", "json")
    assert (done.code, done.json["status"]) == (0, "done")
    assert done.json["metrics"]["trajectories"] == counts(amago, "all") == counts(amago, str(small))
    again = amago("lake", "copy", small, "all", "--output", "json").json
    assert (again["status"], again["metrics"]["present"]) == ("skipped", counts(amago, "all"))


def test_lakes_are_merged(amago: Amago, small: Path) -> None:
    assert amago("lake", "copy", small, "one", "--where", "length > 15").code == 0
    assert amago("lake", "copy", small, "two", "--where", "length < 25").code == 0
    both = amago("lake", "merge", "one", "two", "--into", "all")
    assert both.code == 0
    assert "two" in both.out
    assert counts(amago, "all") == counts(amago, str(small))


def test_damage_is_exit_4_and_the_rest_is_there(amago: Amago, small: Path) -> None:
    segment = next((small / "lake" / "segments").rglob("*.arrow"))
    data = bytearray(segment.read_bytes())
    data[len(data) // 3] ^= 0xFF
    segment.write_bytes(data)
    failed = amago("lake", "copy", small, "all", "--output", "json")
    assert failed.code == 4
    assert failed.json["metrics"]["trajectories"] == counts(amago, "all") > 0
    assert len(failed.json["metrics"]["damaged"]) == 1


def test_what_cannot_be_copied(amago: Amago, small: Path) -> None:
    assert amago("lake", "copy", "nowhere", "all").code == 3
    assert not Path("all").exists()
    assert amago("lake", "copy", small, small).code == 2
    assert amago("lake", "merge", small).code == 2
    assert amago("lake", "copy", small, "all", "--where", "drop table x").code == 2
    assert not Path("all").exists()
