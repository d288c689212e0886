"""The write-ahead log: a trajectory is safe from the death of its writer as soon as `append` returns.

A log is a magic line and frames `kind u8 | length u64 | crc32 u32 | payload` (little endian). Kinds: H, the header
(JSON); M, trajectories (u32 length of a JSON text, the text, then the bytes of each one's columns in the header's
order); S, the segment under which the log is about to be published. The text of M has the fields that the rows share
("row"), the others by columns ("each"), and sizes in bytes ("bytes"). The CRC covers kind, length and payload, except
the bytes of trajectories, each of which has a CRC of its own in the text. A damaged trajectory or frame does not affect
the others: parsing resumes at the next valid frame.

Appended data is in the page cache: it survives kill -9, and a power cut only once its segment is sealed. The owner
holds a flock on the file, so a log that can be locked has no living owner.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import struct
import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.files.malformed import MALFORMED

VERSION = 1
MAGIC = b"AMAGOWAL%d\n" % VERSION
_ANY_MAGIC = re.compile(rb"AMAGOWAL(\d{1,9})\n")
_FRAME = struct.Struct("<cQI")
_CHECKED = struct.Struct("<cQ")
_FRAME_TEXT = struct.Struct("<cQII")  # and the length of the text that its payload begins with
_CHECKED_TEXT = struct.Struct("<cQI")
_KINDS = (b"H", b"M", b"S")
_PIECES = 512  # buffers in one system call, which takes 1024 at most
_open: weakref.WeakSet[Log] = weakref.WeakSet()


def remove_unborn(tmp: Path) -> None:
    """Remove logs whose writers died before publishing them: they hold no trajectory yet."""
    for path in tmp.glob("*.wal"):
        log = Log.claim(path)
        if log is not None:
            log.drop()


class Log:
    """An open log whose lock this process holds. Methods that fail raise OSError and leave complete frames."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._size = size
        self.marks: list[str] = []  # made through this object
        _open.add(self)

    @classmethod
    def create(cls, path: Path, header: dict[str, Any], *, tmp: Path) -> Log:
        """Create a log that is locked before its name appears."""
        staged = tmp / path.name
        while True:
            descriptor = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                break
            os.close(descriptor)  # `remove_unborn` mistook the new file for a dead writer's
        log = cls(path, descriptor, 0)
        try:
            log._write([MAGIC])
            log._frame(b"H", json.dumps(header).encode())
            os.rename(staged, path)
        except BaseException:
            staged.unlink(missing_ok=True)
            log.close()
            raise
        return log

    @classmethod
    def claim(cls, path: Path) -> Log | None:
        """Open the log of a dead writer; None if its writer lives or another process has handled it."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return cls(path, descriptor, os.fstat(descriptor).st_size)
        except (BlockingIOError, FileNotFoundError):
            pass
        os.close(descriptor)
        return None

    def append(
        self, row: Mapping[str, Any], each: Mapping[str, Sequence[Any] | np.ndarray], data: Sequence[bytes | memoryview]
    ) -> None:
        """Log n trajectories, all or none: the fields that their rows share, n values of each other field (all of them
        JSON), "crc" among these, and the bytes of their columns.
        """
        sizes = list(map(len, data))
        # Arrays are encoded as they are: digits would take several times as long.
        columns = {
            name: {"dtype": values.dtype.str, "base64": base64.b64encode(values.tobytes()).decode()}
            if isinstance(values, np.ndarray)
            else values
            for name, values in each.items()
        }
        text = json.dumps({"row": row, "each": columns, "bytes": sizes}).encode()
        length = 4 + len(text) + sum(sizes)
        crc = zlib.crc32(text, zlib.crc32(_CHECKED_TEXT.pack(b"M", length, len(text))))
        head = _FRAME_TEXT.pack(b"M", length, crc, len(text)) + text
        self._write([head, *data] if len(data) < _PIECES else [head, b"".join(data)])

    def mark(self, segment: str) -> None:
        """Record that the log's trajectories are about to be published as `segment`."""
        self.marks.append(segment)
        self._frame(b"S", segment.encode())

    def truncate(self, size: int) -> None:
        """Drop everything after `size` bytes (a torn tail)."""
        os.ftruncate(self._descriptor, size)
        os.lseek(self._descriptor, size, os.SEEK_SET)
        self._size = size

    def read(self) -> LogContent:
        """Read and parse the log; see `parse`."""
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            return parse(file.read())

    def drop(self) -> None:
        """Remove the log, whose trajectories are published."""
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        self.close()

    def close(self) -> None:
        """Release the lock and leave the file to salvage."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _frame(self, kind: bytes, payload: bytes) -> None:
        crc = zlib.crc32(payload, zlib.crc32(_CHECKED.pack(kind, len(payload))))
        self._write([_FRAME.pack(kind, len(payload), crc), payload])

    def _write(self, parts: Sequence[bytes | memoryview]) -> None:
        total = sum(map(len, parts))
        try:
            written = os.writev(self._descriptor, parts)
            if written < total:  # a nearly full disk accepts part of it, and reports the reason at the next write
                rest = memoryview(b"".join(parts))[written:]
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            self.truncate(self._size)
            raise
        self._size += total


def _close_all() -> None:
    """Close all logs in a forked child, which must not keep its parent's locks."""
    for log in list(_open):
        log.close()


