"""A helper process for all user SQL.

DuckDB's own limits are not enough: a list or a text may exceed its memory limit many times over, some functions cannot
be interrupted, some end the process. Queries therefore run in a helper process. While it works, no file grows, and its
memory grows by the limit of the query only; it is killed at the time limit. It is started for the first query and
reused; after a query that met a limit or was interrupted, the next one starts another. It exits with the process that
started it, however that ends.

A request is (directory, opening, task, arguments, limits); its replies are ("notice", Notice), ("started", None) when
the user's text begins to run, ("part", anything) for each value of a task that is a generator, and finally ("answer",
anything) or ("error", exception). Importing this module imports neither Arrow nor DuckDB.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import select
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import GeneratorType
from typing import Any, NamedTuple

from pipelines.errors import AmagoError, StageFailed, StorageError, UsageError
from pipelines.events import Event, Listener, Waiting, silent
from pipelines.processes import end_with_parent, receive, send, start_python

_GRACE_SECONDS = 2.0  # between asking a query to stop and killing its process
_LISTEN_SECONDS = 0.2  # between checks for an interruption
_SLACK_BYTES = 64 << 20  # for stacks of threads and Arrow's buffers
_KEPT_BYTES = 256 << 20  # that queries may leave behind
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # others reserve a gigabyte at once, which would count towards the limit
    "MALLOC_MMAP_THRESHOLD_": "262144",  # freed memory goes back to the system
}


_MOST_MEGABYTES = 1 << 30  # a petabyte: the system takes no number of bytes beyond 2^63


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
        if not (0 < self.seconds < float("inf") and 64 <= self.megabytes <= _MOST_MEGABYTES):
            raise UsageError(f"SQL: its limits are a time above 0 s and a memory of 64 to {_MOST_MEGABYTES:,} MB")

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


class Opened(NamedTuple):
    """What a query works on: the first arguments of its task. `writes`: files may grow while it runs. `notices`: what
    the task reports. They are sent before the answer, and not at once: threads of DuckDB add to them, and would write
    into the middle of another message."""

    arguments: tuple[Any, ...] = ()
    writes: bool = False
    notices: Sequence[Event] = ()


Opening = Callable[[QueryLimits, Listener], AbstractContextManager[Opened]]


def ask(
    task: Callable[..., Any],
    arguments: Mapping[str, Any],
    limits: QueryLimits,
    *,
    opening: Opening | None = None,
    take: Callable[[Any], None] | None = None,
    listener: Listener = silent,
) -> Any:
    """Call `task`, a function of a module, with `arguments` in the helper process, within limits. What `opening` opens
    before, without limits, are its first arguments. If it is a generator, `take` receives what it yields, and the
    limits hold until the last part is taken; an error may follow any part.

    The listener receives Waiting meanwhile, and may raise. UsageError for a wrong text, LimitReached for one that met a
    limit; StageFailed if the helper cannot run.
    """
    directory = None
    with contextlib.suppress(FileNotFoundError):  # the directory was removed
        directory = os.getcwd()
    request = (directory, opening, task, dict(arguments), limits)
    while not _lock.acquire(timeout=_LISTEN_SECONDS):
        listener(Waiting(what="another SQL query"))
    try:
        for is_last in (False, True):
            helper = _get_helper()
            try:
                return helper.ask(request, limits, listener, take)
            except EOFError:  # it exited while it was idle, e.g. for lack of memory on the host
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


class _Helper:
    """The helper process. `is_busy` until a query's last reply is read."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        try:
            self._process = start_python(
                "from pipelines.lake.sql.sandbox import main; main()",
                environment={**self.environment, **_ENVIRONMENT},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise StageFailed(f"cannot start the SQL helper process: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        self.is_busy = False

    def ask(
        self, request: Any, limits: QueryLimits, listener: Listener, take: Callable[[Any], None] | None = None
    ) -> Any:
        """Return the reply to a request. EOFError if the process exited before it started on it."""
        self.is_busy = True
        try:
            send(self._requests, request)
        except BrokenPipeError as error:
            raise EOFError from error
        deadline = None

        def wait() -> None:
            while not select.select([self._replies], [], [], _LISTEN_SECONDS)[0]:
                if deadline is not None and time.monotonic() > deadline:
                    raise limits.out_of_time()
                listener(Waiting(what="the result of a SQL query"))

        while True:
            try:
                kind, value = receive(self._replies, wait)
            except EOFError:
                if deadline is None:
                    raise
                raise limits.out_of_memory() from None  # a failed allocation ends the process
            if kind == "notice":
                listener(value)
            elif kind == "started":
                deadline = time.monotonic() + limits.seconds + _GRACE_SECONDS
            elif kind == "part":
                assert take is not None, "only a task that is called with `take` may be a generator"
                take(value)
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


def _get_helper() -> _Helper:
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


def main() -> None:
    """Answer requests on stdin by replies on stdout until stdin is closed: what the helper process does.

    After a query that met a limit, or left too much memory behind, it exits, and the next query starts another.
    """
    requests, replies = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nowhere, standard)  # nothing else gets between the messages
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end_with_parent()
    most = 0
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            request = receive(requests)  # which imports what it names
            most = most or _private_bytes() + _KEPT_BYTES
            if not _serve(lambda kind, value: send(replies, (kind, value)), *request) or _private_bytes() > most:
                break
    os._exit(0)  # without waiting for threads that a stopped query may have left


def _serve(
    reply: Callable[[str, Any], None],
    directory: str | None,
    opening: Opening | None,
    task: Callable[..., Any],
    arguments: Mapping[str, Any],
    limits: QueryLimits,
) -> bool:
    """Reply to a request. False if it may have left something behind."""
    try:
        if directory is not None:
            with contextlib.suppress(OSError):
                os.chdir(directory)
        opened = contextlib.nullcontext(Opened()) if opening is None else opening(limits, partial(reply, "notice"))
        with opened as given:
            with _confine(limits, writes=given.writes):
                reply("started", None)
                found = task(*given.arguments, **arguments)
                if isinstance(found, GeneratorType):
                    for part in found:
                        reply("part", part)
                    found = None
            for notice in dict.fromkeys(given.notices):  # a query may read a segment several times
                reply("notice", notice)
            reply("answer", found)
    except LimitReached as error:
        reply("error", error)
        return False
    except (AmagoError, StorageError) as error:
        reply("error", error)
    except Exception:
        reply("error", RuntimeError(traceback.format_exc()))
        return False
    return True


@contextlib.contextmanager
def _confine(limits: QueryLimits, *, writes: bool) -> Iterator[None]:
    """Let no file grow inside, and private memory by the limit only (mapped files do not count).

    `writes`: files may grow, for fetches from an object store.
    """
    wanted = {}
    if used := _private_bytes():
        wanted[resource.RLIMIT_DATA] = used + (limits.megabytes << 20) + _SLACK_BYTES
    if not writes:
        wanted[resource.RLIMIT_FSIZE] = 0
    before = {what: resource.getrlimit(what) for what in wanted}
    try:
        for what, value in wanted.items():
            soft, hard = before[what]
            allowed = [value, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
            resource.setrlimit(what, (min(allowed), hard))
        yield
    finally:
        for what, limit in before.items():
            resource.setrlimit(what, limit)


def _private_bytes() -> int:
    """Return the data and stacks of this process; 0 if the system does not report them, as on macOS, where DuckDB's own
    limit is the only one.
    """
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except FileNotFoundError:
        return 0
