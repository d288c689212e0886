"""The lease of a lake in an object store."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.errors import InputMissing, Locked, StageFailed
from pipelines.lake import object_storage as remote_lease
from pipelines.lake.bucket import AlreadyWritten, Bucket, Location, Version, connect
from pipelines.lake.log import lease
from pipelines.lake.maintenance.retention_thread import RetentionThread
from pipelines.lake.object_storage import Lease
from pipelines.lake.store import Lake

WHAT = "the lake is being maintained"


@pytest.fixture
def store(bucket: str) -> Bucket:
    return connect(Location.parse(f"s3://{bucket}"))


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Hasty(threading.Event):
    """An event that is waited for only briefly, whatever the timeout: a lease is renewed at once."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(0.05)


def tag(store: Bucket) -> str:
    return store.get("lease").version["e_tag"]


def test_conditional_writes(store: Bucket) -> None:
    assert store.find("a") is None
    tag = store.put_new("a", b"1")
    assert store.put_new("a", b"1")["e_tag"] == tag["e_tag"]  # as when the answer to the first attempt was lost
    with pytest.raises(AlreadyWritten):
        store.put_new("a", b"2")
    newer = store.put_over("a", b"2", tag)
    with pytest.raises(AlreadyWritten):
        store.put_over("a", b"3", tag)
    with pytest.raises(AlreadyWritten):
        store.put_over("none", b"3", tag)
    assert store.put_over("a", b"2", tag)["e_tag"] == newer["e_tag"]  # as above
    found = store.get("a")
    assert (found.content, found.version["e_tag"]) == (b"2", newer["e_tag"])
    assert -2 < store.now("clock") - found.written < 600


def test_of_many_one_holds_it(store: Bucket) -> None:
    outcomes: list[str] = []

    def attempt() -> None:
        try:
            Lease(store, "lease", what=WHAT).acquire()
            outcomes.append("held")
        except Locked:
            outcomes.append("locked")

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["held"] + ["locked"] * 7


def test_one_that_ran_out_is_taken_over_and_its_holder_knows(store: Bucket) -> None:
    dead, other, third = (Lease(store, "lease", what=WHAT, seconds=seconds) for seconds in (3.0, 600.0, 600.0))
    dead.acquire()
    dead.require()
    with pytest.raises(Locked, match=r"pid \d+ on"):
        other.acquire()

    def free() -> bool:
        try:
            other.acquire()
        except Locked:
            return False
        return True

    wait_until(free)
    with pytest.raises(StageFailed, match="the lease of this process has run out"):
        dead.require()
    dead.renew()
    with pytest.raises(StageFailed):
        dead.require()
    with pytest.raises(Locked):
        third.acquire()
    dead.release()  # not its to give back
    with pytest.raises(Locked):
        third.acquire()
    other.release()
    third.acquire()


def test_one_that_is_renewed_is_kept(store: Bucket) -> None:
    holder, other = (Lease(store, "lease", what=WHAT, seconds=600.0) for _ in range(2))
    holder._done = Hasty()
    holder.acquire()
    tags = [tag(store)]
    with holder.keep_renewing():
        for _ in range(3):
            wait_until(lambda: tag(store) != tags[-1])
            tags.append(tag(store))
            holder.require()
            with pytest.raises(Locked):
                other.acquire()
    assert len(set(tags)) == 4
    other.acquire()


def test_a_holder_that_sees_it_taken_stops_renewing(store: Bucket) -> None:
    holder = Lease(store, "lease", what=WHAT, seconds=0.4)
    holder.acquire()
    with holder.keep_renewing():
        found = store.get("lease")
        while True:  # between two renewals
            try:
                store.put_over("lease", json.dumps({"holder": "me", "seconds": 60}).encode(), found.version)
                break
            except AlreadyWritten:
                found = store.get("lease")
        wait_until(lambda: holder._taken)
        with pytest.raises(StageFailed):
            holder.require()
    found = store.get("lease")
    assert json.loads(found.content)["holder"] == "me"


def test_a_damaged_lease_has_run_out(store: Bucket) -> None:
    store.put_new("lease", b"\xff")
    Lease(store, "lease", what=WHAT).acquire()


def test_maintenance_of_a_lake_excludes_other_hosts(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake.create(f"s3://{bucket}/lake")
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "there"))
    there = Lake(lake.name)
    with lease(lake) as held:
        held()
        with pytest.raises(Locked, match="is being maintained, pid"), lease(there, wait_seconds=0.0):
            pass
    with lease(there, wait_seconds=0.0) as held:
        held()


def test_the_clock_of_the_store_is_read_once_and_continued(store: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    first = store.now("clock")
    monkeypatch.setattr(Bucket, "status", None)
    assert 0 <= store.now("clock") - first < 600


def test_where_conditions_are_ignored_a_host_must_be_declared(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake.create(f"s3://{bucket}/lake")

    def ignore(self: Bucket, name: str, content: bytes, version: Version) -> Version:
        self.put(name, content)
        return version

    monkeypatch.setattr(Bucket, "put_over", ignore)
    with (
        pytest.raises(InputMissing, match=f"no conditional writes.*{remote_lease.DECLARED}=1 declares"),
        lease(lake),
    ):
        pass
    monkeypatch.setenv(remote_lease.DECLARED, "1")
    with lease(lake) as held:
        held()
        with pytest.raises(Locked), lease(Lake(lake.name), wait_seconds=0.0):
            pass


def test_maintenance_is_left_to_the_process_that_has_it(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until a look in which it has not had the lease since the look before."""
    lake = Lake.create(f"s3://{bucket}/lake")
    thread = RetentionThread(lake)

    def another() -> None:
        with monkeypatch.context() as there:
            there.setattr(remote_lease, "name_process", lambda: "pid 1 on another host")
            with lease(lake):
                pass

    assert not thread._is_left_to_another()  # nobody has maintained it
    another()
    assert thread._is_left_to_another()
    another()
    assert thread._is_left_to_another()
    assert not thread._is_left_to_another()  # it has ended
    thread.look()
    assert not thread._is_left_to_another()
    assert not thread._is_left_to_another()
    another()
    assert thread._is_left_to_another()
    holder = Lease(connect(Location.parse(lake.name)), "lake/locks/maintenance.json", what=WHAT)
    for act in (holder.acquire, holder.renew):  # of one that takes long
        with monkeypatch.context() as there:
            there.setattr(remote_lease, "name_process", lambda: "pid 1 on another host")
            act()
        assert thread._is_left_to_another()
    lake.storage.write("locks/maintenance.json", b"{")
    assert not thread._is_left_to_another()


@pytest.mark.parametrize(("left", "waits"), [(False, [30.0, 30.0, 30.0]), (True, [30.0, 60.0, 60.0])])
def test_where_another_maintains_a_lake_it_is_looked_at_less_often(
    bucket: str, left: bool, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    thread = RetentionThread(Lake.create(f"s3://{bucket}/lake"))
    waited: list[float] = []

    class Clock(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0.0)
            return len(waited) == len(waits)

    monkeypatch.setattr(thread, "_stop", Clock())
    monkeypatch.setattr(thread, "_is_left_to_another", lambda: left)
    thread._watch()
    assert waited == waits


def test_maintenance_of_a_directory_takes_turns(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    assert lake.storage.held_by_another("maintenance") == ""
