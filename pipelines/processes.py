"""Child processes: starting them, messages to and from them, what they raised, and how they end.

A child is another Python of this environment. It is not started by multiprocessing, which would run the user's main
module once more. Many children of one kind are forked from a process that has imported what they need (`ForkServer`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from pipelines.errors import AmagoError, StageFailed

_PARENT_SECONDS = 0.5  # between two looks at whether the parent lives
_LENGTH = struct.Struct("<Q")
_NUMBER = struct.Struct("<i")
_ARROW_ALLOCATOR = "JE_ARROW_MALLOC_CONF"
_UNKNOWN_EXIT = 255  # of a child whose fork server was killed


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


class ForkServer:
    """A process that imports `modules` once and is forked for each child, which begins in milliseconds and shares the
    memory of what was imported. A child calls `target` ("module:function") with a descriptor.

    Forking is safe as long as these modules start no threads, and do not touch a GPU. (OpenBLAS may start some, and
    ends them before a fork.) The server ends with the process that started it, which its children have to notice by
    themselves. OSError if it cannot be started.
    """

    def __init__(self, target: str, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._requests, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._process = start_python(
                f"from pipelines.processes import serve_forks; serve_forks({number}, {target!r}, {list(modules)!r})",
                descriptors=(number,),
                environment=environment,
            )

    def fork(self, descriptor: int) -> ForkedProcess:
        """Ask for a child, which gets a duplicate of `descriptor`. BrokenPipeError if the server has ended."""
        reading, writing = os.pipe()
        try:
            socket.send_fds(self._requests, [b"f"], [descriptor, writing])
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        return ForkedProcess(reading)

    def close(self) -> None:
        """End the server, but none of its children."""
        self._requests.close()
        self._process.wait()


class ForkedProcess:
    """A child of a `ForkServer`, which reports its number and, at last, its return code through the pipe `report`."""

    def __init__(self, report: int) -> None:
        self._report = report
        self._numbers: list[int] = []

    def _read(self, count: int) -> list[int]:
        """Wait for the first `count` numbers."""
        while len(self._numbers) < count and (data := os.read(self._report, _NUMBER.size)):
            self._numbers += _NUMBER.unpack(data)
            if len(self._numbers) == 2:
                os.close(self._report)
        return self._numbers

    @property
    def pid(self) -> int:
        """The process id; 0 if the server ended before it forked."""
        return self._read(1)[0] if self._read(1) else 0

    def wait(self) -> int:
        """Wait for the end, and return the return code; 255 if the server was killed, so that nobody knows."""
        return self._read(2)[1] if len(self._read(2)) == 2 else _UNKNOWN_EXIT

    def kill(self) -> None:
        """Kill the process, unless it has ended."""
        if self.pid and len(self._numbers) < 2 and not select.select([self._report], [], [], 0)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def serve_forks(descriptor: int, target: str, modules: Sequence[str]) -> NoReturn:
    """Fork a child for each request on the socket `descriptor` until it is closed: what a `ForkServer` does."""
    module, _, name = target.partition(":")
    given = dict(os.environ)
    os.environ[_ARROW_ALLOCATOR] = "background_thread:false"  # read as it is imported: a thread would not be forked
    for each in (module, *modules):
        importlib.import_module(each)
    os.environ.clear()
    os.environ.update(given)
    gc.collect()
    gc.freeze()  # otherwise the first collection of each child would copy the pages of all objects
    requests = socket.socket(fileno=descriptor)
    woken, waking = os.pipe()
    os.set_blocking(waking, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # without a handler, nothing is written to `waking`
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    reports: dict[int, int] = {}
    while True:
        ready = select.select([requests.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 1 << 12)
            while reports:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                with contextlib.suppress(BrokenPipeError), os.fdopen(reports.pop(pid), "wb", 0) as report:
                    report.write(_NUMBER.pack(os.waitstatus_to_exitcode(status)))
        if requests.fileno() not in ready:
            continue
        _, received, _, _ = socket.recv_fds(requests, 1, 2)
        if not received:
            os._exit(0)
        connection, writing = received
        pid = os.fork()
        if not pid:
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setsid()
                requests.close()
                for inherited in (woken, waking, writing, *reports.values()):
                    os.close(inherited)
                if "numpy" in sys.modules:  # the state that all children would share; `random` sees to itself
                    sys.modules["numpy"].random.seed()
                getattr(sys.modules[module], name)(connection)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(connection)
        with contextlib.suppress(BrokenPipeError):  # the owner was killed; the child notices by its connection
            os.write(writing, _NUMBER.pack(pid))
        reports[pid] = writing


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
