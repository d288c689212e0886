"""Parts of a stage as tasks: each runs in a process of its own on this host, or in an actor of a Ray cluster (`ray`).

A task is a picklable callable. It receives a `Channel`, through which it reports events and results and receives
orders. It stops at its next safe point when its driver asks it to, or has ended.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Protocol

from pipelines import trust
from pipelines.config import host
from pipelines.config.host import count_cores
from pipelines.errors import Interrupted
from pipelines.events import Event, Progress
from pipelines.processes import ForkServer, describe_exit, pack_error, start_python

_ORPHAN_SECONDS = 5.0  # for a task whose driver has ended to store what it has
STOP_SECONDS = 300.0  # for tasks to stop at their next safe point
_POLL_SECONDS = 0.2
STOP = "stop"


class Channel:
    """A task's side of the connection to its driver. `post` sends to the driver, and may be called by any thread."""

    def __init__(self, post: Callable[[str, Any], None]) -> None:
        self.post = post
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopping = threading.Event()

    def listen(self, event: Event) -> None:
        """Report an event to the driver; Interrupted at a Progress after the driver has asked the task to stop."""
        self.post("event", event)
        if self._stopping.is_set() and isinstance(event, Progress):
            raise Interrupted("stopped by the driver")

    def receive(self) -> Any:
        """Wait for the next order; None if the task is to end."""
        return None if self._stopping.is_set() else self._orders.get()

    def deliver(self, order: Any) -> None:
        """Hand over an order of the driver."""
        if order == STOP:
            self._stopping.set()
            order = None
        self._orders.put(order)


Task = Callable[[Channel], Any]


@dataclass(frozen=True, kw_only=True)
class Caller:
    """What a task takes over from the process of its driver: command line, trusted names, paths."""

    argv: Sequence[str] = field(default_factory=lambda: list(sys.argv))
    typed: Sequence[str] | None = field(default_factory=trust.typed_names)
    path: Sequence[str] = field(default_factory=lambda: [os.path.abspath(folder) for folder in sys.path])
    directory: str = field(default_factory=os.getcwd)

    def adopt(self) -> None:
        """Set up this process likewise, as far as the paths exist on this host."""
        sys.argv[:] = self.argv
        sys.path += [folder for folder in self.path if folder not in sys.path and Path(folder).exists()]
        with contextlib.suppress(OSError):
            os.chdir(self.directory)


def perform(task: bytes, caller: Caller, channel: Channel) -> bool:
    """Carry out a pickled task, and post its result as "done", or what it raised as "error". Return whether it ended by
    itself, and was not interrupted."""
    try:
        caller.adopt()
        with contextlib.nullcontext() if caller.typed is None else trust.only(caller.typed):
            channel.post("done", pickle.loads(task)(channel))
    except Interrupted:
        return False
    except Exception as error:
        channel.post("error", pack_error(error))
    return True


class RunningTask(Protocol):
    """A task from its driver's side. `ended` says how its process ended, once it has; "" before."""

    host: str
    ended: str

    @property
    def pid(self) -> int: ...

    def messages(self) -> list[tuple[str, Any]]:
        """Receive what the task has posted since the last call, oldest first."""
        ...

    def send(self, order: Any) -> None:
        """Send an order; without effect if the task has ended."""
        ...

    def stop(self) -> None:
        """Ask the task to stop at its next safe point."""
        ...


class Engine(Protocol):
    """Where tasks run. At its end, all tasks have stopped."""

    def __enter__(self) -> Engine: ...

    def __exit__(self, *raised: object) -> None: ...

    def start(self, task: Task) -> RunningTask:
        """Start a task."""
        ...

    def wait(self, seconds: float) -> None:
        """Wait until a task has posted something, or for `seconds`."""
        ...

    def shortage(self) -> str:
        """Say why tasks have not started yet, e.g. "waiting for CPUs"; "" if none is waiting for anything."""
        ...


