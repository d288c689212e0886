"""The log of a lake: who may append, what a reader sees at every step of a change, and what a damaged log costs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pipelines.errors import StageFailed
from pipelines.lake.folders import FolderChooser, is_rewritten, list_all
from pipelines.lake.footer import hex_uids
from pipelines.lake.live import LiveTable
from pipelines.lake.log import LakeLog, LogEntry, append, find_last_number, read_log
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.files import FileTable
from pipelines.lake.maintenance.retention import RetentionLimits, expire, make_plan
from pipelines.lake.maintenance.verify import repair, verify
from pipelines.lake.reading import Reader
from pipelines.lake.sql import catalog
from pipelines.lake.storage import LocalStorage
from pipelines.lake.store import Lake
from tests.lake import outsider
from tests.lake.factories import derive, fill, quarantine, remove

WRITES = ("publish", "create", "remove")


def uids_of(table: LiveTable) -> set[str]:
    found = [uid for segment in table.segments for uid in hex_uids(segment.uids)]
    assert len(found) == len(set(found))
    return set(found)


def compact_everything(lake: Lake) -> None:
    compact(lake, grace_seconds=0.0)


def expire_some(lake: Lake) -> None:
    expire(lake, RetentionLimits(max_trajectories=3), grace_seconds=0.0)


@contextlib.contextmanager
def at_each_write(action: Callable[[int], None]) -> Iterator[None]:
    """Call `action` with a number before each change of the storage, and once after the last."""
    count, busy = itertools.count(), [False]

    def hooked(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not busy[0]:
                busy[0] = True
                try:
                    action(next(count))
                finally:
                    busy[0] = False
            return real(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in WRITES:
            patch.setattr(LocalStorage, name, hooked(getattr(LocalStorage, name)))
        yield
    action(next(count))


def a_lake(lake: Lake) -> tuple[set[str], set[str]]:
    """Fill a lake; return its uids before and after `expire_some`."""
    written = list(fill(lake, [3, 4, 5, 6, 7, 8], seal_every=2))
    derived = [derive(lake, {uid: {"reward": np.ones(3, np.float32)}})[0] for uid in written[:2]]
    remove(lake, trajectories={list_all(lake.storage)[1]: [written[2]]})
    before = {*written, *derived} - {written[2]}
    return before, before


@pytest.mark.system
@pytest.mark.parametrize("change", [compact_everything, expire_some])
def test_readers_see_a_change_as_a_whole_or_not_at_all(lake: Lake, change: Callable[[Lake], None]) -> None:
    """A new table, one that follows, SQL and an outside program, before each step of the change."""
    a_lake(lake)
    if change is expire_some:
        compact(lake, grace_seconds=0.0)
        fill(lake, [9, 9], seed=1)
    follower, before = LiveTable(lake), set(Reader(lake).uids())
    follower.refresh()
    seen: list[set[str]] = []

    def look(number: int) -> None:
        fresh = LiveTable(Lake(lake.path))
        fresh.refresh(), follower.refresh()
        seen.append(uids_of(fresh))
        assert uids_of(follower) == seen[-1], number
        assert {uid for (uid,) in catalog.query(lake, "select uid from trajectories")[1]} == seen[-1], number
        assert outsider.count(lake.path).keys() == seen[-1], number

    with at_each_write(look):
        change(lake)
    assert len(seen) > 4
    after = set(Reader(lake).uids())
    assert [now == after for now in seen] == sorted(now == after for now in seen)
    assert all(now in (before, after) for now in seen)


class Killed(BaseException):
    pass


@pytest.mark.system
@pytest.mark.parametrize("change", [compact_everything, expire_some])
def test_a_maintainer_may_die_at_every_step(lake: Lake, change: Callable[[Lake], None]) -> None:
    """Nothing is lost and nothing that expired returns, however often the next ones die, too."""
    before, _ = a_lake(lake)
    gone: set[str] = set()
    for step in range(40):

        def die(number: int, step: int = step) -> None:
            if number == step:
                raise Killed

        finished = False
        with contextlib.suppress(Killed), at_each_write(die):
            change(lake)
            finished = True
        now = set(Reader(lake).uids())
        assert now <= before - gone
        assert change is expire_some or now == before
        gone |= before - now
        assert outsider.count(lake.path).keys() == now
        assert {uid for (uid,) in catalog.query(lake, "select uid from trajectories")[1]} == now
        if finished:
            break
        more = fill(lake, [3 + step % 5], seed=step)
        before |= set(more)
    assert step > 3
    change(lake)
    assert not verify(lake).corrupt
    assert set(Reader(lake).uids()) <= before - gone


def test_a_maintainer_whose_lease_ran_out_cannot_expire(lake: Lake) -> None:
    written = fill(lake, [3, 4, 5], seal_every=1)
    stale = FileTable(lake)
    stale.refresh()
    plan = make_plan(stale, RetentionLimits(max_trajectories=1), now=0.0)
    compact(lake, grace_seconds=0.0)
    with pytest.raises(StageFailed, match="maintained by another process"):
        plan.carry_out(lake, reason="late")
    assert sorted(Reader(lake).uids()) == sorted(written)


def test_a_maintainer_whose_lease_ran_out_brings_nothing_back(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one lets a trajectory expire while it writes the merged segment."""
    written = list(fill(lake, [3, 4, 5], seal_every=1))
    name_segment = FolderChooser.name_segment

    def overtaken(*args: Any, **named: Any) -> str:
        append(lake.storage, LogEntry(time=1.0, trajectories={list_all(lake.storage)[0]: [written[0]]}))
        return name_segment(*args, **named)

    monkeypatch.setattr(FolderChooser, "name_segment", overtaken)
    with pytest.raises(StageFailed, match="maintained by another process"):
        compact(lake)
    monkeypatch.undo()
    assert sorted(Reader(lake).uids()) == sorted(written[1:])
    compact(lake, grace_seconds=0.0)
    assert sorted(Reader(lake).uids()) == sorted(written[1:])
    assert sum(is_rewritten(id) for id in list_all(lake.storage)) == 1


