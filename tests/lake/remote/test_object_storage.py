"""A lake in an object store: what a directory would not show."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelines.errors import InputMissing, IntegrityError, StageFailed, StorageError
from pipelines.events import Event
from pipelines.lake.folders import blob_key, list_all, segment_key
from pipelines.lake.live import LiveTable
from pipelines.lake.log import read_log
from pipelines.lake.maintenance.compaction import compact
from pipelines.lake.maintenance.copying import copy
from pipelines.lake.maintenance.files import count_live_steps
from pipelines.lake.maintenance.verify import verify
from pipelines.lake.object_storage import ObjectStorage
from pipelines.lake.reading import Reader
from pipelines.lake.sql import catalog
from pipelines.lake.store import Lake
from pipelines.lake.wal import parse
from pipelines.lake.writer import writer_label
from tests.conftest import Server, start_server, use
from tests.lake.factories import IMAGES, INFO, SCHEMA, assert_same, columns, derive, fill, remove

COLLECTOR = """
import sys
import numpy as np
from pipelines.lake.store import Lake
from pipelines.lake.trajectory import TrajectoryInfo
from tests.lake.factories import SCHEMA, columns

place, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = np.random.default_rng(seed)
with Lake(place).writer(SCHEMA, name=f"w{seed}", seal_seconds=1e9) as writer:
    for number in range(count):
        print(writer.append(columns(rng, 5), TrajectoryInfo(env="maze", task="t")), flush=True)
        if len(sys.argv) < 5 and number % 7 == 6:
            writer.seal()
    if len(sys.argv) == 5:
        sys.stdin.read()  # is killed here
