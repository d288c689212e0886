"""Publication of logs as segments in a thread of its own, so that fsync never blocks acting.

Logs are published one at a time, in order. A log that cannot be published stays first in the queue with its lock held;
its error is raised in the writer's next call, and publication is retried when the next log is submitted.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

from pipelines.errors import StageFailed
from pipelines.lake.segment import UnsealedBatch
from pipelines.lake.wal import Log

WAITING = 2  # queued logs, besides the one being published, at which submit blocks
Publish = Callable[[Log, Sequence[UnsealedBatch]], object]


class Sealer:
    """A queue of logs. `publish(log, items)` turns a log into a segment and drops it. Methods are for the writer's
    thread.
    """

    def __init__(self, publish: Publish) -> None:
        self._publish = publish
        self._line: deque[tuple[Log, Sequence[UnsealedBatch]]] = deque()
        self._moved = threading.Condition()  # held briefly
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._stopped = False
        self._process = os.getpid()

    def submit(self, log: Log, items: Sequence[UnsealedBatch]) -> None:
        """Queue `log` for publication; blocks while the queue is too long. Raises an earlier log's error."""
        self._line.append((log, items))
        self._run()
        with self._moved:
            self._moved.wait_for(lambda: self._error is not None or len(self._line) <= WAITING + 1)
        self.check()

    def check(self) -> None:
        """Raise the error of the last publication, if it failed."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def retry(self) -> None:
        """Retry a failed publication; its error is reported only if it occurs again."""
        self._error = None
        self._run()

    def finish(self) -> None:
        """Wait until all logs are published, or raise the error of the first that cannot be."""
        self._join()
        self.check()

    def abandon(self) -> None:
        """Release the logs that are not published, for salvage."""
        self._stopped = True
        self._join()
        while self._line:
            self._line.popleft()[0].close()
        self._error, self._stopped = None, False

    def _join(self) -> None:
        thread = self._thread
        if thread is not None and self._mine():
            thread.join()

    def _run(self) -> None:
        if not self._mine():
            raise StageFailed("a lake's writer belongs to the process that made it", hint="open one in each process")
        with self._moved:
            if self._thread is None and self._line:
                self._thread = threading.Thread(target=self._work, name="amago-sealer")
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._moved:
                if not self._line or self._error is not None or self._stopped:
                    self._thread = None
                    return
            try:
                self._publish(*self._line[0])
            except BaseException as error:
                self._error = error
            else:
                self._line.popleft()
            with self._moved:
                self._moved.notify_all()

    def _mine(self) -> bool:
        """Return False in a forked child, which has neither the thread nor the logs."""
        return os.getpid() == self._process
