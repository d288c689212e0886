"""Tasks in actors of a Ray cluster. Ray only starts processes and carries messages: an actor performs a whole task.

Ray is imported when an engine starts, and never elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import queue
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

from pipelines.config.settings import CollectSettings
from pipelines.errors import AmagoError, InputMissing, StageFailed, UsageError
from pipelines.events import Notice
from pipelines.processes import start_python
from pipelines.stages.ray_guard import find_descendants
from pipelines.stages.tasks import STOP, STOP_SECONDS, Caller, Channel, Task, perform

_POLL_SECONDS = 1.0  # that a request for messages waits in an actor
_NODES_SECONDS = 5.0  # between checks that the cluster has nodes
_CONNECT_SECONDS = 10.0
_CLOSE_SECONDS = 20.0
_LEAST_STORE = 80 << 20  # bytes of a local cluster's object store, which carries nothing
_END = "end"


class TaskHost:
    """An actor that performs one task, while other threads of it deliver orders and fetch what it has posted."""

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._channel = Channel(lambda kind, body: self._posted.put((kind, body)))

    def place(self) -> tuple[str, int]:
        """Report the host and the process id."""
        return socket.gethostname(), os.getpid()

    def perform(self, task: bytes, caller: Caller) -> None:
        """Perform a pickled task."""
        try:
            perform(task, caller, self._channel)
        finally:
            self._posted.put((_END, None))

    def deliver(self, order: Any) -> None:
        """Hand an order to the task."""
        self._channel.deliver(order)

    def fetch(self) -> bytes:
        """Wait a moment for something posted; return all of it, of other events than notices the newest only."""
        found: list[tuple[str, Any]] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._posted.get(timeout=_POLL_SECONDS))
            while True:
                found.append(self._posted.get_nowait())
        is_figure = [kind == "event" and not isinstance(body, Notice) for kind, body in found]
        newest = {type(body): place for place, (_, body) in enumerate(found) if is_figure[place]}
        kept = [
            message for place, message in enumerate(found) if not is_figure[place] or newest[type(message[1])] == place
        ]
        return pickle.dumps(kept)


class RayEngine:
    """Actors of the Ray cluster that the settings name; one on this host ends with this engine."""

    def __init__(self, settings: CollectSettings) -> None:
        self._settings = settings
        self._ray: Any = None
        self._running: list[RayTask] = []
        self._is_own = False
        self._guard: subprocess.Popen[bytes] | None = None
        self._checked = 0.0

    def __enter__(self) -> RayEngine:
        self._ray = ray = _import_ray()
        if not ray.is_initialized():
            self._is_own = True
            with _keep_signals(), _explain_errors(self._settings.ray):
                self._connect(ray)
        return self

    def _connect(self, ray: Any) -> None:
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": 50, "ignore_reinit_error": True}
        where = self._settings.ray
        if where == "auto":
            try:
                ray.init(address="auto", **options)
                return
            except ConnectionError:
                where = "local"
        if where == "local":
            before = find_descendants(os.getpid())
            try:
                ray.init(address="local", include_dashboard=False, object_store_memory=_LEAST_STORE, **options)
            finally:
                started = find_descendants(os.getpid())
                # The guard ends what is left of the cluster once this process has ended, for whatever reason.
                guard = "from pipelines.stages.ray_guard import main; main()"
                self._guard = start_python(guard, stdin=subprocess.PIPE)
                assert self._guard.stdin is not None
                new = {pid: began for pid, began in started.items() if pid not in before}
                self._guard.stdin.write(json.dumps(new).encode() + b"\n")
        else:
            host, _, port = where.rpartition(":")
            if not (host and port.isdecimal() and "/" not in host):
                raise UsageError(f"'{where}' is not a Ray cluster", hint="give --ray auto, local or HOST:PORT")
            # Fail now if nothing listens there: Ray itself would try it for minutes.
            socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
            os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # it repeats on stderr why it cannot connect
            ray.init(address=where, **options)

    def __exit__(self, *raised: object) -> None:
        for each in self._running:
            each.stop()
        deadline = time.monotonic() + STOP_SECONDS
        with contextlib.suppress(AmagoError):
            while any(not each.ended for each in self._running) and time.monotonic() < deadline:
                self.wait(_POLL_SECONDS)
                for each in self._running:
                    each.messages()
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        if closing.is_alive():  # the cluster does not answer any more
            atexit.unregister(self._ray.shutdown)
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait()

    def _close(self) -> None:
        for each in self._running:
            each.kill()
        if self._is_own:
            with contextlib.suppress(Exception):  # of a cluster that is gone
                self._ray.shutdown()

    def start(self, task: Task) -> RayTask:
        """Start an actor for a task, as soon as the cluster has room for it."""
        ray, settings = self._ray, self._settings
        kind = ray.remote(TaskHost).options(
            num_cpus=settings.cpus, num_gpus=settings.gpus, max_restarts=0, max_concurrency=4
        )
        self._running = [each for each in self._running if not each.ended]
        self._running.append(RayTask(ray, kind.remote(), task))
        return self._running[-1]

    def wait(self, seconds: float) -> None:
        """Wait until an actor has posted something or ended, or for `seconds`. StageFailed if no node is alive."""
        refs = [each.fetched for each in self._running if not each.ended]
        if refs:
            self._ray.wait(refs, num_returns=1, timeout=seconds)
        else:
            time.sleep(seconds)
        if time.monotonic() - self._checked > _NODES_SECONDS:
            self._checked = time.monotonic()
            if not any(node["Alive"] for node in self._ray.nodes()):
                raise StageFailed("no node of the Ray cluster is alive", hint="repeat the command")

    def shortage(self) -> str:
        """Name the resources that tasks are waiting for; "" also for those that have theirs and are starting."""
        alive = [each for each in self._running if not each.ended]
        started = sum(each.has_started for each in alive)
        if started == len(alive):
            return ""
        free, total = self._ray.available_resources(), self._ray.cluster_resources()
        for name, each in (("GPU", self._settings.gpus), ("CPU", self._settings.cpus)):
            left, taken = free.get(name, 0.0), total.get(name, 0.0) - free.get(name, 0.0)
            if left < each and taken < each * len(alive):
                return f"waiting for {name}s"
        return ""


class RayTask:
    """A task in an actor."""

    def __init__(self, ray: Any, actor: Any, task: Task) -> None:
        self._ray, self._actor = ray, actor
        self.host, self.pid, self.ended = "?", 0, ""
        self._place = actor.place.remote()
        self._performed = actor.perform.remote(pickle.dumps(task), Caller())
        self.fetched = actor.fetch.remote()

    @property
    def has_started(self) -> bool:
        """Whether its process runs."""
        if self._place is not None and self._is_ready(self._place):
            try:
                self.host, self.pid = self._ray.get(self._place)
            except self._ray.exceptions.RayError:
                return False
            self._place = None
        return self._place is None

    def _is_ready(self, ref: Any) -> bool:
        return bool(self._ray.wait([ref], timeout=0)[0])

    def messages(self) -> list[tuple[str, Any]]:
        """Receive what the task has posted since the last call, oldest first."""
        found: list[tuple[str, Any]] = []
        self.has_started  # noqa: B018 (learns the process id)
        if self.ended or not self._is_ready(self.fetched):
            return found
        try:
            found = pickle.loads(self._ray.get(self.fetched))
        except self._ray.exceptions.RayError:
            self.ended = "has died"
            return found
        if found and found[-1][0] == _END:
            found.pop()
            self.ended = "has ended"
            self.kill()
        else:
            self.fetched = self._actor.fetch.remote()
        return found

    def send(self, order: Any) -> None:
        """Send an order; without effect if the actor has ended."""
        if not self.ended:
            self._actor.deliver.remote(order)

    def stop(self) -> None:
        """Ask the task to stop at its next safe point; end it if it has not started."""
        if self.has_started:
            self.send(STOP)
        elif not self.ended:
            self.ended = "has not started"
            self.kill()

    def kill(self) -> None:
        """End the actor, which frees its resources."""
        with contextlib.suppress(Exception):  # of a cluster that is gone
            self._ray.kill(self._actor)


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # in a local cluster; else its processes give way to all others
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise InputMissing("--engine ray needs ray, which is not installed", hint='pip install "amago[ray]"') from error
    # Deaths are reported by us, in a line.
    ray._private.worker.print_to_stdstream = lambda data, ignore_prefix=False: None
    return ray


@contextlib.contextmanager
def _keep_signals() -> Iterator[None]:
    """Keep this process's handlers of signals: Ray installs one that exits at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _explain_errors(where: str) -> Iterator[None]:
    """Turn errors of the connection to a cluster into ours."""

    def describe(error: Exception) -> str:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]

    try:
        yield
    except AmagoError:
        raise
    except (OSError, ValueError) as error:
        raise InputMissing(
            f"no Ray cluster at '{where}': {describe(error)}",
            hint="start one with `ray start --head`, give another --ray, or set RAY_AUTH_MODE=token if it has a token",
        ) from error
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise
        versions = re.findall(r"(Ray|Python): *([\w.+]+)", str(error))
        shown = " and ".join(f"{name} {version}" for name, version in versions)
        raise InputMissing(
            f"the Ray cluster at '{where}' has other versions than this process: {shown}",
            hint="Ray and Python must be the same on all nodes",
        ) from error
    except Exception as error:  # Ray raises bare exceptions where a local cluster does not start
        raise StageFailed(
            f"Ray did not start: {describe(error)}", hint="repeat the command, or use --engine local"
        ) from error
