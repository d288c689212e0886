from __future__ import annotations

from pathlib import Path

import pytest

from amago_cli.lakes import below, locate, only, overview, shares
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


@pytest.mark.parametrize(
    ("text", "place", "weight", "last"),
    [
        ("runs/a", "runs/a", 1.0, None),
        ("runs/a:0.8", "runs/a", 0.8, None),
        ("runs/a:3", "runs/a", 3.0, None),
        ("runs/a:.5", "runs/a", 0.5, None),
        ("s3://b/a", "s3://b/a", 1.0, None),
        ("s3://b/a:0.3", "s3://b/a", 0.3, None),
        ("s3://b/a?endpoint_override=http://h:9000", "s3://b/a?endpoint_override=http://h:9000", 1.0, None),
        ("s3://b/a?endpoint_override=h:9000:2", "s3://b/a?endpoint_override=h:9000", 2.0, None),
        ("s3://b/a?endpoint_override=http://h:0.5", "s3://b/a?endpoint_override=http://h:0.5", 1.0, None),
        ("s3://b/a?endpoint_override=h:9000&region=eu:1..2", "s3://b/a?endpoint_override=h:9000&region=eu", 1.0, 2.0),
        ("runs/a:1e-3", "runs/a", 0.001, None),
        ("runs/a:0.8..0.2", "runs/a", 0.8, 0.2),
        ("runs/a:1..0", "runs/a", 1.0, 0.0),
        ("s3://bucket/x", "s3://bucket/x", 1.0, None),
        ("s3://bucket/x:0.3", "s3://bucket/x", 0.3, None),
        ("runs/a:b", "runs/a:b", 1.0, None),
        ("runs/a:-1", "runs/a:-1", 1.0, None),
        ("runs/a:2:0.5", "runs/a:2", 0.5, None),
    ],
)
def test_a_weight_is_a_number_at_the_end(text: str, place: str, weight: float, last: float | None) -> None:
    assert shares([text]) == [(place, weight, last)]


def test_lakes_are_asked_for() -> None:
    with pytest.raises(UsageError, match="no lake is named"):
        shares(None)


def test_an_empty_lake_has_nothing(tmp_path: Path) -> None:
    found = overview(Lake.create(tmp_path / "x").path)
    assert (found["trajectories"], found["steps"], found["segments"], found["environments"]) == (0, 0, 0, [])
