"""A worker process as the one that started it sees it: requests, answers, and how it ended."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from pipelines.envs.env import EnvSpec, RemoteTraceback
from pipelines.envs.worker import Order
from pipelines.errors import AmagoError, StageFailed
from pipelines.events import Listener, Waiting, silent

_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_CLOSING_SECONDS = 5.0
_EARLY = 100  # requests
_MOMENT = 1.0  # seconds between two looks at how long an answer takes


class Died(Exception):
    """A worker process has ended."""


class Worker:
    """A process and the requests that it has yet to answer. When it has died it can be replaced: `generation` counts
    the processes, `obituaries` says how each ended, `mourned` which ends were told. `memory` is the file of its boards.

    A process that takes longer than `timeout_seconds` (0: there is no limit) for an answer is killed; the listener
    hears Waiting while it takes long. `early_ends`: how many processes in a row ended within a
    hundred requests.
    """

    def __init__(self, order: Order, memory: int, *, timeout_seconds: float = 0.0, listener: Listener = silent) -> None:
        self.order, self._memory = order, memory
        self._timeout, self._listener = timeout_seconds, listener
        self.early_ends = 0
        self.generation, self.dead = 0, False
        self.obituaries: dict[int, str] = {}
        self.mourned: set[int] = set()
        self._start()

    def _start(self) -> None:
        # Two pipes: who waits at a socket is woken by its own answer being read, for nothing.
        theirs_in, ours_out = os.pipe()
        self._requests = Connection(ours_out, readable=False)
        ours_in, theirs_out = os.pipe()
        self._replies = Connection(ours_in, writable=False)
        path = [os.path.abspath(folder) for folder in sys.path]
        # Not by multiprocessing, which would run the user's main module once more.
        code = f"from pipelines.envs.worker import main; main({theirs_in}, {theirs_out}, {self._memory})"
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"],
                pass_fds=(theirs_in, theirs_out, self._memory),
                stdin=subprocess.DEVNULL,
                env=dict.fromkeys(_ONE_THREAD, "1") | dict(os.environ),
                start_new_session=True,  # what interrupts this process is for this process to handle
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self._asked: deque[int] = deque()
        self._answers: dict[int, dict[str, Any]] = {}
        self._last = 0
        self._is_late = False
        self._since = time.monotonic()
        self._readable = select.poll()
        self._readable.register(self._replies, select.POLLIN)
        self._requests.send(self.order)

    @property
    def actors(self) -> str:
        """Whose environments it has, in words."""
        return f"actors {' and '.join(f'{place.start} to {place.stop - 1}' for place in self.order.places)}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """What can be read once it has answered, or died."""
        return self._replies.fileno()

    def introduced(self) -> tuple[EnvSpec, bool, bool]:
        """Return what the worker says of its environments once they are made: their spec, whether they have an expert,
        and whether they step one by one. Raises what making them raised.
        """
        self._wait(f"environment '{self.order.name}' to be made")
        try:
            said = self._replies.recv()
        except (EOFError, ConnectionError):
            self._bury()
            how = self.obituaries[self.generation]
            raise StageFailed(f"environment '{self.order.name}' cannot be made: {how}") from None
        if isinstance(said, AmagoError):
            raise said from RemoteTraceback(vars(said).get("trace", ""))
        return said

    def ask(self, what: bytes, part: int, rest: bytes = b"") -> int:
        """The number of a request. Died where there is nobody to be asked."""
        if self.dead:
            raise Died
        try:
            self._requests.send_bytes(what + bytes([part]) + rest)
        except ConnectionError:
            raise self._bury() from None
        self._last += 1
        if not self._asked:
            self._since = time.monotonic()
        self._asked.append(self._last)
        return self._last

    def answer(self, number: int) -> dict[str, Any]:
        """Waits for the answer to a request. Raises what the worker refused with, or Died."""
        while number not in self._answers:
            if self.dead:
                raise Died
            try:
                self._wait()
                data = self._replies.recv_bytes()
            except (EOFError, ConnectionError):
                raise self._bury() from None
            self._since = time.monotonic()
            self._answers[self._asked.popleft()] = pickle.loads(data) if data else {}
        found = self._answers.pop(number)
        if "error" in found:
            raise found["error"] from RemoteTraceback(vars(found["error"]).get("trace", ""))
        return found

    def _wait(self, what: str = "") -> None:
        while not self._readable.poll(1e3 * _MOMENT):
            if what:
                self._listener(Waiting(what=what, stoppable=False))
            else:
                self.linger()

    def linger(self) -> None:
        """Tell that an answer takes long, and kill the process when it takes too long."""
        if self.dead or not self._asked:
            return
        text = f"environment '{self.order.name}', {self.actors} (worker process {self.pid})"
        self._listener(Waiting(what=text, stoppable=False))
        if self._timeout and time.monotonic() - self._since > self._timeout:
            self._is_late = True
            self._process.kill()

    def replace(self) -> None:
        """Start a new process in the place of the dead one; `introduced` comes next."""
        self.dead, self.generation = False, self.generation + 1
        self._start()

    def _bury(self) -> Died:
        self.early_ends = self.early_ends + 1 if self._last < _EARLY else 0
        self._requests.close()
        self._replies.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSING_SECONDS)
        code = self._process.returncode
        if self._is_late:
            how = f"took longer than {self._timeout:g} s for a step or a reset"
        elif code is None:
            how = "has hung up"
            self._process.kill()
            self._process.wait()
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self.dead, self.obituaries[self.generation] = True, f"worker process {self.pid} {how}"
        return Died()

    def hang_up(self) -> None:
        """Let the process close its environments and end."""
        self._requests.close()
        self._replies.close()

    def wait(self) -> None:
        """After `hang_up`: until it has ended."""
        try:
            self._process.wait(_CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
