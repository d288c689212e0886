"""How much a lake in an object store asks of it."""

from pathlib import Path

import pytest

from pipelines.lake.bucket import Bucket
from pipelines.lake.folders import is_rewritten, list_all, segment_key
from pipelines.lake.live import LiveTable
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.reading import Reader
from pipelines.lake.store import Lake
from tests.lake.factories import assert_same, fill


@pytest.fixture
def lake(bucket: str) -> Lake:
    return Lake.create(f"s3://{bucket}/a/lake")


@pytest.fixture
def there(lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lake:
    """The lake as another host sees it."""
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "there"))
    return Lake(lake.name)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of which a store is asked, from now on."""
    names: list[str] = []
    asking = Bucket._ask_store
    monkeypatch.setattr(
        Bucket, "_ask_store", lambda self, name, **options: (names.append(name), asking(self, name, **options))[1]
    )
    return names


def test_a_lake_is_found_and_opened_by_one_request(lake: Lake, requested: list[str]) -> None:
    place = lake.name
    found = Lake.find(place)
    assert found is not None
    assert found.id == lake.id
    assert Lake.open_or_create(place).id == lake.id
    assert Lake.find(f"{place}/none") is None
    assert requested == ["a/lake/lake.json", "a/lake/lake.json", "a/lake/none/lake.json"]


def test_footers_of_segments_that_were_merged_before_are_not_fetched(
    lake: Lake, there: Lake, requested: list[str]
) -> None:
    written = fill(lake, [3, 4, 5], seal_every=1)
    compact(lake)
    fill(lake, [6])
    ids = list_all(there.storage)
    assert len(ids) == 5  # those merged are not deleted yet
    requested.clear()
    assert LiveTable(there).refresh().added == len(written) + 1
    (merged,), newest = (id for id in ids if is_rewritten(id)), ids[-1]
    keys = [name.removeprefix("a/lake/") for name in requested if name.endswith(".arrow")]
    assert keys == [segment_key(merged), segment_key(newest)]


def test_a_file_that_came_whole_with_its_footer_is_not_fetched_again(
    lake: Lake, there: Lake, requested: list[str]
) -> None:
    (short, long), (small, large) = fill(lake, [3, 5000], seal_every=1).items(), list_all(lake.storage)
    assert lake.storage.size(segment_key(small)) < 1 << 14 < lake.storage.size(segment_key(large))
    requested.clear()
    reader = Reader(there)
    for uid, values in (short, long):
        assert_same(reader.read(uid).columns, values)
    assert [requested.count(f"a/lake/{segment_key(id)}") for id in (small, large)] == [1, 2]
