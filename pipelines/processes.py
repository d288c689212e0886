"""Child processes: starting them, messages to and from them, what they raised, and how they end.

A child is another Python of this environment. It is not started by multiprocessing, which would run the user's main
module once more.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from pipelines.errors import AmagoError, StageFailed

_PARENT_SECONDS = 0.5  # between two looks at whether the parent lives
_LENGTH = struct.Struct("<Q")


def start_python(
    code: str,
    *,
    descriptors: Collection[int] = (),
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a Python process that imports what this one can and runs `code`; it inherits `descriptors`.

    It has a session of its own: a signal of the terminal reaches this process only, which then stops the others.
    OSError if it cannot be started.
    """
    path = [os.path.abspath(folder) for folder in sys.path]
    return subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"],
        bufsize=0,
        pass_fds=descriptors,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        start_new_session=True,
    )


def describe_exit(code: int) -> str:
    """Describe how a process ended, by its return code: "was killed by SIGKILL", "ended with exit code 1"."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def end_process(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for a process that has been asked to end, and kill it if that takes longer than `seconds`."""
    try:
        process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def end_with_parent(*, safely: bool = False) -> None:
    """End this process, even in the middle of its work, soon after its parent has ended for whatever reason.

    `safely`: send SIGTERM to this process instead, so that it stops at its next safe point.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_SECONDS)
        if not safely:
            os._exit(0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


class RemoteTraceback(Exception):
    """The traceback of another process, to be shown as the cause of an error."""

    def __init__(self, trace: str) -> None:
        super().__init__(trace)
        self.trace = trace

    def __str__(self) -> str:
        return f"\n{self.trace}"


class PackedError(NamedTuple):
    """An error that can be pickled, and its traceback."""

    error: AmagoError
    trace: str

    def unpack(self) -> AmagoError:
        """Return the error, to be raised, with its traceback as its cause."""
        self.error.__cause__ = RemoteTraceback(self.trace)
        return self.error


def pack_error(error: Exception, what: str = "") -> PackedError:
    """Pack an error for another process: itself if it is an AmagoError that can be pickled, else a StageFailed with its
    message. Where it is no AmagoError, the message begins with `what`.
    """
    trace = "".join(traceback.format_exception(error))
    if not isinstance(error, AmagoError):
        return PackedError(StageFailed(f"{what}{type(error).__name__}: {error}"), trace)
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the pickling of a user's class of errors raises; its message is what must arrive
        return PackedError(StageFailed(error.message, hint=error.hint), trace)
    return PackedError(error, trace)


def send(pipe: int, message: Any) -> None:
    """Write a message: the number of its parts, their lengths, and the parts. These are a pickle and its arrays, which
    are not copied. BrokenPipeError if nobody reads it.
    """
    arrays: list[pickle.PickleBuffer] = []
    parts: list[Any] = [pickle.dumps(message, protocol=5, buffer_callback=arrays.append)]
    parts += [array.raw() for array in arrays]
    lengths = [len(part) for part in parts]
    for part in (b"".join(map(_LENGTH.pack, [len(parts), *lengths])), *parts):
        view = memoryview(part)
        while view:
            view = view[os.write(pipe, view) :]


def receive(pipe: int, wait: Callable[[], None] = lambda: None) -> Any:
    """Read the next message; EOFError if the other end was closed. `wait` is called before each read."""

    def read(count: int) -> bytearray:
        data, filled = bytearray(count), 0
        view = memoryview(data)
        while filled < count:
            wait()
            got = os.readv(pipe, [view[filled:]])
            if not got:
                raise EOFError
            filled += got
        return data

    (count,) = _LENGTH.unpack(read(_LENGTH.size))
    lengths = read(_LENGTH.size * count)
    pickled, *arrays = [read(length) for (length,) in _LENGTH.iter_unpack(lengths)]
    return pickle.loads(pickled, buffers=arrays)