os.register_at_fork(after_in_child=_close_all)


@dataclass
class LogContent:
    """The content of a log. `records` are (row, columns' bytes); `valid` counts the bytes before the torn tail,
    `damaged` the frames and trajectories that differ from what was written (a torn tail is not damage: it was never
    acknowledged). `newer`: of a later format; `foreign`: not a log.
    """

    header: dict[str, Any] | None = None
    records: list[tuple[dict[str, Any], memoryview]] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    valid: int = 0
    damaged: int = 0
    newer: bool = False
    foreign: bool = False


def parse(data: bytes) -> LogContent:
    """Parse the complete frames of a log. Never raises for bad bytes: unreadable ones are not in the result."""
    content = LogContent()
    other = _ANY_MAGIC.match(data)
    if other and int(other[1]) > VERSION:
        content.newer = True
        return content
    if (len(data) < len(MAGIC) and MAGIC.startswith(data)) or not data.strip(b"\0"):
        return content  # its writer died, or the power failed, before it had content
    content.damaged = int(not data.startswith(MAGIC))
    content.valid = min(len(MAGIC), len(data))
    for kind, payload, end in _iterate_frames(memoryview(data), len(MAGIC)):
        content.valid = end
        try:
            if payload is None:
                content.damaged += 1
            elif kind == b"H":
                content.header = dict(json.loads(bytes(payload)))
            elif kind == b"S":
                content.marks.append(bytes(payload).decode())
            elif kind == b"M":
                (length,) = struct.unpack_from("<I", payload)
                text, values = json.loads(bytes(payload[4 : 4 + length])), payload[4 + length :]
                columns = [
                    column
                    if isinstance(column, list)
                    else np.frombuffer(base64.b64decode(column["base64"]), column["dtype"]).tolist()
                    for column in text["each"].values()
                ]
                start = 0
                for own, size in zip(zip(*columns, strict=True), text["bytes"], strict=True):
                    row = {**text["row"], **dict(zip(text["each"], own, strict=True))}
                    if zlib.crc32(values[start : start + size]) == row["crc"]:
                        content.records.append((row, values[start : start + size]))
                    else:
                        content.damaged += 1
                    start += size
        except MALFORMED:
            content.damaged += 1
    content.foreign = not data.startswith(MAGIC) and content.header is None and not content.records
    return content


def _iterate_frames(data: memoryview, start: int) -> Iterator[tuple[bytes, memoryview | None, int]]:
    """Yield (kind, payload or None if it is damaged, end) of each frame that ends inside `data`."""
    while start + _FRAME.size <= len(data):
        kind, payload, end = _parse_frame(data, start)
        if payload is not None:
            yield kind, payload, end
        else:
            following = _find_frame(data, start + 1)
            if following is None and end < 0:
                return  # a torn tail
            if following is not None and not 0 <= end <= following:
                end = following  # its length is wrong
            yield kind, None, end
        start = end


def _parse_frame(data: memoryview, start: int) -> tuple[bytes, memoryview | None, int]:
    """Return the kind, payload (None if its checksum is wrong) and end (-1 if impossible) of the frame at `start`."""
    kind, length, crc = _FRAME.unpack_from(data, start)
    end = start + _FRAME.size + length
    if end > len(data) or kind not in _KINDS:
        return kind, None, -1
    payload = data[start + _FRAME.size : end]
    checked = payload
    if kind == b"M" and length >= 4:
        checked = payload[: 4 + struct.unpack_from("<I", payload)[0]]
    good = zlib.crc32(checked, zlib.crc32(_CHECKED.pack(kind, length))) == crc
    return kind, payload if good else None, end


def _find_frame(data: memoryview, start: int) -> int | None:
    """Find where the first valid frame at `start` or later begins."""
    raw = np.frombuffer(data, np.uint8)[start:]
    if len(raw) < _FRAME.size:
        return None
    first = raw[: len(raw) - _FRAME.size + 1]
    places = np.flatnonzero(np.isin(first, [ord(kind) for kind in _KINDS]))
    for byte in range(5, 9):  # frames are far below 4 GiB: the upper half of a length is zero
        places = places[raw[places + byte] == 0]
    for place in (places + start).tolist():
        text = place + _FRAME.size + (4 if data[place] == ord("M") else 0)
        if (data[place] == ord("S") or bytes(data[text : text + 1]) == b"{") and _parse_frame(data, place)[
            1
        ] is not None:
            return place
    return None
