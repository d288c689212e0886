"""Requests that fail once, or are carried out while their answer is lost: each is repeated, and takes effect once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipelines.lake.bucket import AlreadyWritten, Bucket, Location
from tests.benchmarks.failing_proxy import Proxy
from tests.conftest import Server, use
from tests.ranks import find_free_port


class Scripted(Proxy):
    """A proxy that fails the next requests as `script` says."""

    script: list[str]

    def draw(self) -> str:
        return self.script.pop(0) if self.script else ""


@pytest.fixture
def proxy(s3_server: Server, tmp_path: Path) -> Iterator[Scripted]:
    port = find_free_port()
    made = Scripted(port, int(s3_server.url.rpartition(":")[2]), str(tmp_path / "log"), share=0, seed=0)
    made.script = []
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture
def store(bucket: str, proxy: Scripted, s3_server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    use(s3_server, tmp_path / "host", monkeypatch)
    made = Bucket(Location(bucket=bucket, endpoint=f"http://127.0.0.1:{proxy.server_port}"))
    made.put("reached", b"")
    return made


def replace(store: Bucket) -> object:
    found = store.find("old")
    assert found is not None
    return store.put_over("old", b"newer", found.version)


OPERATIONS: dict[str, tuple[Callable[[Bucket], object], str, bytes | None]] = {
    "put": (lambda store: store.put("new", b"x"), "new", b"x"),
    "put_new": (lambda store: store.put_new("new", b"x"), "new", b"x"),
    "put_over": (replace, "old", b"newer"),
    "remove": (lambda store: store.remove(["old"]), "old", None),
    "remove-several": (lambda store: store.remove(["old", "older"]), "old", None),
}


@pytest.mark.parametrize(
    "fates", [["500"], ["503", "503"], ["reset"], ["lost"], ["lost", "reset", "lost"]], ids="-".join
)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_write_whose_answer_is_lost_takes_effect_once(
    store: Bucket, proxy: Scripted, operation: str, fates: list[str]
) -> None:
    act, name, expected = OPERATIONS[operation]
    for each in ("old", "older"):
        store.put(each, b"old")
    proxy.script = list(fates) if operation != "put_over" else ["", *fates]
    act(store)
    assert proxy.script == []
    found = store.find(name)
    assert (found and found.content) == expected


@pytest.mark.parametrize("fate", ["500", "reset", "lost"])
def test_a_read_is_repeated(store: Bucket, proxy: Scripted, fate: str) -> None:
    store.put("a", b"abc")
    for read, expected in (
        (lambda: store.read("a"), b"abc"),
        (lambda: store.tail("a", 2), b"bc"),
        (lambda: store.status("a").size, 3),
        (lambda: sorted(store.keys("", after="")), ["a", "reached"]),
        (lambda: store.folder("")[1], {"a": 3, "reached": 0}),
    ):
        proxy.script = [fate, fate]
        assert read() == expected
        assert proxy.script == []


@pytest.mark.parametrize("fate", ["reset", "lost"])
def test_another_s_write_is_not_taken_for_one_s_own(store: Bucket, proxy: Scripted, fate: str) -> None:
    store.put("new", b"another's")
    proxy.script = [fate]
    with pytest.raises(AlreadyWritten):
        store.put_new("new", b"mine")
    assert store.read("new") == b"another's"
