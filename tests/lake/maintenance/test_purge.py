"""Expired trajectories whose bytes are deleted, judged by reading every file of the lake."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.data.view import View
from pipelines.lake.maintenance.compaction import purge
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.reading import Reader
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake.factories import SCHEMA, columns, derive, flip_a_bit, live_ids

SECRET = np.float32(1234.5678)
TAG = "somebody's name"


def fill_with_secrets(lake: Lake, count: int = 12) -> dict[str, dict[str, np.ndarray]]:
    """Append trajectories, three to a segment; every fourth one has rewards and a tag that can be found on the disk."""
    rng, written = np.random.default_rng(0), {}
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        for i in range(count):
            values = columns(rng, 5, SCHEMA)
            if i % 4 == 0:
                values["reward"][:] = SECRET
            tags = {"who": TAG if i % 4 == 0 else "nobody"}
            written[writer.append(values, TrajectoryInfo(env="maze", task=f"t{i}", tags=tags))] = values
            if i % 3 == 2:
                writer.seal()
    return written


def find(lake: Lake, content: bytes) -> list[Path]:
    """Find the files anywhere in the lake that contain these bytes."""
    return [path for path in lake.path.rglob("*") if path.is_file() and content in path.read_bytes()]


def expire_secrets(lake: Lake) -> None:
    done = expire(
        lake, RetentionLimits(where=f"tags['who'] = '{TAG.replace(chr(39), chr(39) * 2)}'"), grace_seconds=1e9
    )
    assert done.plan.going


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@pytest.mark.system
def test_nothing_of_what_expired_is_left_on_the_disk(lake: Lake) -> None:
    written = fill_with_secrets(lake)
    view = View(lake, SCHEMA.id)
    view.refresh()
    catalog.query(lake, "select count(*) from trajectories")  # an index lists tags, too
    expire_secrets(lake)
    marks = SECRET.tobytes() * 2, TAG.encode()
    assert all(find(lake, mark) for mark in marks)
    done = purge(lake)
    assert done.segments == len(live_ids(lake)) - 1 == 3  # the last one held none of the expired trajectories
    assert done.bytes > 0
    assert done.waiting == 0
    assert not any(find(lake, mark) for mark in marks)
    reader = Reader(lake)
    reader.refresh()
    kept = {uid: values for i, (uid, values) in enumerate(written.items()) if i % 4}
    assert {reader.read(uid).uid for uid in kept} == set(kept)
    for uid, values in kept.items():
        for name, array in reader.read(uid).columns.items():
            np.testing.assert_array_equal(array, values[name])
    view.refresh()
    assert view.num_trajectories == len(kept)
    assert catalog.query(lake, "select count(*) from trajectories")[1] == [(len(kept),)]
    assert purge(lake).segments == 0


def test_versions_derived_from_what_expired_go_too(lake: Lake) -> None:
    written = fill_with_secrets(lake)
    derive(lake, {uid: {"reward": np.full(6, SECRET, np.float32)} for i, uid in enumerate(written) if i % 4 == 0})
    expire_secrets(lake)
    purge(lake)
    assert not find(lake, SECRET.tobytes() * 2)


def test_a_damaged_segment_is_reported_as_one_that_still_holds_bytes(lake: Lake) -> None:
    written = fill_with_secrets(lake)
    expire_secrets(lake)
    flip_a_bit(lake, list(written.values())[1]["reward"])
    heard = []
    assert purge(lake, listener=heard.append).waiting == 1
    assert any("left unchanged" in getattr(event, "text", "") for event in heard)
