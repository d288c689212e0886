"""What a host keeps of lakes elsewhere."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.errors import StageFailed, UsageError
from pipelines.lake.object_storage import DEFAULT_BYTES, DEFAULT_SHARE, FileCache, host_directory, limit_bytes


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "host"))
    monkeypatch.setenv("AMAGO_CACHE_BYTES", "1000")
    return host_directory("http://x s3://b/p", "b-p")


def writes(content: bytes) -> Callable[[Path], int]:
    return lambda part: part.write_bytes(content)


def test_a_host_keeps_lakes_apart_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AMAGO_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    first = host_directory("one", "bucket/a lake")
    assert first.parent == tmp_path / "me" / ".cache" / "amago"
    assert first.name.startswith("bucket-a-lake-")
    assert sorted(path.name for path in first.iterdir()) == ["cache", "locks", "tmp", "wal"]
    assert host_directory("two", "bucket/a lake") != first == host_directory("one", "bucket/a lake")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert host_directory("one", "x").parent == tmp_path / "xdg" / "amago"
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "mine"))
    assert host_directory("one", "x").parent == tmp_path / "mine"


def test_a_cache_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "file"))
    with pytest.raises(StageFailed, match="AMAGO_CACHE names another place"):
        host_directory("one", "x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000", 1000),
        ("50G", 50 * 10**9),
        ("50 gb", 50 * 10**9),
        ("2.5M", 2_500_000),
        ("1e6", 10**6),
        ("3T", 3 * 10**12),
    ],
)
def test_its_size_is_a_number_of_bytes(
    text: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMAGO_CACHE_BYTES", text)
    assert limit_bytes(tmp_path) == expected


def test_its_size_follows_the_disk_unless_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMAGO_CACHE_BYTES", raising=False)
    assert limit_bytes(tmp_path) == min(DEFAULT_BYTES, shutil.disk_usage(tmp_path).total // DEFAULT_SHARE)
    monkeypatch.setenv("AMAGO_CACHE_BYTES", "much")
    with pytest.raises(UsageError, match="AMAGO_CACHE_BYTES is 'much'"):
        limit_bytes(tmp_path)


def test_what_was_used_longest_ago_goes_first_whatever_lake_it_is_of(home: Path) -> None:
    caches = [FileCache(home), FileCache(host_directory("another", "lake"))]
    for number in range(8):
        path = caches[number % 2].take(f"segments/h/{number}.arrow", writes(bytes(100)))
        os.utime(path, (number, number))
    assert caches[0].find("segments/h/0.arrow") is not None  # used now
    assert caches[1].evict(500) == 300
    left = [n for n in range(8) if (caches[n % 2]._home / "cache" / f"segments/h/{n}.arrow").exists()]
    assert left == [0, 4, 5, 6, 7]


@pytest.mark.system
@given(sizes=st.lists(st.integers(0, 700), max_size=40), limit=st.integers(1, 2000))
def test_the_limit_holds_after_every_download(
    sizes: list[int], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("host") / "lake"
    for name in ("cache", "tmp", "locks"):
        (home / name).mkdir(parents=True)
    cache = FileCache(home)
    cache.limit = limit
    for number, size in enumerate(sizes):
        content = bytes([number]) * size
        path = cache.take(f"segments/h/{number}.arrow", writes(content))
        kept = sum(file.stat().st_size for file in (home / "cache").rglob("*.arrow"))
        assert kept <= limit + limit // 50
        assert size > limit - limit // 10 or path.read_bytes() == content  # the newest goes last


def test_of_many_at_once_one_downloads(home: Path) -> None:
    downloads: list[int] = []

    def fetch(number: int) -> bytes:
        def download(part: Path) -> int:
            downloads.append(number)
            return part.write_bytes(b"content")

        return FileCache(home).take("segments/h/a.arrow", download).read_bytes()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(fetch, range(16))) == {b"content"}
    assert len(downloads) == 1


def test_a_download_that_failed_leaves_nothing(home: Path) -> None:
    cache = FileCache(home)

    def broken(part: Path) -> int:
        part.write_bytes(b"half")
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        cache.take("segments/h/a.arrow", broken)
    assert cache.find("segments/h/a.arrow") is None
    assert list((home / "tmp").iterdir()) == []
    assert cache.take("segments/h/a.arrow", writes(b"whole")).read_bytes() == b"whole"
    assert cache.forget("segments/h/a.arrow")
    assert not cache.forget("segments/h/a.arrow")


def test_a_full_disk_makes_room(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMAGO_CACHE", str(small_disk / "host"))
    monkeypatch.setenv("AMAGO_CACHE_BYTES", "1G")
    cache = FileCache(host_directory("one", "lake"))
    for number in range(40):
        content = os.urandom(100_000)
        assert cache.take(f"segments/h/{number}.arrow", writes(content)).read_bytes() == content
    with pytest.raises(OSError, match="No space left"):
        cache.take("segments/h/large.arrow", writes(bytes(2 << 20)))
    assert list((small_disk / "host").rglob("*.part")) == []


def test_a_full_disk_leaves_the_cache_what_it_has(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = FileCache(home)
    cache.take("segments/a.arrow", writes(b"x" * 300))
    usage = shutil.disk_usage(home)
    for free, expected in ((5000, 1000), (1000, 1000), (999, 1000), (100, 400), (0, 300)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert cache.room() == expected
