"""Fetching by name, from a server on this host."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.config.settings import SourceSettings
from pipelines.errors import InputMissing, IntegrityError
from pipelines.events import Event, Notice, Progress
from pipelines.formats.flat import datasets as d4rl_files
from pipelines.formats.make import open_importer
from tests.formats.d4rl_data import flat, write


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a server that is D4RL's site; downloads go into tmp_path / "home"."""
    folder = tmp_path / "site"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, *_: object) -> None:
            """Not here."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(d4rl_files, "SITE", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AMAGO_CACHE", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "*")
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()


def offered(site: Path, monkeypatch: pytest.MonkeyPatch, *, sha256: str | None = "") -> Path:
    """hopper-medium-v2 as the site has it; `sha256` "": the right one."""
    path = write(site / "hopper.hdf5", flat([4, 5]))
    right = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(d4rl_files.DATASETS, "hopper-medium-v2", ("hopper.hdf5", right if sha256 == "" else sha256))
    return path


def fetch(listener: list[Event]) -> int:
    source = open_importer(SourceSettings(name="d4rl:hopper-medium-v2"), listener=listener.append)
    source.close()
    return source.steps or 0


def test_a_name_is_fetched_once_and_checked(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = offered(site, monkeypatch)
    events: list[Event] = []
    assert fetch(events) == 9
    last = [event for event in events if isinstance(event, Progress)][-1]
    assert (last.done, last.total, last.unit) == (path.stat().st_size, path.stat().st_size, "B")
    path.unlink()
    assert fetch(events) == 9
    assert [file.name for file in (tmp_path / "home" / "datasets").glob("[!.]*")] == ["hopper-medium-v2.hdf5"]


def test_another_file_than_was_published_is_refused(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered(site, monkeypatch, sha256="0" * 64)
    with pytest.raises(IntegrityError, match="not the file that was published"):
        fetch([])
    assert not list((tmp_path / "home").rglob("*hdf5*[!k]"))


def test_a_file_without_a_checksum_is_told(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = offered(site, monkeypatch, sha256=None)
    events: list[Event] = []
    fetch(events)
    (notice,) = [event for event in events if isinstance(event, Notice)]
    assert hashlib.sha256(path.read_bytes()).hexdigest() in notice.text


def test_without_the_site_it_says_what_to_do(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputMissing, match=r"cannot fetch.*404.*give its path"):
        fetch([])
    monkeypatch.setattr(d4rl_files, "SITE", "http://127.0.0.1:1")
    with pytest.raises(InputMissing, match=r"cannot fetch 'http://127\.0\.0\.1:1.*refused.*give its path"):
        fetch([])
