"""The helper process that runs user SQL: see `pipelines.lake.sql.sandbox`.

While it works, no file grows, and its memory grows by the limit of the query only. After a query that met a limit, or
left too much memory behind, it exits, and the next query starts a new process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pipelines.config.parent import end_with_parent
from pipelines.errors import AmagoError, StorageError
from pipelines.lake.sql import catalog, expression, pages, selection, tables
from pipelines.lake.sql import query as sql
from pipelines.lake.sql.sandbox import LimitReached, QueryLimits, receive, send
from pipelines.lake.storage import LocalStorage
from pipelines.lake.store import Lake

_SLACK_BYTES = 64 << 20  # for stacks of threads and Arrow's buffers
_KEPT_BYTES = 256 << 20  # that questions may leave behind

_Reply = Callable[[str, Any], None]

ON_A_LAKE: Mapping[str, Callable[..., Any]] = {
    "answer": sql.answer,
    "select": selection.choose,
    "page": pages.page,
    "count": pages.count,
    "curve": pages.curve,
}
ON_VALUES: Mapping[str, Callable[..., Any]] = {
    "check": expression.check,
    "evaluate": expression.evaluate,
    "answer_tables": tables.answer,
    "matching": tables.matching,
}


def main() -> None:
    """Answer requests on stdin by replies on stdout until stdin is closed."""
    requests, replies = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nowhere, standard)  # nothing else gets between the messages
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    end_with_parent()
    most = _private_bytes() + _KEPT_BYTES
    with contextlib.suppress(EOFError, BrokenPipeError):
        while _serve(receive(requests), lambda kind, value: send(replies, (kind, value))):
            if _private_bytes() > most:
                break
    os._exit(0)  # without waiting for threads that a stopped query may have left


def _serve(request: tuple[Any, ...], reply: _Reply) -> bool:
    """Reply to a request. False if it may have left something behind."""
    directory, lake, task, arguments, limits = request
    try:
        if directory is not None:
            with contextlib.suppress(OSError):
                os.chdir(directory)
        if lake is None:
            with _confined(limits, writes=False):
                reply("started", None)
                reply("answer", ON_VALUES[task](**arguments, limits=limits))
        else:
            _answer(Lake(lake), task, arguments, limits, reply)
    except LimitReached as error:
        reply("error", error)
        return False
    except (AmagoError, StorageError) as error:
        reply("error", error)
    except Exception:
        reply("error", RuntimeError(traceback.format_exc()))
        return False
    return True


def _answer(lake: Lake, task: str, arguments: Mapping[str, Any], limits: QueryLimits, reply: _Reply) -> None:
    with (
        catalog.reading(lake, lambda event: reply("notice", event), megabytes=limits.megabytes // 2) as connection,
        _confined(limits, writes=not isinstance(lake.storage, LocalStorage)),
    ):
        reply("started", None)
        with sql.within(connection, limits):
            found = ON_A_LAKE[task](connection, lake, **arguments)
        reply("answer", found)


@contextlib.contextmanager
def _confined(limits: QueryLimits, *, writes: bool) -> Iterator[None]:
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
