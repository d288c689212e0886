"""An engine whose tasks are threads of this process: quick, and they die where a test says so."""

from __future__ import annotations

import contextlib
import pickle
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from pipelines.stages.tasks import Caller, Channel, Task, perform


class ThreadTask:
    """A task in a thread. `fatal(kind)` is asked before each message whether the task "dies" in its place."""

    host, pid = "here", 0

    def __init__(self, task: Task, fatal: Callable[[str], bool]) -> None:
        self.ended, self._posted = "", queue.SimpleQueue[tuple[str, Any]]()
        self._channel, self._fatal = Channel(self._post), fatal
        self._thread = threading.Thread(target=self._perform, args=(pickle.dumps(task),))
        self._thread.start()

    def _post(self, kind: str, body: Any) -> None:
        if self._fatal(kind):
            raise KeyboardInterrupt  # passes through the task, which stores nothing more
        self._posted.put((kind, pickle.loads(pickle.dumps(body))))

    def _perform(self, task: bytes) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            perform(task, Caller(), self._channel)
        self._posted.put(("end", None))

    def messages(self) -> list[tuple[str, Any]]:
        found = []
        while not self._posted.empty():
            found.append(self._posted.get())
        if found and found[-1][0] == "end":
            self._thread.join()
            self.ended = "was killed by a test"
            found.pop()
        return found

    def send(self, order: Any) -> None:
        self._channel.deliver(order)

    def stop(self) -> None:
        self.send("stop")


class ThreadEngine:
    """Tasks in threads; `fatal(number, kind)` as for `ThreadTask`, `number` counting the tasks that were started."""

    def __init__(self, fatal: Callable[[int, str], bool] = lambda number, kind: False) -> None:
        self._fatal, self._tasks = fatal, list[ThreadTask]()

    def __enter__(self) -> ThreadEngine:
        return self

    def __exit__(self, *raised: object) -> None:
        for task in self._tasks:
            task.stop()
            task._thread.join()

    def start(self, task: Task) -> ThreadTask:
        number = len(self._tasks)
        self._tasks.append(ThreadTask(task, lambda kind: self._fatal(number, kind)))
        return self._tasks[-1]

    def wait(self, seconds: float) -> None:
        time.sleep(0.01)

    def shortage(self) -> str:
        return "waiting for CPUs"