@pytest.mark.parametrize("how", ["damaged", "missing"])
@pytest.mark.parametrize("which", [0, -1])
def test_a_damaged_log_loses_nothing_and_is_repaired(lake: Lake, how: str, which: int) -> None:
    written = fill(lake, [3, 4, 5], seal_every=1)
    compact(lake, grace_seconds=0.0)
    written |= fill(lake, [6, 7], seed=1, seal_every=1)
    compact(lake, grace_seconds=1e9)
    quarantine(lake, "2026010203/none")
    files = sorted((lake.path / "log").iterdir())
    if how == "damaged":
        files[which].write_bytes(files[which].read_bytes().replace(b"time", b"tame"))
    elif which == 0:
        files[which].unlink()
    else:
        files[which].rename(files[which].with_name("000000000099.json"))
    told: list[Any] = []
    table = LiveTable(lake, told.append)
    table.refresh()
    assert uids_of(table) == set(written)
    assert any("counts again" in notice.text for notice in told)
    report = verify(lake)
    assert report.log
    repair(lake, report)
    assert not verify(lake).log
    assert sorted(Reader(lake).uids()) == sorted(written)
    compact(lake, grace_seconds=0.0)
    assert sorted(Reader(lake).uids()) == sorted(written)


def test_readers_do_not_follow_a_foreign_log_in_circles(lake: Lake) -> None:
    """Of the moves of a circle, the one that would close it is ignored."""
    fill(lake, [3, 4], seal_every=1)
    one, two = sorted(list_all(lake.storage))
    for moved in ({one: one}, {one: two}, {two: one}, {one: "2026010203/x"}, {"2026010203/x": two}):
        append(lake.storage, LogEntry(time=1.0, reason="rewritten", moved=moved))
    log = read_log(lake.storage)
    assert log.find_final(one) == two
    assert {id: len(log.find_dead(id)) for id in (one, two)} == {one: 0, two: 0}
    LiveTable(lake).refresh()
    catalog.summary(lake)


