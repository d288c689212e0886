"""What expires, against a literal version; what it takes along and what it may not touch."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.errors import UsageError
from pipelines.lake.folders import is_rewritten, list_all, segment_key
from pipelines.lake.footer import encode, hex_uids, read_footer
from pipelines.lake.log import protect, read_log
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.files import FileTable
from pipelines.lake.maintenance.retention import RetentionLimits, expire, make_plan
from pipelines.lake.reading import Reader
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake import factories
from tests.lake.factories import SCHEMA, columns, fill
from tests.tiers import examples


def derive(lake: Lake, base: str, rows: int) -> str:
    return factories.derive(lake, {base: {"reward": np.ones(rows, dtype=np.float32)}}, copy=rows)[0]


def uids(lake: Lake) -> list[str]:
    return Reader(lake).uids()


@examples(40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    seal_every=st.integers(1, 5),
    max_steps=st.integers(0, 60),
    max_trajectories=st.integers(0, 12),
    chosen=st.sets(st.integers(0, 11)),
    selects=st.booleans(),
    merged=st.booleans(),
)
def test_the_oldest_go_until_the_rest_fits(
    lengths: list[int],
    seal_every: int,
    max_steps: int,
    max_trajectories: int,
    chosen: set[int],
    selects: bool,
    merged: bool,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        written = list(fill(lake, lengths, seal_every=seal_every))
        if merged:
            compact(lake)
        inventory = FileTable(lake)
        inventory.refresh()
        mine = [i for i in range(len(lengths)) if not selects or i in chosen]
        where = np.sort(np.array([bytes.fromhex(written[i]) for i in mine], dtype="S16")) if selects else None
        limits = RetentionLimits(max_steps=max_steps, max_trajectories=max_trajectories)
        make_plan(inventory, limits, chosen=where, now=0.0).carry_out(lake, reason="test")
        left = list(mine) if max_steps or max_trajectories else []
        while (max_steps and sum(lengths[i] for i in left) > max_steps) or (
            max_trajectories and len(left) > max_trajectories
        ):
            left.pop(0)
        assert sorted(uids(lake)) == sorted(written[i] for i in range(len(lengths)) if i in left or i not in mine)
        gone = sum(lengths) - sum(lengths[i] for i in range(len(lengths)) if i in left or i not in mine)
        assert read_log(lake.storage).steps == (Counter({"": gone}) if gone else Counter())


@examples(40)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    seal_every=st.integers(1, 5),
    max_steps=st.integers(1, 60),
)
def test_whole_segments_go_as_long_as_no_cap_is_undershot(lengths: list[int], seal_every: int, max_steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        fill(lake, lengths, seal_every=seal_every)
        inventory = FileTable(lake)
        inventory.refresh()
        plan = make_plan(inventory, RetentionLimits(max_steps=max_steps), now=0.0, whole=True)
        sizes = [sum(lengths[i : i + seal_every]) for i in range(0, len(lengths), seal_every)]
        gone = 0
        while sum(sizes[gone:]) - sizes[gone] >= max_steps:
            gone += 1
        assert [part.file.id for part in plan.going] == list_all(lake.storage)[:gone]
        assert all(part.is_whole for part in plan.going)


def test_bytes_are_met_to_the_nearest_trajectory(lake: Lake) -> None:
    fill(lake, [20] * 10, seal_every=5)
    inventory = FileTable(lake)
    inventory.refresh()
    one = next(iter(inventory.files.values())).bytes / 5
    done = expire(lake, RetentionLimits(max_bytes=round(4.5 * one)))
    assert done.left["trajectories"] == 4
    assert done.left["bytes"] <= 4.5 * one


def test_age_counts_from_the_first_commit_whatever_was_rewritten_since(lake: Lake) -> None:
    old = list(fill(lake, [3]))
    time.sleep(0.3)
    border = time.time()
    time.sleep(0.3)
    new = list(fill(lake, [4]))
    compact(lake, grace_seconds=0.0)
    expire(lake, RetentionLimits(max_age=time.time() - border))
    assert uids(lake) == new
    assert old


def test_an_overlay_goes_with_its_base_and_does_not_keep_it(lake: Lake) -> None:
    one, two, three = fill(lake, [5, 6, 7], seal_every=1)
    overlay, other = derive(lake, one, 4), derive(lake, two, 4)
    compact(lake)
    done = expire(lake, RetentionLimits(max_trajectories=2))
    assert set(uids(lake)) == {two, three, other}
    assert [part.file.is_overlay for part in done.plan.going] == [True, False] or len(done.plan.going) == 2
    assert overlay not in uids(lake)
    assert done.left == {"trajectories": 2, "steps": 13, "bytes": done.left["bytes"]}


def test_an_overlay_may_go_alone(lake: Lake) -> None:
    (base,) = fill(lake, [5])
    derive(lake, base, 4)
    expire(lake, RetentionLimits(where="base_uid is not null"))
    assert uids(lake) == [base]
    assert not read_log(lake.storage).steps


def test_sql_and_a_limit_take_what_both_say(lake: Lake) -> None:
    written = list(fill(lake, [5] * 6))  # tasks t0 t1 t2 t0 t1 t2
    expire(lake, RetentionLimits(where="task = 't1'", max_trajectories=1))
    assert uids(lake) == [uid for i, uid in enumerate(written) if i != 1]
    expire(lake, RetentionLimits(where="task = 't0'"))
    assert uids(lake) == [written[2], written[4], written[5]]


def test_a_dry_run_says_the_same_and_touches_nothing(lake: Lake) -> None:
    written = list(fill(lake, [5] * 4, seal_every=3))
    seen = expire(lake, RetentionLimits(max_steps=11), dry_run=True)
    assert uids(lake) == written
    assert not lake.storage.names("log")
    done = expire(lake, RetentionLimits(max_steps=11))
    assert seen.left["steps"] == done.left["steps"] == 10
    assert [(p.file.id, p.trajectories, p.is_whole) for p in seen.plan.going] == [
        (p.file.id, p.trajectories, p.is_whole) for p in done.plan.going
    ]


def test_one_decision_is_one_entry_of_the_log(lake: Lake) -> None:
    fill(lake, [5] * 4, seal_every=2)
    compact(lake)
    fill(lake, [6, 6], seed=1)
    before = lake.storage.names("log")
    expire(lake, RetentionLimits(max_trajectories=1))
    assert len(lake.storage.names("log")) == len(before) + 1
    log = read_log(lake.storage)
    assert [is_rewritten(id) for id in log.whole] == [True]
    assert [len(uids) for uids in log.dead.values()] == [1]
    assert query(lake, "select count(*) from trajectories")[1] == [(1,)]


def test_a_protected_lake_is_refused_and_a_protected_snapshot_stays(lake: Lake) -> None:
    written = list(fill(lake, [5] * 4, seal_every=1))
    protect(lake)
    with pytest.raises(UsageError, match="protected"):
        expire(lake, RetentionLimits(max_steps=1))
    from pipelines.lake.log import unprotect

    unprotect(lake)
    protect(lake, [list_all(lake.storage)[0]], name="run@1")
    overlay = derive(lake, written[1], 3)
    protect(lake, [list_all(lake.storage)[-1]], name="run@2")  # the overlay's: its base stays with it
    compact(lake)
    done = expire(lake, RetentionLimits(max_trajectories=1))
    assert set(uids(lake)) == {written[0], written[1], overlay}
    assert done.plan.protected == 3


def test_nothing_asked_is_refused(lake: Lake) -> None:
    with pytest.raises(UsageError):
        expire(lake, RetentionLimits())


def test_steps_are_remembered_by_who_collected_them(lake: Lake) -> None:
    rng = np.random.default_rng(0)
    with lake.writer(SCHEMA) as writer:
        for name, length in (("a", 3), ("b", 4), ("a", 5), ("b", 6)):
            writer.append(columns(rng, length), TrajectoryInfo(collector=name))
    (id,) = list_all(lake.storage)
    assert id
    expire(lake, RetentionLimits(max_trajectories=3))
    expire(lake, RetentionLimits(max_trajectories=1), grace_seconds=0.0)
    assert read_log(lake.storage).steps == {"a": 8, "b": 4}
    expire(lake, RetentionLimits(where="true"), grace_seconds=0.0)
    assert not list_all(lake.storage)
    assert read_log(lake.storage).steps == {"a": 8, "b": 10}
    assert len(lake.storage.names("log")) == 1


def test_maintenance_decodes_each_footer_once(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    base, *_ = fill(lake, [3] * 6, seal_every=2)
    compact(lake)
    fill(lake, [3] * 2, seed=1)
    derive(lake, base, 4)
    decoded: list[int] = []
    decompress = pa.decompress

    def count(stream: Any, size: int, *rest: Any) -> Any:
        decoded.append(size)
        return decompress(stream, size, *rest)

    monkeypatch.setattr(pa, "decompress", count)
    table = FileTable(lake)
    table.refresh()
    assert [int(file.alive.sum()) for _, file in sorted(table.files.items())] == [6, 2, 1]
    assert len(decoded) == 3
    fill(lake, [3] * 2, seed=2)
    table.refresh()
    assert sum(int(file.alive.sum()) for file in table.files.values()) == 6 + 2 + 1 + 2
    assert len(decoded) == 3 + 1


def test_trajectories_need_not_stand_in_the_order_of_their_rows(lake: Lake) -> None:
    written = list(fill(lake, [3] * 4))
    (id,) = list_all(lake.storage)
    footer, path = read_footer(lake.storage, id), lake.path / segment_key(id)
    with pa.ipc.open_file(path) as file:
        batch = file.get_batch(0)
    header = {name: value for name, value in footer.header.items() if name != "trajectories_bytes"}
    texts = encode(header, footer.trajectories.take([3, 2, 1, 0]))
    with pa.ipc.new_file(path, batch.schema, metadata=texts) as out:
        out.write_batch(batch)
    expire(lake, RetentionLimits(where=f"uid = '{written[0]}'"))
    table = FileTable(lake)
    table.refresh()
    (found,) = table.files.values()
    assert dict(zip(hex_uids(found.uids), found.alive.tolist(), strict=True)) == {
        uid: uid != written[0] for uid in written
    }
