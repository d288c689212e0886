"""Writing so that other processes see the whole of a file or nothing of it, and a plain sentence when the
disk refuses.

Order: write under a temporary name, fsync, rename, fsync the directory.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from pipelines.errors import StageFailed

_STAGED = re.compile(r"\..+\.[0-9a-f]{8}\.tmp")
_STALE_SECONDS = 60.0  # others may be writing in the same directory
_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}
_TAKEN = {errno.EEXIST, errno.ENOTDIR}


def make_storage_error(error: OSError, action: str) -> StageFailed:
    """Make the error a user should see when the file system refused `action` ("write 'x'")."""
    if error.errno in _FULL:
        return StageFailed(
            f"no space left on the disk: cannot {action}",
            hint="nothing half-written was kept; free some space and repeat the command to go on",
        )
    if error.errno in _REFUSED:
        return StageFailed(
            f"cannot {action}: {os.strerror(error.errno or 0).lower()}",
            hint="check the directory's permissions, or choose another directory",
        )
    if error.errno in _TAKEN:
        return StageFailed(f"cannot {action}: a file is where a directory has to be", hint="choose another directory")
    return StageFailed(f"cannot {action}: {error.strerror or error}")


@contextlib.contextmanager
def explain_errors(action: str) -> Iterator[None]:
    """Turn any OSError inside the block into StageFailed; `action` completes "cannot ..."."""
    try:
        yield
    except OSError as error:
        raise make_storage_error(error, action) from error


def sync_directory(directory: Path) -> None:
    """Make the names in `directory` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stage(directory: Path, name: str, write: Callable[[BinaryIO], object], *, durable: bool = True) -> Path:
    """Write and fsync a file called `name` plus a random ending in `directory`; nothing is left of it on
    failure. Not `durable`: without fsync.

    Raises OSError as the system gives it.
    """
    path = directory / f"{name}.{secrets.token_hex(4)}.tmp"
    try:
        with open(path, "xb") as file:
            write(file)
            if durable:
                file.flush()
                os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def publish(staged: Path, target: Path) -> None:
    """Give a staged file its name, in one step that survives a power cut. Same file system only."""
    os.replace(staged, target)
    sync_directory(target.parent)


def publish_new(staged: Path, target: Path) -> None:
    """As `publish`, but FileExistsError (and the staged file gone) when somebody was first."""
    try:
        os.link(staged, target)
    finally:
        staged.unlink(missing_ok=True)
    sync_directory(target.parent)


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def write_atomically(path: Path, content: bytes | str | Callable[[BinaryIO], object], *, durable: bool = True) -> None:
    """Replace `path` by `content` (or what the callable writes). StageFailed when the disk refuses and, before the
    callable runs, where anything but a file is there.

    Not `durable`: a power cut may lose the content, which is for what is written often and is worth little.
    """
    if isinstance(content, str):
        content = content.encode()
    write = content if callable(content) else operator.methodcaller("write", content)
    kind = None
    with contextlib.suppress(OSError):  # nothing is there, or writing fails with the same error
        kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
        if path.is_symlink() and os.readlink(path).startswith("/proc/"):  # /dev/stdout, whatever it leads to
            kind = kind or "a link to an open file"
    if kind is not None:
        # A rename takes the name away even from a device such as /dev/null, if root asks for it.
        raise StageFailed(f"cannot write '{path}': {kind} is there", hint="name a file, one that need not exist")
    with explain_errors(f"write '{path}'"):
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = stage(path.parent, f".{path.name}", write, durable=durable)
        try:
            if durable:
                publish(staged, path)
            else:
                os.replace(staged, path)
        except BaseException:
            staged.unlink(missing_ok=True)
            raise


def remove_leftovers(directory: Path) -> None:
    """Remove files that a killed process was writing in `directory`: staged ones that have not changed for a minute."""
    with contextlib.suppress(OSError):
        for path in directory.glob(".*.tmp"):
            if _STAGED.fullmatch(path.name) and time.time() - path.stat().st_mtime > _STALE_SECONDS:
                path.unlink()


def write_together(directory: Path, contents: Mapping[str, bytes]) -> None:
    """Replace several files of `directory`, none before all are on the disk. StageFailed when the disk refuses.

    The last one named is absent while the others change: who finds it, finds files that belong together.
    """
    staged: dict[Path, Path] = {}
    with explain_errors(f"write '{directory}'"):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            for name, content in contents.items():
                staged[directory / name] = stage(directory, f".{name}", operator.methodcaller("write", content))
            last = directory / list(contents)[-1]
            last.unlink(missing_ok=True)
            for target, source in staged.items():
                publish(source, target)
        finally:
            for source in staged.values():
                source.unlink(missing_ok=True)


def point(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target` (relative), replacing the old one in one step."""
    temporary = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    with explain_errors(f"write '{link}'"):
        temporary.symlink_to(target)
        os.replace(temporary, link)
