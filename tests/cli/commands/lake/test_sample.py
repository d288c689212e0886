from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.lake.store import Lake
from tests.cli.conftest import Amago
from tests.lake.factories import IMAGES, fill


def test_each_trajectory_has_a_heading_and_its_lines(amago: Amago, small: Path) -> None:
    shown = amago("lake", "sample", small, "-k", 2)
    assert shown.code == 0
    assert shown.out.count("gym:CartPole-v1") == 2
    assert shown.out.count("reward") == 2
    assert "obs[3]" in shown.out


def test_json_has_the_rows(amago: Amago, small: Path) -> None:
    found = amago("lake", "sample", small, "-k", 3, "--where", "length > 10", "--output", "json").json["trajectories"]
    assert len(found) == 3
    for row in found:
        sql = f"select length, policy_id from trajectories where uid = '{row['uid']}'"
        (known,) = amago("lake", "sql", small, sql, "--output", "json").json
        assert known.items() <= row.items()
        assert row["length"] > 10


def test_pictures_are_written(amago: Amago) -> None:
    fill(Lake.create("pictures"), [5, 6], schema=IMAGES)
    done = amago("lake", "sample", "pictures", "-k", 2, "--images", "out", "--output", "json")
    assert sorted(done.json["outputs"]) == sorted(str(path) for path in Path("out").iterdir())
    assert all(Path(path).read_bytes().startswith(b"\x89PNG") for path in done.json["outputs"])
    assert len(done.json["outputs"]) == 2


def test_a_lake_without_pictures_says_so(amago: Amago, small: Path) -> None:
    assert "no observation here is an image" in amago("lake", "sample", small, "--images", "out").out


@pytest.mark.parametrize(
    ("options", "code"), [(["--where", "drop table x"], 2), (["--where", "length < 0"], 3), (["-k", "0"], 2)]
)
def test_what_cannot_be_drawn(amago: Amago, small: Path, options: list[str], code: int) -> None:
    assert amago("lake", "sample", small, *options).code == code
