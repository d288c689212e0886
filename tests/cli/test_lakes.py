from __future__ import annotations

from pathlib import Path

import pytest

from amago_cli.lakes import below, locate, only, overview
from pipelines.errors import InputMissing, UsageError
from pipelines.lake.store import Lake


def test_lakes_are_found_at_any_depth_and_not_inside_one_another(tmp_path: Path) -> None:
    for name in ("a/lake", "b", "c/d/lake", ".hidden/lake"):
        Lake.create(tmp_path / name)
    Lake.create(tmp_path / "b" / "inner")
    assert [path.relative_to(tmp_path).as_posix() for path in below(tmp_path)] == ["a/lake", "b", "c/d/lake"]


def test_a_run_means_its_lake(tmp_path: Path) -> None:
    Lake.create(tmp_path / "run" / "lake")
    lake = str(tmp_path / "run" / "lake")
    assert locate(str(tmp_path / "run")) == locate(lake) == lake
    with pytest.raises(InputMissing):
        locate(str(tmp_path))


def test_one_lake_is_asked_for() -> None:
    assert only(["a"]) == "a"
    for given in (None, [], ["a", "b"]):
        with pytest.raises(UsageError):
            only(given)


def test_an_empty_lake_has_nothing(tmp_path: Path) -> None:
    found = overview(Lake.create(tmp_path / "x").path)
    assert (found["trajectories"], found["steps"], found["segments"], found["environments"]) == (0, 0, 0, [])
