"""Publishes policies while training goes on."""

from __future__ import annotations

import threading
from pathlib import Path

from pipelines.errors import AmagoError, InputMissing
from pipelines.events import Listener, Notice
from pipelines.lake.store import Lake
from pipelines.learning import checkpoint as checkpoints
from pipelines.learning.published import PolicyWriter


class Publisher:
    """A thread that publishes a run's newest checkpoint in a lake. Checkpoints that are written faster than they can be
    uploaded are passed over. What fails is reported, and the next one is tried.
    """

    def __init__(self, lake: Lake, run: str, directory: Path) -> None:
        self._writer, self._lake, self._directory = PolicyWriter(lake, run), lake, directory
        self._wanted: int | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._problem: str | None = None
        self._reported: str | None = None
        self._thread = threading.Thread(target=self._work, name="amago-publisher", daemon=True)
        self._thread.start()

    def publish(self, update: int, listener: Listener) -> None:
        """Publish the checkpoint of `update` soon; report what has failed since the last call."""
        with self._changed:
            self._wanted = update
            self._changed.notify()
        self._report(listener)

    def close(self, listener: Listener) -> None:
        """Publish what is wanted, and end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        self._report(listener)

    def _report(self, listener: Listener) -> None:
        problem, self._problem = self._problem, None
        if problem is not None and problem != self._reported:
            self._reported = problem
            listener(Notice(text=f"cannot publish a policy in '{self._lake.name}': {problem}", level="warning"))

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._wanted is None and not self._closed:
                    self._changed.wait()
                update, self._wanted = self._wanted, None
            if update is None:
                return
            try:
                self._writer.write(checkpoints.load(self._directory, str(update)))
                self._reported = None
            except InputMissing:  # pruned by now: a newer one is wanted
                pass
            except FileExistsError:
                self._problem = "another process publishes policies of this run"
            except (AmagoError, OSError) as error:
                self._problem = str(error)
            except Exception as error:  # the thread's boundary: training goes on
                self._problem = f"{type(error).__name__}: {error}"
