"""Names of lakes in settings and options."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config.places import locate_lake, parse_share


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
    assert parse_share(text) == (place, weight, last)


def test_a_place_may_be_in_the_run() -> None:
    run = Path("runs/a")
    assert locate_lake("", run) == locate_lake("{run}", run) == locate_lake("{run}/lake", run) == run / "lake"
    assert locate_lake("{run}/offline", run) == run / "offline"
    assert locate_lake("lakes/b", run) == "lakes/b"
