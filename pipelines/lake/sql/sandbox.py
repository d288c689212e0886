"""A helper process for all user SQL.

DuckDB's own limits are not enough: a list or a text may exceed its memory limit many times over, some functions cannot
be interrupted, some end the process. Queries therefore run in a helper process, which can neither write a file nor
exceed its memory, and which is killed at the time limit. It is started for the first query and reused; after a query
that met a limit or was interrupted, the next one starts another. It exits with the process that started it, however
that ends. Its code is `pipelines.lake.sql.helper`.

Both directions carry pickled messages. A request is (directory, lake, task, arguments, limits); its replies are
("notice", Notice), ("started", None) when the user's text begins to run, and finally ("answer", anything) or ("error",
exception).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import pickle
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipelines.errors import StageFailed, UsageError
from pipelines.events import Listener, Waiting, silent

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

_LENGTH = struct.Struct("<Q")
_GRACE_SECONDS = 2.0  # between asking a query to stop and killing its process
_LISTEN_SECONDS = 0.2  # between checks for an interruption
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # others reserve a gigabyte at once, which would count towards the limit
    "MALLOC_MMAP_THRESHOLD_": "262144",  # freed memory goes back to the system
}
_CODE = "import sys; sys.path[:] = {path!r}; from pipelines.lake.sql.helper import main; main()"


@dataclass(frozen=True, kw_only=True)
class QueryLimits:
    """The limits of a user's SQL: `seconds` of time, `megabytes` of memory, half of it for DuckDB's tables and half for
    the result. Nothing is written to a disk.
    """

    seconds: float = 60.0
    megabytes: int = 1024
    adjustable: bool = False
    """Whether the user can give it more, by --timeout and --memory."""

    def __post_init__(self) -> None:
        if not (0 < self.seconds < float("inf") and self.megabytes >= 64):
            raise UsageError("SQL: its limits are a time above 0 s and a memory of 64 MB or more")

    def out_of_time(self) -> LimitReached:
        more = ", or raise it with --timeout" if self.adjustable else ""
        return LimitReached(f"SQL: stopped at the time limit of {self.seconds:g} s", hint=f"ask for less{more}")

    def out_of_memory(self) -> LimitReached:
        more = ", or raise it with --memory" if self.adjustable else ""
        return LimitReached(
            f"SQL: stopped at the memory limit of {self.megabytes} MB",
            hint=f"ask for less (an aggregate, a limit, fewer columns){more}",
        )


class LimitReached(UsageError):
    """A user's SQL met one of its limits."""


def ask(
    task: str,
    arguments: Mapping[str, Any],
    limits: QueryLimits,
    *,
    lake: Lake | None = None,
    listener: Listener = silent,
) -> Any:
    """Run a task of `helper.ON_VALUES`, or of `helper.ON_A_LAKE` on the updated index of `lake`.

    The listener receives Waiting meanwhile, and may raise. UsageError for a wrong text, LimitReached for one that met a
    limit; StageFailed if the helper cannot run.
    """
    directory = None
    with contextlib.suppress(FileNotFoundError):  # the directory was removed
        directory = os.getcwd()
    request = (directory, None if lake is None else lake.name, task, dict(arguments), limits)
    while not _lock.acquire(timeout=_LISTEN_SECONDS):
        listener(Waiting(what="another SQL query"))
    try:
        for is_last in (False, True):
            helper = _running()
            try:
                return helper.ask(request, limits, listener)
            except _HelperExited:  # while it was idle, e.g. for lack of memory on the host
                _end()
                if is_last:
                    text = "the SQL helper process exited before it started"
                    raise StageFailed(text, hint="is there enough memory?") from None
            except LimitReached:
                _end()
                raise
            except BaseException:
                if helper.is_busy:
                    _end()
                raise
    finally:
        _lock.release()


class _HelperExited(Exception):
    """The helper exited before it started on a query."""


class _Helper:
    """The helper process. `is_busy` until a query's last reply is read."""

    def __init__(self) -> None:
        path = [os.path.abspath(entry) for entry in sys.path]
        self.environment = dict(os.environ)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE.format(path=path)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**self.environment, **_ENVIRONMENT},
                start_new_session=True,  # signals to this process are handled by this process
            )
        except OSError as error:
            raise StageFailed(f"cannot start the SQL helper process: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        self.is_busy = False

    def ask(self, request: Any, limits: QueryLimits, listener: Listener) -> Any:
        """Return the reply to a request. _HelperExited if the process exited before it started on it."""
        self.is_busy = True
        try:
            send(self._requests, request)
        except BrokenPipeError:
            raise _HelperExited from None
        deadline = None

        def wait() -> None:
            while not select.select([self._replies], [], [], _LISTEN_SECONDS)[0]:
                if deadline is not None and time.monotonic() > deadline:
                    raise limits.out_of_time()
                listener(Waiting(what="the result of a SQL query"))

        while True:
            try:
                kind, value = receive(self._replies, wait)
            except EOFError:  # a failed allocation ends it
                raise (_HelperExited() if deadline is None else limits.out_of_memory()) from None
            if kind == "notice":
                listener(value)
            elif kind == "started":
                deadline = time.monotonic() + limits.seconds + _GRACE_SECONDS
            else:
                self.is_busy = False
                if kind == "error":
                    raise value
                return value

    def end(self) -> None:
        """Kill the process."""
        with self._process:
            self._process.kill()

    def forget(self) -> None:
        """Release what belongs to the process that this one was forked from."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.returncode = 0  # so that nothing waits for it here


_lock = threading.Lock()
_helper: _Helper | None = None


def _running() -> _Helper:
    """Return the helper of this process, a new one if variables have changed (keys of an object store, the cache)."""
    global _helper
    if _helper is not None and _helper.environment != os.environ:
        _end()
    if _helper is None:
        _helper = _Helper()
    return _helper


def _end() -> None:
    global _helper
    helper, _helper = _helper, None
    if helper is not None:
        helper.end()


def _forget() -> None:
    global _helper, _lock
    helper, _helper, _lock = _helper, None, threading.Lock()
    if helper is not None:
        helper.forget()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)


def send(pipe: int, message: Any) -> None:
    """Write a message: the number of its parts, their lengths, and the parts: a pickle, and its arrays unchanged."""
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
    (count,) = _LENGTH.unpack(_read(pipe, _LENGTH.size, wait))
    lengths = _read(pipe, _LENGTH.size * count, wait)
    pickled, *arrays = [_read(pipe, length, wait) for (length,) in _LENGTH.iter_unpack(lengths)]
    return pickle.loads(pickled, buffers=arrays)


def _read(pipe: int, count: int, wait: Callable[[], None]) -> bytearray:
    data, filled = bytearray(count), 0
    view = memoryview(data)
    while filled < count:
        wait()
        got = os.readv(pipe, [view[filled:]])
        if not got:
            raise EOFError
        filled += got
    return data
