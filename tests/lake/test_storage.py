"""What every storage promises, asked of a directory and of object stores."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipelines.errors import Locked, UsageError
from pipelines.lake.storage import LocalStorage, Storage, connect

OTHERS = [pytest.param(name, marks=pytest.mark.system) for name in ("ministack", "azurite")]


@pytest.fixture(params=["directory", "s3", *OTHERS])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "directory":
        place: Storage = LocalStorage(tmp_path / "lake")
    elif request.param == "s3":
        place = connect(f"s3://{request.getfixturevalue('bucket')}/some/lake")
    else:
        place = connect(f"{request.getfixturevalue(request.param)}/some/lake")
    place.create_folders()
    return place


def staged(storage: Storage, content: bytes) -> Path:
    path = storage.local / "tmp" / f"{threading.get_ident()}.tmp"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)) * 100, b"ab" * (3 << 20)])
def test_what_was_written_is_read(storage: Storage, content: bytes) -> None:
    storage.write("a/b.json", content)
    assert storage.read("a/b.json") == content
    assert storage.size("a/b.json") == len(content)
    assert storage.exists("a/b.json")
    storage.write("a/b.json", b"new")
    assert storage.read("a/b.json") == b"new"


@pytest.mark.parametrize("key", ["segments/2026010100/s.arrow", "other/s.json"])
@pytest.mark.parametrize("size", [0, 1, 5000, (1 << 14) - 1, 1 << 14, (1 << 14) + 1, 100_000])
def test_a_tail_is_the_end_of_the_file(storage: Storage, key: str, size: int) -> None:
    content = (bytes(range(251)) * (size // 251 + 1))[:size]
    storage.publish(staged(storage, content), key)
    for fetched in (False, True):
        if fetched and key.startswith("segments/"):
            storage.fetch(key)
        for count in (1, 100, 1 << 14, 20_000, 200_000, 100):
            assert storage.tail(key, count) == content[-count:]
        storage.forget(key)


def test_a_published_file_leaves_its_place_and_can_be_mapped(storage: Storage) -> None:
    path = staged(storage, b"columns")
    storage.publish(path, "segments/2026010100/s.arrow")
    assert not path.exists()
    assert storage.fetch("segments/2026010100/s.arrow").read_bytes() == b"columns"
    storage.forget("segments/2026010100/s.arrow")
    assert storage.fetch("segments/2026010100/s.arrow").read_bytes() == b"columns"
    assert storage.size("segments/2026010100/s.arrow") == 7


def test_folders_are_listed_one_level_deep(storage: Storage) -> None:
    for key in ("segments/h1/a.arrow", "segments/h1/b.arrow", "segments/h2/c.arrow", "tombstones/t.json", "lake.json"):
        storage.write(key, b"1")
    assert sorted(storage.folders("segments")) == ["h1", "h2"]
    assert sorted(storage.names("segments/h1")) == ["a.arrow", "b.arrow"]
    assert storage.names("segments/h3") == storage.folders("nowhere") == storage.names("nowhere") == []
    assert [sorted(names) for names in storage.listings(["segments/h2", "nowhere", "segments/h1"])] == [
        ["c.arrow"],
        [],
        ["a.arrow", "b.arrow"],
    ]
    assert storage.below("segments").names("h2") == ["c.arrow"]
    assert "h1" in storage.names("segments")


def test_keys_come_in_order_from_where_one_was(storage: Storage) -> None:
    keys = ["lake.json", "segments/h1/a.arrow", "segments/h1/b.arrow", "segments/h1_0001/c.arrow", "tombstones/t.json"]
    assert storage.keys("") == []
    for key in reversed(keys):
        storage.write(key, b"1")
    assert storage.keys("") == keys
    assert storage.keys("segments/h1/a.arrow") == keys[2:]
    assert storage.keys("segments/h1/aa") == keys[2:]
    assert storage.keys("segments/", limit=2) == keys[1:3]
    assert storage.keys("tombstones/t.json") == []


def test_a_name_that_begins_alike_is_another(storage: Storage) -> None:
    storage.write("segments/h1x/a.arrow", b"1")
    assert storage.names("segments/h1") == []
    assert not storage.exists("segments/h1")
    assert not storage.exists("segments/h1x")


def test_what_is_not_there_is_told_so(storage: Storage) -> None:
    for ask in (storage.read, storage.size, storage.remove, lambda key: storage.tail(key, 10)):
        for key in ("segments/h/none.arrow", "none.json"):
            if ask == storage.remove:
                storage.remove(key)
            else:
                with pytest.raises(FileNotFoundError):
                    ask(key)
    with pytest.raises(FileNotFoundError):
        storage.fetch("segments/h/none.arrow").stat()
    with pytest.raises(FileNotFoundError):
        storage.age("segments/h/none.arrow", time.time())
    assert not storage.exists("none.json")


def test_a_removed_file_is_gone_from_everywhere(storage: Storage) -> None:
    storage.write("segments/h/a.arrow", b"1")
    storage.names("segments/h")
    storage.fetch("segments/h/a.arrow")
    storage.tail("segments/h/a.arrow", 1)
    storage.remove("segments/h/a.arrow")
    assert storage.names("segments/h") == []
    with pytest.raises(FileNotFoundError):
        storage.tail("segments/h/a.arrow", 1)
    with pytest.raises(FileNotFoundError):
        storage.size("segments/h/a.arrow")


def test_several_files_are_removed_at_once_as_far_as_they_exist(storage: Storage) -> None:
    for key in ("a/1.json", "a/2.json", "a/3.json"):
        storage.write(key, b"1")
    storage.remove("a/1.json", "a/none.json", "a/3.json")
    assert storage.names("a") == ["2.json"]


def test_a_version_is_swapped_once(storage: Storage) -> None:
    assert storage.find("policies/r/latest.json") is None
    storage.swap("policies/r/latest.json", b"1", None)
    with pytest.raises(FileExistsError):
        storage.swap("policies/r/latest.json", b"2", None)
    found = storage.find("policies/r/latest.json")
    assert found is not None
    assert found[0] == b"1"
    storage.swap("policies/r/latest.json", b"3", found[1])
    with pytest.raises(FileExistsError):
        storage.swap("policies/r/latest.json", b"4", found[1])
    assert storage.read("policies/r/latest.json") == b"3"
    with pytest.raises(FileExistsError):
        storage.swap("policies/r/none.json", b"5", found[1])
    with pytest.raises(OSError, match=r"more than|at most"):
        storage.find("policies/r/latest.json", limit=0)


def require_one_winner(storage: Storage, name: str, write: Callable[[bytes], object]) -> None:
    """Of eight threads that write at once, one succeeds, and `name` has its content."""

    def attempt(number: int) -> bool:
        try:
            write(str(number).encode())
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(attempt, range(8)))
    assert sum(won) == 1
    assert storage.read(name) == str(won.index(True)).encode()


def test_of_many_at_once_one_swaps(storage: Storage, request: pytest.FixtureRequest) -> None:
    skip_on_moto(request)
    storage.write("pointer.json", b"before")
    found = storage.find("pointer.json")
    assert found is not None

    require_one_winner(storage, "pointer.json", lambda content: storage.swap("pointer.json", content, found[1]))


def test_only_the_first_creates(storage: Storage) -> None:
    storage.create("lake.json", b"first")
    with pytest.raises(FileExistsError):
        storage.create("lake.json", b"second")
    assert storage.read("lake.json") == b"first"


def skip_on_moto(request: pytest.FixtureRequest) -> None:
    """Skip a test that two writers could win on S3: moto compares and writes in two steps, between which another writer
    may come. S3 itself does not."""
    if request.node.callspec.params["storage"] == "s3":
        pytest.skip("moto compares and writes in two steps, between which another writer may come")


def test_of_many_at_once_one_creates(storage: Storage, request: pytest.FixtureRequest) -> None:
    skip_on_moto(request)
    require_one_winner(storage, "lake.json", lambda content: storage.create("lake.json", content))


def test_age_counts_from_the_writing(storage: Storage) -> None:
    storage.write("a.json", b"1")
    now = time.time()
    assert -2 < storage.age("a.json", now) < 30
    assert storage.age("a.json", now + 1000) == pytest.approx(storage.age("a.json", now) + 1000)


def test_fetching_ahead_changes_nothing_but_the_time(storage: Storage) -> None:
    keys = [f"segments/h/{number}.arrow" for number in range(20)]
    for key in keys:
        storage.write(key, key.encode() * 100)
    storage.prefetch_tails([*keys, "segments/h/none.arrow"], 50)
    storage.prefetch([*keys, "segments/h/none.arrow"])
    for key in keys:
        assert storage.fetch(key).read_bytes() == key.encode() * 100
        assert storage.tail(key, 50) == (key.encode() * 100)[-50:]


def test_what_is_held_is_nobody_else_s(storage: Storage) -> None:
    with storage.hold("maintenance", what="the lake is being maintained") as require:
        require()
        with pytest.raises(Locked, match=r"the lake is being maintained, pid \d+ on"):
            storage.hold("maintenance", what="the lake is being maintained").__enter__()
    with storage.hold("maintenance", what="the lake is being maintained") as require:
        require()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("s3://", "s3://bucket/prefix"),
        ("s3:/bucket/prefix", "s3://bucket/prefix"),
        ("s3://bucket/a//b", "s3://bucket/prefix"),
        ("s3://bucket/a/../b", "s3://bucket/prefix"),
        ("gs://", "gs://"),
        ("gs://bucket/a?region=eu", "gs:// has no options"),
        ("az:/container/a", "az://"),
        ("s3://key:secret@bucket/a", "AWS_PROFILE"),
        ("s3://bucket/a?colour=red", "unknown option colour"),
    ],
)
def test_a_location_that_is_none_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        connect(text)
