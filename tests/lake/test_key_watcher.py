"""Listing an object store from where one was."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.lake import folders
from pipelines.lake.folders import KeyWatcher
from tests.lake.memory import MemoryStorage

NOW = 1_780_000_000.0


class Clock:
    """The time of the module under test, which only `pass_` moves."""

    def __init__(self) -> None:
        self.now = NOW

    def time_ns(self) -> int:
        return int(self.now * 1e9)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    stand_in = SimpleNamespace(
        time_ns=made.time_ns, monotonic=made.monotonic, strftime=time.strftime, gmtime=time.gmtime
    )
    monkeypatch.setattr(folders, "time", stand_in)
    return made


@pytest.fixture
def storage(tmp_path: Path) -> MemoryStorage:
    return MemoryStorage(tmp_path)


def id_at(seconds: float, writer: str = "w", number: int = 0) -> str:
    hour = time.strftime("%Y%m%d%H", time.gmtime(seconds))
    return f"{hour}/{int(seconds * 1e6):016x}-{writer}-{number:08d}"


def key(id: str) -> str:
    return f"segments/{id}.arrow"


def look(watcher: KeyWatcher) -> tuple[list[str], list[str]]:
    new, gone = [], []
    for some, others in watcher:
        new += some
        gone += others
    return new, gone


def requests(storage: MemoryStorage) -> int:
    count = storage.requests.total()
    storage.requests.clear()
    return count


@pytest.mark.system
def test_a_look_at_an_hour_of_a_hundred_thousand_segments_is_two_requests(storage: MemoryStorage, clock: Clock) -> None:
    count = 100_000
    old = [id_at(NOW - 3500 + 3499 * i / count, number=i) for i in range(count)]
    storage.put(map(key, old))
    watcher = KeyWatcher(storage)
    assert look(watcher) == (old, [])
    assert requests(storage) <= count / 1000 + 2  # what is new costs a request a thousand
    spent = []
    for number in range(300):  # ten minutes
        clock.now += 2.0
        fresh = [id_at(clock.now - 0.5, f"v{i:02d}", number) for i in range(56)]  # as many an hour
        storage.put(map(key, fresh))
        assert look(watcher) == (fresh, [])
        spent.append(requests(storage))
    assert max(spent) <= 2
    assert sum(spent) / len(spent) <= 2


def test_what_appears_late_is_found_about_as_late(storage: MemoryStorage, clock: Clock) -> None:
    watcher = KeyWatcher(storage)
    delays = {}
    for late in (1, 5, 30, 120, 600, 3000):
        missing = id_at(clock.now, "late", late)
        for number in range(3000):
            storage.put([key(id_at(clock.now, "steady", number))])
            if number * 2 == late - late % 2:
                storage.put([key(missing)])
            if missing in look(watcher)[0]:
                delays[late] = max(0, number * 2 - late)
                break
            clock.now += 2.0
    assert delays.keys() == {1, 5, 30, 120, 600, 3000}
    assert max(delays[late] for late in (1, 5)) <= 2
    assert max(delays[late] for late in (30, 120, 600)) <= 8
    assert delays[3000] <= 620  # the whole lake, at most every ten minutes


def test_a_name_of_the_future_hides_nothing(storage: MemoryStorage, clock: Clock) -> None:
    watcher = KeyWatcher(storage)
    storage.put([key(id_at(NOW + 86400, "ahead"))])
    assert len(look(watcher)[0]) == 1
    for number in range(5):
        clock.now += 2.0
        fresh = id_at(clock.now - 1, "right", number)
        storage.put([key(fresh)])
        assert look(watcher)[0] == [fresh]


def test_an_hour_that_turns_is_no_gap(storage: MemoryStorage, clock: Clock) -> None:
    watcher, found, written = KeyWatcher(storage), [], []
    clock.now = NOW - NOW % 3600 + 3590
    for number in range(20):
        written.append(id_at(clock.now, number=number))
        storage.put([key(written[-1]), key(written[-1]).replace(".arrow", ".blob.arrow")])
        found += look(watcher)[0]
        clock.now += 1.0
    assert found == written
    assert len({id.partition("/")[0] for id in written}) == 2


def test_what_is_deleted_is_reported_once_at_the_end_at_once_and_elsewhere_in_turn(
    storage: MemoryStorage, clock: Clock
) -> None:
    ids = [id_at(NOW - 3000 + i, number=i) for i in range(3000)]
    storage.put(map(key, ids))
    watcher = KeyWatcher(storage)
    look(watcher)
    storage.drop(key(ids[-1]))
    storage.drop(key(ids[0]))
    clock.now += 2.0
    assert look(watcher) == ([], [ids[-1]])
    gone: list[str] = []
    for _ in range(400):
        clock.now += 2.0
        gone += look(watcher)[1]
    assert gone == [ids[0]]
    storage.drop(key(ids[1]))
    watcher.look_back()
    assert look(watcher) == ([], [ids[1]])


def test_names_of_the_log_come_with_every_other_look(storage: MemoryStorage, clock: Clock) -> None:
    storage.put([key(id_at(NOW)), "log/000000000001.json", "quarantine/a.arrow", "wal/x", "lake.json", "policies/p"])
    watcher = KeyWatcher(storage)
    look(watcher)
    assert watcher.log == ["000000000001.json"]
    storage.put(["log/000000000002.json"])
    for _ in range(2):
        clock.now += 2.0
        look(watcher)
    assert watcher.log == ["000000000001.json", "000000000002.json"]


def test_names_that_no_writer_gave_do_no_harm(storage: MemoryStorage, clock: Clock) -> None:
    strange = [
        "segments/x.arrow",
        "segments/2026010203/zz.arrow",
        "segments/2026010203/a/b/c.arrow",
        "segments/-.arrow",
    ]
    storage.put(strange)
    watcher = KeyWatcher(storage)
    look(watcher)
    fresh = id_at(clock.now)
    storage.put([key(fresh)])
    assert fresh in look(watcher)[0]
