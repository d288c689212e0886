"""Frames of an MP4 file by their times, decoded with PyAV (`pip install "amago[video]"`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipelines.errors import InputMissing, IntegrityError
from pipelines.files.malformed import decoding, open_regular
from pipelines.formats.base import require, require_file

_LARGEST = 64 << 20  # bytes of a frame
_SEEK_SECONDS = 2.0  # frames that are nearer are reached by decoding those between
_HINT = "fetch or make it again"


class Video:
    """The frames of the first video stream of a file, `fps` a second.

    The demuxer is fixed: ffmpeg's choice by content knows playlists, which name other files and addresses.
    """

    def __init__(self, path: Path, fps: float) -> None:
        require("av", "video", f"'{path}'")
        import av

        self._path, self._period = require_file(path), 1 / fps
        with contextlib.ExitStack() as stack, self._decoding():
            file = stack.enter_context(open_regular(path))
            self._container = stack.enter_context(av.open(file, "r", format="mp4"))
            if not self._container.streams.video:
                raise IntegrityError(f"'{path}' has no video", hint=_HINT)
            self._stream = self._container.streams.video[0]
            self._stream.codec_context.thread_count = 1
            size = self._stream.width * self._stream.height * 3
            if not 0 < size <= _LARGEST:
                raise IntegrityError(f"'{path}' has frames of {size:,} bytes, at most {_LARGEST:,} are read")
            self._frames = self._container.decode(self._stream)
            self._last: Any = None
            self._open = stack.pop_all()

    def close(self) -> None:
        """Close the file."""
        self._open.close()

    def frames(self, seconds: np.ndarray) -> np.ndarray:
        """Return the (n, height, width, 3) uint8 frames at these times. IntegrityError where there is none."""
        with self._decoding():
            return np.stack([self._frame(float(at)).to_ndarray(format="rgb24") for at in seconds])

    def _frame(self, wanted: float) -> Any:
        """Return the frame nearest to `wanted`, which is at most half a period away."""
        if not np.isfinite(wanted):
            raise IntegrityError(f"'{self._path}': a frame is asked for at {wanted} s", hint=_HINT)
        if self._last is None or not 0 <= wanted - self._last.time + self._period / 2 <= _SEEK_SECONDS:
            self._seek(wanted)
        while self._last is None or self._last.time < wanted - self._period / 2:
            self._last = next(self._frames, None)
            if self._last is None or self._last.time is None:
                self._last = None
                raise IntegrityError(f"'{self._path}' ends before the frame at {wanted:.3f} s", hint=_HINT)
        if self._last.time > wanted + self._period / 2:
            raise IntegrityError(f"'{self._path}' has no frame at {wanted:.3f} s", hint=_HINT)
        return self._last

    def _seek(self, wanted: float) -> None:
        start = max(wanted - self._period, 0.0) / float(self._stream.time_base or 1)
        self._container.seek(int(start), stream=self._stream)
        self._frames, self._last = self._container.decode(self._stream), None

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        import av

        with decoding(self._path, av.FFmpegError, hint=_HINT):
            yield


def checked_fps(value: Any, what: str) -> float:
    """Return frames a second. InputMissing unless it is a number above 0."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6:
        return float(value)
    raise InputMissing(f"{what}: 'fps' is {value!r}, not a number above 0", hint=_HINT)