class LocalEngine:
    """Processes of this host, for about `count` tasks at a time, which share its cores. They are forked from a process
    that has imported the module of the first task: importing torch costs each of them more than to play for a while.
    """

    def __init__(self, count: int) -> None:
        self._threads = max(count_cores() // count, 1)
        self._running: list[TaskProcess] = []
        self._server: ForkServer | None = None

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *raised: object) -> None:
        for each in self._running:
            each.stop()
        deadline = time.monotonic() + STOP_SECONDS
        while any(not each.ended for each in self._running) and time.monotonic() < deadline:
            self.wait(_POLL_SECONDS)
            for each in self._running:
                each.messages()  # a full pipe would keep a task from ending
        for each in self._running:
            each.process.kill()
            each.process.wait()
        if self._server is not None:
            self._server.close()
            self._server = None

    def start(self, task: Task) -> TaskProcess:
        """Start a process for a task."""
        self._running = [each for each in self._running if not each.ended]
        environment = {"OMP_NUM_THREADS": str(self._threads)} | host.strip_launcher()
        ours, theirs = Pipe()
        with theirs:
            self._running.append(TaskProcess(task, ours, self._start(task, theirs.fileno(), environment)))
        return self._running[-1]

    def _start(self, task: Task, descriptor: int, environment: Mapping[str, str]) -> Process:
        if sys.platform != "linux":  # elsewhere, forking is not safe with the libraries of the system
            code = f"from pipelines.stages.tasks import main; main({descriptor})"
            return start_python(code, descriptors=(descriptor,), environment=environment)
        if self._server is not None and self._server.environment == environment:
            with contextlib.suppress(BrokenPipeError):  # it was killed
                return self._server.fork(descriptor)
        if self._server is not None:
            self._server.close()
        self._server = ForkServer("pipelines.stages.tasks:main", [type(task).__module__], environment)
        return self._server.fork(descriptor)

    def wait(self, seconds: float) -> None:
        """Wait until a process has posted something or ended, or for `seconds`."""
        connections = [each.connection for each in self._running if not each.ended]
        if connections:
            wait(connections, seconds)
        else:
            time.sleep(seconds)

    def shortage(self) -> str:
        """Return "": processes start at once."""
        return ""


class Process(Protocol):
    """A process, forked or a `Popen`."""

    @property
    def pid(self) -> int: ...

    def wait(self) -> int: ...

    def kill(self) -> None: ...


class TaskProcess:
    """A `process` that performs one task, and the other end of its `connection`."""

    def __init__(self, task: Task, connection: Connection, process: Process) -> None:
        self.connection, self.process = connection, process
        self.host, self.ended = socket.gethostname(), ""
        self.send(Caller())
        self.send(pickle.dumps(task))

    @property
    def pid(self) -> int:
        return self.process.pid

    def messages(self) -> list[tuple[str, Any]]:
        """Receive what the task has posted since the last call, oldest first."""
        found: list[tuple[str, Any]] = []
        try:
            while not self.ended and self.connection.poll():
                found.append(self.connection.recv())
        except (EOFError, OSError):
            self.connection.close()
            self.ended = describe_exit(self.process.wait())
        return found

    def send(self, order: Any) -> None:
        """Send an order; without effect if the process has ended."""
        with contextlib.suppress(OSError):
            self.connection.send(order)

    def stop(self) -> None:
        """Ask the task to stop at its next safe point."""
        self.send(STOP)


def main(descriptor: int) -> None:
    """Perform the task that the process at the other end of `descriptor` sends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # what environments print must not get into a result
    connection, sending = Connection(descriptor), threading.Lock()

    def post(kind: str, body: Any) -> None:
        with contextlib.suppress(OSError), sending:  # the driver has ended: its orders end as well
            connection.send((kind, body))

    channel = Channel(post)
    signal.signal(signal.SIGTERM, lambda number, frame: channel.deliver(STOP))
    try:
        caller, task = connection.recv(), connection.recv()
    except (EOFError, OSError):
        os._exit(1)
    threading.Thread(target=_receive, args=(connection, channel), daemon=True).start()
    code = 0 if perform(task, caller, channel) else 128 + signal.SIGTERM
    connection.close()
    sys.stderr.flush()
    os._exit(code)


def _receive(connection: Connection, channel: Channel) -> None:
    """Hand over orders; when the driver has ended, stop the task, at its next safe point if that comes soon."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            channel.deliver(connection.recv())
    channel.deliver(STOP)
    time.sleep(_ORPHAN_SECONDS)
    os._exit(1)
