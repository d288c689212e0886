"""A process of its own for SQL that a user wrote.

DuckDB's own limits are not enough: a list or a text may outgrow its memory limit many times over, some functions
cannot be interrupted, some end the process. So the question goes to a child process, which may neither write a file
nor outgrow its memory, and which is killed when its time is over.

The child reads one pickled request, and answers with pickled messages: ("notice", Notice), ("started", None) when the
user's text begins to run, and last ("answer", anything) or ("error", exception).
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import select
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from pipelines.errors import AmagoError, StageFailed, StorageError, UsageError
from pipelines.events import Listener, silent

if TYPE_CHECKING:
    from pipelines.lake.store import Lake

_LENGTH = struct.Struct("<Q")
_GRACE_SECONDS = 2.0  # between asking a query to stop and killing its process
_SLACK_MB = 256  # for stacks of threads, Arrow's buffers and the answer as Python objects
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # others reserve a gigabyte at once, which would count
    "MALLOC_MMAP_THRESHOLD_": "262144",  # what is let go of goes back
}
_CHILD = "import sys; sys.path[:] = {path!r}; from pipelines.lake.sql.sandbox import main; main()"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a user's SQL may take: `seconds` of time, `megabytes` of memory, half of it for DuckDB's tables and half for
    the answer. Nothing is ever put on a disk.
    """

    seconds: float = 60.0
    megabytes: int = 1024

    def __post_init__(self) -> None:
        if not (0 < self.seconds < float("inf") and self.megabytes >= 64):
            raise UsageError("SQL: its limits are a time above 0 s and a memory of 64 MB or more")

    def out_of_time(self) -> UsageError:
        return UsageError(
            f"SQL: stopped at the time limit of {self.seconds:g} s", hint="ask for less, or raise the time limit"
        )

    def out_of_memory(self) -> UsageError:
        return UsageError(
            f"SQL: stopped at the memory limit of {self.megabytes} MB",
            hint="ask for less (an aggregate, a limit, fewer columns), or raise the memory limit",
        )


def ask(lake: Lake, task: str, arguments: Mapping[str, Any], limits: Limits, *, listener: Listener = silent) -> Any:
    """Run a task ("answer", "select") in a child process on an index that is up to date, and return its answer.

    UsageError for a wrong text and for one that met a limit; StageFailed if the child cannot live.
    """
    command = [sys.executable, "-c", _CHILD.format(path=[os.path.abspath(entry) for entry in sys.path])]
    environment = {**os.environ, **_ENVIRONMENT}
    try:
        child = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    except OSError as error:
        raise StageFailed(f"cannot start a process for SQL: {error.strerror}") from error
    assert child.stdin is not None
    assert child.stdout is not None
    with child, contextlib.ExitStack() as stack:
        stack.callback(child.kill)
        with contextlib.suppress(BrokenPipeError):
            pickle.dump((lake.name, task, dict(arguments), limits), child.stdin)
            child.stdin.close()
        deadline = None
        while True:
            kind, value = _receive(child.stdout, deadline, limits)
            if kind == "notice":
                listener(value)
            elif kind == "started":
                deadline = time.monotonic() + limits.seconds + _GRACE_SECONDS
            elif kind == "answer":
                return value
            elif kind == "error":
                raise value
            elif deadline is not None:  # it died: what cannot be allocated ends it
                raise limits.out_of_memory()
            else:
                raise StageFailed("the process for SQL died before it began", hint="is there enough memory?")


def _receive(pipe: IO[bytes], deadline: float | None, limits: Limits) -> tuple[str, Any]:
    """The next message; ("end", None) when the child has gone."""
    head = _read(pipe, _LENGTH.size, deadline, limits)
    lengths = _read(pipe, _LENGTH.size * _LENGTH.unpack(head)[0], deadline, limits) if head else b""
    parts = [_read(pipe, length, deadline, limits) for (length,) in _LENGTH.iter_unpack(lengths)]
    if not parts or not parts[0]:
        return "end", None
    message: tuple[str, Any] = pickle.loads(parts[0], buffers=parts[1:])
    return message


def _send(pipe: IO[bytes], kind: str, value: Any) -> None:
    """A message: the number of its parts, their lengths, and the parts: a pickle, and the arrays in it as they are."""
    arrays: list[pickle.PickleBuffer] = []
    parts: list[Any] = [pickle.dumps((kind, value), protocol=5, buffer_callback=arrays.append)]
    parts += [array.raw() for array in arrays]
    lengths = [len(part) for part in parts]
    pipe.write(b"".join(map(_LENGTH.pack, [len(parts), *lengths])))
    for part in parts:
        pipe.write(part)
    pipe.flush()


def _read(pipe: IO[bytes], count: int, deadline: float | None, limits: Limits) -> bytearray:
    """`count` bytes, or none when the pipe ended."""
    data, filled = bytearray(count), 0
    view = memoryview(data)
    while filled < count:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([pipe], [], [], left)[0]:
            raise limits.out_of_time()
        got = os.readv(pipe.fileno(), [view[filled:]])
        if not got:
            return bytearray()
        filled += got
    return data


def main() -> None:
    """The child."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else gets between the messages

    def tell(kind: str, value: Any) -> None:
        _send(out, kind, value)

    try:
        name, task, arguments, limits = pickle.load(sys.stdin.buffer)
        tell("answer", _run(name, task, arguments, limits, tell))
    except (AmagoError, StorageError) as error:
        tell("error", error)
    except BaseException:
        tell("error", RuntimeError(traceback.format_exc()))
    os._exit(0)  # without waiting for threads that a stopped query may have left


def _run(name: str, task: str, arguments: Mapping[str, Any], limits: Limits, tell: Callable[[str, Any], None]) -> Any:
    from pipelines.lake.sql import catalog, selection
    from pipelines.lake.sql import query as sql
    from pipelines.lake.storage import LocalStorage
    from pipelines.lake.store import Lake

    tasks: Mapping[str, Callable[..., Any]] = {"answer": sql.answer, "select": selection.choose}
    lake = Lake.open(name)
    with catalog.reading(lake, lambda event: tell("notice", event), megabytes=limits.megabytes // 2) as connection:
        _confine(limits, writes=not isinstance(lake.storage, LocalStorage))
        tell("started", None)
        with sql.within(connection, limits):
            return tasks[task](connection, lake, **arguments)


def _confine(limits: Limits, *, writes: bool) -> None:
    """From now on no file grows, and private memory by so much only (mapped files do not count).

    `writes`: files may grow, for what is fetched from an object store.
    """
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[5])  # data and stack
    most = pages * resource.getpagesize() + (limits.megabytes + _SLACK_MB << 20)
    limited = [(resource.RLIMIT_DATA, most), (resource.RLIMIT_CORE, 0)]
    if not writes:
        limited.append((resource.RLIMIT_FSIZE, 0))
    for what, value in limited:
        _, ceiling = resource.getrlimit(what)
        value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        resource.setrlimit(what, (value, value))
