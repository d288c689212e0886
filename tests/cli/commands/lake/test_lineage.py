from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import Amago


def test_a_tree_names_the_run_its_lake_and_who_collected(amago: Amago, small: Path) -> None:
    shown = amago("lake", "lineage", small)
    identity = f"small-{json.loads((small / 'run.json').read_text())['id']}"
    assert shown.code == 0
    lines = shown.out.splitlines()
    assert lines[0] == f"small ({identity}), checkpoint 3"
    assert "lake" in lines[1]
    assert identity in lines[2]
    assert "random" in lines[3]


def test_json_says_the_same(amago: Amago, small: Path) -> None:
    found = amago("lake", "lineage", f"{small}@3", "--output", "json").json["lineage"]
    facts = amago("lake", "info", small, "--output", "json").json["metrics"]
    assert (found["checkpoint"], found["lakes"][0]["steps"]) == (3, facts["steps"])


def test_trajectories_are_listed_one_a_line(amago: Amago, small: Path) -> None:
    listed = amago("lake", "lineage", small, "--trajectories").out.split()
    rows = amago("lake", "sql", small, "select uid from trajectories", "--output", "json").json
    assert sorted(listed) == sorted(row["uid"] for row in rows)
    assert amago("lake", "lineage", small, "--trajectories", "--output", "json").json["trajectories"] == listed


def test_what_is_not_there(amago: Amago, small: Path) -> None:
    assert amago("lake", "lineage", "nowhere").code == 3
    assert amago("lake", "lineage", f"{small}@99").code == 3
    assert amago("lake", "lineage", f"{small}@newest").code == 2
