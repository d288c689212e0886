"""A thousand writers and a million segments on a virtual clock: what listing an object store costs a reader.

`python -m tests.lake.test_scale` prints the table of docs/scaling.md.
"""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from pipelines.lake import folders
from pipelines.lake.folders import KeyWatcher
from pipelines.lake.object_storage import PARALLEL
from tests.lake.memory import MemoryStorage

REQUEST_SECONDS = 0.08
UPLOAD_SECONDS = (0.1, 2.0)  # from a segment's name to its appearance
REFRESH_SECONDS = 2.0  # between looks: `train.refresh_seconds`
DOLLARS = {"LIST": 0.005 / 1000, "PUT": 0.005 / 1000, "GET": 0.0004 / 1000}  # S3 Standard, us-east-1
NOW, DAY = 1_780_000_000.0, 86_400.0


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What the looks of a reader came to, after the first."""

    segments: int  # found
    missing: int  # that had appeared before the last look
    requests: list[int]  # of each look
    seconds: list[float]  # of each look's listing
    delays: list[float]  # of each segment, from its appearance, or the end of the first look, to the look that found it
    elapsed: float

    @property
    def lister_dollars(self) -> float:
        """Return dollars a day for listing."""
        return sum(self.requests) * DOLLARS["LIST"] * DAY / self.elapsed

    def dollars(self, kind: str) -> float:
        """Return dollars a day for one request of a kind for each segment."""
        return self.segments * DOLLARS[kind] * DAY / self.elapsed

    @property
    def footer_share(self) -> float:
        """Return the share of the time in which a reader fetches footers, one request a segment."""
        return self.segments / PARALLEL * REQUEST_SECONDS / self.elapsed


class _Clock:
    def __init__(self) -> None:
        self.now = NOW

    def spend(self, count: int) -> None:
        self.now += count * REQUEST_SECONDS


def _id(seconds: float, writer: int, number: int) -> str:
    hour = time.strftime("%Y%m%d%H", time.gmtime(seconds))
    return f"{hour}/{int(seconds * 1e6):016x}-w{writer:04d}-{number:08d}"


def _appearances(writers: int, seal_seconds: float) -> Iterator[tuple[float, str]]:
    """Yield when segments appear, in order, and their ids: each writer publishes one every `seal_seconds`."""
    rng = random.Random(0)
    named = [(NOW + seal_seconds * writer / writers, writer, 0) for writer in range(writers)]
    heapq.heapify(named)
    uploading: list[tuple[float, str]] = []
    while True:
        began, writer, number = heapq.heapreplace(named, (named[0][0] + seal_seconds, named[0][1], named[0][2] + 1))
        heapq.heappush(uploading, (began + rng.uniform(*UPLOAD_SECONDS), _id(began, writer, number)))
        while uploading and uploading[0][0] <= began:
            yield heapq.heappop(uploading)


def simulate(folder: Path, *, keys: int, writers: int, seal_seconds: float, minutes: float) -> Simulated:
    """Let `writers` publish into a lake that has `keys` segments of the last days, and a reader look at it."""
    clock = _Clock()
    storage = MemoryStorage(folder, spend=clock.spend)
    storage.put(f"segments/{_id(NOW - 1.0 - 3.0 * DAY * i / keys, i % writers, i)}.arrow" for i in range(keys))
    watcher = KeyWatcher(storage)
    coming = _appearances(writers, seal_seconds)
    following = next(coming)
    appeared: dict[str, float] = {}
    requests, seconds, delays = [], [], []
    with pytest.MonkeyPatch.context() as patch:
        stand_in = SimpleNamespace(
            time_ns=lambda: int(clock.now * 1e9),
            monotonic=lambda: clock.now,
            strftime=time.strftime,
            gmtime=time.gmtime,
        )
        patch.setattr(folders, "time", stand_in)
        for _ in watcher:
            pass  # the first look lists the whole lake
        began, found = clock.now, 0
        while clock.now < began + 60 * minutes:
            clock.now += REFRESH_SECONDS
            fresh = []
            while following[0] <= clock.now:
                appeared[following[1]] = following[0]
                fresh.append(f"segments/{following[1]}.arrow")
                following = next(coming)
            storage.put(fresh)
            storage.requests.clear()
            at = clock.now
            new = [id for some, _ in watcher for id in some]
            requests.append(storage.requests.total())
            seconds.append(clock.now - at)
            delays += [at - max(began, appeared.pop(id)) for id in new]
            found += len(new)
    return Simulated(
        segments=found, missing=len(appeared), requests=requests, seconds=seconds, delays=delays,
        elapsed=clock.now - began,
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("seal_seconds", [10.0, 60.0])
def test_a_reader_of_a_thousand_writers_lists_within_two_seconds_and_two_dollars_a_day(
    tmp_path: Path, seal_seconds: float
) -> None:
    found = simulate(tmp_path, keys=1_000_000, writers=1_000, seal_seconds=seal_seconds, minutes=20)
    assert found.segments > 0.95 * 1_000 * found.elapsed / seal_seconds
    assert found.missing == 0
    assert max(found.seconds) < 2.0
    assert found.lister_dollars < 2.0
    assert max(found.delays) < 30.0
    assert sorted(found.delays)[int(0.99 * len(found.delays))] < 3.0


def test_what_listing_costs_does_not_depend_on_the_lake_s_size(tmp_path: Path) -> None:
    few, many = (
        simulate(tmp_path / str(keys), keys=keys, writers=50, seal_seconds=10.0, minutes=3) for keys in (1_000, 60_000)
    )
    assert few.missing == many.missing == 0
    assert abs(sum(few.requests) - sum(many.requests)) <= 0.02 * sum(few.requests)


def main() -> None:
    """Print the table of docs/scaling.md."""
    for writers, seal in ((100, 10.0), (1_000, 10.0), (1_000, 60.0), (4_000, 10.0), (4_000, 60.0)):
        with TemporaryDirectory() as folder:
            s = simulate(Path(folder), keys=1_000_000, writers=writers, seal_seconds=seal, minutes=20)
        looks, delays = len(s.requests), sorted(s.delays)
        dollars = (s.lister_dollars, s.dollars("GET"), s.dollars("PUT"))
        row = [f"{writers:,}", f"{seal:.0f} s", f"{sum(s.requests) / looks:.2f}"]
        row += [f"{sum(s.seconds) / looks:.2f}, {max(s.seconds):.2f} s"]
        row += [f"{delays[len(delays) // 2]:.1f}, {delays[-1]:.1f} s", f"{s.footer_share:.0%}"]
        row += [f"${each:.2f}" for each in dollars]
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
