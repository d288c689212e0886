"""The one way a file that another process may read is written: whole, under its final name, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pipelines.errors import StageFailed

_UNWRITABLE = {
    errno.ENOSPC: ("no space left on the disk of", "free some space and repeat the command; what was saved is kept"),
    errno.EDQUOT: ("the disk quota is used up at", "free some space and repeat the command; what was saved is kept"),
    errno.EROFS: ("read-only file system at", "choose a writable directory"),
    errno.EACCES: ("no permission to write", "choose a writable directory"),
    errno.EPERM: ("no permission to write", "choose a writable directory"),
    errno.ENOTDIR: ("a file is in the way of the directory", "choose another directory"),
    errno.EEXIST: ("a file is in the way of the directory", "choose another directory"),
}


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn a full, read-only or forbidden disk into a StageFailed that names `path`; other errors pass."""
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        what, hint = _UNWRITABLE[error.errno]
        raise StageFailed(f"{what} '{path}'", hint=hint) from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically: temporary name, fsync, rename. Parent directories are made."""
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


def write_text(path: Path, text: str) -> None:
    """`write_bytes` for UTF-8 text."""
    write_bytes(path, text.encode())


def point(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target` (relative), replacing the old one in one step."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    with storage_errors(link):
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        temporary.symlink_to(target)
        os.replace(temporary, link)
