"""The lease of a lake in an object store."""

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipelines.errors import InputMissing, Locked, StageFailed
from pipelines.lake.maintenance.lease import lease
from pipelines.lake.remote import lease as remote_lease
from pipelines.lake.remote import s3
from pipelines.lake.remote.lease import Lease
from pipelines.lake.remote.s3 import AlreadyWritten, ConditionalWrites, ConditionalWritesUnsupported, Location, connect
from pipelines.lake.store import Lake

WHAT = "the lake is being maintained"


@pytest.fixture
def store(bucket: str) -> ConditionalWrites:
    return ConditionalWrites(connect(Location.parse(f"s3://{bucket}")))


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Hasty(threading.Event):
    """An event that is waited for only briefly, whatever the timeout: a lease is renewed at once."""

    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(0.05)


def tag(store: ConditionalWrites) -> str:
    found = store.get("lease")
    assert found is not None
    return found.tag


def test_conditional_writes(store: ConditionalWrites) -> None:
    assert store.get("a") is None
    tag = store.put_new("a", b"1")
    assert store.put_new("a", b"1") == tag  # as when the answer to the first attempt was lost
    with pytest.raises(AlreadyWritten):
        store.put_new("a", b"2")
    newer = store.put_over("a", b"2", tag)
    with pytest.raises(AlreadyWritten):
        store.put_over("a", b"3", tag)
    with pytest.raises(AlreadyWritten):
        store.put_over("none", b"3", tag)
    found = store.get("a")
    assert found is not None
    assert (found.content, found.tag) == (b"2", newer)
    assert 0 <= found.age < 600


def test_of_many_one_holds_it(store: ConditionalWrites) -> None:
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


def test_one_that_ran_out_is_taken_over_and_its_holder_knows(store: ConditionalWrites) -> None:
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


def test_one_that_is_renewed_is_kept(store: ConditionalWrites) -> None:
    holder, other = (Lease(store, "lease", what=WHAT, seconds=600.0) for _ in range(2))
    holder._done = Hasty()
    holder.acquire()
    tags = [tag(store)]
    with holder.renewed():
        for _ in range(3):
            wait_until(lambda: tag(store) != tags[-1])
            tags.append(tag(store))
            holder.require()
            with pytest.raises(Locked):
                other.acquire()
    assert len(set(tags)) == 4
    other.acquire()


def test_a_holder_that_sees_it_taken_stops_renewing(store: ConditionalWrites) -> None:
    holder = Lease(store, "lease", what=WHAT, seconds=0.4)
    holder.acquire()
    with holder.renewed():
        found = store.get("lease")
        while True:  # between two renewals
            assert found is not None
            try:
                store.put_over("lease", json.dumps({"holder": "me", "seconds": 60}).encode(), found.tag)
                break
            except AlreadyWritten:
                found = store.get("lease")
        wait_until(lambda: holder._taken)
        with pytest.raises(StageFailed):
            holder.require()
    found = store.get("lease")
    assert found is not None
    assert json.loads(found.content)["holder"] == "me"


def test_a_damaged_lease_has_run_out(store: ConditionalWrites) -> None:
    store.put_new("lease", b"\xff")
    Lease(store, "lease", what=WHAT).acquire()


def test_maintenance_of_a_lake_excludes_other_hosts(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake.create(f"s3://{bucket}/lake")
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "there"))
    there = Lake.open(lake.name)
    with lease(lake) as held:
        held()
        with pytest.raises(Locked, match="is being maintained, pid"), lease(there, wait_seconds=0.0):
            pass
    with lease(there, wait_seconds=0.0) as held:
        held()


@pytest.mark.parametrize("missing", ["boto3", "conditional writes"])
def test_without_conditional_writes_a_host_must_be_declared(
    bucket: str, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    lake = Lake.create(f"s3://{bucket}/lake")
    if missing == "boto3":
        monkeypatch.setattr(s3, "is_available", lambda: False)
    else:

        def refuse(*_: object) -> str:
            raise ConditionalWritesUnsupported

        monkeypatch.setattr(ConditionalWrites, "put_new", refuse)
    words = r"amago\[s3\]" if missing == "boto3" else "does not support conditional writes"
    with pytest.raises(InputMissing, match=f"{words}.*{remote_lease.DECLARED}=1 declares"), lease(lake):
        pass
    monkeypatch.setenv(remote_lease.DECLARED, "1")
    with lease(lake) as held:
        held()
        with pytest.raises(Locked), lease(Lake.open(lake.name), wait_seconds=0.0):
            pass
