import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from pipelines.errors import InputMissing, StageFailed
from pipelines.files.atomic import publish_new, stage, write_atomically, write_together
from pipelines.lake.store import Lake


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    write_atomically(path, "one")
    write_atomically(path, b"two")
    write_atomically(path, lambda file: file.write(b"three"))
    assert path.read_text() == "three"
    assert os.listdir(path.parent) == ["file"]


def test_content_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        state = os.fstat(descriptor)
        done.append("directory" if stat.S_ISDIR(state.st_mode) else f"{state.st_size} bytes")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda old, new: done.append("name") or replace(old, new))
    write_atomically(tmp_path / "file", b"three")
    assert done == ["5 bytes", "name", "directory"]


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_a_failing_writer_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(file) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StageFailed, match="under"):
        write_atomically(tmp_path / "file" / "under", "x")


def make_place(path: Path, kind: str) -> None:
    if kind == "a directory":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    else:
        try:
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("only root makes devices")


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", ["a directory", "a pipe", "a socket", "a device"])
def test_only_a_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, linked: bool) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket may not be long
    make_place(Path("place"), kind)
    Path("link").symlink_to("place")
    path = Path("link" if linked else "place")
    before, asked = os.lstat(path), []
    with pytest.raises(StageFailed, match=f"cannot write '{path}': {kind} is there"):
        write_atomically(path, asked.append)
    after = os.lstat(path)
    assert (after.st_ino, after.st_mode, asked) == (before.st_ino, before.st_mode, [])
    assert sorted(os.listdir()) == ["link", "place"]


def test_a_link_to_an_open_file_is_not_replaced(tmp_path: Path) -> None:
    """/dev/stdout is one, also where standard output is a file."""
    with open(tmp_path / "open", "wb") as file:
        link = tmp_path / "stdout"
        link.symlink_to(f"/proc/self/fd/{file.fileno()}")
        with pytest.raises(StageFailed, match="a link to an open file is there"):
            write_atomically(link, b"x")
        assert link.is_symlink()


def test_a_link_to_a_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "link", "new")
    assert ((tmp_path / "file").read_text(), (tmp_path / "link").read_text()) == ("old", "new")


def test_only_the_first_publishes_new(tmp_path: Path) -> None:
    publish_new(stage(tmp_path, "a", lambda file: file.write(b"1")), tmp_path / "name")
    with pytest.raises(FileExistsError):
        publish_new(stage(tmp_path, "a", lambda file: file.write(b"2")), tmp_path / "name")
    assert os.listdir(tmp_path) == ["name"]
    assert (tmp_path / "name").read_text() == "1"


def test_many_who_open_or_create_get_one_lake(tmp_path: Path) -> None:
    found: list[Lake] = []
    threads = [threading.Thread(target=lambda: found.append(Lake.open_or_create(tmp_path / "lake"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({lake.id for lake in found}) == 1
    assert len(found) == 8
    with pytest.raises(InputMissing, match="a lake already"):
        Lake.create(tmp_path / "lake")


def test_files_that_belong_together_are_replaced_together_or_not_at_all(tmp_path: Path) -> None:
    write_together(tmp_path / "b", {"x": b"1", "y": b"1"})
    (tmp_path / "b" / "z").mkdir()
    with pytest.raises(StageFailed):
        write_together(tmp_path / "b", {"x": b"2", "no/such/place": b"", "y": b"2"})
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["x", "y", "z"]
    assert (tmp_path / "b" / "x").read_bytes() == (tmp_path / "b" / "y").read_bytes() == b"1"
    write_together(tmp_path / "b", {"x": b"3", "y": b"3"})
    assert (tmp_path / "b" / "x").read_bytes() == (tmp_path / "b" / "y").read_bytes() == b"3"
