"""Batches made ahead by a thread of their own, while the learner works: the same ones as without it.

The source is drawn from by one thread at a time. Its state before every batch is kept, so that what was made but not
taken can be unmade: at a checkpoint, and whenever the source changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from pipelines.data.batch import Batch

Request = tuple[int, int]  # windows of a batch; update it is for


class Source(Protocol):
    """What batches are drawn from."""

    @property
    def version(self) -> Any: ...
    def sample(self, batch_size: int, update: int) -> Batch: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Made:
    """A batch, or why there is none, and the source's state before it."""

    state: dict[str, Any]
    content: Batch | BaseException


class Prefetch:
    """Gives the batches of `plan` in order, up to `ahead` of them made before they are asked for (0: none).

    An error of the source is raised where its batch would have been given.
    """

    def __init__(self, source: Source, plan: Iterator[Request], *, ahead: int) -> None:
        self._source, self._plan, self._ahead = source, plan, ahead
        self._made: deque[tuple[Request, Future[Made]]] = deque()
        self._again: deque[Request] = deque()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="prefetch") if ahead else None

    def __enter__(self) -> Prefetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()
        if self._worker is not None:
            self._worker.shutdown()

    def next(self) -> Batch:
        """The next batch of the plan. StopIteration after the last."""
        if self._worker is None:
            return self._source.sample(*self._request())
        if not self._made:
            self._make(self._request())
        _, future = self._made.popleft()
        made = future.result()
        while len(self._made) < self._ahead:
            try:
                self._make(self._request())
            except StopIteration:
                break
        if isinstance(made.content, BaseException):
            raise made.content
        return made.content

    def settle(self) -> None:
        """Unmake what was made but not taken: the source is as if it had not been drawn, and at rest."""
        if not self._made:
            return
        made, self._made = self._made, deque()
        begun = [future.result().state for _, future in made if not future.cancel()]
        self._again.extendleft(request for request, _ in reversed(made))
        if begun:
            self._source.load_state_dict(begun[0])

    def changing(self, change: Callable[[], Any]) -> Any:
        """What `change` returns, called while the source is at rest; what was made before a change is made again."""
        self.wait()
        before = self._source.version
        result = change()
        if self._source.version != before:
            self.settle()
        return result

    def wait(self) -> None:
        """Return when the source is at rest."""
        for _, future in self._made:
            future.result()

    def state_dict(self) -> dict[str, Any]:
        """The source's state after the batches that were taken."""
        self.wait()
        return self._made[0][1].result().state if self._made else self._source.state_dict()

    def _request(self) -> Request:
        return self._again.popleft() if self._again else next(self._plan)

    def _make(self, request: Request) -> None:
        assert self._worker is not None
        self._made.append((request, self._worker.submit(self._work, request)))

    def _work(self, request: Request) -> Made:
        state = self._source.state_dict()
        try:
            return Made(state, self._source.sample(*request))
        except BaseException as error:
            return Made(state, error)
