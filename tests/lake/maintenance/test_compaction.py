"""Which segments are merged, and that merging them changes nothing that is read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.data.view import View
from pipelines.errors import UsageError
from pipelines.events import Progress
from pipelines.lake.folders import list_all
from pipelines.lake.maintenance.compaction import CompactionRules, compact, group_runs
from pipelines.lake.maintenance.files import File, FileTable
from pipelines.lake.maintenance.retention import RetentionLimits, expire
from pipelines.lake.reading import Reader
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake.factories import IMAGES, SCHEMA, columns, derive, fill, segment_files
from tests.lake.windows import windows_of


def a_file(id: str, size: int, alive: int, dead: int, kind: str = "a", time: float = 0.0) -> File:
    n = alive + dead
    return File(
        id=id,
        kind=(kind, False, ()),
        bytes=size,
        replaces={},
        uids=np.array([b"%d" % i for i in range(n)], dtype="S16"),
        steps=np.ones(n, dtype=np.int64),
        times=np.full(n, time),
        collectors=np.array([""] * n, dtype=object),
        episodes=None,
        base_ids=np.zeros(0, dtype=object),
        base_uids=np.zeros(0, "S16"),
        alive=np.arange(n) < alive,
    )


FILES = st.lists(
    st.builds(
        lambda size, alive, dead, kind: (size, alive, dead, kind),
        st.integers(1, 40), st.integers(1, 4), st.integers(0, 6), st.sampled_from("ab"),
    ),
    max_size=20,
)  # fmt: skip


@given(FILES, st.integers(1, 20), st.integers(20, 60))
def test_runs_take_all_that_is_small_or_half_dead_and_nothing_else(
    made: list[tuple[int, int, int, str]], small: int, target: int
) -> None:
    files = [a_file(f"{i:03d}", *values) for i, values in enumerate(made)]
    found = group_runs(files[::-1], small_bytes=small, target_bytes=target)
    taken = [file.id for run in found for file in run]
    assert len(taken) == len(set(taken))
    wanted = {file.id for file in files if file.bytes < small or file.live_bytes * 2 <= file.bytes}
    assert set(taken) <= wanted
    for run in found:
        assert [file.id for file in run] == sorted(file.id for file in run)
        assert len({file.kind for file in run}) == 1
        assert len(run) > 1 or run[0].is_wasteful
        assert len(run) == 1 or sum(file.live_bytes for file in run) <= target
    for kind in ("a", "b"):  # what was left is alone, or did not fit with its neighbours
        candidates = [file for file in files if file.id in wanted and file.kind[0] == kind]
        for one, two in pairwise(candidates):
            if one.id not in taken and two.id not in taken:
                assert one.live_bytes + two.live_bytes > target


def test_a_view_that_was_open_and_a_snapshot_read_the_same_before_and_after(lake: Lake) -> None:
    written = fill(lake, [3, 40, 5, 1, 7], seal_every=1)
    view = View(lake, SCHEMA.id)
    view.refresh()
    snapshot, uids = view.snapshot(), view.uids()
    before = list(windows_of(view))
    events: list = []
    done = compact(lake, grace_seconds=0.0, listener=events.append)
    assert (done.segments, done.trajectories) == ((5, 1), 5)
    assert done.bytes[1] == sum(path.stat().st_size for path in segment_files(lake))
    assert any(isinstance(event, Progress) and event.stage == "compact" for event in events)
    assert len(segment_files(lake)) == 1
    restored = View(lake, SCHEMA.id)
    restored.restore(snapshot)
    view.refresh()
    for each in (view, restored):
        assert (each.uids() == uids).all()
        for one, two in zip(windows_of(each), before, strict=True):
            assert all(np.array_equal(one[name], two[name]) for name in one)
    assert len(written) == 5
    assert not compact(lake, grace_seconds=0.0).runs


def test_schemas_and_kinds_are_kept_apart(lake: Lake) -> None:
    written = fill(lake, [3, 4], seal_every=1)
    fill(lake, [5, 6], schema=IMAGES, seal_every=1, seed=1)
    for base in written:
        derive(lake, {base: {"reward": written[base]["reward"] + 1}})
    done = compact(lake, grace_seconds=0.0)
    assert done.segments == (6, 3)
    assert len(Reader(lake).uids()) == 6


def test_a_dry_run_foresees_and_touches_nothing(lake: Lake) -> None:
    fill(lake, [3, 4, 5], seal_every=1)
    before = segment_files(lake)
    seen = compact(lake, dry_run=True)
    assert segment_files(lake) == before
    done = compact(lake)
    assert (seen.runs, seen.segments, seen.trajectories) == (done.runs, done.segments, done.trajectories)
    assert seen.swept is None


def test_room_is_made_where_half_is_dead(lake: Lake) -> None:
    fill(lake, [10, 10, 10])
    expire(lake, RetentionLimits(max_trajectories=2))
    assert not compact(lake, CompactionRules(small_bytes=1)).runs
    expire(lake, RetentionLimits(max_trajectories=1))
    done = compact(lake, CompactionRules(small_bytes=1, target_bytes=1), grace_seconds=0.0)
    assert len(done.runs) == 1
    (file,) = segment_files(lake)
    inventory = FileTable(lake)
    inventory.refresh()
    (left,) = inventory.files.values()
    assert len(left.uids) == 1
    assert left.bytes == file.stat().st_size


def test_young_segments_wait_while_somebody_writes(lake: Lake) -> None:
    fill(lake, [3, 4], seal_every=1)
    with lake.writer(SCHEMA, seal_seconds=1e9) as writer:
        writer.append(columns(np.random.default_rng(0), 3), TrajectoryInfo())
        assert not compact(lake).runs
        assert len(compact(lake, CompactionRules(settle_seconds=0.0)).runs) == 1


def test_leftovers_of_a_dead_rewriter_are_removed(lake: Lake) -> None:
    fill(lake, [3])
    leftover = lake.path / "tmp" / "compact.1f.00000000.abcd.tmp"
    leftover.write_bytes(b"half")
    other: Path = lake.path / "tmp" / "w.1f.00000000.abcd.tmp"
    other.write_bytes(b"somebody's")
    compact(lake)
    assert not leftover.exists()
    assert other.exists()


def test_rules_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(UsageError):
        CompactionRules(small_bytes=100, target_bytes=10)


def test_ids_are_in_the_order_of_their_making(lake: Lake) -> None:
    fill(lake, [3, 4], seal_every=1)
    before = list_all(lake.storage)
    compact(lake)
    (new,) = set(list_all(lake.storage)) - set(before)
    assert new > max(before)