"""


@pytest.fixture
def place(bucket: str) -> str:
    return f"s3://{bucket}/a/lake"


@pytest.fixture
def lake(place: str) -> Lake:
    return Lake.create(place)


def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lake: Lake) -> Lake:
    """The lake as another host sees it."""
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / f"host{os.urandom(4).hex()}"))
    return Lake(lake.name)


def collector(place: str, seed: int, count: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COLLECTOR, place, str(seed), str(count), *more]
    root = str(Path(__file__).parents[3])
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": root}
    )


def cached(lake: Lake) -> dict[str, int]:
    """Keys and bytes of what this host keeps of the lake's files."""
    root = lake.local / "cache"
    return {path.relative_to(root).as_posix(): path.stat().st_size for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("schema", [SCHEMA, IMAGES], ids=["plain", "wide"])
def test_another_host_reads_what_was_written(
    lake: Lake, schema: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = fill(lake, [3, 40, 7, 12], schema=schema, seal_every=2)
    there = elsewhere(monkeypatch, tmp_path, lake)
    assert cached(there) == {}
    reader = Reader(there)
    assert set(reader.uids()) == set(written)
    for uid, values in written.items():
        assert_same(reader.read(uid).columns, values)
    assert there.schema(schema.id).id == schema.id
    assert catalog.query(there, "select count(*), sum(length) from trajectories")[1] == [(4, 62)]
    assert catalog.summary(there)["bytes"] == sum(
        there.storage.size(key)
        for id in list_all(there.storage)
        for key in (segment_key(id), blob_key(id))
        if there.storage.exists(key)
    )


def test_steps_of_a_collector_are_counted_by_its_own_segments(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As SQL counts them, with what was expired, merged and copied; footers of other collectors are not fetched."""

    def add(there: Lake, collector: str, lengths: Sequence[int]) -> list[str]:
        with there.writer(SCHEMA, name=collector, seal_seconds=1e9) as writer:
            uids = []
            for length in lengths:
                info = replace(INFO, collector=collector)
                uids.append(writer.append(columns(np.random.default_rng(length), length), info))
                writer.seal()
            return uids

    uids = add(lake, "c/1", [3, 4, 5])
    add(lake, "c/1.0", [7])
    add(lake, "other", [11, 12])
    there = elsewhere(monkeypatch, tmp_path, lake)
    label = writer_label("c/1")
    assert count_live_steps(there, label) == {"c/1": 12, "c/1.0": 7}
    assert len(cached(there)) == 4
    assert all(f"-{label}." in name for name in cached(there))
    remove(lake, trajectories={list_all(lake.storage)[0]: uids[:1]})
    compact(lake)
    source = Lake.create(tmp_path / "source")
    add(source, "c/1", [20])
    derive(source, {Reader(source).uids()[0]: {"reward": np.zeros(21, dtype=np.float32)}})
    copy(source, lake)
    found = count_live_steps(elsewhere(monkeypatch, tmp_path, lake), label)
    assert found["c/1"] == 9 + 20
    assert {name: found[name] for name in ("c/1", "c/1.0")} == {
        name: steps
        for name, steps in catalog.query(
            lake, "select collector, sum(length) from trajectories where base_uid is null group by collector"
        )[1]
        if name != "other"
    }


def test_a_lake_s_directory_and_run_are_none(lake: Lake) -> None:
    assert lake.run is None
    assert lake.name.startswith("s3://bucket-")
    with pytest.raises(InputMissing, match="is not in a directory"):
        _ = lake.path


def test_a_location_may_say_where_its_server_is(
    s3_server: Server, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import boto3

    name, region = f"{bucket}-elsewhere", "eu-west-1"
    boto3.client("s3").create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": region})
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_REGION")
    host = s3_server.url.removeprefix("http://")
    url = f"s3://{name}/lake"
    query = f"endpoint_override={s3_server.url}&region={region}"
    id = Lake.create(f"{url}?{query}").id
    for same in (query, f"scheme=http&endpoint_override={host}&region={region}"):
        opened = Lake(f"{url}?{same}")
        assert opened.id == id
        assert Lake(opened.name).id == id
        assert "endpoint" not in opened.storage.url("lake.json")


def test_a_folder_of_more_names_than_a_page_is_listed_whole(lake: Lake) -> None:
    import boto3

    client, bucket = boto3.client("s3"), lake.storage.url().split("/")[2]
    for number in range(1005):
        client.put_object(Bucket=bucket, Key=f"a/lake/segments/2026010100/{number:04d}.json", Body=b"")
    assert lake.storage.names("segments/2026010100") == [f"{number:04d}.json" for number in range(1005)]


def test_writers_at_once_and_a_follower(lake: Lake) -> None:
    writers = [collector(lake.name, seed, 30) for seed in range(2)]
    follower, seen = LiveTable(lake), 0
    while any(writer.poll() is None for writer in writers):
        seen += follower.refresh().added
    said = [uid for writer in writers for uid in writer.communicate()[0].split()]
    assert [writer.returncode for writer in writers] == [0, 0]
    seen += follower.refresh().added
    assert seen == len(said) == 60
    assert sorted(Reader(lake).uids()) == sorted(said)


def test_a_killed_writer_s_log_is_salvaged_on_its_host(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writer = collector(lake.name, 0, 5, "and wait")
    assert writer.stdout is not None
    said = [writer.stdout.readline().strip() for _ in range(5)]
    os.kill(writer.pid, signal.SIGKILL)
    writer.communicate()
    host = os.environ["AMAGO_CACHE"]
    assert elsewhere(monkeypatch, tmp_path, lake).salvage() == 0
    monkeypatch.setenv("AMAGO_CACHE", host)
    assert lake.salvage() == 5
    assert lake.salvage() == 0
    assert Reader(lake).uids() == said
    assert list((lake.local / "wal").iterdir()) == []


def test_a_truncated_object_is_told_and_the_rest_is_read(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = fill(lake, [3, 4, 5, 6], seal_every=2)
    first = list_all(lake.storage)[0]
    content = lake.storage.read(segment_key(first))
    lake.storage.write(segment_key(first), content[: len(content) // 2])
    there = elsewhere(monkeypatch, tmp_path, lake)
    told: list[Event] = []
    reader = Reader(there, listener=told.append)
    assert reader.uids() == list(written)[2:]
    assert "damaged" in str(told[0])
    report = verify(there)
    assert [found.segment for found in report.corrupt] == [first]
    assert [*read_log(there.storage).quarantined] == [first]
    # The writer's host still has the whole file: verify must not take its word for it.
    assert [found.segment for found in verify(lake).corrupt] == [first]
    lake.storage.write(segment_key(first), content)
    assert verify(there).corrupt == ()
    assert sorted(Reader(there).uids()) == sorted(written)


def test_an_object_deleted_behind_the_reader_s_back(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = fill(lake, [3, 4, 5, 6], seal_every=2)
    there = elsewhere(monkeypatch, tmp_path, lake)
    reader = Reader(there)
    first, second, *_ = reader.uids()
    kept = reader.read(first)
    lake.storage.remove(segment_key(list_all(lake.storage)[0]))
    assert_same(reader.read(second).columns, written[second])  # this host has it already
    assert_same(kept.columns, written[first])
    fresh = Reader(elsewhere(monkeypatch, tmp_path, lake))
    assert fresh.uids() == list(written)[2:]


def test_a_deleted_blob_is_damage_not_the_end(lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fill(lake, [3, 4], schema=IMAGES)
    (id,) = list_all(lake.storage)
    lake.storage.remove(blob_key(id))
    there = elsewhere(monkeypatch, tmp_path, lake)
    (uid, _) = Reader(there).uids()
    with pytest.raises(IntegrityError, match="wide columns are gone"):
        Reader(there).read(uid)
    assert [found.segment for found in verify(there).corrupt] == [id]


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-9], lambda content: b"", lambda content: bytes(len(content))],
    ids=["truncated", "emptied", "zeros"],
)
@pytest.mark.parametrize("schema", [SCHEMA, IMAGES], ids=["plain", "wide"])
def test_a_damaged_copy_is_fetched_again(
    lake: Lake,
    damage: Callable[[bytes], bytes],
    schema: object,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    written = fill(lake, [3, 40], schema=schema)
    there = elsewhere(monkeypatch, tmp_path, lake)
    uids = Reader(there).uids()
    Reader(there).read(uids[0])
    assert len(cached(there)) == (2 if schema is SCHEMA else 3)
    for key in cached(there):
        path = there.local / "cache" / key
        path.write_bytes(damage(path.read_bytes()))
    reader = Reader(there)
    assert reader.uids() == uids
    for uid in uids:
        assert_same(reader.read(uid).columns, written[uid])


def test_a_cache_smaller_than_the_lake(lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = fill(lake, [50] * 40, seal_every=4)
    size = sum(lake.storage.size(segment_key(id)) for id in list_all(lake.storage))
    limit = size // 3
    monkeypatch.setenv("AMAGO_CACHE_BYTES", str(limit))
    there = elsewhere(monkeypatch, tmp_path, lake)
    reader, rng = Reader(there), np.random.default_rng(0)
    for uid in rng.choice(reader.uids(), 100).tolist():
        assert_same(reader.read(uid).columns, written[uid])
        assert sum(cached(there).values()) <= limit
    there.storage.prefetch(segment_key(id) for id in list_all(there.storage))
    assert sum(cached(there).values()) <= limit


def test_what_is_mapped_may_be_evicted(lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = fill(lake, [50] * 4)
    reader = Reader(elsewhere(monkeypatch, tmp_path, lake))
    uids = reader.uids()
    reader.read(uids[0])
    assert isinstance(reader.lake.storage, ObjectStorage)
    assert reader.lake.storage._cache.evict(0) > 0
    assert cached(reader.lake) == {}
    assert_same(reader.read(uids[1]).columns, written[uids[1]])


def test_a_file_evicted_before_it_was_opened_is_fetched_again(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    written = fill(lake, [50])
    there = elsewhere(monkeypatch, tmp_path, lake)
    fetch, calls = there.storage.fetch, []

    def evicted(key: str) -> Path:
        path = fetch(key)
        calls.append(key)
        if len(calls) < 3:
            path.unlink()
        return path

    monkeypatch.setattr(there.storage, "fetch", evicted)
    (uid,) = Reader(there).uids()
    assert_same(Reader(there).read(uid).columns, written[uid])
    assert len(calls) == 3


def test_processes_of_a_host_download_a_segment_once(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fill(lake, [50] * 4)
    key = segment_key(list_all(lake.storage)[0])
    elsewhere(monkeypatch, tmp_path, lake)
    stores = [Lake(lake.name).storage for _ in range(8)]
    downloads: list[str] = []
    together = threading.Barrier(8)

    def fetch(store: ObjectStorage) -> None:
        download = store._download
        monkeypatch.setattr(store, "_download", lambda *what: (downloads.append(key), download(*what))[1])
        together.wait()
        store.fetch(key)

    threads = [threading.Thread(target=fetch, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert downloads == [key]


def test_a_bucket_that_is_not_there(bucket: str) -> None:
    with pytest.raises(InputMissing, match="no lake at 's3://no-such-bucket/lake'"):
        Lake("s3://no-such-bucket/lake")
    with pytest.raises(StageFailed, match="there is no bucket 'no-such-bucket'"):
        Lake.create("s3://no-such-bucket/lake")


def test_a_server_that_goes_away_is_told_in_a_line_and_nothing_acknowledged_is_lost(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.lake.bucket.PATIENT", 3)
    server = start_server()
    try:
        use(server, tmp_path / "host", monkeypatch)
        import boto3

        boto3.client("s3").create_bucket(Bucket=bucket)
        lake = Lake.create(f"s3://{bucket}/lake")
        fill(lake, [3, 4])
        writer = lake.writer(SCHEMA, seal_seconds=1e9)
        writer.append(columns(np.random.default_rng(0), 5), INFO)
    finally:
        server.stop()
    problem = "no connection to http://127.0.0.1:"
    with pytest.raises(StageFailed, match=f"cannot write a segment into 's3://{bucket}/lake': {problem}"):
        writer.seal()
    writer._abandon()
    with pytest.raises(StageFailed, match=problem):
        Lake(lake.name)
    with pytest.raises(StageFailed, match=problem):
        LiveTable(lake).refresh()
    with pytest.raises(StorageError, match=problem):
        lake.storage.read("lake.json")
    with pytest.raises(StorageError, match=problem):
        lake.storage.create("lease.json", b"")
    (log,) = (lake.local / "wal").iterdir()
    assert len(parse(log.read_bytes()).records) == 1