def test_segments_may_have_been_rewritten_thousands_of_times(lake: Lake) -> None:
    names = [f"2026010203/{number:05}" for number in range(3000)]
    uid = b"\1" * 16
    append(lake.storage, LogEntry(time=1.0, reason="rewritten", moved=dict(itertools.pairwise(names))))
    append(lake.storage, LogEntry(time=2.0, reason="expired", trajectories={names[-1]: [uid.hex()]}))
    log = read_log(lake.storage)
    assert [*log.find_dead(names[0])] == [uid]
    assert [*log._origins(names[-1])] == names[::-1]


def test_a_reader_that_slept_through_a_restart_keeps_order_and_place(lake: Lake) -> None:
    fill(lake, [3, 4, 5, 6], seal_every=1)
    follower = LiveTable(lake)
    follower.refresh()
    order = [hex_uids(segment.uids) for segment in follower.segments]
    for seed in range(3):
        fill(lake, [7], seed=seed)
        compact(lake, grace_seconds=0.0)
    assert len(read_log(lake.storage).names) == 1
    follower.refresh()
    assert [hex_uids(segment.uids) for segment in follower.segments[:4]] == order
    assert {segment.file for segment in follower.segments[:4]} == {*list_all(lake.storage)}


def test_an_attempt_whose_response_was_lost_counts_once(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    create = LocalStorage.create

    def lose(self: LocalStorage, key: str, content: bytes) -> None:
        create(self, key, content)
        create(self, key, content)

    monkeypatch.setattr(LocalStorage, "create", lose)
    append(lake.storage, LogEntry(time=1.0, steps={"a": 3}))
    assert find_last_number(lake.storage) == 1
    assert read_log(lake.storage).steps == {"a": 3}


def test_sources_of_a_quarantined_segment_count_without_what_expired_in_it(lake: Lake) -> None:
    written = list(fill(lake, [3, 4, 5], seal_every=1))
    first, *_ = list_all(lake.storage)
    compact(lake, grace_seconds=1e9)
    expire(lake, RetentionLimits(where=f"uid = '{written[0]}'"), grace_seconds=1e9)
    quarantine(lake, read_log(lake.storage).moved[first])
    log = LakeLog(lake.storage, lake.id)
    log.refresh()
    assert hex_uids(log.find_dead(first)) == written[:1]
    table = LiveTable(lake)
    table.refresh()
    assert uids_of(table) == set(written[1:])
    assert catalog.query(lake, "select uid from trajectories order by length")[1] == [(uid,) for uid in written[1:]]


@pytest.mark.parametrize("is_there", [True, False], ids=["middle there", "middle gone"])
def test_restarted_log_means_the_same(lake: Lake, is_there: bool) -> None:
    """Expiry in a merged segment, which is merged again, and then the first one of a chain counts again."""
    written = list(fill(lake, [3, 4, 5], seal_every=1))
    first, *_ = list_all(lake.storage)
    compact(lake, grace_seconds=1e9)
    expire(lake, RetentionLimits(where=f"uid = '{written[0]}'"), grace_seconds=1e9)
    fill(lake, [6], seed=1)
    compact(lake, grace_seconds=1e9)
    log = LakeLog(lake.storage, lake.id)
    log.refresh()
    (middle,) = {log.moved[first]}
    ids = [id for id in list_all(lake.storage) if is_there or id != middle]
    log.problems = ("none",) if is_there else ()  # otherwise there is nothing to forget
    last = log.find_final(first)
    assert log.shorten(ids)
    again = LakeLog(lake.storage, lake.id)
    again.refresh()
    assert again.find_final(first) == last
    assert again.hides(first)
    quarantine(lake, last)
    again.refresh()
    assert not again.hides(first)
    assert not again.select_live(first, np.array([bytes.fromhex(written[0])], "S16")).any()
