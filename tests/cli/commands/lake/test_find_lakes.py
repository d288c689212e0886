from __future__ import annotations

from pathlib import Path

import pytest

from amago_cli.commands.lake import find_lakes
from pipelines.lake.sql.catalog import summary
from pipelines.lake.store import Lake
from tests.cli.conftest import Amago


def test_lakes_are_found_at_any_depth_and_not_inside_one_another(tmp_path: Path) -> None:
    for name in ("a/lake", "b", "c/d/lake", ".hidden/lake"):
        Lake.create(tmp_path / name)
    Lake.create(tmp_path / "b" / "inner")
    assert [path.relative_to(tmp_path).as_posix() for path in find_lakes(tmp_path)] == ["a/lake", "b", "c/d/lake"]


@pytest.mark.parametrize("given", [(), ("a", "b")])
def test_relabel_takes_exactly_one_lake(given: tuple[str, ...], amago: Amago) -> None:
    failed = amago("relabel", *(word for lake in given for word in ("--from-lake", lake)))
    assert (failed.code, failed.out) == (2, "")
    assert "lake" in failed.err


def test_empty_lake_is_summarised_by_zeros(tmp_path: Path) -> None:
    found = summary(Lake.create(tmp_path / "x"))
    assert (found["trajectories"], found["steps"], found["segments"], found["environments"]) == (0, 0, 0, [])
